"""What a reader of results is: a name, how it knows its files, and how it reads one."""

from collections.abc import Callable
from dataclasses import dataclass

from gpubench.model.results.result_file import ResultFile


@dataclass(frozen=True, slots=True)
class ResultReader:
    """One kind of file that holds results.

    `name` is that of its module, `summary` completes "a file may be ..."; `recognises(text)` looks at how the text
    begins or what it mentions, and `read(text, name)` makes rows of it or raises a UsageError that begins with `name`.
    """

    name: str
    summary: str
    recognises: Callable[[str], bool]
    read: Callable[[str, str], ResultFile]
