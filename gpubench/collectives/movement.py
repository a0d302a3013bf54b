"""The data that a collective has to move, whatever the algorithm: derived from what each rank ends up with."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpubench.collectives.record import Collective
from gpubench.model.terms.operation import Layout


@dataclass(frozen=True, slots=True)
class Movement:
    """Elements that have to leave a rank, and to arrive there, at least."""

    sent: int
    received: int


def least_moved(collective: Collective, layout: Layout, rank: int, ranks: int, root: int) -> Movement:
    """A rank's part: what others end up with of its data has left it, what it ends up with of others' has arrived.

    Algorithms may move more (a ring forwards what others sent), multicast moves no less.
    """
    others = [each for each in range(ranks) if each != rank]
    wanted = (
        (segment.start, segment.start + segment.count)
        for other in others
        for segment in collective.expected(layout, other, ranks, root)
        if segment.source in (None, rank)
    )
    arriving = (
        segment.count for segment in collective.expected(layout, rank, ranks, root) if others and segment.source != rank
    )
    return Movement(sent=_covered(wanted), received=sum(arriving))


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    covered = end = 0
    for first, last in sorted(set(spans)):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered


def exchanges(collective: Collective, layout: Layout, ranks: int, root: int) -> Iterator[tuple[int, int]]:
    """The ordered pairs of ranks that a collective made of sends and receives connects."""
    for rank in range(ranks):
        for segment in collective.expected(layout, rank, ranks, root):
            if segment.source not in (None, rank):
                yield segment.source, rank
