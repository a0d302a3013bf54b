"""What each rank saw of each row, and the finding on who is late."""

from msgspec.structs import replace

from gpubench.measure.collective.cases import RankTimings
from gpubench.model.facts.process import GpuCondition
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import EntryTimes
from tests.formats.sample import ROW

FOUR = [
    RankIdentity(rank=rank, host=f"n{rank // 2}", node=rank // 2, local_rank=rank % 2, pid=1, gpu_bus_id=f"0:{rank}")
    for rank in range(4)
]
ON_TIME, LATE = EntryTimes(200, 5, 3e-6, 1e-6), EntryTimes(200, 190, 2e-3, 1e-6)


def test_without_times_of_entering_nobody_is_late() -> None:
    rank_timings = RankTimings(FOUR)
    assert rank_timings.findings() == ()
    rank_timings.add_row(ROW, [(1e-6, None)] * 3 + [(9e-6, None)])
    assert rank_timings.findings() == ()


def test_a_rank_that_is_late_is_named_with_how_late_and_how_sure() -> None:
    rank_timings = RankTimings(FOUR)
    rank_timings.add_row(replace(ROW, time_us=2500.0), [(2e-3, ON_TIME)] * 3 + [(1e-3, LATE)])
    (finding,) = rank_timings.findings()
    assert finding.id == "straggler"
    assert finding.subject == str(FOUR[3])
    assert finding.seen == (
        "the last to enter 190 of 200 operations, 1997 µs behind the others in the median row; an operation "
        "takes 2500 µs"
    )
    assert finding.expected.startswith("25% of them, like any other rank (probability by chance: at most ")


def test_a_node_that_is_late_is_named_as_one() -> None:
    rank_timings = RankTimings(FOUR)
    half = replace(LATE, last=95)
    rank_timings.add_row(replace(ROW, time_us=2500.0), [(2e-3, replace(ON_TIME, last=5))] * 2 + [(1e-3, half)] * 2)
    (finding,) = rank_timings.findings()
    assert finding.subject == "ranks 2-3 on n1"
    assert finding.subjects == (str(FOUR[2]), str(FOUR[3]))


def test_beside_a_rank_that_is_late_stands_what_is_off_with_its_gpu() -> None:
    rank_timings = RankTimings([replace(each, gpu_index=each.local_rank) for each in FOUR])
    slow = GpuCondition(throttle_reasons=("sw_power_cap",), clock_mhz=1200, most_clock_mhz=1980)
    for conditions in ([slow, GpuCondition(), None, slow], [None, None, None, GpuCondition(unread={"clock": "gone"})]):
        rank_timings.add_row(replace(ROW, time_us=2500.0), [(2e-3, ON_TIME)] * 3 + [(1e-3, LATE)])
        rank_timings.add_conditions(conditions)
    (finding,) = rank_timings.findings()
    assert finding.seen.endswith("takes 2500 µs; its GPU 1 is throttled: sw power cap; 1200 of 1980 MHz")


def test_of_a_late_rank_whose_gpu_nobody_could_read_that_is_said_and_of_a_healthy_one_nothing() -> None:
    unread = GpuCondition(unread={"throttle_reasons": "Not Supported"})
    for condition, ending in ((unread, "; not read of its GPU 1: throttle reasons (Not Supported)"), (None, "")):
        rank_timings = RankTimings([replace(each, gpu_index=each.local_rank) for each in FOUR])
        rank_timings.add_row(replace(ROW, time_us=2500.0), [(2e-3, ON_TIME)] * 3 + [(1e-3, LATE)])
        throttled = GpuCondition(throttle_reasons=("hw_slowdown",))
        rank_timings.add_conditions([throttled] * 3 + [condition or GpuCondition()])
        (finding,) = rank_timings.findings()
        assert finding.seen.endswith(f"takes 2500 µs{ending}")
