"""Fill buffers with test data, and count what an operation got wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.collectives.pattern import STORAGE, Pattern, Stretch, row_seeds
from gpubench.model.operation import Segment
from gpubench.ports import Array, Memory

POISON = 0xA5
"""What a receive buffer holds before an operation, so that a result left from an earlier one is not taken for this."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Rotated buffers of equal size in one memory: buffer k starts at element `k × stride`."""

    memory: Memory
    stride: int
    used: int

    def elements(self, pattern: Pattern) -> Array:
        """All buffers in use as unsigned integers of shape (buffers, elements)."""
        storage = STORAGE[pattern.dtype.size_bytes]
        return self.memory.array(0, self.used * self.stride, storage).reshape(self.used, self.stride)

    def pieces(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Cuts of (buffers, elements) that cover `count` elements of every buffer, none too large for one go."""
        most = self.memory.chunk_elements
        rows = max(1, most // count)
        for first in range(0, self.used, rows):
            for start in range(0, count, most):
                yield slice(first, min(first + rows, self.used)), slice(start, min(start + most, count))


def fill_sent(slots: Slots, pattern: Pattern, row: int, rank: int, offset: int, count: int) -> None:
    """Write what `rank` sends into elements `[offset, offset + count)` of every buffer."""
    elements = slots.elements(pattern)
    for buffers, piece in slots.pieces(count):
        stretch = Stretch(piece.start, piece.stop - piece.start, row_seeds(row, range(buffers.start, buffers.stop)))
        elements[buffers, offset + piece.start : offset + piece.stop] = pattern.sent(rank, stretch)


def poison(slots: Slots, pattern: Pattern) -> None:
    """Overwrite every buffer in use with a byte that no result consists of."""
    size_bytes = slots.used * slots.stride * pattern.dtype.size_bytes
    slots.memory.array(0, size_bytes, "uint8")[:] = POISON


def count_wrong(slots: Slots, pattern: Pattern, row: int, offset: int, segments: Sequence[Segment]) -> int:
    """Wrong elements in every buffer, whose received data start at element `offset`."""
    elements = slots.elements(pattern)
    wrong = 0
    for segment in segments:
        for buffers, piece in slots.pieces(segment.count):
            seeds = row_seeds(row, range(buffers.start, buffers.stop))
            stretch = Stretch(segment.start + piece.start, piece.stop - piece.start, seeds)
            expected = pattern.reduced(stretch) if segment.source is None else pattern.sent(segment.source, stretch)
            begin = offset + segment.offset
            wrong += pattern.wrong(elements[buffers, begin + piece.start : begin + piece.stop], expected)
    return wrong
