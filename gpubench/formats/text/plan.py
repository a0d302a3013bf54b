"""A plan for people: what it follows from, layouts, what is exposed, faults, the last sentence."""

from collections.abc import Sequence

from gpubench.formats.lines import INDENT, Column, fitted_lines, note_columns, or_dash
from gpubench.formats.table import ReportView
from gpubench.model.results.plan import ExposedRow, FaultCostRow, LayoutRow
from gpubench.model.results.report import Report
from gpubench.model.terms.units import counted, format_memory


class PlanView(ReportView):
    """Header, tables, sentence."""

    def end(self, report: Report) -> None:
        """The whole."""
        self._header()
        if report.sections:
            layouts = report.rows(LayoutRow)
            self._layouts(layouts)
            self._exposed(layouts[0], report.rows(ExposedRow))
            self._faults(report.rows(FaultCostRow))
        self._page.outcome(report)

    def _header(self) -> None:
        metadata, options = self._metadata, self._metadata.options
        origin = f"  ({metadata.origin.upper()})" if metadata.origin == "simulated" else ""
        machine = f"{counted(int(options['gpus']), 'GPU')} ({options['gpu']})"
        self._page.wrap(f"gpubench {metadata.gpubench_version}  plan  {options['model']} on {machine}{origin}")
        shape = (
            f"{options['parameters'] / 1e6:,.0f} M parameters: {options['layers']} layers, hidden {options['hidden']}, "
            f"{options['heads']} heads, sequence {options['sequence']}, {options['batch']} a microbatch, "
            f"{options['data_type']}"
        )
        self._page.wrap(f"{INDENT}{shape}")
        self._page.wrap(
            f"{INDENT}a microbatch on one GPU: forward {options['forward_ms']:.1f} ms, backward "
            f"{options['backward_ms']:.1f} ms ({options['compute_origin']})"
        )
        for note in options["notes"]:
            self._page.wrap(f"{INDENT}{note}")
        self._page.defaults(metadata)
        self._page.print("")

    def _layouts(self, rows: Sequence[LayoutRow]) -> None:
        memory = rows[0].gpu_memory_bytes
        self._page.wrap(
            "layouts, the fastest first; a step is forward, backward and optimizer; states are what weights, gradients "
            "and optimizer take on a GPU" + (f", which has {format_memory(memory)}" if memory else "")
        )
        self._page.table(fitted_lines(_layout_columns(rows), self._page.width))
        self._page.print("")

    def _exposed(self, best: LayoutRow, rows: Sequence[ExposedRow]) -> None:
        if not rows:
            return
        copies = ", copies of gradients into buckets and out of them among it" if best.bucket_mb is not None else ""
        computing = f"computing {best.compute_ms:.1f}{copies}"
        self._page.wrap(f"{best.layout}: {_span(best.step_least_ms, best.step_most_ms)} ms a step; {computing}")
        self._page.table(fitted_lines(_exposed_columns(rows), self._page.width))
        self._page.print("")

    def _faults(self, rows: Sequence[FaultCostRow]) -> None:
        if not rows:
            return
        assumed = self._metadata.options["contention_assumed"]
        least = "; contention was not measured" if assumed else ""
        self._page.wrap(f"the same step on another fabric; what faults make of it is modelled, not measured{least}")
        self._page.table(fitted_lines(_fault_columns(rows), self._page.width))
        for row in rows:
            if row.note:
                self._page.wrap(f"{INDENT}{row.fault}: {row.note}")
        self._page.print("")


def _layout_columns(rows: Sequence[LayoutRow]) -> list[Column]:
    waits = [or_dash(row.host_ms, ".1f") for row in rows]
    return [
        Column("#", [str(row.place) for row in rows], 3, right=True),
        Column("layout", [row.layout for row in rows]),
        Column("step ms", [_span(row.step_least_ms, row.step_most_ms) for row in rows], right=True),
        Column("tokens/s", [_tokens(row) for row in rows], 4, right=True),
        Column("compute", [f"{row.compute_ms:.1f}" for row in rows], 5, right=True),
        Column("slowed", [f"{row.slowed_ms:.1f}" for row in rows], 5, right=True),
        Column("exposed", [f"{row.exposed_ms:.1f}" for row in rows], 2, right=True),
        Column("bubble", [f"{row.bubble_ms:.1f}" for row in rows], 3 if rows[0].bubble_ms else 6, right=True),
        *([Column("host", waits, 5, right=True)] if any(row.host_ms is not None for row in rows) else ()),
        Column("bucket MB", [or_dash(row.bucket_mb, ".4g") for row in rows], 8, right=True),
        Column("microbatches", [str(row.microbatches) for row in rows], 7, right=True),
        Column("states", [format_memory(row.states_bytes) for row in rows], 1, right=True),
    ]


def _exposed_columns(rows: Sequence[ExposedRow]) -> list[Column]:
    return [
        Column("communication", [row.source for row in rows]),
        Column("collective", [row.collective for row in rows], 4),
        Column("times", [str(row.operations) for row in rows], 2, right=True),
        Column("bytes", [format_memory(row.bytes) for row in rows], 3, right=True),
        Column("alone ms", [f"{row.alone_ms:.2f}" for row in rows], 1, right=True),
        Column("exposed ms", [f"{row.exposed_ms:.2f}" for row in rows], right=True),
        Column("hidden", [f"{row.hidden_percent:.0f} %" for row in rows], right=True),
    ]


def _fault_columns(rows: Sequence[FaultCostRow]) -> list[Column]:
    return [
        Column("fault", [row.fault for row in rows]),
        Column("what", [row.what for row in rows], 3),
        Column("step ms", [f"{row.step_ms:.1f}" for row in rows], right=True),
        Column("slower", [f"{row.slower_percent:.0f} %" for row in rows], right=True),
        Column("exposed ms", [f"{row.exposed_ms:.1f}" for row in rows], 1, right=True),
        Column("slowed ms", [f"{row.slowed_ms:.1f}" for row in rows], 4, right=True),
        Column("alone ms", [f"{row.communication_ms:.1f}" for row in rows], 2, right=True),
        Column("from", [row.source for row in rows], 5),
    ]


def _layouts_on_page(rows: Sequence[LayoutRow]) -> list[Column]:
    memory = ["-" if row.gpu_memory_bytes is None else format_memory(row.gpu_memory_bytes) for row in rows]
    return [*_layout_columns(rows), Column("GPU memory", memory)]


def _faults_on_page(rows: Sequence[FaultCostRow]) -> list[Column]:
    return [*_fault_columns(rows), *note_columns(rows)]


COLUMNS = {LayoutRow: _layouts_on_page, ExposedRow: _exposed_columns, FaultCostRow: _faults_on_page}
"""Pages have in columns, too, what the terminal says above and below its tables."""


def _span(least: float, most: float) -> str:
    low, high = (f"{each:.{1 if most < 100 else 0}f}" for each in (least, most))
    return low if low == high else f"{low} to {high}"


def _tokens(row: LayoutRow) -> str:
    low, high = (f"{row.tokens_per_second * row.step_ms / each:,.0f}" for each in (row.step_most_ms, row.step_least_ms))
    return low if low == high else f"{low} to {high}"
