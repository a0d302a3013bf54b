"""The last sentence of a report, and the exit code that it explains."""

from msgspec.structs import replace

from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import Metadata, Report
from gpubench.model.results.sentence import sentence
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Cure, Finding, Verdict
from tests.formats.sample import METADATA as SAMPLE
from tests.formats.sample import ROW

RANKS = tuple(
    RankIdentity(rank=rank, host="node3", node=0, local_rank=rank, pid=1, gpu="NVIDIA H200") for rank in range(4)
)
METADATA = replace(SAMPLE, subject="allreduce", hosts=["node3"], ranks=RANKS, options={})
FAST = replace(ROW, busbw_gb_s=363.0, expected_gb_s=362.0, expected_source="profile", wrong=0, verdict="PASS")
SLOW = replace(ROW, busbw_gb_s=25.0, expected_gb_s=340.0, expected_source="profile", wrong=0, verdict="FAIL")
CHANNELS = Finding(
    id="few-channels",
    severity=Verdict.FAIL,
    subject="allreduce of 1G",
    seen="NCCL_MAX_NCHANNELS=1 in /etc/nccl.conf",
    expected="none",
    cause="few channels",
    cure=Cure.of("unset NCCL_MAX_NCHANNELS", comment="Or raise it."),
    consequences=("allreduce: 25 GB/s",),
)


def said(report: Report, *rows: object, metadata: Metadata = METADATA) -> str:
    figures = SpeedFigures()
    for row in rows:
        figures.add(row)  # type: ignore[arg-type]
    return sentence(metadata, report, figures)


def report(verdict: Verdict, *findings: Finding, complete: bool = True) -> Report:
    return Report(verdict=verdict, complete=complete, findings=findings)


def test_a_slow_collective_names_its_cause_and_cure() -> None:
    assert said(report(Verdict.FAIL, CHANNELS), SLOW) == (
        "FAIL: allreduce of 1G on node3: NCCL_MAX_NCHANNELS=1 in /etc/nccl.conf, "
        "all-reduce reaches 25 of 340 GB/s (7 %). Try: unset NCCL_MAX_NCHANNELS"
    )


def test_a_healthy_run_has_its_figures() -> None:
    assert said(report(Verdict.PASS), FAST) == "PASS: 4 × H200, all-reduce 363 GB/s (100 % of expected), data right"


def test_what_was_not_judged_says_so() -> None:
    row = replace(FAST, expected_gb_s=None, expected_source=None, wrong=None)
    unjudged = said(report(Verdict.PASS), row, metadata=replace(METADATA, profile=None))
    assert unjudged.endswith("data not verified, speed not judged: no profile, no past results")


def test_wrong_data_come_first() -> None:
    wrong = replace(CHANNELS, id="wrong-data", subject="rank 1", seen="2 wrong elements", consequences=())
    assert said(report(Verdict.FAIL, CHANNELS, wrong), SLOW).startswith("FAIL: rank 1 on node3: 2 wrong elements")


def test_a_run_that_was_cut_short_says_so() -> None:
    ended = report(Verdict.ERROR, complete=False)
    assert said(ended, FAST) == "ERROR: the run was cut short, so only some rows were measured"
    assert said(ended) == "ERROR: the run was cut short before its first row"


def test_data_that_were_checked_in_part_are_not_said_to_be_right() -> None:
    figures = SpeedFigures()
    figures.add(FAST)
    figures.add(replace(FAST, wrong=None))
    assert ", data right where they were checked" in sentence(METADATA, report(Verdict.PASS), figures)
