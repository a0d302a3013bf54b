"""Test data: what every rank sends and what every rank must receive, written against an array namespace.

Data differ per rank, element, buffer and row, so that a block from the wrong rank, a shifted block, a buffer left over
from before and a missing contribution all show. Moved data are random bits. Reduced data are small integers, so that
the result is exact in every type and in any order of adding: of any number of ranks at most `contributors` have a
value other than the reduction's neutral one at an element, a different set at each.

Elements 2**32 apart look alike.
"""

from dataclasses import dataclass

from gpubench.model.operation import DataType, Kind, ReduceOp
from gpubench.ports import Array, ArrayNamespace

_WORD = 0xFFFFFFFF
_MOST_CONTRIBUTORS = 8
_FLOAT_AVERAGE_CONTRIBUTORS = 2
_AVERAGE_TOLERANCE_ULP = 2

STORAGE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
"""Elements are written and compared as unsigned integers of their size, so that every bit counts."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of elements of a rank's data: `count` of them from `start` on, in buffers with the given 32-bit `seeds`."""

    start: int
    count: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The data of one row. `op` is None where data are only moved."""

    namespace: ArrayNamespace
    dtype: DataType
    op: ReduceOp | None
    ranks: int

    def sent(self, rank: int, stretch: Stretch) -> Array:
        """What `rank` sends: unsigned integers of shape (buffers, elements)."""
        if self.op is None:
            return self._random_bits(stretch, rank)
        turn = (self._first_contributor(stretch) + rank) % self.ranks
        values = self._contribution(stretch, turn)
        if self.contributors < self.ranks:
            values = self.namespace.where(turn < self.contributors, values, self._neutral)
        return self._encode(values)

    def reduced(self, stretch: Stretch) -> Array:
        """What the reduction over all ranks gives: unsigned integers of shape (buffers, elements)."""
        total = self._contribution(stretch, 0)
        for turn in range(1, self.contributors):
            total = self._combine(total, self._contribution(stretch, turn))
        if self.op is ReduceOp.AVG:
            return self._encode(total // self.ranks if self.dtype.kind is not Kind.FLOAT else total / self.ranks)
        return self._encode(total)

    def wrong(self, got: Array, expected: Array) -> int:
        """How many elements differ. An average over a number of ranks that is no power of two may be off by two ulp."""
        if self.op is ReduceOp.AVG and self.dtype.kind is Kind.FLOAT and self.ranks & (self.ranks - 1):
            # Averages are of positive values, so their bits order as the values do.
            distance = self.namespace.where(got > expected, got - expected, expected - got)
            return int(self.namespace.count_nonzero(distance > _AVERAGE_TOLERANCE_ULP))
        return int(self.namespace.count_nonzero(got != expected))

    @property
    def contributors(self) -> int:
        """How many ranks have a value of their own at an element."""
        rounds = self.op is ReduceOp.AVG and self.dtype.kind is Kind.FLOAT
        return min(self.ranks, _FLOAT_AVERAGE_CONTRIBUTORS if rounds else _MOST_CONTRIBUTORS)

    @property
    def _lowest(self) -> int:
        """The least value that max and min work with."""
        return 0 if self.dtype.kind is Kind.UNSIGNED else -100

    @property
    def _neutral(self) -> int:
        """What a rank sends that does not contribute."""
        neutral = {ReduceOp.PROD: 1, ReduceOp.MAX: self._lowest, ReduceOp.MIN: self._lowest + 200}
        return neutral.get(self.op or ReduceOp.SUM, 0)

    def _contribution(self, stretch: Stretch, turn: Array | int) -> Array:
        """Small int32 values of the contributors number `turn` (0-based: one for all elements, or one for each)."""
        random = self._hash(stretch, turn)
        if self.op is ReduceOp.PROD:
            return self._factor(random, self.namespace.asarray(turn))
        if self.op is ReduceOp.AVG:
            most = 100 if self.dtype.kind is Kind.FLOAT else 15
            return (random % most + 1).astype("int32")
        if self.op is ReduceOp.SUM:
            spread, lowest = (16, 0) if self.dtype.kind is Kind.UNSIGNED else (31, -15)
            return (random % spread).astype("int32") + lowest
        above_neutral = 1 if self.op is ReduceOp.MAX else 0
        return (random % 200).astype("int32") + (self._lowest + above_neutral)

    def _factor(self, random: Array, turn: Array) -> Array:
        """1..7 for the first contributor, then four of ±1 or ±2, then ±1: at most 112 in all, so exact even in int8."""
        namespace = self.namespace
        first = (random % 7 + 1).astype("int32")
        doubled = ((random & 1) + 1).astype("int32")
        values = namespace.where(turn == 0, first, namespace.where(turn <= 4, doubled, 1))
        if self.dtype.kind is Kind.UNSIGNED:
            return values
        return namespace.where((random >> 8) & 1 == 1, -values, values)

    def _combine(self, left: Array, right: Array) -> Array:
        if self.op is ReduceOp.PROD:
            return left * right
        if self.op is ReduceOp.MAX:
            return self.namespace.maximum(left, right)
        if self.op is ReduceOp.MIN:
            return self.namespace.minimum(left, right)
        return left + right

    def _encode(self, values: Array) -> Array:
        """The bits of int32 or float64 values in the row's type."""
        storage = STORAGE[self.dtype.size_bytes]
        if self.dtype is DataType.BFLOAT16:
            bits = values.astype("float32").view("uint32")
            to_nearest_even = ((bits >> 16) & 1) + 0x7FFF
            return ((bits + to_nearest_even) >> 16).astype(storage)
        return values.astype(self.dtype.value).view(storage)

    def _random_bits(self, stretch: Stretch, rank: int) -> Array:
        low = self._hash(stretch, rank)
        if self.dtype.size_bytes < 8:
            return low.astype(STORAGE[self.dtype.size_bytes])
        high = self._hash(stretch, rank + self.ranks)
        return low.astype("uint64") | (high.astype("uint64") << 32)

    def _indices(self, stretch: Stretch) -> Array:
        return (self.namespace.arange(stretch.count, dtype="uint32") + (stretch.start & _WORD))[None, :]

    def _seeds(self, stretch: Stretch) -> Array:
        return self.namespace.asarray(stretch.seeds, dtype="uint32")[:, None]

    def _first_contributor(self, stretch: Stretch) -> Array:
        """A number below `ranks` for each element: rank r's turn at it is that number plus r, modulo `ranks`."""
        return (self._indices(stretch) + self._seeds(stretch)) % self.ranks

    def _hash(self, stretch: Stretch, key: Array | int) -> Array:
        """32 random bits for every (buffer, element, key): Chris Wellons' lowbias32, a public-domain integer hash."""
        keys = ((key + 1) * 0x27D4EB2F) & _WORD
        bits = (self._indices(stretch) * 0x9E3779B1) ^ self._seeds(stretch) ^ keys
        bits ^= bits >> 16
        bits *= 0x7FEB352D
        bits ^= bits >> 15
        bits *= 0x846CA68B
        bits ^= bits >> 16
        return bits


def row_seeds(row: int, slots: range) -> tuple[int, ...]:
    """32-bit seeds of the rotated buffers of a row, none like those of another row or buffer of the run."""
    return tuple(((row * 0x85EBCA6B) ^ (slot * 0xC2B2AE35) ^ (row >> 16)) & _WORD for slot in slots)
