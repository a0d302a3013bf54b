"""Results that are kept: a JSON document a run, in a folder, under names that sort by time."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from gpubench.formats.json import JsonWriter
from gpubench.formats.writer import Target
from gpubench.model.results.history import DatedName
from gpubench.model.results.report import Metadata


class DatedWriter(JsonWriter):
    """The JSON format in a file of its own in the folder that is its target."""

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:
        """A document without rows, under a name that nobody has."""
        if self._target.path is None:
            raise ValueError("dated results go to a folder")
        self._target = Target(path=_claimed(self._target.path, metadata))
        super().begin(metadata, columns)


def _claimed(folder: Path, metadata: Metadata) -> Path:
    """A new file: who creates it has its name, also among runs that begin in the same second on several hosts."""
    for number in count(1):
        path = folder / str(DatedName.of(metadata, number))
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")
