"""What is shown of one interval of a watch: the rows of its devices, and what every job does now."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.results.rows.watch import JobRow, TrafficRow
from gpubench.model.terms.grouping import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFrame:
    """An interval, which ended `seconds` after the watch began; `silences` say by host why GPUs are not known."""

    seconds: float
    rows: Sequence[TrafficRow]
    jobs: Sequence[JobRow]
    silences: Sequence[tuple[str, str]] = ()
    waiting: bool = False

    @property
    def kinds(self) -> "list[AlikeNodes]":
        """The nodes by what they do, the largest kind first."""
        jobs = grouped(self.jobs, lambda row: row.node)
        hosts = list(dict.fromkeys((*(row.node for row in self.rows), *jobs, *(host for host, _ in self.silences))))
        silent = dict(self.silences)
        by_doing = grouped(hosts, lambda host: (silent.get(host), *map(_doing, jobs.get(host, ()))))
        kinds = [AlikeNodes(tuple(members), tuple(jobs.get(members[0], ()))) for members in by_doing.values()]
        return sorted(kinds, key=lambda kind: -len(kind.hosts))


@dataclass(frozen=True, slots=True)
class AlikeNodes:
    """Nodes whose jobs go the same way, with the jobs of the first of them."""

    hosts: tuple[str, ...]
    jobs: tuple[JobRow, ...]


def _doing(row: JobRow) -> tuple[str, int, str | None]:
    """What makes two nodes alike: processes have other names on each, and rates are never equal."""
    return row.way, len(row.gpus), row.cause
