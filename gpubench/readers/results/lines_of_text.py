"""The lines of a text of results, as many as are read."""

import re

from gpubench.errors import UsageError
from gpubench.readers.results import limits


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
    return re.split(r"\r?\n|\r", text)
