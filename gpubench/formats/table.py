"""The default output: a page on which the view for the command prints, with findings and the verdict."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from gpubench.formats import layout
from gpubench.formats.layout import INDENT, Column
from gpubench.formats.registry import Presentation, Target
from gpubench.model.facts.environment import performance_variables
from gpubench.model.paths.p2p import SLOW_SHARE
from gpubench.model.paths.topology import ROCM
from gpubench.model.paths.transport import Conclusion, Confidence
from gpubench.model.results.ending import is_brief
from gpubench.model.results.fallback import describe_pairs, describe_slowdown, read_cure
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
from gpubench.model.terms.units import compress_names, plural, printable_line, shorten
from gpubench.model.terms.verdict import Detail, Finding, Origin, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from gpubench.model.results.compare import Chart

_MOST_CAUSES = 3


class CauseText(NamedTuple):
    """A cause of fallback: its id, its verdict, its first line, and labelled details."""

    id: str
    verdict: Verdict
    line: str
    details: tuple[Detail, ...]


def named_causes(report: Report) -> frozenset[str]:
    """Return the ids of the causes that are printed below the fallback lines, which then need not repeat them."""
    return frozenset(row.id for row in _root_findings(report))


def top_causes(report: Report) -> Iterator[CauseText]:
    """Return at most three causes that explain the fallback verdict, each with its cure."""
    return (_cause_text(report, row, whole=False) for row in _root_findings(report))


def all_causes(report: Report) -> Iterator[CauseText]:
    """Return every cause with its full description, except causes that another cause implies."""
    return (_cause_text(report, row, whole=True) for row in report.rows(CauseRow) if not row.implied_by)


def unread_lines(report: Report) -> list[str]:
    """Return one line per reason why some causes could not be checked."""
    ids: dict[str, dict[str, None]] = {}
    subjects: dict[str, dict[str, None]] = {}
    for row in report.rows(UnreadRow):
        ids.setdefault(row.reason, {})[row.id] = None
        subjects.setdefault(row.reason, {})[row.subject] = None
    return [f"not known: {', '.join(ids[reason])} on {shorten(list(subjects[reason]))}: {reason}" for reason in ids]


def _root_findings(report: Report) -> list[CauseRow]:
    blamed = {row.cause for row in report.rows(FallbackRow)}
    rows = [row for row in report.rows(CauseRow) if not row.implied_by]
    return [row for row in rows if row.paths or row.id in blamed][:_MOST_CAUSES] if blamed else []


def _cause_text(report: Report, row: CauseRow, *, whole: bool) -> CauseText:
    verdict = Verdict(row.verdict)
    sure = f"by design, {row.confidence}" if verdict is Verdict.SKIP else row.confidence
    implied = [cause.id for cause in report.rows(CauseRow) if cause.implied_by == row.id]
    details = [Detail("what", f"{row.title}: {', '.join(row.effects)}")] if whole else []
    details += [Detail("on", row.subject)] if whole else []
    details += [Detail("implies", ", ".join(implied))] if implied else []
    details += read_cure(row).details
    details += [Detail("settle", row.settles)] if row.settles and (whole or row.confidence != Confidence.PROVEN) else []
    details += [Detail("see", row.link)] if whole else []
    return CauseText(row.id, verdict, f"cause {row.id} ({sure}): {row.evidence}", tuple(details))


_MOST_PAIRS = 8
_FEW_PAIRS = 2
_ARROW = " → "

_BETWEEN_NODES = (Effect.SOCKETS, Effect.NO_GPUDIRECT)
_ELSEWHERE = {
    Effect.SLOW: "would be slow, because",
    Effect.NETWORK_INSIDE: "would use a network inside a node if there is no P2P, because",
    Effect.APPLICATION: "would be copied through host memory by MPI, UCX or a framework, because",
    Effect.WRONG: "would hang or get wrong data, because",
}
"""Words for causes that do not make a path fall back. The key is the first effect of the cause."""


def lead(origin: str) -> str:
    """Return the prefix of every fallback line."""
    return "fallback (simulated): " if origin == Origin.SIMULATED else "fallback: "


def prospect_lines(report: Report) -> list[tuple[Verdict, str]]:
    """Return a line for each group of GPU pairs, and for nodes that would fall back, each with its verdict."""
    rows = report.rows(FallbackRow)
    between = list(_lines_between_nodes(report))
    is_only = len(rows) == 1
    return [
        *((Verdict(row.verdict), _prospect_line(row, is_only=is_only, nodes=bool(between))) for row in rows),
        *between,
    ]


def other_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """Yield a line for each cause that makes no GPU pair fall back, but would make paths slow or break them."""
    blamed = {row.cause for row in report.rows(FallbackRow)}
    for row in _causes(report):
        said = _ELSEWHERE.get(Effect(row.effects[0]))
        if row.id not in blamed and said is not None:
            maybe = said.replace("would", "might") if row.confidence == Confidence.WEAK else said
            yield Verdict(row.verdict), f"{row.subject} {maybe} {row.evidence} ({row.id})"


def _prospect_line(row: FallbackRow, *, is_only: bool, nodes: bool) -> str:
    """Return the line about GPU pairs inside nodes.

    `is_only` means that this row covers all pairs. `nodes` means that other lines cover paths between nodes.
    """
    pairs = f"all {row.count} pairs" if is_only and row.count > 1 else _named(row)
    begin = lead(row.origin)
    match Conclusion(row.conclusion):
        case Conclusion.IMPOSSIBLE:
            kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
            return f"{begin}{pairs} would fall back, because {row.cause_seen}: {kind}, {row.cause} ({row.how})"
        case Conclusion.POSSIBLE:
            none = f"no pair {'inside a node ' if nodes else ''}would fall back: " if is_only else ""
            where = pairs if is_only else "all others"
            return f"{begin}{none}direct possible for {where} ({row.how})" + (
                "" if ROCM in row.how else ". Try: gpubench p2p"
            )
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}: {row.how}"


def _named(row: FallbackRow) -> str:
    """Name the pairs of a row, by the GPU that all of them share, or by listing the first few pairs."""
    common = set[str].intersection(*(set(pair.split(_ARROW)) for pair in row.pairs))
    if len(common) == 1 and len(row.pairs) == row.count > _FEW_PAIRS:
        return f"all {row.count} pairs of {common.pop()}"
    return describe_pairs(row, _MOST_PAIRS)


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


def fallback_lines(report: Report) -> list[str]:
    """Return the fallback lines. A run without paths has none."""
    return [line for _, line in _judged_lines(report)]


def fallback_notes(report: Report) -> Iterator[str]:
    """Yield the fallback lines followed by their cures, for stderr."""
    yield from fallback_lines(report)
    for row in report.rows(FallbackRow):
        if row.verdict != Verdict.SKIP:
            yield from read_cure(row).text_lines


def _judged_lines(report: Report, said: Collection[str] = ()) -> list[tuple[Verdict, str]]:
    if UnreadRow.section in report.sections:  # This command predicts paths without sending data
        return prospect_lines(report)
    rows = report.rows(FallbackRow)
    if rows and all(row.conclusion == Conclusion.DIRECT for row in rows):
        return [(Verdict.PASS, _none(rows))]
    if len(rows) == 1 and rows[0].conclusion == Conclusion.UNKNOWN and rows[0].count > 1:
        return [(Verdict(rows[0].verdict), _line_of_pairs(rows[0], f"all {rows[0].count} pairs", said))]
    return [(Verdict(row.verdict), _line_of_pairs(row, describe_pairs(row, _MOST_PAIRS), said)) for row in rows]


def _none(rows: Sequence[FallbackRow]) -> str:
    pairs = sum(row.count for row in rows)
    over = " and ".join(dict.fromkeys(row.transport for row in rows if row.transport))
    most = max(rows, key=lambda row: row.count)
    sure = "/".join(dict.fromkeys(row.confidence for row in rows))
    subject = f"{'Both' if pairs == 2 else f'All {pairs}'} pairs are" if pairs > 1 else f"{describe_pairs(most)} is"
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
            return f"{begin}{kind}: {pairs} through host memory{over}{describe_slowdown(row)}; {why}"
        case Conclusion.WRONG:
            return f"{begin}{pairs}{over}: wrong data arrived"
        case Conclusion.DISPUTED:
            return f"{begin}disputed: {pairs}{over}: {row.how}"
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}{over}: {row.how}"


_EVIDENCE_MARKS = {"present": "+", "absent": ".", "contradicting": "-"}


EVIDENCE_COLUMNS = (
    Column("from", "source"),
    Column("to", "destination"),
    Column("path", lambda row: row.path_class or "?", spare=1),
    Column("could", lambda row: _EVIDENCE_MARKS[row.capability]),
    Column("chosen", lambda row: _EVIDENCE_MARKS[row.selection]),
    Column("moved", lambda row: _EVIDENCE_MARKS[row.measurement]),
    Column("right", lambda row: _EVIDENCE_MARKS[row.correctness]),
    Column("over", lambda row: row.transport or "?"),
    Column("GB/s", lambda row: "?" if row.bandwidth_gb_s is None else f"{row.bandwidth_gb_s:.1f}", spare=2),
    Column("limit", lambda row: "?" if row.limit_gb_s is None else f"{row.limit_gb_s:g}", spare=3),
    Column("verdict", lambda row: f"{row.conclusion}, {row.confidence}"),
)


def evidence_notes(report: Report) -> list[str]:
    rows = report.rows(EvidenceRow)
    found: dict[str, list[str]] = {}
    for kind in ("capability", "selection", "measurement", "correctness"):
        for row in rows:
            seen = getattr(row, f"{kind}_seen")
            if seen:
                found.setdefault(f"{kind}: {seen}", []).append(f"{row.source} → {row.destination}")
    lines = []
    for seen, ends in found.items():
        names = ", ".join(ends[:_MOST_PAIRS]) + (" …" if len(ends) > _MOST_PAIRS else "")
        lines.append(f"  {seen} [{'all' if len(ends) == len(rows) else names}]")
    return lines


def line_text(line: str, style: str = "") -> "Text":
    """Convert a line to rich text, with control characters escaped and markup ignored."""
    from rich.text import Text

    return Text(printable_line(line), style=style)


def heading(metadata: Metadata, *words: str) -> str:
    """Return the first line of a page. It has the origin in capitals, unless the results were measured."""
    origin = "" if metadata.origin == Origin.MEASURED else f"({metadata.origin.upper()})"
    return "  ".join(filter(None, (f"gpubench {metadata.gpubench_version}", *words, origin)))


def software_lines(metadata: Metadata, *, verbose: bool) -> Iterator[str]:
    """List libraries and settings. Unless `verbose`, shorten them to versions and settings that affect performance."""
    if verbose:
        yield from (f"{INDENT}{name} {text}" for name, text in metadata.libraries.items())
    elif metadata.libraries:
        yield INDENT + "; ".join(f"{name} {text.partition(' from ')[0]}" for name, text in metadata.libraries.items())
    yield from setting_lines(metadata.environment, verbose=verbose)
    if verbose:
        yield from default_lines(metadata)


def default_lines(metadata: Metadata) -> Iterator[str]:
    """List the options that the environment or a file has set."""
    if metadata.defaults_file is not None:
        yield f"{INDENT}options from {metadata.defaults_file} of this folder"
    for option, source in metadata.defaults.items():
        yield f"{INDENT}{option} by {source}"


def setting_lines(environment: Mapping[str, str], *, verbose: bool) -> Iterator[str]:
    """List environment variables and mark those that affect performance. Unless `verbose`, only count the others."""
    bearing = performance_variables(environment)
    mark = "! affects performance"
    if verbose:
        for name, value in environment.items():
            yield f"{INDENT}{name}={value}" + (f"  {mark}" if name in bearing else "")
        return
    if bearing:
        yield f"{INDENT}{mark}: " + ", ".join(f"{name}={value}" for name, value in bearing.items())
    if others := len(environment) - len(bearing):
        yield f"{INDENT}{plural(others, 'other setting')}: -v shows all"


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
"""Styles by regular expression. Only verdicts, and words that imply one, have colours."""

_PART = re.compile(r"(?<!\S)(\d+(?: x\d+)?) of (\d+(?: x\d+)?)(?!\S)")
"""Matches a part of a total, such as '12 of 18' NVLinks, or the PCIe link '5 x8 of 5 x16'."""


class Page:
    """The page on which a view prints. `charts` are drawn before the verdict, and are None without --plot."""

    def __init__(self, target: Target, shown: Presentation) -> None:
        self.width = shown.columns
        self.verbose = shown.verbose
        self._breaks_last_line = shown.terminal
        self.charts: Sequence[Chart] | None = None
        self._own_file = target.path is not None
        self._shown = shown
        self._stream = target.open()

    @cached_property
    def _console(self) -> "Console":
        return _console(self._stream, self._shown)

    def print(self, *lines: str, style: str = "") -> None:
        self._show(lines, lambda line: line_text(line, style))

    def _show(self, lines: Iterable[str], colored: "Callable[[str], Text]") -> None:
        """Print lines. Import rich only for colours, because importing it takes a tenth of the start time."""
        for line in lines:
            if self._shown.is_colored:
                self._console.print(colored(line))
            else:
                self._stream.write(f"{printable_line(line)}\n")
        self._stream.flush()

    def heading(self, metadata: Metadata, *words: str) -> None:
        self.wrap(heading(metadata, *words))

    def table(self, columns: Sequence[Column], rows: Sequence[Any], keys: int = 1, indent: str = "") -> None:
        """Print a table. Verdicts, refused peer access, marked values and incomplete counts are coloured."""
        lines = layout.table_lines(columns, rows, self.width - len(indent), keys)
        self._show((indent + line for line in lines), lambda line: _coloured(line_text(line)))

    def grid(self, grid: layout.Grid) -> None:
        """Print a grid. Marked cells have their verdict's colour, others are green if they reach the expected value."""
        if grid.title:
            self.wrap(grid.title)
        for pieces in layout.grid_lines(grid, self.width):
            if not self._shown.is_colored:
                self.print("".join(text for text, _ in pieces))
                continue
            line = line_text("")
            for text, cell in pieces:
                word = printable_line(text).lstrip()
                is_good = cell.share is not None and cell.share >= SLOW_SHARE
                style = _VERDICT_STYLES[Verdict.PASS] if is_good and cell.verdict not in layout.VERDICT_MARKS else ""
                line.append(word.rjust(len(text)))
                line.stylize(style, len(line) - len(word), len(line))
            self._console.print(_coloured(line))
        self._stream.flush()

    def wrap(self, text: str, hanging: int = 4, style: str = "") -> None:
        """Print a sentence wrapped at the page width. All lines but the first are indented by `hanging` columns."""
        self.print(*layout.wrapped(text, self.width, " " * hanging), style=style)

    def labelled(self, label: str, text: str, verdict: Verdict | None = None) -> None:
        """Print a label and its text in the colour of the verdict. Further lines are aligned with the text."""
        self.wrap(label + text, len(label), "" if verdict is None else _VERDICT_STYLES.get(verdict, ""))

    def software(self, metadata: Metadata) -> None:
        for line in software_lines(metadata, verbose=self.verbose):
            self.wrap(line)

    def defaults(self, metadata: Metadata) -> None:
        """With --verbose, print the options that the environment or a file has set."""
        for line in default_lines(metadata) if self.verbose else ():
            self.wrap(line)

    def tree(self, tree: "Tree") -> None:
        self._console.print(tree)

    def evidence(self, report: Report) -> None:
        rows = report.rows(EvidenceRow)
        self.print("")
        if rows:
            self.wrap("evidence that a path is direct: + for, - against, . unknown")
            self.table(EVIDENCE_COLUMNS, rows, keys=2)
        else:
            self.wrap("evidence: none, because no path between GPUs was observed")
        for line in evidence_notes(report):
            self.wrap(line)
        self.print("")
        self.all_causes(report)

    def all_causes(self, report: Report) -> None:
        """Print every cause that applies, and the causes that could not be checked."""
        causes, unread = list(all_causes(report)), unread_lines(report)
        self._causes(causes)
        for line in unread:
            self.wrap(line)
        if causes or unread:
            self.print("")

    def outcome(self, report: Report) -> None:
        """Print curves, findings, fallback lines with their causes, and the verdict."""
        if self.charts is not None and not self.charts:
            self.print("no curve: fewer than three sizes were measured", "")
        for chart in self.charts or ():
            self.print("", *layout.plot_lines(chart, self.width), "")
        for finding in report.findings:
            self._finding(finding)
        for verdict, line in _judged_lines(report, named_causes(report)):
            self.wrap(line, style=_VERDICT_STYLES.get(verdict, ""))
        self._causes(top_causes(report))
        self.closing(report)

    def brief(self, report: Report) -> None:
        for finding in report.findings:
            self._finding(finding)
        self.closing(report)

    def prospects(self, report: Report) -> None:
        """Print paths that would fall back, all causes with cures, what could not be checked, and the verdict."""
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
        """Print the last line of the report, which has the verdict."""
        if self.verbose and report.duration_s is not None:
            self.print(f"took {report.duration_s:.1f} s")
        cut_short = "" if report.complete else ": the run was cut short. The rows above were measured"
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
        if self._own_file:
            self._stream.close()

    def _finding(self, finding: Finding) -> None:
        line = f"{finding.severity} {finding.id}: {finding.subject}"
        self.wrap(line, _LABEL_WIDTH, _VERDICT_STYLES.get(finding.severity, ""))
        self._details(finding.details)

    def _details(self, details: Iterable[Detail]) -> None:
        """Print the details of a finding or a cause. Commands are not wrapped, so that they can be copied."""
        before = ""
        for label, text, is_command in details:
            shown = "" if label == before else f"{label}:"
            line = f"{INDENT}{shown:<{_LABEL_WIDTH - len(INDENT)}}{text}"
            if is_command:
                self.print(line)
            else:
                self.wrap(line, _LABEL_WIDTH)
            before = label


