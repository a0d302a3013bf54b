"""Text that others chose, as badly as they can; and what must be true of each format whatever text is in it."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from xml.etree import ElementTree

from markdown_it import MarkdownIt

HOSTILE: Mapping[str, str] = {
    "colour": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "bell": "\x07\x08\x7f\x9b31m",
    "bidi": "a\u202eb\u2066c",
    "separator": "a\u2028INJECTED\u2029INJECTED",
    "next-line": "a\x85INJECTED\x0bINJECTED\x0cINJECTED\x1cINJECTED",
    "newline": "a\nINJECTED",
    "return": "a\r\nINJECTED\rINJECTED",
    "nul": "a\x00b",
    "tab": "a\tb",
    "tag": "a\U000e0041\ufeff\u200bb",
    "surrogate": "a\ud800b\udfff",
    "github": "::error file=x::INJECTED",
    "github-line": "a\n::set-env name=PATH::INJECTED",
    "github-indented": "  ::stop-commands::x",
    "github-inside": "word " * 30 + "::error::x " * 30,
    "azure": "##[error]x",
    "azure-inside": "a ##vso[task.setvariable variable=x]y ###[group]z",
    "formula": '=HYPERLINK("http://x","y")',
    "plus": "+1",
    "minus": "-1",
    "at": "@x",
    "formula-indented": " =1+1",
    "formula-tab": "\t=1+1",
    "apostrophe": "'=1",
    "image": "![x](http://x/y.png)",
    "link": "[a](http://b) <http://c> http://d www.e.f mailto:g@h.i",
    "reference": "[a]: http://b",
    "heading": "# a",
    "list": "- a",
    "rule": "---",
    "fence": "```a",
    "script": "<script>alert(1)</script>",
    "attribute": "\"' onload=x><img src=x onerror=y>&lt;",
    "entity": "&#x3c;script&#x3e;&amp;",
    "bar": "a | b | c",
    "backquote": "`a``b`",
    "percent": "%s%n 5% off %0A::error::x",
    "backslash": "\\",
    "backslashes": "a\\|b\\\\|c\\n\\x1b[31m",
    "shell": "$(id) `id` ${x} ; & id",
    "quote": '",\n"=1',
    "long": "x" * 3_000,
    "digits": "9" * 5000,
    "words": "x " * 1_500,
}
"""By a name for the test."""

WORST = {
    *("colour", "separator", "newline", "return", "nul", "surrogate", "github", "github-inside", "azure-inside"),
    *("formula", "apostrophe", "image", "link", "script", "attribute", "bar", "backquote", "percent", "backslashes"),
    "quote",
}
"""Names of those that break out each in a way of its own."""

LONGEST: Mapping[str, str] = {"longest": "x" * 100_000, "most-words": "x " * 50_000}
"""The same at sizes that take seconds in most formats."""

_RUNNER = re.compile(r"^\s*::|##[A-Za-z]*\[")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def line_problems(text: str) -> Iterator[str]:
    """What a terminal or the runner of a CI would obey in a text, and lines that are another's."""
    for line in text.split("\n"):
        if not line.isprintable():
            yield f"control characters in {line[:80]!a}"
        if _RUNNER.search(line):
            yield f"a runner's command in {line[:80]!r}"
        if line.lstrip().startswith("INJECTED"):
            yield f"a line of its own: {line[:80]!r}"


def _csv(text: str) -> Iterator[str]:
    csv.field_size_limit(1 << 30)
    yield from line_problems(text)
    lines = list(csv.reader(io.StringIO(text)))
    if len({len(line) for line in lines}) > 1:
        yield "lines of several lengths"
    for cell in (cell for line in lines for cell in line):
        if cell.lstrip()[:1] in tuple("=+-@") and not _NUMBER.fullmatch(cell):
            yield f"a formula {cell[:80]!r}"


def _json(text: str) -> Iterator[str]:
    yield from line_problems(text)
    json.loads(text)


def _json_lines(text: str) -> Iterator[str]:
    yield from line_problems(text)
    for line in text.splitlines():
        json.loads(line)


