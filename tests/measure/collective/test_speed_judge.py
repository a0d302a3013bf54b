"""Verdicts on the speed of a sweep, and the causes of slow rows."""

from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from gpubench.collectives.registry import collective_named
from gpubench.conditions.circumstances import Circumstances, Sighting
from gpubench.conditions.ranking import Diagnosis, Named
from gpubench.conditions.registry import CONDITIONS
from gpubench.jobs.collective.metadata import speed_judge_maker
from gpubench.measure.collective.report import ExpectedTimes, SpeedJudge
from gpubench.measure.paths import Explained
from gpubench.model.facts.process import RankFacts
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import MEASURED, ExpectedTime
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, Cure, Finding, Verdict
from gpubench.profiles import load
from tests.fakes.measured_rows import row

if TYPE_CHECKING:
    from gpubench.conditions.condition import Condition

ALLREDUCE = collective_named("allreduce")
H200 = ExpectedTimes(collective=ALLREDUCE, profile=load("hgx-h200-4"), nccl="2.28.9")


def four(size_bytes: int, time_us: float, **changes: Any) -> CollectiveRow:
    busbw = size_bytes * 1.5 / time_us / 1e3
    return replace(row(size_bytes, time_us, busbw, ranks=4), algbw_gb_s=busbw / 1.5, **changes)


def judge(expected: ExpectedTimes = H200) -> SpeedJudge:
    return SpeedJudge(expected, ["node3"])


def explained(*causes: tuple[str, Confidence], **where: Any) -> Explained:
    by_id: dict[str, Condition] = {condition.id: condition for condition in CONDITIONS}
    named = tuple(
        Named(by_id[id_], (Sighting(subject="this job", seen=f"{id_} was seen", confidence=sure, **where),))
        for id_, sure in causes
    )
    explanation = Explained(Circumstances(wiring=Wiring((), {})))
    explanation.__dict__["diagnosis"] = Diagnosis(named, {})
    return explanation


def findings(explanation: Explained | None, *rows: CollectiveRow, found: tuple[Finding, ...] = ()) -> list[Finding]:
    judging = judge()
    for each in rows:
        judging.row(each)
    return list(judging.findings(found, explanation))


SLOW = four(2**28, 16_150.0)


def test_the_first_source_with_an_expectation_counts() -> None:
    past = lambda _row: ExpectedTime(7.0, "the past", MEASURED)  # noqa: E731
    assert cast("ExpectedTime", H200.of(SLOW)).source == "profile hgx-h200-4"
    assert cast("ExpectedTime", replace(H200, past=past).of(SLOW)).source == "profile hgx-h200-4"
    bare = ExpectedTimes(collective=ALLREDUCE, past=past)
    assert cast("ExpectedTime", bare.of(SLOW)).source == "the past"
    limit = ExpectedTimes(collective=ALLREDUCE)
    assert "of the limit" in cast("ExpectedTime", limit.of(SLOW)).source
    assert limit.of(replace(SLOW, limit_gb_s=None)) is None


def test_a_framework_is_judged_by_the_profile_if_it_makes_one_nccl_call() -> None:
    in_place = four(2**24, 500.0, backend="torch:nccl", placement="in_place")
    alone = judge().row(in_place)
    assert (alone.verdict, alone.expected_source) == ("FAIL", "profile hgx-h200-4")
    copied_first = four(2**24, 500.0, backend="torch:nccl", placement="out_of_place")
    assert judge().row(copied_first).expected_source is None
    beside = judge()
    beside.row(four(2**24, 100.0))
    compared = beside.row(in_place)
    assert (compared.verdict, compared.expected_source) == ("PASS", "profile hgx-h200-4")
    assert not beside.slow


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "FAIL"),
        ({"setting": "again"}, "FAIL"),
        ({"setting": "ring/ll"}, "PASS"),
        ({"setting": "hierarchical"}, "PASS"),
    ],
)
def test_compared_settings_are_not_judged(changes: dict[str, Any], verdict: str) -> None:
    shown = judge().row(replace(SLOW, **changes))
    assert shown.verdict == verdict
    assert shown.expected_percent == pytest.approx(7.3, abs=0.1)


@pytest.mark.parametrize(
    ("size_bytes", "time_us", "verdict", "note"),
    [
        (2**10, 10.0, "PASS", None),
        (2**10, 19.0, None, "not judged: through host memory, and slower than expected"),
        (2**28, 1_240.0, "PASS", None),
    ],
)
def test_a_slow_host_staged_row_is_no_pass(
    size_bytes: int, time_us: float, verdict: str | None, note: str | None
) -> None:
    """Small sizes have wide tolerances, within which host memory fits."""
    shown = judge().row(four(size_bytes, time_us, host_staged=True))
    assert (shown.verdict, shown.note) == (verdict, note)
    assert judge().row(four(size_bytes, time_us)).verdict == "PASS"


def test_a_small_row_that_only_a_wide_tolerance_passes_is_not_judged() -> None:
    judging = judge(ExpectedTimes(collective=ALLREDUCE, profile=load("hgx-h100-8")))
    row = replace(four(2**20, 30.0), ranks=8)
    expected_us = judging.row(row).expected_us or 0.0
    assert expected_us > 20
    late = judging.row(replace(row, time_us=2.5 * expected_us))
    assert (late.expected_percent, late.note) == (None, "0.4 times what profile hgx-h100-8 expects")


NOISY = four(2**20, 18.0, ci95_percent=416.0)


