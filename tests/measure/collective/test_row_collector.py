"""Wrong elements, verdicts and late ranks in the report on a sweep."""

from msgspec.structs import replace

from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.measure.collective.cases import Answer, JobFacts, OwnTimes, cases
from gpubench.measure.collective.report import MeasuredRow, RowCollector, RowSample
from gpubench.model.results.report import Report
from gpubench.model.terms.ranks import UNWATCHED, RankIdentity
from gpubench.model.terms.verdict import Origin, Verdict
from tests.measure.collective.test_sweep import SIZES, ReceivedRows, request_for

RANKS = 6
IDENTITIES = [
    RankIdentity(rank=rank, host="n0", pid=rank, node=0, local_rank=rank, gpu_index=rank, gpu_bus_id=f"0:{rank}")
    for rank in range(RANKS)
]


def report_of(*wrong_by_row: tuple[int, ...]) -> tuple[Report, ReceivedRows]:
    request = replace(request_for(ALLREDUCE, sizes=SIZES), check=True)
    shown = ReceivedRows()
    collector = RowCollector(IDENTITIES, shown, None)
    for case, wrong in zip(cases(request, RANKS), wrong_by_row, strict=False):
        answers = tuple(Answer((rank + 1) * 1e-6, wrong=each) for rank, each in enumerate(wrong))
        sample = RowSample(OwnTimes(1e-6, 20), answers)
        job = JobFacts("nccl", Origin.MEASURED, RANKS, 1)
        collector.add(case, MeasuredRow(sample.row(request, case, job), sample), UNWATCHED)
    return collector.report(), shown


def test_wrong_elements_are_summed_over_rows_and_ranks() -> None:
    report, shown = report_of((0,) * RANKS, (0, 2, 0, 3, 0, 0), (0, 0, 0, 0, 0, 1))
    assert [row.wrong for row in shown.rows] == [0, 5, 1]
    assert report.verdict is Verdict.FAIL
    (finding,) = report.findings
    assert finding.seen == "6 wrong elements in 2 rows (first at 4K, float32, in place)"
    assert finding.subject == f"{IDENTITIES[1]}, {IDENTITIES[3]}"


def test_four_ranks_with_wrong_elements_are_named() -> None:
    report, _ = report_of((1,) * RANKS)
    named = ", ".join(str(identity) for identity in IDENTITIES[:4])
    assert report.findings[0].subject == f"{named} and 2 more"
    assert report.findings[0].seen == "6 wrong elements in 1 row (first at 4K, float32, out of place)"
    report, _ = report_of((1, 1, 1, 1, 0, 0))
    assert report.findings[0].subject == named
