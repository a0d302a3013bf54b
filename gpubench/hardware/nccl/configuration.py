"""`ncclConfig_t` and `ncclUniqueId`, with which communicators are made by calls into the library itself."""

import ctypes

UNIQUE_ID_BYTES = 128
INITIALISE = "ncclCommInitRankConfig"

_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT: NCCL's own value."""

_BYTES_OF_2_14 = 24


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is handed over by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class CommunicatorConfig(ctypes.Structure):
    """`ncclConfig_t` as NCCL 2.17 had it; later ones take what it lacks from their defaults (init.cc)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster_size", ctypes.c_int),
        ("least_ctas", ctypes.c_int),
        ("most_ctas", ctypes.c_int),
        ("network", ctypes.c_char_p),
    )


def not_blocking() -> CommunicatorConfig:
    """Of a communicator whose calls return at once; as long as NCCL 2.14 had it."""
    return CommunicatorConfig(_BYTES_OF_2_14, _MAGIC, 21400, 0)


def capped(most_ctas: int) -> CommunicatorConfig:
    """Of a communicator whose kernels have no more CTAs than that."""
    size = ctypes.sizeof(CommunicatorConfig)
    return CommunicatorConfig(size, _MAGIC, 21700, _UNDEFINED, _UNDEFINED, _UNDEFINED, most_ctas, None)