@pytest.mark.parametrize(
    ("row", "expected", "verdict"),
    [
        (NOISY, H200, "INCONCLUSIVE"),
        (replace(NOISY, backend="host"), H200, "INCONCLUSIVE"),  # Has no expectation
        (replace(NOISY, ci95_percent=99.0), H200, "PASS"),
        (replace(NOISY, ci95_percent=None), H200, "PASS"),
        (replace(NOISY, size_bytes=512), H200, "PASS"),
        (replace(NOISY, wrong=1, verdict="FAIL"), H200, "FAIL"),
    ],
)
def test_a_row_lost_in_noise_is_repeated_and_does_not_pass(
    row: CollectiveRow, expected: ExpectedTimes, verdict: str
) -> None:
    judging = judge(expected)
    assert judging.row(row).verdict == verdict
    hidden = verdict == "INCONCLUSIVE"
    assert [finding.id for finding in judging.findings((), None)] == ["figures-too-noisy"] * hidden
    assert judging.needs_repetition([row]) == hidden


def test_the_noisiest_row_is_named_with_its_placement() -> None:
    judging = judge()
    for each in (NOISY, replace(NOISY, placement="in_place", ci95_percent=500.0), replace(NOISY, size_bytes=2**21)):
        judging.row(each)
    (found,) = judging.findings((), None)
    assert (found.subject, found.seen) == ("all-reduce of 1M in place, and 2 more", "18 µs ±500 %")


def test_ranks_that_take_turns_on_few_cpus_measure_the_scheduler() -> None:
    crowded = replace(judge(), turns_on_cpus="64 ranks share 2 CPUs")
    host = replace(NOISY, backend="host", ci95_percent=40.0, time_us=23e3)
    assert crowded.row(host).verdict == "INCONCLUSIVE"
    (found,) = crowded.findings((), None)
    assert (found.id, found.seen) == ("figures-too-noisy", "23 ms ±40 %; 64 ranks share 2 CPUs")
    assert found.next_command.startswith("gpubench allreduce --sizes ")
    assert "--np 2" in found.next_command
    assert found.cause == "more ranks than CPUs"
    assert crowded.row(replace(host, wrong=1, verdict="FAIL")).verdict == "FAIL"
    assert crowded.row(replace(host, backend="nccl", time_us=18.0)).verdict == "PASS"


@pytest.mark.parametrize(
    ("ranks", "cpus", "shared"), [(64, "0-1", True), (9, "0-1", True), (8, "0-1", False), (64, "0-63", False)]
)
def test_more_than_four_ranks_on_a_cpu_take_turns(ranks: int, cpus: str, *, shared: bool) -> None:
    facts = [RankFacts(rank=rank, host="n0", node=0, local_rank=rank, pid=1, affinity=cpus) for rank in range(ranks)]
    identities = [RankIdentity(rank=rank, host="n0", node=0, local_rank=rank, pid=1) for rank in range(ranks)]
    make = speed_judge_maker(ALLREDUCE, identities, None, None)
    assert bool(make(Circumstances(wiring=Wiring(identities, {}), facts=facts)).turns_on_cpus) == shared


def test_the_most_certain_cause_is_named_and_a_weak_one_is_a_hint() -> None:
    (weak,) = findings(explained(("row-remap-pending", Confidence.WEAK)), SLOW)
    assert weak.id == SLOW_UNEXPLAINED
    assert "perhaps row-remap-pending was seen" in weak.cause
    (found,) = findings(explained(("gpu-throttled", Confidence.PROVEN), ("row-remap-pending", Confidence.WEAK)), SLOW)
    assert (found.id, found.severity) == ("gpu-throttled", Verdict.FAIL)
    assert found.seen == "gpu-throttled was seen"
    assert found.consequences[0].endswith("at 256M")
    own = next(condition for condition in CONDITIONS if condition.id == "gpu-throttled")
    assert (found.subject, found.expected, found.cause) == ("this job", own.expected, own.likely)


def test_a_cause_without_a_check_has_the_expectation_of_the_rows() -> None:
    (found,) = findings(explained(("cuda-launch-blocking", Confidence.PROVEN)), SLOW)
    assert (found.id, found.severity) == ("cuda-launch-blocking", Verdict.FAIL)
    assert found.expected == "339.5 GB/s, profile hgx-h200-4"


def test_host_staged_paths_explain_slow_rows() -> None:
    staged = Finding("host-staged", Verdict.FAIL, "0 → 1", "SHM", "P2P", "NCCL_P2P_DISABLE=1", Cure.of("unset it"))
    (found,) = findings(explained(), SLOW, found=(staged,))
    assert found.id == "host-staged"
    assert found.consequences == ("allreduce: 24.93 GB/s (7 % of expected) at 256M",)
    by_design = replace(staged, severity=Verdict.SKIP)
    assert [finding.id for finding in findings(explained(), SLOW, found=(by_design,))] == [
        "host-staged",
        SLOW_UNEXPLAINED,
    ]


@pytest.mark.parametrize(
    ("times", "again"),
    [
        ([1190.0], False),
        ([16_150.0], True),
        ([16_150.0, 16_200.0], False),
        ([16_150.0, 1190.0], True),
        ([16_150.0, 1190.0, 1191.0], False),
    ],
)
def test_a_doubtful_row_is_repeated_until_two_tries_agree(times: list[float], *, again: bool) -> None:
    assert judge().needs_repetition([four(2**28, time_) for time_ in times]) is again


@pytest.mark.parametrize("changes", [{"wrong": 1}, {"host_staged": True}, {"setting": "ring/ll"}, {"backend": "host"}])
def test_rows_without_a_speed_verdict_are_measured_once(changes: dict[str, Any]) -> None:
    assert judge().needs_repetition([replace(SLOW, **changes)]) is False
