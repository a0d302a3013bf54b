"""The definition of test data, which NumPy computes on a host and a kernel on a GPU.

Data differ per rank, element, buffer and row, so that a block from the wrong rank, a shifted block, a buffer left over
from before and a missing contribution all show. Moved data are random bits. Reduced data are small integers, so that
the result is exact in every type and in any order of adding: of any number of ranks at most `contributors` have a
value other than the reduction's neutral one at an element, a different set at each.
"""

from dataclasses import dataclass

from gpubench.model.terms.operation import DataType, NumberKind, ReduceOp

POISON = 0xA5
"""The byte that fills a receive buffer before an operation, so that an older result is not taken for this one's."""

WORD = 0xFFFFFFFF
"""Seeds, hashes and element indices are 32-bit: elements 2**32 apart look alike."""

ROW_SEED, BUFFER_SEED = 0x85EBCA6B, 0xC2B2AE35

MOST_CONTRIBUTORS = 8
FLOAT_AVERAGE_CONTRIBUTORS = 2
AVERAGE_TOLERANCE_ULP = 2


@dataclass(frozen=True, slots=True)
class DataPattern:
    """The kind of data of a row. `op` is None where data are only moved."""

    dtype: DataType
    op: ReduceOp | None
    ranks: int

    @property
    def contributors(self) -> int:
        """The number of ranks with a value of their own at an element."""
        rounds = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT
        return min(self.ranks, FLOAT_AVERAGE_CONTRIBUTORS if rounds else MOST_CONTRIBUTORS)

    @property
    def lowest(self) -> int:
        """The least value that max and min work with; the greatest is 200 more."""
        return 0 if self.dtype.kind is NumberKind.UNSIGNED else -100

    @property
    def neutral(self) -> int:
        """The value of a rank that does not contribute."""
        neutral = {ReduceOp.PROD: 1, ReduceOp.MAX: self.lowest, ReduceOp.MIN: self.lowest + 200}
        return neutral.get(self.op or ReduceOp.SUM, 0)

    @property
    def tolerance_ulp(self) -> int:
        """The error that a result may have: 0, but for averages over a number of ranks that is no power of two.

        NCCL scales by a rounded 1/n before it adds, an MPI average divides after; nccl-tests allows two ulp as well.
        """
        inexact = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT and self.ranks & (self.ranks - 1)
        return AVERAGE_TOLERANCE_ULP if inexact else 0


@dataclass(frozen=True, slots=True)
class Block:
    """A run of elements at the same offset in each of several equally spaced buffers of one memory.

    Buffer k starts at element `k × stride`; the run is `[offset, offset + count)` of it, and holds, or must hold,
    elements `[start, start + count)` of a rank's data of row `row`.
    """

    row: int
    buffers: int
    stride: int
    offset: int
    count: int
    start: int = 0

    def seeds(self) -> tuple[int, ...]:
        """A 32-bit seed for each buffer, unlike those of other buffers and rows."""
        return tuple(seed(self.row, buffer) for buffer in range(self.buffers))


def seed(row: int, buffer: int) -> int:
    """The 32-bit seed of one buffer of a row."""
    return ((row * ROW_SEED) ^ (buffer * BUFFER_SEED) ^ (row >> 16)) & WORD
