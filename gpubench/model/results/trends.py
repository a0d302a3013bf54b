"""The few figures that tell how a machine fares, and how they went from run to run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.results.curves import HOST
from gpubench.model.results.report import CollectiveRow, PairRow, Row
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.verdict import Verdict


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """A figure of one run, in GB/s, with the verdict of that run; `started_at` is UTC, as ISO 8601."""

    started_at: str
    gb_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure over time, the oldest run first."""

    name: str
    points: tuple[TrendPoint, ...]


def headline_figures(rows: Iterable[Row]) -> dict[str, float]:
    """Of one run, by name in GB/s: peak busbw of each collective, the slowest pair of GPUs, the slowest way to host.

    Pairs count with the largest size, peer access on, one way, as copy engines or NCCL make them; host memory pinned.
    """
    known = list(rows)
    return {
        **_peaks([row for row in known if isinstance(row, CollectiveRow)]),
        **_slowest([row for row in known if isinstance(row, PairRow)]),
    }


def _peaks(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for row in rows:
        name = f"{row.collective}: peak busbw"
        if row.mode == "throughput" and row.busbw_gb_s is not None:
            peaks[name] = max(row.busbw_gb_s, peaks.get(name, 0.0))
    return peaks


def _slowest(rows: Sequence[PairRow]) -> dict[str, float]:
    ways: dict[str, list[PairRow]] = {}
    for row in rows:
        name = _way(row)
        if name is not None and row.bandwidth_gb_s is not None:
            ways.setdefault(name, []).append(row)
    slowest = {}
    for name, members in ways.items():
        largest = max(row.size_bytes or 0 for row in members)
        slowest[name] = min(row.bandwidth_gb_s or 0.0 for row in members if (row.size_bytes or 0) == largest)
    return slowest


def _way(row: PairRow) -> str | None:
    if HOST in (row.source, row.destination):
        if HostMemory.of_note(row.note) is not HostMemory.PINNED:
            return None
        return "host memory to GPU: slowest" if row.source == HOST else "GPU to host memory: slowest"
    one_way = row.direction in ("write", "read") and row.engine in ("ce", "nccl") and row.peer != "off"
    return "p2p: slowest pair" if one_way else None


def trends(runs: Iterable[tuple[str, Verdict, Mapping[str, float]]]) -> Iterator[Trend]:
    """A trend for each figure, of runs in any order: when each began, its verdict, its figures."""
    points: dict[str, list[TrendPoint]] = {}
    for started_at, verdict, figures in sorted(runs, key=lambda run: run[0]):
        for name, gb_s in figures.items():
            points.setdefault(name, []).append(TrendPoint(started_at, gb_s, verdict))
    yield from (Trend(name, tuple(each)) for name, each in points.items())
