"""Formats, files, looks and exit style that a run was asked to present its report in.

A Nagios plugin ends with 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN. A plugin of node-problem-detector ends with 0 no
problem, 1 problem, anything else unknown. The `slurm` style has the same codes, for scripts that drain nodes.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from gpubench.errors import DONE
from gpubench.formats.registry import DATED, NAGIOS, NPD, SLURM, TABLE, Format
from gpubench.model.terms.units import printable_line
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report

OPTION = "--exit-style"
MOST_CHARACTERS = 80
"""Characters that node-problem-detector keeps of a message: its default `max_output_length`."""

MOST_BYTES = 1024
"""Bytes of a line that every way to Nagios carries, its end included: those of NRPE 2."""

MOST_BYTES_OF_REASON = 240
"""Bytes of a reason for draining, so that 'gpubench: ' and the reason fit the 255 of slurmdbd's column (tinytext)."""

_SPELLED = str.maketrans({"|": "/", "\\": "/", "%": " percent", "`": "'", "$": "?"})
"""A bar begins figures; the others mean something to printf, to shells or to Nagios' macros."""

_IN_ASCII = str.maketrans({"→": "->", "×": "x", "µ": "u", "·": ".", "−": "-", "–": "-", "±": "+-", "°": "", "…": "..."})

STATES = {
    Verdict.PASS: "OK",
    Verdict.SKIP: "UNKNOWN",
    Verdict.WARN: "WARNING",
    Verdict.INCONCLUSIVE: "WARNING",
    Verdict.FAIL: "CRITICAL",
    Verdict.ERROR: "UNKNOWN",
}
"""Nagios' word for each verdict; what was not judged is never OK."""

_NAGIOS_CODES = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}
_NO_PROBLEM, _PROBLEM, _NOT_KNOWN = 0, 1, 2
_DECISIONS = {_NO_PROBLEM: "keep", _PROBLEM: "drain", _NOT_KNOWN: "unknown"}


class ExitStyle(StrEnum):
    """The monitoring system whose exit codes are used."""

    NAGIOS = "nagios"
    NPD = "npd"
    SLURM = "slurm"

    @property
    def line_format(self) -> Format:
        return {ExitStyle.NAGIOS: NAGIOS, ExitStyle.NPD: NPD, ExitStyle.SLURM: SLURM}[self]

    def code(self, verdict: Verdict, *, strict: bool = False, drains: bool | None = None) -> int:
        """Return the exit code of a verdict. A warning is a problem of the node only with `--strict`.

        `drains` says whether a finding blames the node itself. If none does, a FAIL is no problem of the node.
        """
        if self is ExitStyle.NAGIOS:
            return _NAGIOS_CODES[STATES[verdict]]
        if drains or (strict and verdict in (Verdict.WARN, Verdict.INCONCLUSIVE)):
            return _PROBLEM
        return _NO_PROBLEM if verdict in (Verdict.PASS, Verdict.WARN) else _NOT_KNOWN

    def line(self, verdict: Verdict, text: str, *, drains: bool = False) -> str:
        """Return the line on stdout of a run that has no report."""
        if self is ExitStyle.NAGIOS:
            return nagios_line("gpubench", STATES[verdict], text)
        if self is ExitStyle.SLURM:
            return slurm_line(self.code(verdict, drains=drains), text)
        return npd_line(f"{verdict}: {text}")


def nagios_line(subject: str, state: str, text: str, figures: str = "") -> str:
    behind = f" | {figures}" if figures else ""
    return f"{_cut(_inert(f'{subject.upper()} {state} - {text}'), MOST_BYTES - len(behind) - 1)}{behind}\n"


def npd_line(text: str) -> str:
    """Return a message of at most 80 bytes in ASCII, so that nothing else cuts it inside a character."""
    words = _inert(text.translate(_IN_ASCII)).encode("ascii", "replace").decode("ascii")
    return _cut(words, MOST_CHARACTERS) + "\n"


def slurm_line(code: int, text: str) -> str:
    """Return what to do with a node and why, in ASCII: 'drain: GPU3: 9 of 18 NVLinks down'."""
    words = printable_line(" ".join(text.translate(_IN_ASCII).split()))
    return f"{_DECISIONS[code]}: {_cut(words.encode('ascii', 'replace').decode('ascii'), MOST_BYTES_OF_REASON)}\n"


def is_inert(text: str) -> bool:
    """True if monitoring passes a text on unchanged."""
    return text.isascii() and _inert(text) == text


def _inert(text: str) -> str:
    """Return a text in which no figure begins, and that no shell, macro or printf changes."""
    return " ".join(printable_line(" ".join(text.split())).translate(_SPELLED).split())


def _cut(text: str, most_bytes: int) -> str:
    if len(text.encode()) <= most_bytes:
        return text
    return text.encode()[: most_bytes - 3].decode(errors="ignore") + "..."


def exit_style_in(arguments: Sequence[str]) -> ExitStyle | None:
    """Return the style that a command line asks for, even if the rest of it cannot be read."""
    words = [*arguments, ""]
    for argument, following in pairwise(words):
        value = (
            following if argument == OPTION else argument.partition("=")[2] if argument.startswith(f"{OPTION}=") else ""
        )
        if value in tuple(ExitStyle):
            return ExitStyle(value)
    return None


class Color(StrEnum):
    """The choice of colours in the table."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Output(Struct, frozen=True):
    """A file to write, in the format of its suffix, or a folder for a dated result."""

    path: Path
    format: Format


class Presentation(Struct, frozen=True, kw_only=True):
    """The outputs and the look of a report. `section`, `width` and `exit_style` are None if nobody chose.

    `defaults` are options from the environment or `defaults_file`, with their places. `job_defaults` are those that
    ranks must agree about.
    """

    format: Format = TABLE
    outputs: tuple[Output, ...] = ()
    section: str | None = None
    color: Color = Color.AUTO
    width: int | None = None
    verbose: bool = False
    show_progress: bool = True
    exit_style: ExitStyle | None = None
    exit_zero: bool = False
    plot: bool = False
    wide: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_file: str | None = None
    job_defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def history(self) -> Path | None:
        return next((output.path for output in self.outputs if output.format is DATED), None)

    def exit_code(self, metadata: "Metadata", report: "Report") -> int:
        from gpubench.conditions.policy import drains
        from gpubench.model.results.ending import exit_code_of, is_strict

        if self.exit_zero:
            return DONE
        if self.exit_style is None:
            return exit_code_of(metadata, report)
        return self.exit_style.code(
            report.verdict, strict=is_strict(metadata.options), drains=any(map(drains, report.findings))
        )
