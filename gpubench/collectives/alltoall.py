"""alltoall: rank r ends with block r of every rank's buffer."""

from gpubench.collectives.record import Collective, per_rank_count
from gpubench.model.terms.operation import DataType, Layout, Segment, all_but_own_factor


def layout(elements: int, dtype: DataType, ranks: int) -> Layout:
    """One block to and from every rank, itself included."""
    block = per_rank_count(elements, dtype, ranks)
    return Layout(count=block, send=block * ranks, receive=block * ranks)


def expected(layout: Layout, rank: int, ranks: int, _root: int) -> tuple[Segment, ...]:
    """Block s on rank r is block r of what rank s sent."""
    block = layout.count
    return tuple(
        Segment(offset=source * block, count=block, start=rank * block, source=source) for source in range(ranks)
    )


ALLTOALL = Collective(
    name="alltoall",
    description="The size is each rank's whole send buffer, its own block included. busbw = algbw × (n-1)/n.",
    layout=layout,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=lambda calls, call: calls.all_to_all(call.send, call.receive, call.count, call.dtype),
    in_place=False,
    point_to_point=True,
)
