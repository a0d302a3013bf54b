"""What a reader of files is: a name, how it knows its files, and how it reads one."""

from collections.abc import Callable
from dataclasses import dataclass

from gpubench.model.facts.snapshot import Snapshot

MOST_GPUS, MOST_NICS, MOST_SWITCHES = 128, 512, 1024
"""Of a node in a file: several times what the largest machines have. A file with more is none of a machine, and its
pairs would take hours."""


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
