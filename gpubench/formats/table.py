"""The table for people: the page that the view of every subject prints on, with findings and verdict."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from gpubench.formats.lines import (
    INDENT,
    VERDICT_MARKS,
    Column,
    default_lines,
    fitted_lines,
    line_text,
    plot_lines,
    software_lines,
    wrapped,
)
from gpubench.formats.registry import Style, Target
from gpubench.model.paths.p2p import SLOW_SHARE
from gpubench.model.paths.transport import Conclusion, Confidence
from gpubench.model.results.ending import is_brief
from gpubench.model.results.fallback import cure_of, shown, slowdown
from gpubench.model.results.report import (
    CauseRow,
    Effect,
    EvidenceRow,
    FallbackRow,
    Metadata,
    Report,
    Row,
    UnreadRow,
)
from gpubench.model.terms.units import compress_names, printable_line, some_of
from gpubench.model.terms.verdict import Detail, Finding, Origin, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from gpubench.model.results.compare import Chart

_MOST_CAUSES = 3


class CauseText(NamedTuple):
    """A cause by its id and in words: its first line with its verdict, and what is said below it, by label."""

    id: str
    verdict: Verdict
    line: str
    details: tuple[Detail, ...]


def named_causes(report: Report) -> frozenset[str]:
    """The ids of the causes that are printed below the verdict on fallback, which need not be said in it."""
    return frozenset(row.id for row in _root_findings(report))


def top_causes(report: Report) -> Iterator[CauseText]:
    """The causes that explain what the verdict on fallback says, with their cures: the first few."""
    return (_text(report, row, whole=False) for row in _root_findings(report))


def all_causes(report: Report) -> Iterator[CauseText]:
    """All causes that hold, with everything that the catalogue says of them."""
    return (_text(report, row, whole=True) for row in report.rows(CauseRow) if not row.implied_by)


def unread_lines(report: Report) -> list[str]:
    """Of which causes it is not known whether they hold, and why; those of one reason together."""
    ids: dict[str, dict[str, None]] = {}
    subjects: dict[str, dict[str, None]] = {}
    for row in report.rows(UnreadRow):
        ids.setdefault(row.reason, {})[row.id] = None
        subjects.setdefault(row.reason, {})[row.subject] = None
    return [f"not known: {', '.join(ids[reason])} on {some_of(list(subjects[reason]))}: {reason}" for reason in ids]


def _root_findings(report: Report) -> list[CauseRow]:
    blamed = {row.cause for row in report.rows(FallbackRow)}
    rows = [row for row in report.rows(CauseRow) if not row.implied_by]
    return [row for row in rows if row.paths or row.id in blamed][:_MOST_CAUSES] if blamed else []


def _text(report: Report, row: CauseRow, *, whole: bool) -> CauseText:
    verdict = Verdict(row.verdict)
    sure = f"by design, {row.confidence}" if verdict is Verdict.SKIP else row.confidence
    implied = [each.id for each in report.rows(CauseRow) if each.implied_by == row.id]
    details = [Detail("what", f"{row.title}: {', '.join(row.effects)}")] if whole else []
    details += [Detail("on", row.subject)] if whole else []
    details += [Detail("implies", ", ".join(implied))] if implied else []
    details += cure_of(row).details
    details += [Detail("settle", row.settles)] if whole or row.confidence != Confidence.PROVEN else []
    details += [Detail("see", row.link)] if whole else []
    return CauseText(row.id, verdict, f"cause {row.id} ({sure}): {row.evidence}", tuple(details))


_MOST_PAIRS = 8
_FEW_PAIRS = 2
_ARROW = " → "

_BETWEEN_NODES = (Effect.SOCKETS, Effect.NO_GPUDIRECT)
_ELSEWHERE = {
    Effect.SLOW: "would be slow, because",
    Effect.NETWORK_INSIDE: "would take a network inside a node where there is no P2P, because",
    Effect.APPLICATION: "would be copied through host memory by MPI, UCX or a framework, because",
    Effect.WRONG: "would hang or get wrong data, because",
}
"""Words for causes that leave a path direct, by the first of their effects."""


def was_looked_at(report: Report) -> bool:
    """True where nothing was sent between the machines of a report: it alone has causes that could not be read."""
    return UnreadRow.section in report.sections


def lead(origin: str) -> str:
    """The beginning of every line on fallback."""
    return "fallback (simulated): " if origin == Origin.SIMULATED else "fallback: "


def prospect_lines(report: Report) -> list[tuple[Verdict, str]]:
    """The pairs of GPUs and the nodes that would fall back, with causes."""
    rows = report.rows(FallbackRow)
    between = list(_lines_between_nodes(report))
    is_only = len(rows) == 1
    return [*((Verdict(row.verdict), _line(row, is_only=is_only, nodes=bool(between))) for row in rows), *between]


def other_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """Causes that would make paths slow, or go wrong in other ways."""
    blamed = {row.cause for row in report.rows(FallbackRow)}
    for row in _causes(report):
        said = _ELSEWHERE.get(Effect(row.effects[0]))
        if row.id not in blamed and said is not None:
            maybe = said.replace("would", "might") if row.confidence == Confidence.WEAK else said
            yield Verdict(row.verdict), f"{row.subject} {maybe} {row.evidence} ({row.id})"


def _line(row: FallbackRow, *, is_only: bool, nodes: bool) -> str:
    """A line of pairs inside nodes. `is_only` is whether it is of all of them; `nodes` whether others are between."""
    pairs = f"all {row.count} pairs" if is_only and row.count > 1 else _named(row)
    begin = lead(row.origin)
    match Conclusion(row.conclusion):
        case Conclusion.IMPOSSIBLE:
            kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
            return f"{begin}{pairs} would fall back, because {row.cause_seen}: {kind}, {row.cause} ({row.how})"
        case Conclusion.POSSIBLE:
            none = f"no pair {'inside a node ' if nodes else ''}would fall back: " if is_only else ""
            where = pairs if is_only else "all others"
            return f"{begin}{none}direct possible for {where} ({row.how}). Try: gpubench p2p"
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}: {row.how}"


def _named(row: FallbackRow) -> str:
    """The pairs of a line: by the GPU that all of them have in common, else the first few."""
    common = set[str].intersection(*(set(pair.split(_ARROW)) for pair in row.pairs))
    if len(common) == 1 and len(row.pairs) == row.count > _FEW_PAIRS:
        return f"all {row.count} pairs of {common.pop()}"
    return shown(row, _MOST_PAIRS)


def _lines_between_nodes(report: Report) -> Iterator[tuple[Verdict, str]]:
    origin = next((row.origin for row in report.rows(FallbackRow)), "")
    for row in _causes(report):
        effects = [effect for effect in row.effects if effect in _BETWEEN_NODES]
        if row.effects[0] not in _BETWEEN_NODES:
            continue
        kind = "by design" if row.verdict == Verdict.SKIP else " or ".join(effects)
        would = "might" if row.confidence == Confidence.WEAK else "would"
        hosts = compress_names(row.hosts)
        yield (
            Verdict(row.verdict),
            f"{lead(origin)}{hosts} → other nodes {would} fall back, because {row.evidence}: {kind}, {row.id}",
        )


def _causes(report: Report) -> Sequence[CauseRow]:
    return [row for row in report.rows(CauseRow) if not row.implied_by]


_KINDS = {"capability": "could", "selection": "chosen", "measurement": "moved", "correctness": "right"}
_MARKS = {"present": "+", "absent": ".", "contradicting": "-"}


def fallback_lines(report: Report) -> list[str]:
    """The lines for a report; none where the run had nothing to say of paths."""
    return [line for _, line in _judged_lines(report)]


def fallback_notes(report: Report) -> Iterator[str]:
    """The same with cures, for a run whose findings nobody reads."""
    yield from fallback_lines(report)
    for row in report.rows(FallbackRow):
        if row.verdict != Verdict.SKIP:
            yield from cure_of(row).told


def _judged_lines(report: Report, said: Collection[str] = ()) -> list[tuple[Verdict, str]]:
    if was_looked_at(report):
        return prospect_lines(report)
    rows = report.rows(FallbackRow)
    if rows and all(row.conclusion == Conclusion.DIRECT for row in rows):
        return [(Verdict.PASS, _none(rows))]
    if len(rows) == 1 and rows[0].conclusion == Conclusion.UNKNOWN and rows[0].count > 1:
        return [(Verdict(rows[0].verdict), _line_of_pairs(rows[0], f"all {rows[0].count} pairs", said))]
    return [(Verdict(row.verdict), _line_of_pairs(row, shown(row, _MOST_PAIRS), said)) for row in rows]


def _none(rows: Sequence[FallbackRow]) -> str:
    pairs = sum(row.count for row in rows)
    over = " and ".join(dict.fromkeys(row.transport for row in rows if row.transport))
    most = max(rows, key=lambda row: row.count)
    sure = "/".join(dict.fromkeys(row.confidence for row in rows))
    subject = f"{'Both' if pairs == 2 else f'All {pairs}'} pairs are" if pairs > 1 else f"{shown(most)} is"
    return f"{lead(most.origin)}none. {subject} direct{f' over {over}' if over else ''} ({sure}): {most.how}"


def _line_of_pairs(row: FallbackRow, pairs: str, said: Collection[str]) -> str:
    begin = lead(row.origin)
    over = f" over {row.transport}" if row.transport else ""
    kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
    why = str(row.cause if row.cause in said else row.cause_seen)
    match Conclusion(row.conclusion):
        case Conclusion.DIRECT:
            return f"{begin}not for {pairs}, direct{over} ({row.confidence})"
        case Conclusion.STAGED:
            return f"{begin}{kind}: {pairs} through host memory{over}{slowdown(row)}; {why}"
        case Conclusion.WRONG:
            return f"{begin}{pairs}{over}: wrong data arrived"
        case Conclusion.DISPUTED:
            return f"{begin}disputed: {pairs}{over}: {row.how}"
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}{over}: {row.how}"


def evidence_table(report: Report, width: int) -> list[str]:
    """All evidence, a line a path: + for, - against, . nothing known."""
    rows = report.rows(EvidenceRow)
    if not rows:
        return ["evidence: none, no path between GPUs was watched"]
    table = [
        Column("from", [row.source for row in rows]),
        Column("to", [row.destination for row in rows]),
        Column("path", [row.path_class or "?" for row in rows], spare=1),
        *(Column(head, [_MARKS[getattr(row, kind)] for row in rows]) for kind, head in _KINDS.items()),
        Column("over", [row.transport or "?" for row in rows]),
        Column("GB/s", ["?" if row.bandwidth_gb_s is None else f"{row.bandwidth_gb_s:.1f}" for row in rows], spare=2),
        Column("limit", ["?" if row.limit_gb_s is None else f"{row.limit_gb_s:g}" for row in rows], spare=3),
        Column("verdict", [f"{row.conclusion}, {row.confidence}" for row in rows]),
    ]
    return [
        "evidence that a path is direct: + for it, - against it, . nothing known",
        *fitted_lines(table, width, keys=2),
    ]


def evidence_notes(report: Report) -> list[str]:
    """The evidence of each kind, with its paths."""
    rows = report.rows(EvidenceRow)
    found: dict[str, list[str]] = {}
    for kind in _KINDS:
        for row in rows:
            seen = getattr(row, f"{kind}_seen")
            if seen:
                found.setdefault(f"{kind}: {seen}", []).append(f"{row.source} → {row.destination}")
    return [f"  {seen} [{_named_pairs(ends, len(rows))}]" for seen, ends in found.items()]


def _named_pairs(ends: Sequence[str], total: int) -> str:
    if len(ends) == total:
        return "all"
    return ", ".join(ends[:_MOST_PAIRS]) + (" …" if len(ends) > _MOST_PAIRS else "")


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
        self._breaks_last_line = style.terminal
        self.charts: Sequence[Chart] | None = None
        self._own_file = target.path is not None
        self._style = style
        self._stream = target.open()

    @cached_property
    def _console(self) -> "Console":
        return _console(self._stream, self._style)

    def print(self, *lines: str, style: str = "") -> None:
        """Lines as they are."""
        self._show(lines, lambda line: line_text(line, style))

    def _show(self, lines: Iterable[str], colored: "Callable[[str], Text]") -> None:
        """Lines on a page with or without colours, for which alone rich is loaded: a tenth of a start."""
        for line in lines:
            if self._style.color:
                self._console.print(colored(line))
            else:
                self._stream.write(f"{printable_line(line)}\n")
        self._stream.flush()

    def table(self, lines: Iterable[str]) -> None:
        """Lines of words in columns: verdicts, refusals and parts that are missing in the colour of how they fare."""

        def colored(line: str) -> "Text":
            text = line_text(line)
            for pattern, style in _WORD_STYLES.items():
                text.highlight_regex(pattern, style)
            for part in _PART.finditer(text.plain):
                if part[1] != part[2]:
                    text.stylize(_VERDICT_STYLES[Verdict.FAIL], *part.span())
            return text

        self._show(lines, colored)

    def heat(self, lines: Sequence[str], *, expected: float | None = None, less_is_better: bool = False) -> None:
        """A matrix of numbers in the colour of how they fare: by the mark behind them, else as well as is expected.

        Where nothing is expected a number without a mark was not judged, and has no colour.
        """

        def colored(line: str) -> "Text":
            text = line_text(line)
            for found in _NUMBER.finditer(text.plain):
                value, style = float(found[1]), _MARKED.get(found[2], "")
                share = (expected or 0.0) / value if less_is_better and value else value / expected if expected else 0.0
                if not found[2] and share >= SLOW_SHARE:
                    style = _VERDICT_STYLES[Verdict.PASS]
                text.stylize(style, *found.span())
            return text

        self._show(lines, colored)

    def wrap(self, text: str, hanging: int = 4, style: str = "") -> None:
        """A sentence, broken at the page's width, its further lines indented."""
        self.print(*wrapped(text, self.width, " " * hanging), style=style)

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
        if self.charts is not None and not self.charts:
            self.print("no curve: fewer than three sizes were measured", "")
        for chart in self.charts or ():
            self.print("", *plot_lines(chart, self.width), "")
        for finding in report.findings:
            self._finding(finding)
        for verdict, line in _judged_lines(report, named_causes(report)):
            self.wrap(line, style=_VERDICT_STYLES.get(verdict, ""))
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
        for verdict, line in (*_judged_lines(report, [cause.id for cause in causes]), *other_lines(report)):
            self.wrap(line, style=_VERDICT_STYLES.get(verdict, ""))
        self.print("")
        self.all_causes(report)
        for finding in report.findings:
            if finding.severity is Verdict.ERROR:
                self._finding(finding)
        self.closing(report)

    def closing(self, report: Report) -> None:
        """The last line, which has the verdict."""
        if self.verbose and report.duration_s is not None:
            self.print(f"took {report.duration_s:.1f} s")
        cut_short = "" if report.complete else ": the run was cut short, the rows above were measured"
        line = report.sentence or f"verdict: {report.verdict}{cut_short}"
        style = _VERDICT_STYLES.get(report.verdict, "")
        if not self._breaks_last_line or len(line) <= self.width:
            self.print(line, style=style)
            return
        said, a_try, command = line.rpartition(" Try: ")
        for part in (said, a_try.lstrip() + command) if a_try else (line,):
            self.wrap(part, style=style)

    def _causes(self, causes: Iterable[CauseText]) -> None:
        for cause in causes:
            self.wrap(cause.line, style=_VERDICT_STYLES.get(cause.verdict, ""))
            self._details(cause.details)

    def close(self) -> None:
        """Close a file of our own."""
        if self._own_file:
            self._stream.close()

    def _finding(self, finding: Finding) -> None:
        self._labelled(f"{finding.severity} {finding.id}: ", finding.subject, _VERDICT_STYLES.get(finding.severity, ""))
        self._details(finding.details)

    def _details(self, details: Iterable[Detail]) -> None:
        """Parts of a finding or a cause; a command stays in one line, so that it can be copied."""
        before = ""
        for label, text, is_command in details:
            shown = "" if label == before else f"{label}:"
            line = f"{INDENT}{shown:<{_LABEL_WIDTH - len(INDENT)}}{text}"
            if is_command:
                self.print(line)
            else:
                self.wrap(line, _LABEL_WIDTH)
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
    return _pipe_console(
        stream,
        width=style.width,
        height=1,  # else the terminal is asked for its size with each line
        force_terminal=style.color,
        color_system="standard" if style.color else None,
        soft_wrap=True,
    )


