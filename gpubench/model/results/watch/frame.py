"""What is shown of one interval of a watch: the rows of its devices, and what every job does now."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpubench.model.results.rows.watch import JobRow, TrafficRow
from gpubench.model.terms.grouping import grouped

_MOST_ALIKE = 2
_RATES = ("nvlink_gb_s", "pcie_sent_gb_s", "pcie_received_gb_s")


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
        kinds = [AlikeNodes(tuple(members), tuple(together(jobs.get(members[0], ())))) for members in by_doing.values()]
        return sorted(kinds, key=lambda kind: -len(kind.hosts))


@dataclass(frozen=True, slots=True)
class AlikeNodes:
    """Nodes whose jobs go the same way, with the jobs of the first of them."""

    hosts: tuple[str, ...]
    jobs: tuple[JobRow, ...]


def together(jobs: Sequence[JobRow]) -> Iterator[JobRow]:
    """The jobs of a node, where more than a few do the same in one line: servers with a process a GPU."""
    for alike in grouped(jobs, lambda row: (row.way, row.verdict, row.cause)).values():
        if len(alike) <= _MOST_ALIKE:
            yield from alike
            continue
        rates = {name: _sum([getattr(row, name) for row in alike]) for name in _RATES}
        gpus = [gpu for row in alike for gpu in row.gpus]
        yield replace(alike[0], job=f"{len(alike)} jobs, {alike[0].job} and others", gpus=gpus, **rates)  # type: ignore[arg-type]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if len(known) == len(values) else None


def _doing(row: JobRow) -> tuple[str, int, str | None]:
    """What makes two nodes alike: processes have other names on each, and rates are never equal."""
    return row.way, len(row.gpus), row.cause
