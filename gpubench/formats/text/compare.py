"""Print a comparison: both sides, changed versions and settings, rows that changed, and a summary of all rows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpubench.formats.layout import INDENT, Column, figure
from gpubench.formats.table import ReportView
from gpubench.model.results.compare import (
    Change,
    CircumstanceRow,
    ComparisonRow,
    FindingChangeRow,
    FindingStatus,
    HistoryRow,
    MachineRow,
    Status,
    Use,
    bandwidth_lost,
)
from gpubench.model.results.report import Report, RowsByColumn
from gpubench.model.terms.units import format_size, group_by, plural, shorten
from gpubench.model.terms.verdict import Verdict

_MOST_ROWS, _MOST_FASTER = 10, 5
_MOST_CHANGED, _MOST_FILES = 12, 4
_MOST_REASONS, _MOST_NAMED, _MOST_GONE = 8, 2, 8
_STATUSES = {status: "as before" if status is FindingStatus.SAME else status.value for status in FindingStatus}
_BANDWIDTH_FROM_BYTES = 2**20
_FASTER = (Change.FASTER, Verdict.PASS)

ROWS = (
    Column("row", lambda row: replace(row, size_bytes=None).name),
    Column("size", "size_bytes", right=True, optional=True),
    Column("before → now", lambda row: _format_change(row), 1, right=True, optional=True),
    Column("% of before", lambda row: _percent_of_before(row.slower_percent), right=True, optional=True),
    Column(
        "noise",
        lambda row: "?" if row.noise_percent is None else f"{bandwidth_lost(row.noise_percent):.1f} %",
        2,
        right=True,
        optional=True,
    ),
    Column("verdict", lambda row: "faster" if (row.change, row.verdict) == _FASTER else row.verdict),
    Column("because", "reason", 3, optional=True),
)
REACHED = (
    Column("collective", "what"),
    Column("GPUs", lambda row: _arrow(row.base_gpus, row.new_gpus), right=True),
    Column("at", lambda row: "peak" if row.size_bytes is None else format_size(row.size_bytes), right=True),
    Column("GB/s per GPU", lambda row: _arrow(row.base_gb_s, row.new_gb_s), right=True),
    Column("ratio", lambda row: _ratio(row.base_gb_s, row.new_gb_s), right=True),
    Column("GB/s per node", lambda row: _arrow(row.base_node_gb_s, row.new_node_gb_s), 1, right=True),
    Column("ratio", lambda row: _ratio(row.base_node_gb_s, row.new_node_gb_s), 1, right=True),
)
CURVES = (
    REACHED[0],
    Column("peak GB/s", lambda row: _arrow(row.base_peak_gb_s, row.new_peak_gb_s), right=True),
    Column("peak at", lambda row: _sizes(row.base_peak_bytes, row.new_peak_bytes), 1, right=True),
    Column("half from", lambda row: _sizes(row.base_half_bytes, row.new_half_bytes), right=True),
    Column("latency µs", lambda row: _arrow(row.base_latency_us, row.new_latency_us), right=True),
    Column("ratio", lambda row: _ratio(row.base_latency_us, row.new_latency_us), right=True),
)
COLUMNS = {ComparisonRow: ROWS, MachineRow: (*REACHED, *CURVES[1:])}


class CompareView(ReportView):
    """Prints both sides, the rows that changed, findings and the verdict."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        if report.sections:
            metadata = self._metadata
            self._page.heading(metadata, "compare")
            self._page.defaults(metadata)
            rows = report.by_column(ComparisonRow)
            judged = list(enumerate(map(_Judged._make, rows.cells(*_Judged._fields))))
            circumstances = report.rows(CircumstanceRow)
            changes = report.rows(FindingChangeRow)
            for number, series in enumerate(dict.fromkeys(file["series"] for file in metadata.options["new"])):
                if number:
                    self._page.print("")
                self._header(series, [row for row in circumstances if row.series == series])
                own = [row for row in judged if row[1].series == series]
                found = [row for row in changes if row.series == series]
                if own:
                    self._comparison(own, rows)
                elif found:
                    self._page.print("")
                self._findings(found)
            self._machines(report.rows(MachineRow))
            if HistoryRow.section in report.sections:
                self._left_out(report.rows(HistoryRow))
            self._page.print("")
        self._page.outcome(report)

    def _header(self, series: str | None, circumstances: Sequence[CircumstanceRow]) -> None:
        options = self._metadata.options
        for side in ("base", "new"):
            files = [file for file in options[side] if file["series"] == series]
            for file in files[:_MOST_FILES]:
                self._page.wrap(f"{INDENT}{side.upper():<5} {_described(file)}", hanging=8)
            if len(files) > _MOST_FILES:
                self._page.print(f"{INDENT}{side.upper():<5} and {plural(len(files) - _MOST_FILES, 'file')} more")
        changed = [row for row in circumstances if row.changed]
        for row in changed[:_MOST_CHANGED]:
            self._page.wrap(f"{INDENT}changed: {row.name}: {row.base} → {row.new}")
        if len(changed) > _MOST_CHANGED:
            left = len(changed) - _MOST_CHANGED
            self._page.print(f"{INDENT}and {left} more: --format csv --section {CircumstanceRow.section}")
        if options["threshold"] is not None:
            self._page.wrap(
                f"{INDENT}more than {options['threshold']:g} % less bandwidth is a regression, whatever the noise"
            )

    def _comparison(self, own: "Sequence[tuple[int, _Judged]]", rows: RowsByColumn[ComparisonRow]) -> None:
        """Print the comparison of one series. `own` has the rows of the series with their indices in `rows`.

        Only rows that are printed are created from the columns, because a cluster has very many rows.
        """
        compared = [row for row in own if row[1].status == Status.COMPARED]
        self._table(compared, rows)
        self._page.print("")
        for line in _summary([judged for _, judged in compared]):
            self._page.wrap(line)
        added = sum(judged.status == Status.ADDED for _, judged in own)
        if added:
            self._page.print(f"{plural(added, 'row')} only in the new results")

    def _machines(self, rows: Sequence[MachineRow]) -> None:
        """Print two machines side by side: bandwidth per GPU and per node, then peak, half-peak size and latency."""
        if not rows:
            return
        for columns in (REACHED, CURVES):
            self._page.print("")
            self._page.table(columns, rows)
        self._page.wrap("half from: the smallest measured size with half of the peak; latency: at the smallest size")
        for reason in dict.fromkeys(row.reason for row in rows if row.reason):
            self._page.wrap(f"latency is not compared: {reason}")

    def _findings(self, rows: Sequence[FindingChangeRow]) -> None:
        if not rows:
            return
        counts = ((status, sum(row.status == status for row in rows)) for status in FindingStatus)
        self._page.wrap("findings: " + ", ".join(f"{count} {_STATUSES[status]}" for status, count in counts if count))
        for status in (FindingStatus.MILDER, FindingStatus.GONE):
            own = [row for row in rows if row.status == status]
            for row in own[:_MOST_GONE]:
                now = f" → {row.new_severity}" if row.new_severity else ""
                self._page.wrap(f"{INDENT}{status}: {row.base_severity}{now} {row.finding}: {row.subject}", hanging=8)
            if len(own) > _MOST_GONE:
                left = len(own) - _MOST_GONE
                self._page.print(f"{INDENT}and {left} more: --format csv --section {FindingChangeRow.section}")

    def _left_out(self, files: Sequence[HistoryRow]) -> None:
        reasons: dict[str, list[str]] = {}
        for row in files:
            if row.use == Use.LEFT_OUT:
                reasons.setdefault(row.reason or "", []).append(row.file)
        if reasons:
            self._page.print("")
        for reason, names in list(reasons.items())[:_MOST_REASONS]:
            self._page.wrap(f"left out: {shorten(names, _MOST_NAMED)}: {reason}", hanging=10)
        if len(reasons) > _MOST_REASONS:
            left = sum(map(len, reasons.values())) - sum(map(len, list(reasons.values())[:_MOST_REASONS]))
            self._page.print(f"left out: {plural(left, 'file')} more: --format csv --section {HistoryRow.section}")

    def _table(self, compared: "Sequence[tuple[int, _Judged]]", rows: RowsByColumn[ComparisonRow]) -> None:
        """Print the rows that got slower, then the rows that got faster."""
        worse = [number for number, judged in compared if judged.verdict != Verdict.PASS]
        faster = [number for number, judged in reversed(compared) if (judged.change, judged.verdict) == _FASTER]
        shown = rows.made([*worse[:_MOST_ROWS], *faster[:_MOST_FASTER]])
        if not shown:
            return
        self._page.print("")
        self._page.table(ROWS, shown)
        if any(row.slower_percent is not None for row in shown):
            self._page.wrap("% of before: the new bandwidth as a percentage of the old one (lower is slower)")
        left = len(worse) - _MOST_ROWS, len(faster) - _MOST_FASTER
        for count, what in zip(left, ("worse", "faster"), strict=True):
            if count > 0:
                self._page.print(f"and {plural(count, 'more row')} that got {what}")


