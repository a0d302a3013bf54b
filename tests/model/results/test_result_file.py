"""Verdicts, samples, rows and reports."""

import pytest

from gpubench.model.results.report import COLLECTIVE_COLUMNS, Metadata, Report
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import DroppedSize
from gpubench.model.terms.verdict import Cure, Finding, Verdict, exit_code, worst_verdict

DESIGN_COLUMNS = """
collective backend origin group ranks nodes size_bytes count dtype op root placement mode graph iterations time_us
time_us_fastest_rank time_us_slowest_rank slowest_rank algbw_gb_s busbw_gb_s limit_gb_s limit_percent wrong verified
batch_median_us batch_cv ci95_percent p50_us p95_us p99_us algorithm protocol channels transport host_staged
expected_gb_s verdict note setting expected_us expected_percent expected_source issue_us ranks_per_gpu registered skew
"""


def test_the_columns_are_the_documented_ones_in_order() -> None:
    assert list(COLLECTIVE_COLUMNS) == DESIGN_COLUMNS.split()


@pytest.mark.parametrize(
    ("verdicts", "whole", "code"),
    [
        ([], Verdict.SKIP, 0),
        ([Verdict.PASS, Verdict.SKIP], Verdict.PASS, 0),
        ([Verdict.PASS, Verdict.WARN], Verdict.WARN, 0),
        ([Verdict.WARN, Verdict.INCONCLUSIVE], Verdict.INCONCLUSIVE, 0),
        ([Verdict.PASS, Verdict.ERROR], Verdict.ERROR, 3),
        ([Verdict.ERROR, Verdict.FAIL, Verdict.PASS], Verdict.FAIL, 1),
    ],
)
def test_the_worst_verdict_decides(verdicts: list[Verdict], whole: Verdict, code: int) -> None:
    assert worst_verdict(verdicts) is whole
    assert exit_code(whole) == code


def test_metadata_and_reports_travel_as_plain_data() -> None:
    metadata = Metadata(
        gpubench_version="1",
        run_id="r",
        started_at="2026-01-01T00:00:00+00:00",
        command=["gpubench", "allreduce"],
        subject="allreduce",
        hosts=["b", "a"],
        collective="allreduce",
        backend="host",
        origin="measured",
        ranks=(
            RankIdentity(rank=0, host="b", node=0, local_rank=0, pid=1),
            RankIdentity(rank=1, host="a", node=1, local_rank=0, pid=2),
            RankIdentity(rank=2, host="b", node=0, local_rank=1, pid=3),
        ),
        libraries={"MPI": "x"},
        environment={},
        options={"sizes": [8]},
        dropped_sizes=(DroppedSize(16, "why"),),
    )
    assert from_plain(Metadata, metadata.to_record()).to_record() == metadata.to_record()
    places = DevicePlace("b", "GPU0", "0000:1b:00.0"), DevicePlace("b", "GPU1")
    cure = Cure.of("first", "second", comment="Then look.")
    finding = Finding(
        "id", Verdict.FAIL, "subject", "seen", "expected", "cause", cure, ("subject", "other"), ("x",), places=places
    )
    report = Report(verdict=Verdict.FAIL, complete=True, findings=(finding,))
    assert Report.from_record(report.to_record()) == report
