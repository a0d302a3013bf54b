"""Print a scan: bad nodes and rails, a summary of the rounds, exclude lists, findings and the verdict."""

from collections.abc import Sequence

from gpubench.formats.layout import INDENT, Column, or_dash
from gpubench.formats.table import ReportView
from gpubench.model.results.report import Report
from gpubench.model.results.scan import ExclusionRow, ScanCellRow, ScanCollectiveRow, ScanPartRow, ScanRoundRow, Tool
from gpubench.model.terms.units import plural, shorten
from gpubench.model.terms.verdict import Verdict

_MOST_CELLS = 16
_MOST_HOSTS = 4
_CELLS = (
    Column("node", "node"),
    Column("rail", "rail", right=True),
    Column("NIC", lambda row: row.nic or "?", 3),
    Column("leaf", lambda row: row.leaf or "?", 2),
    Column("% of others", lambda row: or_dash(row.score_percent, ".0f"), right=True),
    Column("GB/s both ways", lambda row: or_dash(row.both_ways_gb_s, ".4g"), 1, right=True),
    Column("rounds", "figures", 4, right=True),
    Column("failed", "failures", 5, right=True),
    Column("verdict", "verdict"),
    Column("because of", "part", 6),
)


class ScanView(ReportView):
    """Prints bad cells (a node on a rail), rounds, exclude lists, findings and the verdict."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        self._header()
        if report.sections:
            self._cells(report.rows(ScanCellRow), report.rows(ScanPartRow))
            self._rounds(report.rows(ScanRoundRow))
            self._collectives(report.rows(ScanCollectiveRow))
            self._exclusions(report.rows(ExclusionRow))
            self._page.print("")
        self._page.outcome(report)

    def _header(self) -> None:
        metadata, options = self._metadata, self._metadata.options
        rails = f"{plural(int(options['rails']), 'rail')} each"
        known = options["leaves"]
        leaves = ", leaves not known" if not known else f", {known} {'leaf' if known == 1 else 'leaves'}"
        nodes = f"{len(metadata.hosts):,} nodes of {rails}{leaves}"
        self._page.heading(metadata, "scan", nodes, f"backend {metadata.backend}")
        if metadata.source:
            self._page.wrap(f"{INDENT}from {metadata.source}")
        if "ranks_per_gpu" in options:
            share = options.get("sm_percent")
            how = "taking turns" if share is None else f"MPS, {share:g} % of its SMs each"
            self._page.wrap(
                f"{INDENT}{options['ranks_per_gpu']} ranks share each GPU ({how}), and each counts as a node"
            )
        self._page.software(metadata)
        self._page.print("")

    def _cells(self, cells: Sequence[ScanCellRow], parts: Sequence[ScanPartRow]) -> None:
        bad = [row for row in cells if row.verdict != Verdict.PASS]
        if not bad:
            return
        order = {row.subject: place for place, row in enumerate(parts)}
        shown: list[ScanCellRow] = []
        for part in sorted({row.part for row in bad}, key=lambda name: order.get(name or "", len(order))):
            own = sorted(
                (row for row in bad if row.part == part),
                key=lambda row: -1.0 if row.score_percent is None else row.score_percent,
            )
            shown += own[: 2 if part is not None and len(parts) > 1 else _MOST_CELLS]
        shown = shown[:_MOST_CELLS]
        self._page.table(_CELLS, shown)
        if len(bad) > len(shown):
            self._page.print(f"and {len(bad) - len(shown):,} more: --format csv --section {ScanCellRow.section}")
        self._page.print("")

    def _rounds(self, rows: Sequence[ScanRoundRow]) -> None:
        options = self._metadata.options
        noise, sure = options["noise_percent"], options["sure_loss_percent"]
        phases = dict.fromkeys(row.phase for row in rows)
        counts = ", ".join(f"{sum(row.phase == phase for row in rows)} {phase}" for phase in phases)
        figures = sum(row.figures for row in rows)
        failures = sum(row.failures for row in rows)
        failed = f", {failures:,} failed" if failures else ""
        took = f"{sum(row.seconds for row in rows):.1f} s" + (
            ", by the model" if self._metadata.origin == "simulated" else ""
        )
        self._page.wrap(f"{plural(len(rows), 'round')}: {counts}; {figures:,} figures{failed}; {took}")
        self._page.wrap(
            f"measurement noise {noise:.1f} %; a {min(sure, 100):.0f} % slowdown is detected with 99 % probability"
        )
        if (percent_of_nics := options.get("nic_rate_percent")) is not None:
            slowest = ", on the slowest rail" if options["rails"] > 1 else ""
            self._page.wrap(f"usual between nodes: {percent_of_nics:.0f} % of the NICs' rate{slowest}")

    def _collectives(self, rows: Sequence[ScanCollectiveRow]) -> None:
        for row in rows:
            measured, predicted = or_dash(row.measured_gb_s, ".4g"), or_dash(row.predicted_gb_s, ".4g")
            reached = row.note or f"each node sends {measured} of {predicted} GB/s predicted"
            share = "" if row.percent is None else f" ({row.percent:.0f} %)"
            self._page.wrap(f"ring of {row.subject} ({len(row.nodes):,} nodes): {reached}{share}")

    def _exclusions(self, rows: Sequence[ExclusionRow]) -> None:
        if all(row.tool == Tool.MPIRUN for row in rows):
            return
        self._page.print("", "to leave the bad nodes out:")
        for row in rows:
            if row.tool != Tool.MPIRUN:
                self._page.print(f"{INDENT}{row.tool + ':':<13}{row.line}")
        good = [row.line for row in rows if row.tool == Tool.MPIRUN]
        hosts = shorten([line.partition(" ")[0] for line in good], _MOST_HOSTS)
        file = self._metadata.options.get("hostfile")
        kept = f"{hosts}: {f'written to {file}' if file else '--hostfile FILE writes them'}"
        kept = kept if good else "no node is known to be healthy"
        self._page.print(f"{INDENT}{'hostfile:':<13}{kept}")