def _described(file: Mapping[str, Any]) -> str:
    remarks = "".join(f"; {remark}" for remark in file["remarks"])
    return f"{file['file']}: {file['kind']}, {plural(file['rows'], 'row')}; {file['told']}{remarks}"


def _format_change(row: ComparisonRow) -> str:
    if row.base_time_us is None and row.new_time_us is None:
        return "?"
    if (row.size_bytes or 0) < _BANDWIDTH_FROM_BYTES:
        return f"{figure(row.base_time_us)} → {figure(row.new_time_us)} µs"
    return f"{figure(row.base_gb_s)} → {figure(row.new_gb_s)} GB/s"


def _arrow(base: float | None, new: float | None) -> str:
    return "-" if base is None or new is None else f"{_short(base)} → {_short(new)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _sizes(base: int, new: int) -> str:
    return f"{format_size(base)} → {format_size(new)}"


def _ratio(base: float | None, new: float | None) -> str:
    return "-" if not base or new is None else f"{new / base:.2f} ×"


def _percent_of_before(slower_percent: float | None) -> str:
    return "?" if slower_percent is None else f"{100 - bandwidth_lost(slower_percent):.1f} %"


class _Judged(NamedTuple):
    """The columns of a compared row that the summary uses."""

    series: str | None
    status: str
    collective: str | None
    verdict: str
    change: str | None
    slower_percent: float | None


def _summary(compared: Sequence[_Judged]) -> Iterator[str]:
    """Yield a line per collective and one for copies: the number of rows, and how much their bandwidth changed."""
    for kind, rows in group_by(compared, lambda row: row.collective or "pairs").items():
        changes = [row.slower_percent for row in rows if row.slower_percent is not None]
        counts = Counter(row.change for row in rows)
        counted_changes = ", ".join(f"{counts[change]} {change}" for change in Change if counts[change])
        figures = ""
        if changes:
            least, middle, most = (
                _percent_of_before(change) for change in (max(changes), median(changes), min(changes))
            )
            figures = f"; bandwidth {middle} of the old one (median), from {least} to {most}"
        yield f"{kind}: {plural(len(rows), 'row')} in common: {counted_changes or 'without times'}{figures}"
