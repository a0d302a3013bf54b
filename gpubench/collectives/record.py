"""The definition of a collective: its library call, the data that it moves, and the parameters of a sweep."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import field

from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp, Segment
from gpubench.model.terms.plain import Bytes, Count
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.statistics import Sampling
from gpubench.ports.backend import CollectiveCalls, Launch, Region

ALIGNMENT_BYTES = 16


class Call(Struct, frozen=True):
    """The arguments of one operation on one rank."""

    send: Region
    receive: Region
    count: int
    dtype: DataType
    op: ReduceOp
    root: int
    rank: int
    ranks: int


class Collective(Struct, frozen=True, kw_only=True):
    """A collective: element counts (`layout`), expected receive buffer, library call, and busbw factor.

    `in_place` is False if NCCL defines no in-place form. `point_to_point` is true for sends and receives. `decomposes`
    is true if there is a hierarchical form.

    `skewed` returns a form with unequal amounts per rank. Its argument is the fraction by which the least loaded rank
    receives less. `row_name` replaces the name in rows.
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
    """Return a layout in which every rank sends and receives all elements."""
    return Layout(count=elements, send=elements, receive=elements)


def count_per_rank(elements: int, dtype: DataType, ranks: int) -> int:
    """Return the number of elements in one rank's block, rounded down to 16 bytes as in nccl-tests."""
    step = ALIGNMENT_BYTES // dtype.size_bytes
    return elements // ranks // step * step


def gathered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """Return a layout with one sent block and a received block per rank.

    In place, a rank sends from the position of its own block in the receive buffer.
    """
    block = count_per_rank(elements, dtype, ranks)
    return Layout(count=block, send=block, receive=block * ranks, in_place_send=block)


def scattered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """Return a layout with a sent block per rank and one received block. In place, the result overwrites the rank's
    own block.
    """
    block = count_per_rank(elements, dtype, ranks)
    return Layout(count=block, send=block * ranks, receive=block, in_place_receive=block)


def every_block(layout: Layout, ranks: int) -> tuple[Segment, ...]:
    """Return the expected receive buffer, in which block r is the data that rank r sent."""
    block = layout.count
    return tuple(Segment(offset=source * block, count=block, start=0, source=source) for source in range(ranks))


class Movement(Struct, frozen=True):
    """The minimum number of elements that a rank must send and receive."""

    sent: int
    received: int


def least_moved(collective: Collective, layout: Layout, rank: int, ranks: int, root: int) -> Movement:
    """Return how many elements of other ranks' data a rank needs, and how many of its own other ranks need."""
    others = [other for other in range(ranks) if other != rank]
    wanted = (
        (segment.start, segment.start + segment.count)
        for other in others
        for segment in collective.expected(layout, other, ranks, root)
        if segment.source in (None, rank)
    )
    sent = end = 0
    for first, last in sorted(set(wanted)):  # several ranks may need the same elements
        sent += max(0, last - max(first, end))
        end = max(end, last)
    arriving = (
        segment.count for segment in collective.expected(layout, rank, ranks, root) if others and segment.source != rank
    )
    return Movement(sent=sent, received=sum(arriving))


def exchanges(collective: Collective, layout: Layout, ranks: int, root: int) -> Iterator[tuple[int, int]]:
    """Yield (sender, receiver) for all pairs of ranks that exchange data."""
    for rank in range(ranks):
        for segment in collective.expected(layout, rank, ranks, root):
            if segment.source not in (None, rank):
                yield segment.source, rank


class Hierarchy(Struct, frozen=True):
    """One rank's communicators for a hierarchical collective: all ranks, its node, and ranks with the same local
    rank.
    """

    whole: CollectiveCalls
    node: CollectiveCalls
    across: CollectiveCalls
    place: int
    ranks_a_node: int
    chain: Callable[[Sequence[Launch]], Launch]

    @staticmethod
    def fits(count: int, dtype: DataType, ranks_a_node: int) -> bool:
        """True if each rank of a node gets at least one 16-byte block."""
        return count_per_rank(count, dtype, ranks_a_node) > 0

    def all_reduce(self, call: Call) -> Launch:
        """All-reduce in three steps: reduce-scatter in the node, all-reduce across nodes, and all-gather in the
        node.

        Elements that do not fill equal 16-byte blocks are reduced over all ranks directly.
        """
        block = count_per_rank(call.count, call.dtype, self.ranks_a_node)
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
        return self.chain(parts)


def _from(region: Region, elements: int, dtype: DataType) -> Region:
    return Region(region.memory, region.offset_bytes + elements * dtype.size_bytes)


class Asked(Struct, frozen=True, kw_only=True):
    """The parameters of a sweep, for any collective. `ops` applies to reductions.

    If `graph_replays` is 0, no CUDA graph is captured. If `cycles` is 0, the sweep repeats until it is interrupted.
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
        """Return the parameters for one collective, in its skewed form if `skew` is set."""
        if self.skew is not None and collective.skewed is not None:
            collective = collective.skewed(self.skew)
        return SweepRequest(collective=collective, **{name: getattr(self, name) for name in Asked.__struct_fields__})


class SweepRequest(Asked, frozen=True, kw_only=True):
    """The parameters of a sweep for one collective."""

    collective: Collective

    @property
    def asked(self) -> Asked:
        """The parameters without the collective, for a recording."""
        return Asked(**{name: getattr(self, name) for name in Asked.__struct_fields__})
