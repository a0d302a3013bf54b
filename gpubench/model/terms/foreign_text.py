"""Text that others chose (host names, logs, paths), made harmless on a terminal and in the log of a CI's runner."""

import re

from gpubench.errors import GpubenchError

_RUNNER_COMMAND = re.compile(r"^(?P<indent> *):(?=:)|#(?P<hash>#)(?=[A-Za-z]*\[)")
"""GitHub's runner obeys a line that begins with '::', and it and Azure's '##[' and '##vso[' wherever they stand."""


def printable_line(text: str) -> str:
    """A text as one line that only shows something: no terminal and no runner does anything because of it.

    Characters that cannot be printed, of colours, of line ends, of the other writing direction, become escapes as
    Python spells them, a tab a space, and a backslash breaks what a runner would take for a command. A line that came
    from here stays as it is.
    """
    if text.isprintable() and "::" not in text and "##" not in text:
        return text
    shown = text.replace("\t", " ")
    if not shown.isprintable():
        shown = "".join(map(escaped, shown))
    return _RUNNER_COMMAND.sub(_broken, shown)


def escaped(character: str) -> str:
    r"""A character that cannot be printed as Python spells it, '\x1b'; others as they are."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _broken(command: re.Match[str]) -> str:
    return "#\\#" if command["hash"] else f"{command['indent']}\\:"


def error_text(error: GpubenchError) -> str:
    """An error as it is printed: a line for each thing that it says."""
    return "gpubench: error: " + "\n".join(map(printable_line, error.lines()))
