"""alltoallv: how much each rank sends, and where it arrives."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpubench.collectives.alltoall import ALLTOALL, block_counts, skewed
from gpubench.collectives.record import Asked, exchanges, least_moved
from gpubench.collectives.registry import collective_named
from gpubench.model.terms.operation import DataType

SKEWS = st.floats(0, 1)
RANKS = st.integers(1, 64)


@given(st.integers(0, 2**30), RANKS, SKEWS)
def test_blocks_shrink_evenly_from_the_first_rank_to_the_last(block: int, ranks: int, skew: float) -> None:
    counts = block_counts(block, ranks, skew)
    assert len(counts) == ranks
    assert counts[0] == block
    assert all(one >= other for one, other in pairwise(counts))
    assert all(count % 16 == 0 for count in counts[1:])
    if ranks > 1:
        assert abs(counts[-1] - block * (1 - skew)) <= 16
        middle = block * (1 - skew * (ranks // 2) / (ranks - 1))
        assert abs(counts[ranks // 2] - middle) <= 16


@given(st.integers(0, 2**26), st.sampled_from(DataType), RANKS, SKEWS)
def test_every_element_that_is_sent_arrives_once(size: int, dtype: DataType, ranks: int, skew: float) -> None:
    collective = skewed(skew)
    layout = collective.layout(size // dtype.size_bytes, dtype, ranks)
    assert layout.largest == layout.receive == layout.count * ranks
    wanted: dict[int, list[tuple[int, int]]] = {source: [] for source in range(ranks)}
    for rank in range(ranks):
        end = 0
        for segment in collective.expected(layout, rank, ranks, 0):
            assert segment.source is not None
            assert segment.offset == end, "one block after the other"
            end += segment.count
            wanted[segment.source].append((segment.start, segment.start + segment.count))
        assert end <= layout.receive
    for spans in wanted.values():
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        assert (spans[0][0] if spans else 0, spans[-1][1] if spans else 0) == (0, layout.send)


def test_without_a_skew_it_is_an_alltoall() -> None:
    even = skewed(0.0)
    for rank in range(4):
        layout = even.layout(4096, DataType.FLOAT32, 4)
        assert layout == ALLTOALL.layout(4096, DataType.FLOAT32, 4)
        assert even.expected(layout, rank, 4, 0) == ALLTOALL.expected(layout, rank, 4, 0)


def test_with_a_whole_skew_the_last_rank_gets_nothing() -> None:
    collective = skewed(1.0)
    layout = collective.layout(3 * 1024, DataType.FLOAT32, 3)
    assert collective.expected(layout, 2, 3, 0) == ()
    assert {destination for _, destination in exchanges(collective, layout, 3, 0)} == {0, 1}
    first, last = (least_moved(collective, layout, rank, 3, 0) for rank in (0, 2))
    assert (first.received, last.received) == (2 * 1024, 0)
    assert (first.sent, last.sent) == (512, 1024 + 512)


def test_a_request_makes_it_of_the_plain_one() -> None:
    asked = Asked(sizes=(1024,), skew=0.5)
    request = asked.request(collective_named("alltoall"))
    assert (request.collective.name, request.collective.row_name) == ("alltoall", "alltoallv")
    assert request.asked == asked
    assert asked.request(collective_named("allreduce")).collective is collective_named("allreduce")