def _junit(text: str) -> Iterator[str]:
    yield from line_problems(text)
    try:
        ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        yield f"no XML: {error}"


_SAMPLE = re.compile(r'[a-z_]+\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*\} [-+.e0-9]+')


def _prometheus(text: str) -> Iterator[str]:
    yield from line_problems(text)
    for line in text.removesuffix("\n").split("\n"):
        if not line.startswith(("# HELP ", "# TYPE ")) and not _SAMPLE.fullmatch(line):
            yield f"no sample: {line[:80]!r}"


_MARKDOWN = MarkdownIt("commonmark").enable("table")
_INERT = {
    *("text", "code_inline", "strong_open", "strong_close", "softbreak", "inline"),
    *(f"{name}_{end}" for name in ("table", "thead", "tbody", "tr", "th", "td") for end in ("open", "close")),
    *(f"{name}_{end}" for name in ("heading", "paragraph", "bullet_list", "list_item") for end in ("open", "close")),
}


def _markdown(text: str) -> Iterator[str]:
    yield from line_problems(text)
    for token in _MARKDOWN.parse(text):
        for each in (token, *(token.children or ())):
            if each.type not in _INERT:
                yield f"{each.type} {each.content[:80]!r}"
            if each.type == "heading_open" and each.tag not in ("h1", "h2"):
                yield f"a heading {each.tag}"
    for line in text.split("\n"):
        if re.search(r"https?://|\bwww\.|@\w", re.sub(r"`[^`]*`", "", line)):
            yield f"a link of GitHub's in {line[:80]!r}"
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        if len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in block.splitlines()}) > 1:
            yield "a table with lines of several lengths"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a" and named.keys() == {"href"} and re.fullmatch(r"#[a-z0-9-]+", named["href"] or ""):
            return  # to a heading of the page, in its contents
        live = {name for name in named if name.startswith("on")} | set(named) & {"src", "href", "srcset"}
        if tag in ("script", "img", "a", "iframe", "link") or live:
            self.problems.append(f"<{tag}> with {sorted(live)}")


def _html(text: str) -> Iterator[str]:
    yield from line_problems(text)
    page = _Page()
    page.feed(text)
    yield from page.problems
    for number in map(int, re.findall(r"&#(\d+);", text)):
        if not chr(number).isprintable():
            yield f"a reference to U+{number:04X}"


_WORKFLOW_COMMAND = re.compile(r"::(error|warning|notice) title=[^:,]*::.*")


def _github(text: str) -> Iterator[str]:
    for line in text.removesuffix("\n").split("\n"):
        if not _WORKFLOW_COMMAND.fullmatch(line):
            yield f"no annotation: {line[:80]!r}"
        if not line.isprintable() or "##[" in line or re.search(r"%(?!25|0D|0A|3A|2C)", line):
            yield f"not escaped: {line[:80]!a}"


def _nagios(text: str) -> Iterator[str]:
    yield from line_problems(text)
    said, bar, _ = text.partition(" | ")
    if text.count("\n") != 1 or re.search(r"[|%\\`$]", said) or len(text.encode("utf-8", "replace")) > 1024:
        yield f"a line of {len(text)} characters with {bar!r}: {said[:80]!r}"


def _npd(text: str) -> Iterator[str]:
    yield from line_problems(text)
    if text.count("\n") != 1 or len(text) > 81 or not text.isascii() or re.search(r"[|%\\`$]", text):
        yield f"not a message: {text[:100]!r}"


PROBLEMS: Mapping[str, Callable[[str], Iterator[str]]] = {
    "table": line_problems,
    "csv": _csv,
    "json": _json,
    "jsonl": _json_lines,
    "junit": _junit,
    "prometheus": _prometheus,
    "markdown": _markdown,
    "github": _github,
    "html": _html,
    "summary": line_problems,
    "nagios": _nagios,
    "npd": _npd,
}
"""By format: what foreign text has become in an output. `line_problems` is for stderr too."""
