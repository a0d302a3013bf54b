"""A page of text: lines on a console, with the findings and the verdict that end every report."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from gpubench.formats.text.columns import VERDICT_MARKS
from gpubench.formats.text.header import INDENT, default_lines, software_lines
from gpubench.formats.text.line import line_text
from gpubench.formats.text.machine.causes import CauseText, all_causes, named_causes, top_causes, unread_lines
from gpubench.formats.text.machine.fallback import evidence_notes, evidence_table, judged_lines
from gpubench.formats.text.machine.prospects import other_lines
from gpubench.formats.text.plot import plot_lines
from gpubench.formats.writer import Style, Target
from gpubench.model.paths.p2p import SLOW_SHARE
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.terms.foreign_text import printable_line
from gpubench.model.terms.verdict import Finding, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from gpubench.model.results.curves import Chart

_LABEL_WIDTH = 12

_VERDICT_STYLES = {
    Verdict.PASS: "bold green",
    Verdict.WARN: "bold yellow",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
}
_WORD_STYLES = {
    **{rf"(?<!\S){verdict}(?!\S)": style for verdict, style in _VERDICT_STYLES.items()},
    r"(?<!\S)OK(?!\S)": _VERDICT_STYLES[Verdict.PASS],
    r"(?<!\S)(CNS|GNS|TNS|DR|NS|U|down|init|lost|\S+!)(?!\S)": _VERDICT_STYLES[Verdict.FAIL],
    r"(?<!\S)(\S+\*)(?!\S)": _VERDICT_STYLES[Verdict.WARN],
}
"""A colour says how something fares: how things are wired has none, however fast it is."""

_PART = re.compile(r"(?<!\S)(\d+(?: x\d+)?) of (\d+(?: x\d+)?)(?!\S)")
"""'12 of 18' NVLinks, a PCIe link of '5 x8 of 5 x16'."""

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([!*~]?)(?!\w)")
_MARKED = {mark: _VERDICT_STYLES[verdict] for verdict, mark in VERDICT_MARKS.items() if verdict in _VERDICT_STYLES}


class Page:
    """The page that a view prints on. `charts` are drawn before the outcome; None where nobody asked for any."""

    def __init__(self, target: Target, style: Style) -> None:
        self.width = style.width
        self.verbose = style.verbose
        self.charts: Sequence[Chart] | None = None
        self._own_file = target.path is not None
        self._console = _console(target.open(), style)

    def print(self, *lines: str, style: str = "") -> None:
        """Lines as they are."""
        for line in lines:
            self._console.print(line_text(line, style))
        self._console.file.flush()

    def table(self, lines: Iterable[str]) -> None:
        """Lines of words in columns: verdicts, refusals and parts that are missing in the colour of how they fare."""
        for line in lines:
            text = line_text(line)
            for pattern, style in _WORD_STYLES.items():
                text.highlight_regex(pattern, style)
            for part in _PART.finditer(text.plain):
                if part[1] != part[2]:
                    text.stylize(_VERDICT_STYLES[Verdict.FAIL], *part.span())
            self._console.print(text)

    def heat(self, lines: Sequence[str], *, expected: float | None = None, less_is_better: bool = False) -> None:
        """A matrix of numbers in the colour of how they fare: by the mark behind them, else as well as is expected.

        Where nothing is expected a number without a mark was not judged, and has no colour.
        """
        for line in lines:
            text = line_text(line)
            for found in _NUMBER.finditer(text.plain):
                value, style = float(found[1]), _MARKED.get(found[2], "")
                share = (expected or 0.0) / value if less_is_better and value else value / expected if expected else 0.0
                if not found[2] and share >= SLOW_SHARE:
                    style = _VERDICT_STYLES[Verdict.PASS]
                text.stylize(style, *found.span())
            self._console.print(text)

    def wrap(self, text: str, hanging: int = 4, style: str = "") -> None:
        """A sentence, broken at the page's width, its further lines indented."""
        indent = " " * hanging
        lines = textwrap.wrap(printable_line(text), self.width, subsequent_indent=indent, break_on_hyphens=False)
        self.print(*lines, style=style)

    def labelled(self, label: str, text: str, verdict: Verdict | None = None) -> None:
        """A label and what it says, whose further lines begin below its first word; in the verdict's colour."""
        self.wrap(label + text, len(label), "" if verdict is None else _VERDICT_STYLES.get(verdict, ""))

    def software(self, metadata: Metadata) -> None:
        """Libraries and settings of a run."""
        for line in software_lines(metadata, verbose=self.verbose):
            self.wrap(line)

    def defaults(self, metadata: Metadata) -> None:
        """Options that have their values from the environment or a file, where all is asked for."""
        for line in default_lines(metadata) if self.verbose else ():
            self.wrap(line)

    def tree(self, tree: "Tree") -> None:
        """A tree, made of `line_text`."""
        self._console.print(tree)

    def evidence(self, report: Report) -> None:
        """All that is known of every path."""
        title, *table = evidence_table(report, self.width)
        self.print("")
        self.wrap(title)
        self.print(*table)
        for line in evidence_notes(report):
            self.wrap(line)
        self.print("")
        self.all_causes(report)

    def all_causes(self, report: Report) -> None:
        """All causes that hold, and of which others it is not known."""
        causes, unread = list(all_causes(report)), unread_lines(report)
        self._causes(causes)
        for line in unread:
            self.wrap(line)
        if causes or unread:
            self.print("")

    def outcome(self, report: Report) -> None:
        """Curves, findings, the verdict on fallback, and the verdict."""
        self._plot()
        for finding in report.findings:
            self._finding(finding)
        self._fallback(report)
        self._causes(top_causes(report))
        self.closing(report)

    def brief(self, report: Report) -> None:
        """Findings, and the verdict."""
        for finding in report.findings:
            self._finding(finding)
        self.closing(report)

    def prospects(self, report: Report) -> None:
        """The paths that would fall back, and why; all causes with their cures; what could not be read; the verdict."""
        causes = list(all_causes(report))
        for verdict, line in (*judged_lines(report, [cause.id for cause in causes]), *other_lines(report)):
            self.wrap(line, style=_VERDICT_STYLES.get(verdict, ""))
        self.print("")
        self.all_causes(report)
        for finding in report.findings:
            if finding.severity is Verdict.ERROR:
                self._finding(finding)
        self.closing(report)

    def _fallback(self, report: Report) -> None:
        for verdict, line in judged_lines(report, named_causes(report)):
            self.wrap(line, style=_VERDICT_STYLES.get(verdict, ""))

    def closing(self, report: Report) -> None:
        """The last line, which has the verdict."""
        if self.verbose and report.duration_s is not None:
            self.print(f"took {report.duration_s:.1f} s")
        # One line, however wide: it is there to be pasted.
        cut_short = "" if report.complete else ": the run was cut short, the rows above were measured"
        line = report.sentence or f"verdict: {report.verdict}{cut_short}"
        self.print(line, style=_VERDICT_STYLES.get(report.verdict, ""))

    def _plot(self) -> None:
        if self.charts is not None and not self.charts:
            self.print("no curve: fewer than three sizes were measured", "")
        for chart in self.charts or ():
            self.print("", *plot_lines(chart, self.width), "")

    def _causes(self, causes: Iterable[CauseText]) -> None:
        for cause in causes:
            self.wrap(cause.line, style=_VERDICT_STYLES.get(cause.verdict, ""))
            for label, text in cause.details:
                self._labelled(f"{INDENT}{label + ':':<{_LABEL_WIDTH - len(INDENT)}}", text)

    def close(self) -> None:
        """Close a file of our own."""
        if self._own_file:
            self._console.file.close()

    def _finding(self, finding: Finding) -> None:
        self._labelled(f"{finding.severity} {finding.id}: ", finding.subject, _VERDICT_STYLES.get(finding.severity, ""))
        before = ""
        for label, text in finding.details:
            shown = "" if label == before else f"{label}:"
            self._labelled(f"{INDENT}{shown:<{_LABEL_WIDTH - len(INDENT)}}", text)
            before = label

    def _labelled(self, label: str, text: str, style: str = "") -> None:
        self.wrap(label + text, _LABEL_WIDTH, style)


class ReportView:
    """A view that prints everything at the end: there is nothing to wait for in between."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._metadata = metadata

    def row(self, row: Row) -> None:
        """Nothing comes row by row."""
        raise TypeError(f"{self._metadata.subject} has no rows of {type(row).__name__}")


def _console(stream: TextIO, style: Style) -> "Console":
    return pipe_console(
        stream,
        width=style.width,
        force_terminal=style.color,
        color_system="standard" if style.color else None,
        soft_wrap=True,
    )


def pipe_console(stream: TextIO, **settings: Any) -> "Console":
    """A console that shows text as it is. Where its reader is gone, whoever runs the measurement decides."""
    from rich.console import Console

    class PipeConsole(Console):
        """Rich ends the process when its reader is gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(file=stream, highlight=False, markup=False, emoji=False, **settings)
