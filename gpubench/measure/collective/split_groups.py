"""The same collective in several groups of ranks at once: they keep in step, and the first rank reports on all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpubench.model.results.rank_times import RANK_TIMES_SECTION, RankTimeRow
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Row, Table
from gpubench.model.terms.lateness import Offset
from gpubench.model.terms.split import RankGroup
from gpubench.model.terms.verdict import Finding, Verdict, overall
from gpubench.ports.group import Group
from gpubench.ports.listener import Listener

T = TypeVar("T")


class InStep:
    """A group whose barriers are those of the whole job, so that all groups begin together what is timed."""

    def __init__(self, own: Group, whole: Group) -> None:
        self._own = own
        self._whole = whole
        self.rank = own.rank
        self.size = own.size

    def gather(self, value: T) -> list[T]:
        """Every value of the group, on all its ranks."""
        return self._own.gather(value)

    def collect(self, value: T) -> list[T] | None:
        """Every value of the group, on its first rank."""
        return self._own.collect(value)

    def broadcast(self, value: T | None, root: int = 0) -> T:
        """The value of the group's root."""
        return self._own.broadcast(value, root)

    def barrier(self) -> None:
        """Return once every rank of the job has called it."""
        self._whole.barrier()

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Each of the values where it is largest in the group."""
        return self._own.largest(values)

    def clock_offset(self) -> Offset:
        """The offset of this rank's clock from that of the group's first rank."""
        return self._own.clock_offset()

    def split(self, color: int, key: int) -> Group:
        """A part of this group alone."""
        return self._own.split(color, key)


@dataclass(frozen=True, slots=True)
class PartReport:
    """The part of a group's report that its first rank sends to the first rank of the job."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    rank_times: tuple[RankTimeRow, ...]

    @classmethod
    def of(cls, report: Report) -> "PartReport":
        """From the report of the group."""
        section = report.sections.get(RANK_TIMES_SECTION)
        lines: Sequence[Row] = list(section.rows()) if isinstance(section, Table) else ()
        return cls(
            report.verdict, tuple(report.findings), tuple(each for each in lines if isinstance(each, RankTimeRow))
        )


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


class NamedRows:
    """A listener of one group's rows: another one gets them with the group's name, and all else as it is."""

    def __init__(self, part: RankGroup, listener: Listener[CollectiveRow]) -> None:
        self._part = part
        self._listener = listener

    def begin(self, metadata: Metadata) -> None:
        """Passed on."""
        self._listener.begin(metadata)

    def progress(self, done: int, total: int, label: str) -> None:
        """Passed on."""
        self._listener.progress(done, total, label)

    def row(self, row: CollectiveRow) -> None:
        """A row with the group's name; ranks are counted in the whole job."""
        self._listener.row(named(row, self._part))

    def end(self, report: Report) -> None:
        """Passed on."""
        self._listener.end(report)


class GroupRows(NamedRows):
    """The listener of one group while all measure at once: the first rank of the job gets a row of every group."""

    def __init__(self, part: RankGroup, own: Group, whole: Group, listener: Listener[CollectiveRow]) -> None:
        super().__init__(part, listener)
        self._own = own
        self._whole = whole

    def row(self, row: CollectiveRow) -> None:
        """A row each of all groups, with the group's name. Every rank calls it."""
        for each in self._whole.collect(named(row, self._part) if self._own.rank == 0 else None) or ():
            if each is not None:
                self._listener.row(each)

    def merged(self, report: Report) -> Report:
        """The report of the whole job, on its first rank; on others that of the group."""
        collected = self._whole.collect(PartReport.of(report) if self._own.rank == 0 else None)
        return report if collected is None else together([each for each in collected if each is not None])
