"""The kinds of files that a folder of readers knows, and how the reader of a file is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpubench.readers.documents.text_files import Wanted, read_text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileKind(Generic[T]):
    """One kind of file. Its module is imported when a file may be of it; `summary` completes "a file may be ...".

    The module has `recognises(text)`, which looks at how a text begins or what it mentions, and `read(text, name)`,
    which returns what is in it or raises a UsageError that begins with `name`. `takes` names what a person may tell
    `read` besides.
    """

    module: str
    summary: str
    takes: tuple[str, ...] = ()

    def recognises(self, text: str) -> bool:
        """True if a text looks like this kind of file."""
        return bool(import_module(self.module).recognises(text))

    def read(self, text: str, name: str, told: Mapping[str, Any]) -> T:
        """The value in a text of the file `name`; of what a person told, the module is given what it takes."""
        value: T = import_module(self.module).read(text, name, **{key: told.get(key) for key in self.takes})
        return value


def read_file_of(kinds: Sequence[FileKind[T]], path: Path, wanted: Wanted, **told: Any) -> T:
    """The value in a file, read by the first of `kinds` that recognises it; `told` is what a person says of it.

    Raises UsageError where there is no such file, it is no text, no kind recognises it, or its reader finds it wrong.
    """
    return read_text_of(kinds, read_text(path, wanted), str(path), wanted, **told)


def read_text_of(kinds: Sequence[FileKind[T]], text: str, name: str, wanted: Wanted, **told: Any) -> T:
    """The same of a text that was read already."""
    for kind in kinds:
        if kind.recognises(text):
            return kind.read(text, name, told)
    raise wanted.unknown(text, name)
