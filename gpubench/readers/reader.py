"""What a reader of files is: a name, how it knows its files, and how it reads one."""

from collections.abc import Callable
from dataclasses import dataclass

from gpubench.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file that describes a machine.

    `name` is that of its module, `summary` completes "a file may be ..."; `recognises(text)` looks at how the text
    begins or what it mentions, and `read(text, name)` makes a snapshot of it or raises a UsageError that begins with
    `name`.
    """

    name: str
    summary: str
    recognises: Callable[[str], bool]
    read: Callable[[str, str], Snapshot]
