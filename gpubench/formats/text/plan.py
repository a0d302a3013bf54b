"""Print a training plan: its inputs, the layouts, exposed communication, the cost of faults, and the last line."""

from collections.abc import Sequence

from gpubench.formats.layout import INDENT, Column, or_dash
from gpubench.formats.table import ReportView
from gpubench.model.results.plan import ExposedRow, FaultCostRow, LayoutRow
from gpubench.model.results.report import Report
from gpubench.model.terms.units import format_memory, plural

LAYOUTS = (
    Column("#", "place", 3, right=True),
    Column("layout", "layout"),
    Column("step ms", lambda row: _span(row.step_least_ms, row.step_most_ms), right=True),
    Column("tokens/s", lambda row: _tokens(row), 4, right=True),
    Column("compute", lambda row: f"{row.compute_ms:.1f}", 5, right=True),
    Column("slowed", lambda row: f"{row.slowed_ms:.1f}", 5, right=True),
    Column("exposed", lambda row: f"{row.exposed_ms:.1f}", 2, right=True),
    Column("bubble", lambda row: f"{row.bubble_ms:.1f}", 3, right=True),
    Column("host", lambda row: or_dash(row.host_ms, ".1f"), 5, right=True, optional=True),
    Column("bucket MB", lambda row: or_dash(row.bucket_mb, ".4g"), 8, right=True),
    Column("microbatches", "microbatches", 7, right=True),
    Column("states", "states_bytes", 1, right=True),
    Column("GPU memory", "gpu_memory_bytes", page_only=True),
)
EXPOSED = (
    Column("communication", "source"),
    Column("collective", "collective", 4),
    Column("times", "operations", 2, right=True),
    Column("bytes", "bytes", 3, right=True),
    Column("alone ms", lambda row: f"{row.alone_ms:.2f}", 1, right=True),
    Column("exposed ms", lambda row: f"{row.exposed_ms:.2f}", right=True),
    Column("hidden", lambda row: f"{row.hidden_percent:.0f} %", right=True),
)
FAULTS = (
    Column("fault", "fault"),
    Column("what", "what", 3),
    Column("step ms", lambda row: f"{row.step_ms:.1f}", right=True),
    Column("slower", lambda row: f"{row.slower_percent:.0f} %", right=True),
    Column("exposed ms", lambda row: f"{row.exposed_ms:.1f}", 1, right=True),
    Column("slowed ms", lambda row: f"{row.slowed_ms:.1f}", 4, right=True),
    Column("alone ms", lambda row: f"{row.communication_ms:.1f}", 2, right=True),
    Column("from", "source", 5),
    Column("note", "note", page_only=True),
)
COLUMNS = {LayoutRow: LAYOUTS, ExposedRow: EXPOSED, FaultCostRow: FAULTS}


class PlanView(ReportView):
    """Prints layouts, exposed communication and the cost of faults."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        self._header()
        if report.sections:
            layouts = report.rows(LayoutRow)
            self._layouts(layouts)
            self._exposed(layouts[0], report.rows(ExposedRow))
            self._faults(report.rows(FaultCostRow))
        self._page.outcome(report)

    def _header(self) -> None:
        metadata, options = self._metadata, self._metadata.options
        machine = f"{plural(int(options['gpus']), 'GPU')} ({options['gpu']})"
        self._page.heading(metadata, "plan", f"{options['model']} on {machine}")
        shape = (
            f"{options['parameters'] / 1e6:,.0f} M parameters: {options['layers']} layers, hidden "
            f"{options['hidden']}, {options['heads']} heads, sequence {options['sequence']}, {options['batch']} per "
            f"microbatch, {options['data_type']}"
        )
        self._page.wrap(f"{INDENT}{shape}")
        self._page.wrap(
            f"{INDENT}one microbatch on one GPU: forward {options['forward_ms']:.1f} ms, backward "
            f"{options['backward_ms']:.1f} ms ({options['compute_origin']})"
        )
        for note in options["notes"]:
            self._page.wrap(f"{INDENT}{note}")
        self._page.defaults(metadata)
        self._page.print("")

    def _layouts(self, rows: Sequence[LayoutRow]) -> None:
        memory = rows[0].gpu_memory_bytes
        self._page.wrap(
            "layouts, fastest first. A step is forward, backward and optimizer. States are the memory for weights, "
            "gradients and optimizer on one GPU" + (f", which has {format_memory(memory)}" if memory else "")
        )
        self._page.table(LAYOUTS, rows)
        self._page.print("")

    def _exposed(self, best: LayoutRow, rows: Sequence[ExposedRow]) -> None:
        if not rows:
            return
        copies = ", including copies of gradients into buckets and back" if best.bucket_mb is not None else ""
        computing = f"computing {best.compute_ms:.1f}{copies}"
        self._page.wrap(f"{best.layout}: {_span(best.step_least_ms, best.step_most_ms)} ms per step, {computing}")
        self._page.table(EXPOSED, rows)
        self._page.print("")

    def _faults(self, rows: Sequence[FaultCostRow]) -> None:
        if not rows:
            return
        assumed = self._metadata.options["contention_assumed"]
        least = ", and contention was not measured" if assumed else ""
        self._page.wrap(f"the same step on another fabric. The effect of faults is modelled, not measured{least}")
        self._page.table(FAULTS, rows)
        for row in rows:
            if row.note:
                self._page.wrap(f"{INDENT}{row.fault}: {row.note}")
        self._page.print("")


def _span(least: float, most: float) -> str:
    low, high = (f"{value:.{1 if most < 100 else 0}f}" for value in (least, most))
    return low if low == high else f"{low} to {high}"


def _tokens(row: LayoutRow) -> str:
    low, high = (
        f"{row.tokens_per_second * row.step_ms / step_ms:,.0f}" for step_ms in (row.step_most_ms, row.step_least_ms)
    )
    return low if low == high else f"{low} to {high}"
