"""Test data, computed on arrays from NumPy or a compatible library. `backends/pattern.cu` computes the same data on
a GPU.
"""

from msgspec import Struct

from gpubench.model.terms.operation import WORD, DataPattern, DataType, NumberKind, ReduceOp
from gpubench.ports.backend import Array, ArrayNamespace

# Compare data as unsigned integers, so that every bit counts
STORAGE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


class Stretch(Struct, frozen=True):
    """The elements `[start, start + count)` of a rank's data, in one buffer per seed."""

    start: int
    count: int
    seeds: tuple[int, ...]


class ArrayPattern(Struct, frozen=True):
    """A test pattern as arrays from `namespace`, a NumPy-like module. Results have the shape (buffers, elements)."""

    namespace: ArrayNamespace
    data: DataPattern

    def sent(self, rank: int, stretch: Stretch) -> Array:
        """Return the data that `rank` sends, as unsigned integers."""
        if self.data.op is None:
            return self._random_bits(stretch, rank)
        # The order in which ranks contribute differs per element. `first` is the first rank, and rank r's turn is first
        # + r, modulo the number of ranks.
        first = _remainder(self._indices(stretch) + self._seeds(stretch), self.data.ranks)
        turn = _remainder(first + rank, self.data.ranks)
        values = self._contribution(stretch, turn)
        if self.data.contributors < self.data.ranks:
            values = self.namespace.where(turn < self.data.contributors, values, self.data.neutral)
        return self._encode(values)

    def reduced(self, stretch: Stretch) -> Array:
        """Return the reduction over all ranks, as unsigned integers."""
        total = self._contribution(stretch, 0)
        for turn in range(1, self.data.contributors):
            total = self._combine(total, self._contribution(stretch, turn))
        if self.data.op is ReduceOp.AVG:
            is_float = self.data.dtype.kind is NumberKind.FLOAT
            return self._encode(total / self.data.ranks if is_float else total // self.data.ranks)
        return self._encode(total)

    def wrong(self, got: Array, expected: Array) -> int:
        """Count the elements that differ by more than the pattern's tolerance."""
        if self.data.tolerance_ulp == 0:
            return int(self.namespace.count_nonzero(got != expected))
        # Only averages have a tolerance, and they are positive, so their bit patterns have the same order as their
        # values.
        distance = self.namespace.where(got > expected, got - expected, expected - got)
        return int(self.namespace.count_nonzero(distance > self.data.tolerance_ulp))

    def _contribution(self, stretch: Stretch, turn: Array | int) -> Array:
        """Return the int32 values of the rank at `turn`. `turn` is one number for all elements, or an array with
        one per element.
        """
        random, data = self._hash(stretch, turn), self.data
        if data.op is ReduceOp.PROD:
            return self._factor(random, self.namespace.asarray(turn))
        if data.op is ReduceOp.AVG:
            most = 100 if data.dtype.kind is NumberKind.FLOAT else 15
            return (_remainder(random, most) + 1).astype("int32")
        if data.op is ReduceOp.SUM:
            spread, lowest = (16, 0) if data.dtype.kind is NumberKind.UNSIGNED else (31, -15)
            return _remainder(random, spread).astype("int32") + lowest
        above_neutral = 1 if data.op is ReduceOp.MAX else 0
        return _remainder(random, 200).astype("int32") + (data.lowest + above_neutral)

    def _factor(self, random: Array, turn: Array) -> Array:
        """Return the factors for a product: 1 to 7 at turn 0, ±1 or ±2 at turns 1 to 4, and ±1 after that.

        Products stay below 113, so int8 represents them exactly.
        """
        namespace = self.namespace
        first = (_remainder(random, 7) + 1).astype("int32")
        doubled = ((random & 1) + 1).astype("int32")
        values = namespace.where(turn == 0, first, namespace.where(turn <= 4, doubled, 1))
        if self.data.dtype.kind is NumberKind.UNSIGNED:
            return values
        return namespace.where((random >> 8) & 1 == 1, -values, values)

    def _combine(self, left: Array, right: Array) -> Array:
        if self.data.op is ReduceOp.PROD:
            return left * right
        if self.data.op is ReduceOp.MAX:
            return self.namespace.maximum(left, right)
        if self.data.op is ReduceOp.MIN:
            return self.namespace.minimum(left, right)
        return left + right

    def _encode(self, values: Array) -> Array:
        dtype = self.data.dtype
        storage = STORAGE[dtype.size_bytes]
        if dtype is DataType.BFLOAT16:
            bits = values.astype("float32").view("uint32")
            to_nearest_even = ((bits >> 16) & 1) + 0x7FFF
            return ((bits + to_nearest_even) >> 16).astype(storage)
        return values.astype(dtype.value).view(storage)

    def _random_bits(self, stretch: Stretch, rank: int) -> Array:
        low = self._hash(stretch, rank)
        if self.data.dtype.size_bytes < 8:
            return low.astype(STORAGE[self.data.dtype.size_bytes])
        high = self._hash(stretch, rank + self.data.ranks)
        return low.astype("uint64") | (high.astype("uint64") << 32)

    def _indices(self, stretch: Stretch) -> Array:
        return (self.namespace.arange(stretch.count, dtype="uint32") + (stretch.start & WORD))[None, :]

    def _seeds(self, stretch: Stretch) -> Array:
        return self.namespace.asarray(stretch.seeds, dtype="uint32")[:, None]

    def _hash(self, stretch: Stretch, key: Array | int) -> Array:
        """Return 32 random bits for each (buffer, element, key), computed with Chris Wellons' public-domain hash
        lowbias32.
        """
        keys = ((key + 1) * 0x27D4EB2F) & WORD
        bits = (self._indices(stretch) * 0x9E3779B1) ^ self._seeds(stretch) ^ keys
        bits ^= bits >> 16
        bits *= 0x7FEB352D
        bits ^= bits >> 15
        bits *= 0x846CA68B
        bits ^= bits >> 16
        return bits


def _remainder(values: Array, divisor: int) -> Array:
    """Return unsigned `values % divisor`, with a vectorized division that is 5 times as fast as NumPy's remainder."""
    whole = values // divisor
    whole *= divisor
    return values - whole
