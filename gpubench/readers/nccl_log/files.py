"""NCCL's logs as they lie on disks: files, folders of files, standard input, any of them packed by gzip."""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.readers.documents.text_files import unreadable
from gpubench.readers.nccl_log.stream import NcclLogReader

STDIN = "-"

_GZIP = b"\x1f\x8b"
_UNPACKERS = {
    b"\xfd7zXZ\x00": "xz -dc",
    b"\x28\xb5\x2f\xfd": "zstd -dc",
    b"BZh": "bzip2 -dc",
    b"PK\x03\x04": "unzip -p",
    b"\xff\xfe": "iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "iconv -f UTF-16 -t UTF-8",
}
_LONGEST_MAGIC = 6
_EXPECTED = "NCCL's log, as NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log writes one for every rank"


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file that was read, and how many of its lines are NCCL's."""

    name: str
    nccl_lines: int


def read_logs(names: Sequence[str], reader: NcclLogReader, stdin: BinaryIO) -> tuple[LogFile, ...]:
    """Have `reader` read all of these: '-' is `stdin`, and a folder is every file in it but hidden ones.

    A file that is named twice is read once. Raises UsageError where something is not there, cannot be opened, or is
    packed in another way than by gzip, and CouldNotMeasureError where a gzip is damaged.
    """
    found = []
    for name in _files(names):
        before = reader.nccl_lines
        if name == STDIN:
            _read(reader, io.BufferedReader(stdin) if not hasattr(stdin, "peek") else stdin, "standard input")  # type: ignore[arg-type]
        else:
            try:
                with Path(name).open("rb") as stream:
                    _read(reader, stream, name)
            except (OSError, ValueError) as error:
                raise unreadable(name, error, _EXPECTED) from None
        found.append(LogFile(name, reader.nccl_lines - before))
    return tuple(found)


def _files(names: Sequence[str]) -> Iterator[str]:
    """Every file once, folders opened."""
    seen = set()
    for name in names:
        for file in [name] if name == STDIN else _opened(name):
            key = file if file == STDIN else os.path.realpath(file)
            if key not in seen:
                seen.add(key)
                yield file


def _opened(name: str) -> list[str]:
    """A file, or those of a folder by name."""
    if not name:
        raise UsageError("the name of a log is empty", expected=_EXPECTED, reason="a variable that is not set")
    try:
        mode = Path(name).stat().st_mode
        if not stat.S_ISDIR(mode):
            return [name]
        entries = sorted(entry for entry in Path(name).iterdir() if not entry.name.startswith("."))
        files = [str(entry) for entry in entries if entry.is_file()]
    except (OSError, ValueError) as error:
        raise unreadable(name, error, _EXPECTED) from None
    if not files:
        raise UsageError(
            f"{name} is a folder without files" + (", but with folders in it" if entries else ""),
            expected=_EXPECTED,
            reason="a folder stands for the files in it, not for folders below",
            next_step=f"ls -R {name} shows where the logs are",
        )
    return files


def _read(reader: NcclLogReader, stream: io.BufferedReader, name: str) -> None:
    magic = stream.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    for beginning, unpacker in _UNPACKERS.items():
        if magic.startswith(beginning):
            raise UsageError(
                f"{name} is no plain text, and no gzip",
                expected=_EXPECTED,
                next_step=f"{unpacker} {name} | gpubench explain -",
            )
    if not magic.startswith(_GZIP):
        reader.read(stream)
        return
    lines = reader.lines
    try:
        with gzip.GzipFile(fileobj=stream) as unpacked:
            reader.read(unpacked)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CouldNotMeasureError(
            f"{name} is a damaged gzip, behind line {reader.lines - lines}: {error}",
            expected="a whole gzip",
            reason="it was cut off while it was written or copied",
            next_step=f"gzip -dc {name} | gpubench explain -  reads as much of it as there is",
        ) from None
