"""A folder of dated results: names first, then the beginnings of files, so that a hundred thousand cost little."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.results.history import DatedName, ResultHead
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.documents.json_lines import load_json
from gpubench.readers.results.gpubench_rows import check_version

_EXPECTED = "what gpubench --output FOLDER/ writes"
_HOW_TO_KEEP = "gpubench allreduce --output results/ keeps one there"
_END_OF_METADATA = re.compile(r"  \},?\s*")
_BEGINNING_OF_METADATA = '  "metadata": {'
_MOST_HEAD_BYTES = 16 * 2**20
"""A thousand ranks make 300 KB of metadata."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The names in a folder: of dated results the newest first, and of visible files that are none."""

    folder: Path
    names: tuple[DatedName, ...]
    others: tuple[str, ...]

    def path(self, name: DatedName) -> Path:
        """The path of a result."""
        return self.folder / str(name)


def list_results(folder: Path) -> Kept:
    """The results in a folder, by their names alone. Hidden files, which are being written, are passed over.

    Raises UsageError where there is no such folder, or it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            texts = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise _no_folder(folder, error) from None
    dated = {text: DatedName.parse(text) for text in texts}
    names = sorted((name for name in dated.values() if name is not None), reverse=True)
    return Kept(folder, tuple(names), tuple(text for text, name in dated.items() if name is None))


def _no_folder(folder: Path, error: OSError) -> UsageError:
    seen = f"{folder} cannot be read: {os.strerror(error.errno or 0)}"
    reason = "its owner or mode forbids it, or its disk fails"
    next_step = f"ls -ld {folder}"
    if isinstance(error, NotADirectoryError):
        seen, reason = f"{folder} is no folder", "a single result was meant"
        next_step = f"gpubench compare BASE {folder} compares two files"
    elif isinstance(error, FileNotFoundError):
        seen, reason = f"there is no folder {folder}", "the path is mistyped, or nothing was kept yet"
        next_step = _HOW_TO_KEEP
    return UsageError(seen, expected="a folder of dated results", reason=reason, next_step=next_step)


def read_head(path: Path) -> ResultHead:
    """A result's metadata and verdict; of a file that gpubench wrote, rows are not read.

    Raises UsageError where it cannot be read, is none of gpubench's, or of a newer version.
    """
    with _naming(path):
        document = load_json(_beginning(path))
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        check_version(document.get("schema_version"), str(path))
        return ResultHead.of(
            document["metadata"],
            path.name,
            Verdict(document["verdict"]),
            complete=document["complete"] is True,
        )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn any error about a file into a UsageError that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", expected=_EXPECTED) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is no result: {type(error).__name__}: {error}",
            expected=_EXPECTED,
            reason="the file was cut off, or edited by hand",
        ) from None


def _beginning(path: Path) -> str:
    """A document's JSON up to its metadata, closed; the whole of one that is laid out otherwise."""
    lines: list[str] = []
    read_bytes, within = 0, False
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        # A pipe that nobody writes would hold its reader up for ever.
        raise ValueError("a pipe, socket or device of that name")
    with path.open(encoding="utf-8") as file:
        while read_bytes < _MOST_HEAD_BYTES and (line := file.readline(_MOST_HEAD_BYTES)):
            lines.append(line)
            read_bytes += len(line)
            within = within or line.startswith(_BEGINNING_OF_METADATA)
            if within and _END_OF_METADATA.fullmatch(line):
                lines[-1] = "  }\n}\n"
                return "".join(lines)
    if not lines:
        raise UsageError(f"{path} is empty", expected=_EXPECTED, reason="its run has just begun, or died")
    if read_bytes >= _MOST_HEAD_BYTES:
        raise ValueError(f"its metadata do not end within {_MOST_HEAD_BYTES // 2**20} MiB")
    return "".join(lines)
