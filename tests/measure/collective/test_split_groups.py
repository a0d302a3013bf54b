"""Groups that measure at the same time, and their merged report."""

import pytest
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.measure.collective.cases import Answer, RankTimings
from gpubench.measure.collective.sweep import fitting_all
from gpubench.measure.collective.variants import GroupRows, SynchronizedGroup
from gpubench.model.results.report import RankTimeRow, Report
from gpubench.model.terms.ranks import RankIdentity, split_ranks
from gpubench.model.terms.units import DroppedSize
from gpubench.model.terms.verdict import Cure, Finding, Verdict
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.formats.sample import ROW
from tests.measure.collective.test_sweep import ReceivedRows

FIVE = [RankIdentity(rank=rank, host="n", node=0, local_rank=rank, pid=1) for rank in range(5)]
PARTS = split_ranks("3", FIVE)
WRONG = Finding("wrong-data", Verdict.FAIL, "rank 4", "seen", "expected", "cause", Cure.of("next"))


def test_groups_share_barriers_and_exchange_data_only_inside() -> None:
    def body(group: ThreadGroup) -> tuple[object, ...]:
        own = group.split(group.rank // 3, group.rank)
        together = SynchronizedGroup(own, group)
        together.barrier()
        return (
            together.rank,
            together.size,
            together.gather(group.rank),
            together.collect(group.rank),
            together.broadcast(group.rank, 1),
            together.largest([group.rank]),
            together.clock_offset().seconds,
            together.split(0, -together.rank).rank,
        )

    assert run_ranks(5, body) == [
        (0, 3, [0, 1, 2], [0, 1, 2], 1, [2], 0.0, 2),
        (1, 3, [0, 1, 2], None, 1, [2], 0.0, 1),
        (2, 3, [0, 1, 2], None, 1, [2], 0.0, 0),
        (0, 2, [3, 4], [3, 4], 4, [4], 0.0, 1),
        (1, 2, [3, 4], None, 4, [4], 0.0, 0),
    ]


def test_the_first_rank_gets_rows_and_verdict_of_all_groups() -> None:
    heard = ReceivedRows()

    def body(group: ThreadGroup) -> Report:
        color = group.rank // 3
        own = group.split(color, group.rank)
        rows = GroupRows(PARTS[color], own, group, heard if group.rank == 0 else ReceivedRows())
        row = replace(ROW, slowest_rank=1)
        rows.row(row)
        rank_timings = RankTimings([FIVE[rank] for rank in PARTS[color].ranks])
        rank_timings.add(row, [Answer(1e-6)] * own.size)
        verdict, findings = (Verdict.FAIL, (WRONG,)) if color else (Verdict.PASS, ())
        return rows.merged(Report(verdict=verdict, complete=True, findings=findings, sections=rank_timings.sections()))

    report = run_ranks(5, body)[0]
    assert [(row.group, row.slowest_rank) for row in heard.rows] == [("ranks 0-2", 1), ("ranks 3-4", 4)]
    assert report.verdict is Verdict.FAIL
    assert report.findings == (WRONG,)
    assert [row.rank for row in report.rows(RankTimeRow)] == [0, 1, 2, 3, 4]


def test_sizes_must_fit_every_group() -> None:
    small, large = DroppedSize(8, "rounds to nothing"), DroppedSize(4096, "does not fit")
    assert fitting_all([((8, 64, 4096), ()), ((64, 4096), (small,)), ((8, 64), (large,))]) == ((64,), (small, large))
    with pytest.raises(CouldNotMeasureError, match="no size is left"):
        fitting_all([((8,), ()), ((64,), (small,))])


def test_groups_are_compared_with_each_other_without_an_expectation() -> None:
    heard = ReceivedRows()
    parts = split_ranks("2", [replace(each, rank=rank) for rank, each in enumerate(FIVE[:4])])

    def body(group: ThreadGroup) -> Report:
        color = group.rank // 2
        own = group.split(color, group.rank)
        rows = GroupRows(parts[color], own, group, heard if group.rank == 0 else ReceivedRows())
        rows.row(replace(ROW, ranks=2, expected_us=None, wrong=0, verdict="PASS", time_us=200.0 if color else 50.0))
        return rows.merged(Report(verdict=Verdict.PASS, complete=True))

    report = run_ranks(4, body)[0]
    assert [(row.group, row.verdict, row.expected_us) for row in heard.rows] == [
        ("ranks 0-1", "PASS", 50.0),
        ("ranks 2-3", "FAIL", 50.0),
    ]
    assert report.verdict is Verdict.FAIL
    (finding,) = report.findings
    assert (finding.id, finding.severity) == ("slow-unexplained", Verdict.FAIL)
    assert finding.subject.endswith("on group ranks 2-3")