def _coloured(line: "Text") -> "Text":
    for pattern, style in _WORD_STYLES.items():
        line.highlight_regex(pattern, style)
    for part in _PART.finditer(line.plain):
        if part[1] != part[2]:
            line.stylize(_VERDICT_STYLES[Verdict.FAIL], *part.span())
    return line


class ReportView:
    """Base class for views that print only at the end of the run."""

    def __init__(self, page: Page, metadata: Metadata) -> None:
        self._page = page
        self._metadata = metadata

    def row(self, row: Row) -> None:
        raise TypeError(f"{self._metadata.subject} has no rows of {type(row).__name__}")


def _console(stream: TextIO, shown: Presentation) -> "Console":
    """Return a rich console that prints text unchanged and raises BrokenPipeError if the reader exited."""
    from rich.console import Console

    class PipeConsole(Console):
        """A console that does not exit the process if the reader of stdout exited, as rich would."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        width=shown.columns,
        height=1,  # Otherwise rich queries the terminal size before each line
        force_terminal=shown.is_colored,
        color_system="standard" if shown.is_colored else None,
        soft_wrap=True,
    )


class QuietWriter:
    """Prints only the findings and the last line."""

    def __init__(self, target: Target, shown: Presentation) -> None:
        self._page = Page(target, shown)

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None: ...
    def row(self, row: Row) -> None: ...
    def end(self, report: Report) -> None:
        self._page.brief(report)


class View(Protocol):
    """Prints the rows and the report of one command on a page."""

    def row(self, row: Row) -> None: ...

    def end(self, report: Report) -> None: ...


class TableWriter:
    """Prints the table during the run."""

    def __init__(self, target: Target, shown: Presentation) -> None:
        self._target = target
        self._shown = shown
        self._page: Page | None = None
        self._view: View | None = None
        self._rows: list[Row] = []

    def begin(self, metadata: Metadata, _columns: Sequence[str]) -> None:
        self._page = Page(self._target, self._shown)
        self._view = _view(self._page, metadata)

    def row(self, row: Row) -> None:
        if self._shown.plot:
            self._rows.append(row)
        if self._view is not None:
            self._view.row(row)

    def end(self, report: Report) -> None:
        if self._view is not None and self._page is not None:
            if self._shown.plot:
                from gpubench.model.results.compare import charts
                from gpubench.model.results.scaling import ScalingRow, drop_smaller_runs, scaling_charts

                scaling = report.rows(ScalingRow)
                found = [*scaling_charts(scaling), *charts(drop_smaller_runs(self._rows, scaling))]
                self._page.charts = [chart for chart in found if not chart.logarithmic]
            self._view.end(report)
            self._page.close()


def _view(page: "Page", metadata: Metadata) -> View:
    """Return the view for the command of the run, for example `P2pView` from `text.p2p`. Import only that module."""
    name = "brief" if is_brief(metadata.options) else metadata.command_record.page
    make: Callable[[Page, Metadata], View] = getattr(text_module(metadata), f"{name.capitalize()}View")
    return make(page, metadata)


def text_module(metadata: Metadata) -> ModuleType:
    """Return the module in `formats.text` for the command of the run.

    Its `COLUMNS` maps types of rows to the columns that Markdown and HTML pages use too.
    """
    return import_module(f"gpubench.formats.text.{metadata.command_record.page}")
