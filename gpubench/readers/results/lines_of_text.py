"""The lines of a text of results, as many as are read."""

import re

from gpubench.errors import UsageError
from gpubench.readers.results import limits

_QUOTED = re.compile(r"(?:\s*>)+ ?|\s*\|(?=[^|]*\|)")
"""Markdown before a line: of a quotation, or of a row of a table."""


def lines_of(text: str, name: str) -> list[str]:
    """The lines of a text, whichever way they end; UsageError for more than a result has."""
    count = text.count("\n") + text.count("\r")
    if count > limits.MOST_LINES:
        raise UsageError(
            f"{name} has {count} lines",
            expected=f"at most {limits.MOST_LINES}",
            reason="it is a log of a whole job, or was made to hold up who reads it",
            next_step=f"grep '^[# ]' {name} > shorter.txt keeps the lines of nccl-tests and OSU",
        )
    return [unquoted(line) for line in re.split(r"\r?\n|\r", text)]


def unquoted(line: str) -> str:
    """A line as it was before somebody quoted it on a page, or made a row of a table there."""
    return _QUOTED.sub("", line, count=1).replace("|", " ") if _QUOTED.match(line) else line
