"""The record of a collective: its calls, the data it has to move, and the request for a sweep of it."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import field

from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp, Segment
from gpubench.model.terms.plain import Bytes, Count
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.statistics import Sampling
from gpubench.ports.backend import CollectiveCalls, Launch, Region

ALIGNMENT_BYTES = 16


class Call(Struct, frozen=True):
    """One operation on one rank, ready to be issued."""

    send: Region
    receive: Region
    count: int
    dtype: DataType
    op: ReduceOp
    root: int
    rank: int
    ranks: int


class Collective(Struct, frozen=True, kw_only=True):
    """A collective: its layout of counts, expected receive buffer, library call, and busbw factor.

    `in_place` is False if NCCL defines no in-place form. A `point_to_point` collective consists of sends and receives.
    One that `decomposes` has a hierarchical form. `skewed` returns a form whose ranks receive unequal amounts. Its
    argument is the share that the least loaded rank lacks. `row_name` replaces the name in rows.
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
    """Lay out buffers that hold the whole size on every rank."""
    return Layout(count=elements, send=elements, receive=elements)


def count_per_rank(elements: int, dtype: DataType, ranks: int) -> int:
    """Return the elements of one rank's block, rounded down to 16 bytes as in nccl-tests."""
    step = ALIGNMENT_BYTES // dtype.size_bytes
    return elements // ranks // step * step


def gathered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """Lay out one sent block and all received blocks. In place, a rank's block is where the result has it."""
    block = count_per_rank(elements, dtype, ranks)
    return Layout(count=block, send=block, receive=block * ranks, in_place_send=block)


def scattered(elements: int, dtype: DataType, ranks: int) -> Layout:
    """Lay out all sent blocks and one received block. In place, the result replaces the rank's own block."""
    block = count_per_rank(elements, dtype, ranks)
    return Layout(count=block, send=block * ranks, receive=block, in_place_receive=block)


def every_block(layout: Layout, ranks: int) -> tuple[Segment, ...]:
    """Expect that block r is what rank r sent."""
    block = layout.count
    return tuple(Segment(offset=source * block, count=block, start=0, source=source) for source in range(ranks))


class Movement(Struct, frozen=True):
    """The least elements that must leave a rank, and arrive there."""

    sent: int
    received: int


def least_moved(collective: Collective, layout: Layout, rank: int, ranks: int, root: int) -> Movement:
    """Return a rank's least movement: the data of others that it needs, and its data that others need."""
    others = [other for other in range(ranks) if other != rank]
    wanted = (
        (segment.start, segment.start + segment.count)
        for other in others
        for segment in collective.expected(layout, other, ranks, root)
        if segment.source in (None, rank)
    )
    sent = end = 0
    for first, last in sorted(set(wanted)):  # spans may overlap
        sent += max(0, last - max(first, end))
        end = max(end, last)
    arriving = (
        segment.count for segment in collective.expected(layout, rank, ranks, root) if others and segment.source != rank
    )
    return Movement(sent=sent, received=sum(arriving))


def exchanges(collective: Collective, layout: Layout, ranks: int, root: int) -> Iterator[tuple[int, int]]:
    """Yield the ordered pairs of ranks that send to each other."""
    for rank in range(ranks):
        for segment in collective.expected(layout, rank, ranks, root):
            if segment.source not in (None, rank):
                yield segment.source, rank


class Hierarchy(Struct, frozen=True):
    """The collectives of one rank: among all ranks, in its node, and among ranks with its place on other nodes."""

    whole: CollectiveCalls
    node: CollectiveCalls
    across: CollectiveCalls
    place: int
    ranks_a_node: int
    chain: Callable[[Sequence[Launch]], Launch]

    @staticmethod
    def fits(count: int, dtype: DataType, ranks_a_node: int) -> bool:
        """True if each rank of a node gets a block."""
        return count_per_rank(count, dtype, ranks_a_node) > 0

    def all_reduce(self, call: Call) -> Launch:
        """Reduce in three steps. Elements beyond whole 16-byte blocks are reduced flat."""
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
    """The request for a sweep of any collective. `ops` applies to reductions.

    With 0 `graph_replays` no graph is captured. With 0 `cycles` the sweep repeats until it is interrupted.
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
        """Return the request for one collective, skewed if asked for."""
        if self.skew is not None and collective.skewed is not None:
            collective = collective.skewed(self.skew)
        return SweepRequest(collective=collective, **{name: getattr(self, name) for name in Asked.__struct_fields__})


class SweepRequest(Asked, frozen=True, kw_only=True):
    """The request for a sweep of one collective."""

    collective: Collective

    @property
    def asked(self) -> Asked:
        """The request without the collective, for a recording."""
        return Asked(**{name: getattr(self, name) for name in Asked.__struct_fields__})