def _pipe_console(stream: TextIO, **settings: Any) -> "Console":
    """A console that shows text as it is. Where its reader is gone, whoever runs the measurement decides."""
    from rich.console import Console

    class PipeConsole(Console):
        """Rich ends the process when its reader is gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(file=stream, highlight=False, markup=False, emoji=False, **settings)


class QuietWriter:
    """Prints findings and sentence at the end, and nothing before."""

    def __init__(self, target: Target, style: Style) -> None:
        self._page = Page(target, style)

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """Findings and sentence."""
        self._page.brief(report)


class View(Protocol):
    """The part of a table that shows one subject."""

    def row(self, row: Row) -> None:
        """One more row."""
        ...

    def end(self, report: Report) -> None:
        """The last lines: findings, verdict."""
        ...


class TableWriter:
    """Prints a run as it happens."""

    def __init__(self, target: Target, style: Style) -> None:
        self._target = target
        self._style = style
        self._page: Page | None = None
        self._view: View | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        """The header."""
        self._page = Page(self._target, self._style)
        self._view = _view(self._page, metadata)

    def row(self, row: Row) -> None:
        """A line, or what it adds to one."""
        if self._style.plot:
            self._rows.append(row)
        if self._view is not None:
            self._view.row(row)

    def end(self, report: Report) -> None:
        """The footer."""
        if self._view is not None and self._page is not None:
            if self._style.plot:
                from gpubench.model.results.compare import charts

                self._page.charts = [chart for chart in charts(self._rows) if not chart.logarithmic]
            self._view.end(report)
            self._page.close()


def _view(page: "Page", metadata: Metadata) -> View:
    """The view of the run's command, `P2pView` of `text.p2p`; only that one is imported."""
    name = "brief" if is_brief(metadata.options) else metadata.of_command.page
    make: Callable[[Page, Metadata], View] = getattr(text_module(metadata), f"{name.capitalize()}View")
    return make(page, metadata)


def text_module(metadata: Metadata) -> ModuleType:
    """The module of `formats.text` for the run's command.

    Pages take the columns of its tables, too, those in its `COLUMNS`: what makes columns of rows, by the rows' type.
    """
    return import_module(f"gpubench.formats.text.{metadata.of_command.page}")
