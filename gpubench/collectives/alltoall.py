"""alltoall: rank r receives block r of every rank's buffer. With a skew, higher ranks receive smaller blocks."""

from msgspec.structs import replace

from gpubench.collectives.record import Collective, count_per_rank
from gpubench.model.terms.operation import DataType, Layout, Segment, all_but_own_factor


def layout(elements: int, dtype: DataType, ranks: int) -> Layout:
    block = count_per_rank(elements, dtype, ranks)
    return Layout(count=block, send=block * ranks, receive=block * ranks)


def expected(layout: Layout, rank: int, ranks: int, _root: int) -> tuple[Segment, ...]:
    """Return the expected receive buffer: on rank r, block s is block r from rank s."""
    block = layout.count
    return tuple(
        Segment(offset=source * block, count=block, start=rank * block, source=source) for source in range(ranks)
    )


_STEP = 16  # Block sizes are multiples of this many elements, which is 16 bytes for the smallest type


def block_counts(largest: int, ranks: int, skew: float) -> tuple[int, ...]:
    """Return the number of elements that each rank receives from every rank.

    It decreases linearly from `largest` on rank 0 to (1 - skew) × `largest` on the last rank.
    """
    shares = (skew * rank / max(1, ranks - 1) for rank in range(1, ranks))
    return (largest, *(int(largest * (1 - share)) // _STEP * _STEP for share in shares))


def skewed(skew: float) -> Collective:
    """Return alltoallv with unequal blocks, as with busy and idle experts in a mixture of experts.

    The size is rank 0's receive buffer, so busbw is the bandwidth of its links, as in alltoall. The last rank receives
    (1 - skew) times the size.
    """

    def layout_v(elements: int, dtype: DataType, ranks: int) -> Layout:
        block = count_per_rank(elements, dtype, ranks)
        return Layout(count=block, send=sum(block_counts(block, ranks, skew)), receive=block * ranks)

    def expected_v(layout: Layout, rank: int, ranks: int, _root: int) -> tuple[Segment, ...]:
        counts = block_counts(layout.count, ranks, skew)
        start, own = sum(counts[:rank]), counts[rank]
        sources = range(ranks) if own else ()
        return tuple(Segment(offset=source * own, count=own, start=start, source=source) for source in sources)

    return replace(
        ALLTOALL,
        layout=layout_v,
        expected=expected_v,
        issue=lambda calls, call: calls.all_to_all_v(
            call.send, call.receive, block_counts(call.count, call.ranks, skew), call.dtype
        ),
        row_name="alltoallv",
        skewed=None,
    )


ALLTOALL = Collective(
    name="alltoall",
    description="The size is that of each rank's send buffer, including its own block. busbw = algbw × (n-1)/n.",
    layout=layout,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=lambda calls, call: calls.all_to_all(call.send, call.receive, call.count, call.dtype),
    in_place=False,
    point_to_point=True,
    skewed=skewed,
)
