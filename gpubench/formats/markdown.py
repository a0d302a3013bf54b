"""Markdown with verdict, findings and tables, for `$GITHUB_STEP_SUMMARY`, issues and merge requests."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpubench.formats.json import DocumentRun, documents
from gpubench.model.terms.units import printable_line
from gpubench.model.terms.verdict import Finding, Verdict

if TYPE_CHECKING:
    from gpubench.formats.layout import Grid

_SIGNS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.WARN: "⚠️", Verdict.ERROR: "🟣", Verdict.SKIP: "⏭️"}
_MARKS = {Verdict.FAIL: " **!**", Verdict.WARN: " **\\***", Verdict.INCONCLUSIVE: " **~**"}
_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]|~$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)
_BLOCK = re.compile(r"^(?P<space> *)(?P<mark>[-+=#]|\d+(?=[.)](?: |$)))")
"""Matches the characters that begin a Markdown heading, list or rule."""

_LINK = re.compile(r"(?P<before>(?i:https?|ftp)(?=://)|(?i:\bwww)(?=\.)|(?i:mailto|xmpp)(?=:))|(?P<at>@)")
"""Matches plain text that GitHub converts to a link or a mention."""


def render(run: DocumentRun) -> Iterator[str]:
    from gpubench.formats.blocks import Listing, blocks, facts, outcome, title
    from gpubench.formats.layout import Grid
    from gpubench.formats.table import fallback_lines

    sign = _SIGNS.get(run.report.verdict, "")
    yield f"# {_text(title(run.metadata))}: {' '.join(filter(None, (sign, _text(outcome(run)))))}\n"
    for line in fallback_lines(run.report):
        yield f"\n{_text(line)}\n"
    for finding in run.report.findings:
        yield from _finding(finding)
    yield "\n"
    yield from (f"- {_text(label)}: {_text(words)}\n" for label, words in facts(run.metadata))
    for block in blocks(run):
        if isinstance(block, (Listing, Grid)):
            yield f"\n## {_text(block.title)}\n\n"
            yield f"{_text(block.note)}\n\n" if block.note else ""
        if isinstance(block, Listing):
            yield from _table(block.heads, block.lines)
            if block.left_out:
                yield f"\n{_text(block.left_out)}\n"
        elif isinstance(block, Grid):
            yield from _table((block.corner, *block.columns), list(_lines(block)), marked=True)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"\n**{finding.severity} {_text(finding.id)}**: {_text(finding.subject)}\n"
    before = ""
    for label, words, is_command in finding.details:
        shown = f"`{printable_line(words).replace('`', '')}`" if is_command else _text(words)
        yield f"- {shown}\n" if label == before == "try" else f"- {label}: {shown}\n"
        before = label


def _lines(grid: "Grid") -> Iterator[Sequence[str]]:
    for name, cells in grid.lines.items():
        words = [_text(name)]
        for column in grid.columns:
            cell = cells.get(column)
            mark = "" if cell is None or cell.verdict is None else _MARKS.get(cell.verdict, "")
            words.append(("X" if name == column else "") if cell is None else _text(cell.text) + mark)
        yield words


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, marked: bool = False) -> Iterator[str]:
    yield "| " + " | ".join(map(_text, heads)) + " |\n"
    yield "|" + " --- |" * len(heads) + "\n"
    for line in lines:
        yield "| " + " | ".join(line if marked else map(_text, line)) + " |\n"


def _text(words: str) -> str:
    """Escape text for Markdown. All text except commands in backquotes must go through this function."""
    escaped = printable_line(words).translate(_ESCAPES)
    return _BLOCK.sub(_broken_block, _LINK.sub(_broken_link, escaped))


def _broken_block(found: re.Match[str]) -> str:
    space, mark = found["space"], found["mark"]
    return f"{space}{mark}\\" if mark.isdigit() else f"{space}\\{mark}"


def _broken_link(found: re.Match[str]) -> str:
    # A backslash breaks a link but not a mention, because GitHub finds mentions in the rendered text. Break a mention
    # with a zero-width space.
    return "@&#8203;" if found["at"] else f"{found['before']}\\"


writer = documents(render)
