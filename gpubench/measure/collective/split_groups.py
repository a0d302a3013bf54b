"""The same collective in several groups of ranks at once: they keep in step, and the first rank reports on all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpubench.measure.collective.speed_judge import slow_unexplained
from gpubench.model.results.rank_times import RANK_TIMES_SECTION, RankTimeRow
from gpubench.model.results.report import CollectiveRow, Report, Table
from gpubench.model.results.sibling_rows import figures_of_siblings
from gpubench.model.results.speed import AMONG_SIBLINGS, ExpectedTime, Slowness, is_slow, judged
from gpubench.model.terms.split import RankGroup
from gpubench.model.terms.verdict import Finding, Verdict, overall
from gpubench.ports.group import Group
from gpubench.ports.listener import Listener

T = TypeVar("T")


class InStep:
    """A group whose barriers are those of the whole job, so that all groups begin together what is timed."""

    def __init__(self, own: Group, whole: Group) -> None:
        self.rank, self.size = own.rank, own.size
        self.gather, self.collect, self.broadcast = own.gather, own.collect, own.broadcast
        self.largest, self.clock_offset, self.split = own.largest, own.clock_offset, own.split
        self.barrier = whole.barrier


@dataclass(frozen=True, slots=True)
class PartReport:
    """The part of a group's report that its first rank sends to the first rank of the job."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    rank_times: tuple[RankTimeRow, ...]

    @classmethod
    def of(cls, report: Report) -> "PartReport":
        """From the report of the group."""
        return cls(report.verdict, tuple(report.findings), tuple(report.rows(RANK_TIMES_SECTION, RankTimeRow)))


def named(row: CollectiveRow, part: RankGroup) -> CollectiveRow:
    """The row of a group with its name; the slowest rank is counted in the whole job."""
    slowest = None if row.slowest_rank is None else part.ranks[row.slowest_rank]
    return replace(row, group=part.name, slowest_rank=slowest)


def together(parts: Sequence[PartReport]) -> Report:
    """The report of the whole job."""
    rank_times = [line for each in parts for line in each.rank_times]
    return Report(
        verdict=overall(each.verdict for each in parts),
        complete=True,
        findings=tuple(finding for each in parts for finding in each.findings),
        sections={RANK_TIMES_SECTION: Table(RankTimeRow.columns(), lambda: rank_times)},
    )


class SiblingJudge:
    """Judges rows of which nothing else tells what to expect by those of other groups."""

    def __init__(self) -> None:
        self._slow: list[CollectiveRow] = []

    def judged(self, rows: Sequence[CollectiveRow]) -> Iterator[CollectiveRow]:
        """The rows that all groups have of one case, with what is expected of each."""
        for row, sibling in zip(rows, figures_of_siblings(rows), strict=True):
            if row.expected_us is not None or sibling is None:
                yield row
                continue
            shown = judged(row, ExpectedTime(sibling.time_us, sibling.source, AMONG_SIBLINGS))
            self._slow += [shown] if is_slow(shown) else []
            yield shown

    def report(self, report: Report) -> Report:
        """The report with a finding on the rows that are slow."""
        if not self._slow:
            return report
        found = slow_unexplained(Slowness.of(self._slow), f"group {self._slow[0].group}")
        return replace(report, verdict=overall([report.verdict, found.severity]), findings=(*report.findings, found))


class NamedRows:
    """A listener of one group's rows: another one gets them with the group's name, and all else as it is."""

    def __init__(self, part: RankGroup, listener: Listener[CollectiveRow]) -> None:
        self._part = part
        self._listener = listener
        self.begin, self.progress, self.end = listener.begin, listener.progress, listener.end

    def row(self, row: CollectiveRow) -> None:
        """A row with the group's name; ranks are counted in the whole job."""
        self._listener.row(named(row, self._part))


class GroupRows(NamedRows):
    """The listener of one group while all measure at once: the first rank of the job gets a row of every group."""

    def __init__(self, part: RankGroup, own: Group, whole: Group, listener: Listener[CollectiveRow]) -> None:
        super().__init__(part, listener)
        self._own = own
        self._whole = whole
        self._siblings = SiblingJudge()

    def row(self, row: CollectiveRow) -> None:
        """A row each of all groups, with the group's name. Every rank calls it.

        Rows of which nothing else tells what to expect are held against those of other groups.
        """
        collected = self._whole.collect(named(row, self._part) if self._own.rank == 0 else None) or ()
        for each in self._siblings.judged([each for each in collected if each is not None]):
            self._listener.row(each)

    def merged(self, report: Report) -> Report:
        """The report of the whole job, on its first rank; on others that of the group."""
        collected = self._whole.collect(PartReport.of(report) if self._own.rank == 0 else None)
        if collected is None:
            return report
        return self._siblings.report(together([each for each in collected if each is not None]))
