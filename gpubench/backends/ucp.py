"""UCX's C API for one-sided transfers, through ctypes: one context, one worker and one peer for each process.

Structures and constants are those of ucp.h of UCX 1.10 to 1.23. UCX only appends fields to structures, and reads only
the fields that `field_mask` names, so the structures here end with the last field in use.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

_API = 1, 10  # The oldest API version that has every function and field in use here
_RMA, _AM = 1 << 1, 1 << 6  # NIXL's features: transfers, and messages for notifications
_IN_PROGRESS = 1
_ERROR_POINTERS = 2**64 - 100  # UCS_PTR_IS_ERR: statuses from UCS_ERR_LAST, -100, to -1
_PEER_ERRORS = 1  # UCP_ERR_HANDLING_MODE_PEER, NIXL's default, which excludes shared memory transports
_MEMH = 1 << 8  # UCP_OP_ATTR_FIELD_MEMH
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")

_STATUS = ctypes.c_int8  # ucs_status_t is a packed enum, so the other bytes of a returned register are undefined
_ON_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, _STATUS)


class _ContextParameters(Structure):
    _fields_ = (("field_mask", c_uint64), ("features", c_uint64))


class _EndpointParameters(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("error_mode", c_int),
        ("on_error", _ON_ERROR),
        ("on_error_argument", c_void_p),
    )


class _MemoryParameters(Structure):
    _fields_ = (("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t))


class _RequestParameters(Structure):
    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("receive_info", c_void_p),
        ("memory", c_void_p),
    )


class UcxError(Exception):
    """A UCX call failed. The text has the call and UCX's words for the error."""


class TransferBlock(NamedTuple):
    """One block of a transfer: its addresses in this process and in the peer, and its size in bytes."""

    local: int
    remote: int
    size_bytes: int


def load_ucp(library: Path) -> Any:
    """Load libucp.so.0 and the libraries beside it, and declare its functions. Raises OSError."""
    for name in _LIBRARIES[:-1]:
        beside = library.with_name(name)
        if beside.exists():  # Else the dynamic loader finds them
            ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)
    ucp = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    for name in ("ucp_put_nbx", "ucp_get_nbx"):
        transfer = getattr(ucp, name)
        transfer.restype = c_uint64
        transfer.argtypes = (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParameters))
    ucp.ucp_ep_flush_nbx.restype = c_uint64
    ucp.ucp_ep_flush_nbx.argtypes = (c_void_p, POINTER(_RequestParameters))
    ucp.ucp_worker_progress.restype = c_uint
    ucp.ucp_worker_progress.argtypes = (c_void_p,)
    ucp.ucp_request_check_status.restype = _STATUS
    ucp.ucp_request_check_status.argtypes = (c_void_p,)
    ucp.ucp_request_free.argtypes = (c_void_p,)
    ucp.ucp_request_free.restype = None
    return ucp


class UcxProcess:
    """One of the two processes of a transfer: UCX's context and worker, its own memory, and the peer's."""

    def __init__(self, library: Path) -> None:
        self._ucp = load_ucp(library)
        self._words = ctypes.CDLL(None).ucs_status_string
        self._words.restype = c_char_p
        self._words.argtypes = (_STATUS,)
        self._context, self._worker, self._endpoint = c_void_p(), c_void_p(), c_void_p()
        self._requests: dict[str, _RequestParameters] = {}
        self._own_keys: dict[str, bytes] = {}
        self._peer_keys: dict[str, c_void_p] = {}
        self._peer_error = ""
        self._on_error = _ON_ERROR(self._note_peer_error)
        parameters = _ContextParameters(field_mask=1, features=_RMA | _AM)
        config, no_parameters = c_void_p(), c_uint64()
        self._call("ucp_config_read", None, None, byref(config))
        self._call("ucp_init_version", *_API, byref(parameters), config, byref(self._context))
        self._ucp.ucp_config_release(config)
        self._call("ucp_worker_create", self._context, byref(no_parameters), byref(self._worker))

    def register(self, name: str, address: int, size_bytes: int) -> None:
        """Register memory of this process under a name, which the peer uses too."""
        memory, key, length = c_void_p(), c_void_p(), c_size_t()
        parameters = _MemoryParameters(field_mask=1 | 1 << 1, address=address, length=size_bytes)
        self._call("ucp_mem_map", self._context, byref(parameters), byref(memory))
        self._requests[name] = _RequestParameters(op_attr_mask=_MEMH, memory=memory)
        self._call("ucp_rkey_pack", self._context, memory, byref(key), byref(length))
        self._own_keys[name] = ctypes.string_at(key, length.value)

    def address(self) -> tuple[bytes, dict[str, bytes]]:
        """Return what the peer needs to connect: the worker's address, and the keys to registered memory."""
        address, length = c_void_p(), c_size_t()
        self._call("ucp_worker_get_address", self._worker, byref(address), byref(length))
        return ctypes.string_at(address, length.value), self._own_keys

    def connect(self, peer: tuple[bytes, dict[str, bytes]]) -> None:
        address, keys = peer
        parameters = _EndpointParameters(
            field_mask=1 | 1 << 1 | 1 << 2, address=address, error_mode=_PEER_ERRORS, on_error=self._on_error
        )
        self._call("ucp_ep_create", self._worker, byref(parameters), byref(self._endpoint))
        for name, key in keys.items():
            self._peer_keys[name] = c_void_p()
            self._call("ucp_ep_rkey_unpack", self._endpoint, c_char_p(key), byref(self._peer_keys[name]))

    def prepare(self, own: str, peers: str, blocks: Sequence[TransferBlock], *, writes: bool) -> Callable[[], float]:
        """Return a function that moves all blocks between this process's memory `own` and the peer's memory `peers`,
        waits until the data have arrived, and returns the time in seconds.
        """
        issue = self._ucp.ucp_put_nbx if writes else self._ucp.ucp_get_nbx
        flush, endpoint, key = self._ucp.ucp_ep_flush_nbx, self._endpoint, self._peer_keys[peers]
        with_memory, without = byref(self._requests[own]), byref(_RequestParameters())

        def move() -> float:
            start = perf_counter()
            pending = [issue(endpoint, local, size, remote, key, with_memory) for local, remote, size in blocks]
            pending.append(flush(endpoint, without))
            for started in pending:
                if started:
                    self._wait(started)
            return perf_counter() - start

        return move

    def progress(self) -> int:
        """Let UCX work for a moment. Return 0 if there was nothing to do."""
        return int(self._ucp.ucp_worker_progress(self._worker))

    def _wait(self, request: int) -> None:
        if request >= _ERROR_POINTERS:
            raise UcxError(self._describe("the transfer", request - 2**64))
        check, progress, worker = self._ucp.ucp_request_check_status, self._ucp.ucp_worker_progress, self._worker
        while (status := check(request)) == _IN_PROGRESS:
            progress(worker)
        self._ucp.ucp_request_free(request)
        if status < 0:
            raise UcxError(self._describe("the transfer", status))

    def _call(self, function: str, *arguments: object) -> None:
        called = getattr(self._ucp, function)
        called.restype = _STATUS
        status = called(*arguments)
        if status < 0:
            raise UcxError(self._describe(function, status))

    def _describe(self, call: str, status: int) -> str:
        return f"{call} failed: {self._peer_error or self._words(status).decode()}"

    def _note_peer_error(self, _argument: int, _endpoint: int, status: int) -> None:
        self._peer_error = str(self._words(status).decode())
