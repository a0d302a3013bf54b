"""The rows and charts of a run that was repeated on 1, 2, 4, 8, ... GPUs."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from gpubench.model.results.compare import Chart, CurveLine
from gpubench.model.results.report import OnPage, Record, Row
from gpubench.model.terms.units import format_size, group_by
from gpubench.model.terms.verdict import Origin


class ScalingRow(Record, frozen=True, kw_only=True):
    """One measurement with one number of ranks, compared with the same measurement on fewer ranks."""

    section = "scaling"
    on_page = OnPage(title="Scaling over GPUs")

    #: description of the measurement: the data type, reduction and placement of a collective, the computation and
    #: CTA limit of an overlap, or the memory and blocks of a KV transfer
    measured: str
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    size_bytes: int  #: size of one operation in bytes
    ranks: int  #: number of ranks, each with one GPU
    nodes: int  #: number of hosts of the ranks
    gpus: str  #: GPUs of the ranks: GPU0-3, or node0-1: GPU0-7
    #: time in microseconds: of one operation, of one step of an overlap, or of the slowest pair of a KV transfer (null
    #: if not measured)
    time_us: float | None = None
    #: bandwidth in GB/s: bus bandwidth of a collective, or slowest pair of a KV transfer (null for one rank or an
    #: overlap)
    bandwidth_gb_s: float | None = None
    expected_gb_s: float | None = None  #: bandwidth in GB/s expected from a healthy machine with these ranks
    expected_percent: float | None = None  #: bandwidth as a percentage of expected_gb_s
    ci95_percent: float | None = None  #: half of the 95 % confidence interval of time_us, as a percentage of it
    #: bandwidth as a percentage of the bandwidth with the fewest ranks above one; of an overlap, the step time with the
    #: fewest ranks as a percentage of this step time
    efficiency_percent: float | None = None
    #: whether efficiency_percent or expected_percent at the largest size is the first to fall by more than 10 % and the
    #: noise
    breaks: bool = False
    reason: str | None = None  #: reason for the lower efficiency, or for a missing measurement


_MOST_SIZES = 3  # A chart with more curves is hard to read


def largest_rows(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Return the rows at the largest size of each measurement."""
    most = {
        name: max(row.size_bytes for row in alike) for name, alike in group_by(rows, lambda row: row.measured).items()
    }
    return [row for row in rows if row.size_bytes == most[row.measured]]


def describe_efficiency(rows: Sequence[ScalingRow]) -> str:
    """Return the lowest efficiency with the most ranks, at the largest size. Empty if there are no two runs."""
    known = [row for row in largest_rows(rows) if row.efficiency_percent is not None]
    last = max(known, key=lambda row: (row.ranks, -(row.efficiency_percent or 0.0)), default=None)
    if last is None or len({row.ranks for row in known}) == 1:
        return ""
    return f"scaling efficiency {last.efficiency_percent:.0f} % at {last.ranks} ranks"


def drop_smaller_runs(rows: Sequence[Row], scaling: Sequence[ScalingRow]) -> Sequence[Row]:
    """Return the rows with the most ranks, because curves over size show one number of ranks."""
    most = max((row.ranks for row in scaling), default=0)
    return [row for row in rows if getattr(row, "ranks", most) == most] if scaling else rows


def scaling_charts(rows: Sequence[ScalingRow]) -> Iterator[Chart]:
    """Yield one chart per measurement: bandwidth over the number of GPUs, or efficiency if there is no bandwidth.

    The expected values are those of the largest size. A mark shows where scaling breaks.
    """
    for name, members in group_by(rows, lambda row: row.measured).items():
        sizes = sorted({row.size_bytes for row in members}, reverse=True)[:_MOST_SIZES]
        column = "bandwidth_gb_s" if any(row.bandwidth_gb_s is not None for row in members) else "efficiency_percent"
        lines = [CurveLine(format_size(size), _points(members, size, column)) for size in sizes]
        if any(len(line.points) > 1 for line in lines):
            yield Chart(
                f"{name}: {'bandwidth' if column == 'bandwidth_gb_s' else 'efficiency'} over GPUs",
                "GB/s" if column == "bandwidth_gb_s" else "%",
                tuple(line for line in lines if line.points),
                expected=_points(members, sizes[0], "expected_gb_s") if column == "bandwidth_gb_s" else (),
                axis="GPUs, log scale",
                marks=tuple((row.ranks, row.reason or "scaling breaks") for row in members if row.breaks),
            )


def _points(rows: Sequence[ScalingRow], size: int, column: str) -> tuple[tuple[int, float], ...]:
    values = {row.ranks: getattr(row, column) for row in rows if row.size_bytes == size}
    return tuple(sorted((ranks, value) for ranks, value in values.items() if value is not None))
