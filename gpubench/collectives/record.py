"""The record of a collective: its calls, the data it has to move, and the request for a sweep of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, fields

from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp, Segment
from gpubench.model.terms.plain import Bytes, Count
from gpubench.model.terms.statistics import Sampling
from gpubench.ports.backend import CollectiveCalls, Launch, Region
from gpubench.records import dataclass

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a collective on one rank, ready to be issued."""

    send: Region
    receive: Region
    count: int
    dtype: DataType
    op: ReduceOp
    root: int
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective: its layout of counts, expected receive buffer, library call, and busbw factor.

    `in_place` is false where NCCL defines no in-place form; `point_to_point` is made of sends and receives;
    `decomposes` is what `hierarchical` makes of smaller ones. `skewed` makes one whose ranks receive unequally much, by
    the share that the least loaded rank lacks; `row_name` is what rows call it, where that is not its name.
    """

    name: str
    description: str
    layout: Callable[[int, DataType, int], Layout]
    busbw_factor: Callable[[int], float]
    expected: Callable[[Layout, int, int, int], Sequence[Segment]]
    issue: Callable[[CollectiveCalls, Call], Launch]
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    point_to_point: bool = False
    decomposes: bool = False
    skewed: "Callable[[float], Collective] | None" = None
    row_name: str = ""


def whole(elements: int, _dtype: DataType, _ranks: int) -> Layout:
    """Every rank's buffers hold the whole size."""
    return Layout(count=elements, send=elements, receive=elements)


def per_rank_count(elements: int, dtype: DataType, ranks: int) -> int:
    """Elements of one rank's block: an equal share, rounded down to 16 bytes as nccl-tests rounds it."""
    step = ALIGNMENT_BYTES // dtype.size_bytes
    return elements // ranks // step * step


def gathered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """One block is sent, all are received; in place, a rank's block lies where the result has it."""
    block = per_rank_count(elements, dtype, ranks)
    return Layout(count=block, send=block, receive=block * ranks, in_place_send=block)


def scattered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """All blocks are sent, one is received; in place, the result lands where the rank's own block lies."""
    block = per_rank_count(elements, dtype, ranks)
    return Layout(count=block, send=block * ranks, receive=block, in_place_receive=block)


def every_block(layout: Layout, ranks: int) -> tuple[Segment, ...]:
    """Block r is what rank r sent."""
    block = layout.count
    return tuple(Segment(offset=source * block, count=block, start=0, source=source) for source in range(ranks))


@dataclass(frozen=True, slots=True)
class Movement:
    """Elements that have to leave a rank, and to arrive there, at least."""

    sent: int
    received: int


def least_moved(collective: Collective, layout: Layout, rank: int, ranks: int, root: int) -> Movement:
    """A rank's part: what others get of its data has left it, and the reverse; no algorithm moves less."""
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


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One rank's part: the collectives among all ranks, in its node, and among the ranks with its place in theirs."""

    whole: CollectiveCalls
    node: CollectiveCalls
    across: CollectiveCalls
    place: int
    ranks_a_node: int
    in_order: Callable[[Sequence[Launch]], Launch]

    @staticmethod
    def fits(count: int, dtype: DataType, ranks_a_node: int) -> bool:
        """True where there is a block for every rank of a node; of less nothing would be hierarchical."""
        return per_rank_count(count, dtype, ranks_a_node) > 0

    def all_reduce(self, call: Call) -> Launch:
        """The operation, in place where the call is; it has to fit. What 16-byte blocks leave over is reduced flat."""
        block = per_rank_count(call.count, call.dtype, self.ranks_a_node)
        own = _from(call.receive, self.place * block, call.dtype)
        parts = [
            self.node.reduce_scatter(call.send, own, block, call.dtype, call.op),
            self.across.all_reduce(own, own, block, call.dtype, call.op),
            self.node.all_gather(own, call.receive, block, call.dtype),
        ]
        done = block * self.ranks_a_node
        if done < call.count:
            send, receive = (_from(region, done, call.dtype) for region in (call.send, call.receive))
            parts.append(self.whole.all_reduce(send, receive, call.count - done, call.dtype, call.op))
        return self.in_order(parts)


def _from(region: Region, elements: int, dtype: DataType) -> Region:
    return Region(region.memory, region.offset_bytes + elements * dtype.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request for any collective.

    0 `graph_replays` launches plainly; `ops` is for collectives that reduce; 0 `cycles` have no end of their own.
    """

    sizes: tuple[Bytes, ...]
    dtypes: tuple[DataType, ...] = (DataType.FLOAT32,)
    ops: tuple[ReduceOp, ...] = (ReduceOp.SUM,)
    placements: tuple[Placement, ...] = (Placement.OUT_OF_PLACE,)
    root: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    warmup: Count = 5
    graph_replays: Count = 0
    check: bool = True
    skew: float | None = None
    cycles: Count = 1

    def request(self, collective: Collective) -> "SweepRequest":
        """The request for one collective, skewed where that is asked for."""
        if self.skew is not None and collective.skewed is not None:
            collective = collective.skewed(self.skew)
        return SweepRequest(collective=collective, **{each.name: getattr(self, each.name) for each in fields(Asked)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest(Asked):
    """The request for one collective."""

    collective: Collective

    @property
    def asked(self) -> Asked:
        """The same without the collective; `request` is the inverse."""
        return Asked(**{each.name: getattr(self, each.name) for each in fields(Asked)})
