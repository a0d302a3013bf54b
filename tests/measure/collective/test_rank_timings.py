"""The finding on late ranks."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpubench.measure.collective.cases import Answer, RankTimings
from gpubench.model.facts.process import GpuCondition
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import EntryTimes
from gpubench.model.terms.verdict import Finding
from tests.formats.sample import ROW

FOUR = [
    RankIdentity(
        rank=rank,
        host=f"n{rank // 2}",
        node=rank // 2,
        local_rank=rank % 2,
        pid=1,
        gpu_bus_id=f"0:{rank}",
        gpu_index=rank % 2,
    )
    for rank in range(4)
]
ON_TIME, LATE = EntryTimes(200, 5, 3e-6, 1e-6), EntryTimes(200, 190, 2e-3, 1e-6)
LAST_LATE = [Answer(2e-3, ON_TIME)] * 3 + [Answer(1e-3, LATE)]


def findings(*rows: Sequence[Answer]) -> tuple[Finding, ...]:
    rank_timings = RankTimings(FOUR)
    for answers in rows:
        rank_timings.add(replace(ROW, time_us=2500.0), answers)
    return rank_timings.findings()


def with_conditions(conditions: Sequence[GpuCondition | None]) -> list[Answer]:
    return [replace(answer, condition=condition) for answer, condition in zip(LAST_LATE, conditions, strict=True)]


def test_no_rank_is_late_without_entry_times() -> None:
    assert findings() == ()
    assert findings([Answer(1e-6)] * 3 + [Answer(9e-6)]) == ()


def test_a_late_rank_is_named_with_its_delay_and_probability() -> None:
    (finding,) = findings(LAST_LATE)
    assert (finding.id, finding.subject) == ("straggler", str(FOUR[3]))
    assert finding.seen == (
        "last to enter 190 of 200 operations, 2 ms after the others (median row); an operation takes 2.5 ms"
    )
    assert finding.expected.startswith("25% of them, like any other rank (probability by chance: at most ")


def test_a_late_node_is_named_as_one() -> None:
    half = replace(LATE, last=95)
    (finding,) = findings([Answer(2e-3, replace(ON_TIME, last=5))] * 2 + [Answer(1e-3, half)] * 2)
    assert finding.subject == "ranks 2-3 on n1"
    assert finding.subjects == (str(FOUR[2]), str(FOUR[3]))


def test_a_late_rank_is_shown_with_the_condition_of_its_gpu() -> None:
    slow = GpuCondition(throttle_reasons=("sw_power_cap",), clock_mhz=1200, most_clock_mhz=1980)
    healthy, unread = GpuCondition(), GpuCondition(unread={"throttle_reasons": "Not Supported"})
    others = [GpuCondition(throttle_reasons=("hw_slowdown",))] * 3
    for rows, ending in (
        (
            ([slow, healthy, None, slow], [None, None, None, GpuCondition(unread={"clock": "gone"})]),
            "; its GPU 1 is throttled: sw power cap; 1200 of 1980 MHz",
        ),
        (([*others, unread],), "; not read on its GPU 1: throttle reasons (Not Supported)"),
        (([*others, healthy],), ""),
    ):
        (finding,) = findings(*map(with_conditions, rows))
        assert finding.seen.endswith(f"takes 2.5 ms{ending}")
