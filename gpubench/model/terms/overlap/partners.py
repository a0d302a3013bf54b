"""The operations of the computation beside a collective."""

from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap.asked import OverlapAsked, Partner
from gpubench.model.terms.units import format_size

COPY_BYTES = 256 * 2**20
"""Bytes that one operation of the partner copy reads, and writes: more than any cache of a GPU holds."""

CHAIN_KERNELS = 64
"""Kernels of one operation of the partner chain, one after another in a captured graph."""

CHAIN_BYTES = 1 * 2**20
"""Bytes that each of them reads and writes: they stay in a cache."""


def gemm_type(dtype: DataType) -> DataType:
    """The type of a GEMM beside a collective of a type: 16 bits, as trained in."""
    return DataType.FLOAT16 if dtype is DataType.FLOAT16 else DataType.BFLOAT16


def partner_bytes(partner: Partner, asked: OverlapAsked) -> int:
    """Memory that a partner takes on every GPU, what its result is held against included."""
    if partner is Partner.GEMM:
        return 4 * asked.gemm_side**2 * DataType.BFLOAT16.size_bytes
    return 2 * (COPY_BYTES if partner is Partner.COPY else CHAIN_BYTES)


def operation_words(partner: Partner, asked: OverlapAsked, dtype: DataType) -> str:
    """One operation in words: 'GEMM 8192³ bfloat16'."""
    if partner is Partner.GEMM:
        return f"GEMM {asked.gemm_side}³ {gemm_type(dtype)}"
    if partner is Partner.COPY:
        return f"copy of {format_size(COPY_BYTES)} within GPU memory"
    return f"chain of {CHAIN_KERNELS} kernels on {format_size(CHAIN_BYTES)}"
