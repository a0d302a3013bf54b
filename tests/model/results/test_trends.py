"""Headline figures of a run, and how they went."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.results.history import headline_figures, trends
from gpubench.model.terms.verdict import Verdict
from tests.formats.sample import LARGE, ROW, ROWS
from tests.formats.sample import PAIR as SAMPLE_PAIR

PAIR = replace(SAMPLE_PAIR, source_bus_id=None, destination_bus_id=None, scope="process", latency_us=None)
TO_GPU = replace(PAIR, source="host", destination="GPU0", peer=None, bandwidth_gb_s=55.0, note="pinned host memory")


def test_the_peak_of_each_collective() -> None:
    latency = replace(LARGE, mode="latency", busbw_gb_s=999.0)
    other = replace(ROW, collective="allgather", busbw_gb_s=7.0)
    assert headline_figures([*ROWS, latency, other]) == {
        "allreduce: peak busbw": LARGE.busbw_gb_s,
        "allgather: peak busbw": 7.0,
    }


def test_the_slowest_pair_with_peer_access_and_the_largest_size() -> None:
    rows = [
        PAIR,
        replace(PAIR, destination="GPU2", bandwidth_gb_s=38.0),
        replace(PAIR, peer="off", bandwidth_gb_s=1.0),
        replace(PAIR, size_bytes=16, bandwidth_gb_s=0.01),
        replace(PAIR, direction="both", bandwidth_gb_s=2.0),
        replace(PAIR, engine="sm", bandwidth_gb_s=3.0),
        replace(PAIR, destination="GPU3", bandwidth_gb_s=None),
    ]
    assert headline_figures(rows) == {"p2p: slowest pair": 38.0}


def test_host_memory_both_ways_where_it_is_pinned() -> None:
    rows = [
        TO_GPU,
        replace(TO_GPU, destination="GPU1", bandwidth_gb_s=27.0),
        replace(TO_GPU, note="pageable host memory", bandwidth_gb_s=1.0),
        replace(TO_GPU, source="GPU0", destination="host", bandwidth_gb_s=54.0),
    ]
    assert headline_figures(rows) == {"host memory to GPU: slowest": 27.0, "GPU to host memory: slowest": 54.0}


def test_wiring_alone_has_no_figures() -> None:
    assert headline_figures([replace(PAIR, bandwidth_gb_s=None, direction=None, engine=None)]) == {}


@given(st.lists(st.tuples(st.integers(1, 28), st.sampled_from(Verdict), st.floats(0.1, 1e4)), max_size=20))
def test_points_are_in_order_of_time_and_none_is_lost(runs: list[tuple[int, Verdict, float]]) -> None:
    found = list(trends((f"2026-11-{day:02}T08:00:00+00:00", verdict, {"x": gb_s}) for day, verdict, gb_s in runs))
    points = [point for trend in found for point in trend.points]
    assert sorted((point.verdict, point.gb_s) for point in points) == sorted((run[1], run[2]) for run in runs)
    assert [point.started_at for point in points] == sorted(point.started_at for point in points)
    assert len(found) == bool(runs)
