"""The record of a collective: a value that the measuring engine, the command line and the tests read alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpubench.model.terms.operation import DataType, Layout, ReduceOp, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Region

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
    """One collective.

    `layout(elements, dtype, ranks)` gives the counts for a requested size of that many elements;
    `expected(layout, rank, ranks, root)` says what the receive buffer holds afterwards; `issue(calls, call)` binds the
    library call.
    `busbw_factor(ranks)` turns algbw into busbw. `in_place` is false where NCCL defines no in-place form;
    `point_to_point` is what NCCL makes of sends and receives, without an algorithm of its own; `decomposes` what
    `hierarchical` makes of smaller ones.
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
