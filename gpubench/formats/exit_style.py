"""Exit codes as monitoring wants them: `--exit-style nagios` and `--exit-style npd`.

A Nagios plugin ends with 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN; a plugin of node-problem-detector with 0 no problem, 1
problem, anything else unknown.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from gpubench.formats.registry import NAGIOS, NPD
from gpubench.formats.status_line import STATES, nagios_line, npd_line
from gpubench.formats.writer import Format
from gpubench.model.terms.verdict import Verdict, exit_code

OPTION = "--exit-style"
_NAGIOS_CODES = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}
_NPD_UNKNOWN = 2


class ExitStyle(StrEnum):
    """The monitoring system whose exit codes are used."""

    NAGIOS = "nagios"
    NPD = "npd"

    @property
    def line_format(self) -> Format:
        """The line that belongs on stdout."""
        return NAGIOS if self is ExitStyle.NAGIOS else NPD

    def code(self, verdict: Verdict) -> int:
        """The exit code of a verdict. A warning is no problem to node-problem-detector: `--strict` makes it one."""
        if self is ExitStyle.NAGIOS:
            return _NAGIOS_CODES[STATES[verdict]]
        return _NPD_UNKNOWN if verdict is Verdict.ERROR else exit_code(verdict)

    def line(self, verdict: Verdict, text: str) -> str:
        """The line on stdout of a run that never came to a report."""
        if self is ExitStyle.NAGIOS:
            return nagios_line("gpubench", STATES[verdict], text)
        return npd_line(f"{verdict}: {text}")


def exit_style_in(arguments: Sequence[str]) -> ExitStyle | None:
    """The style that a command line asks for, also one that cannot be read otherwise."""
    words = [*arguments, ""]
    for word, following in pairwise(words):
        value = following if word == OPTION else word.partition("=")[2] if word.startswith(f"{OPTION}=") else ""
        if value in tuple(ExitStyle):
            return ExitStyle(value)
    return None
