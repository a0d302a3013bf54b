"""A plan for people: what it follows from, layouts ranked, what is exposed, settings, faults, the last sentence."""

from collections.abc import Sequence
from itertools import groupby

from gpubench.formats.lines import INDENT, Column, fitted_lines
from gpubench.formats.table import ReportView
from gpubench.model.results.plan import (
    EXPOSED_SECTION,
    FAULT_COSTS_SECTION,
    LAYOUTS_SECTION,
    SETTINGS_SECTION,
    ExposedRow,
    FaultCostRow,
    LayoutRow,
    SettingRow,
)
from gpubench.model.results.report import Report
from gpubench.model.terms.units import counted, format_memory

_MOST_LAYOUTS = 12


class PlanView(ReportView):
    """Header, tables, sentence."""

    def end(self, report: Report) -> None:
        """The whole."""
        self._header()
        if report.sections:
            layouts = report.rows(LAYOUTS_SECTION, LayoutRow)
            self._layouts(layouts)
            self._exposed(layouts[0], report.rows(EXPOSED_SECTION, ExposedRow))
            self._settings(report.rows(SETTINGS_SECTION, SettingRow))
            self._faults(report.rows(FAULT_COSTS_SECTION, FaultCostRow))
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
        shown = rows[:_MOST_LAYOUTS]
        memory = shown[0].gpu_memory_bytes
        self._page.wrap(
            "layouts, the fastest that fits first; a step is forward and backward, without the optimizer's own time"
            + (f"; a GPU has {format_memory(memory)}" if memory else "")
        )
        columns = [
            Column("", [str(row.place) for row in shown], 3, right=True),
            Column("layout", [row.layout for row in shown]),
            Column("step ms", [f"{row.step_ms:.1f}" for row in shown], right=True),
            Column("tokens/s", [f"{row.tokens_per_second:,.0f}" for row in shown], 4, right=True),
            Column("compute", [f"{row.compute_ms:.1f}" for row in shown], 5, right=True),
            Column("slowed", [f"{row.slowed_ms:.1f}" for row in shown], 5, right=True),
            Column("exposed", [f"{row.exposed_ms:.1f}" for row in shown], 2, right=True),
            Column("bubble", [f"{row.bubble_ms:.1f}" for row in shown], 6, right=True),
            *([] if shown[0].host_ms is None else [_host_column(shown)]),
            Column("microbatches", [str(row.microbatches) for row in shown], 7, right=True),
            Column("memory", [format_memory(row.memory_bytes) for row in shown], 1, right=True),
            Column("fits", ["?" if row.fits is None else "yes" if row.fits else "no" for row in shown]),
        ]
        self._page.table(fitted_lines(columns, self._page.width))
        if len(rows) > len(shown):
            self._page.wrap(f"and {len(rows) - len(shown):,} more: --format csv --section {LAYOUTS_SECTION}")
        self._page.print("")

    def _exposed(self, best: LayoutRow, rows: Sequence[ExposedRow]) -> None:
        if not rows:
            return
        noise = "noise not known"
        if best.step_most_ms > best.step_least_ms:
            noise = f"{best.step_least_ms:.2f} to {best.step_most_ms:.2f} by the noise of what was measured"
        copies = ", copies of gradients into buckets and out of them among it" if best.bucket_mb is not None else ""
        computing = f"computing {best.compute_ms:.1f}{copies}"
        self._page.wrap(f"{best.layout}: {best.step_ms:.1f} ms a step, {noise}; {computing}")
        columns = [
            Column("communication", [row.source for row in rows]),
            Column("collective", [row.collective for row in rows], 4),
            Column("times", [str(row.operations) for row in rows], 2, right=True),
            Column("bytes", [format_memory(row.bytes) for row in rows], 3, right=True),
            Column("alone ms", [f"{row.alone_ms:.2f}" for row in rows], 1, right=True),
            Column("exposed ms", [f"{row.exposed_ms:.2f}" for row in rows], right=True),
            Column("hidden", [f"{row.hidden_percent:.0f} %" for row in rows], right=True),
        ]
        self._page.table(fitted_lines(columns, self._page.width))
        self._page.print("")

    def _settings(self, rows: Sequence[SettingRow]) -> None:
        for name in dict.fromkeys(row.setting for row in rows):
            own = [row for row in rows if row.setting == name]
            label = {"bucket_mb": "bucket MiB", "ctas": "CTA cap"}.get(name, name)
            same = [list(rows) for _, rows in groupby(own, key=lambda row: (*_figures(row), row.flat))]
            firsts = [rows[0] for rows in same]
            columns = [
                Column(label, [_span([row.value for row in rows]) for rows in same], right=True),
                Column("step ms", [_figures(row)[0] for row in firsts], right=True),
                Column("exposed ms", [_figures(row)[1] for row in firsts], 1, right=True),
                Column("slower", [_figures(row)[2] for row in firsts], right=True),
                Column("", [_advice(rows) for rows in same]),
            ]
            self._page.table(fitted_lines(columns, self._page.width))
            self._page.print("")

    def _faults(self, rows: Sequence[FaultCostRow]) -> None:
        if not rows:
            return
        assumed = self._metadata.options["contention_assumed"]
        least = "; contention was not measured, so that a step is slower by at least this" if assumed else ""
        self._page.wrap(f"the same step on another fabric; what faults make of it is modelled, not measured{least}")
        columns = [
            Column("fault", [row.fault for row in rows]),
            Column("", [row.what for row in rows], 3),
            Column("step ms", [f"{row.step_ms:.1f}" for row in rows], right=True),
            Column("slower", [f"{row.slower_percent:.0f} %" for row in rows], right=True),
            Column("exposed ms", [f"{row.exposed_ms:.1f}" for row in rows], 1, right=True),
            Column("slowed ms", [_milliseconds(row.slowed_ms) for row in rows], 4, right=True),
            Column("alone ms", [_milliseconds(row.communication_ms) for row in rows], 2, right=True),
            Column("from", [row.source for row in rows], 5),
        ]
        self._page.table(fitted_lines(columns, self._page.width))
        for row in rows:
            if row.note:
                self._page.wrap(f"{INDENT}{row.fault}: {row.note}")
        self._page.print("")


def _host_column(rows: Sequence[LayoutRow]) -> Column:
    """What a step waits for the host."""
    return Column("host", ["?" if row.host_ms is None else f"{row.host_ms:.1f}" for row in rows], 5, right=True)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _figures(row: SettingRow) -> tuple[str, str, str]:
    return f"{row.step_ms:.1f}", f"{row.exposed_ms:.1f}", f"{row.slower_percent:.1f} %"


def _span(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _advice(rows: Sequence[SettingRow]) -> str:
    best = [row.value for row in rows if row.best]
    if best:
        return "best" if len(rows) == 1 else f"best: {', '.join(best)}, others as good"
    return "as good" if rows[0].flat else ""
