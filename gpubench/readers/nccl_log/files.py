"""Open log files, folders and standard input, compressed with gzip or not, for the reader in `stream.py`."""

import io
import os
import select
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.readers import limits
from gpubench.readers.documents import SilentPipeError, open_file, unreadable_error
from gpubench.readers.hangs import is_recorder_dump, read_recorder_dump
from gpubench.readers.nccl_log.stream import EndlessLineError, NcclLogReader, Readable

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
_PACKED_BYTES = 2**10  # Decompress in small pieces, because a damaged piece is lost completely.

_MOST_AT_ONCE = 2**18
_GZIP_HEADER = 16  # zlib's flag for a gzip header

_MIB_WITHOUT_LINE_END = limits.MOST_BYTES_WITHOUT_LINE_END // 2**20
_EXPECTED = "NCCL's log, one file per rank, written with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log"


class LogFile(Struct, frozen=True):
    """A log file that was read.

    `is_damaged` is true if its gzip data is truncated or corrupt. `beginning` is the first text of a file without NCCL
    lines.
    """

    name: str
    nccl_lines: int
    is_damaged: bool = False
    beginning: str = ""


ReadSoFar = Callable[[int, int, str], None]
"""A callback for progress, with the bytes read so far, the total bytes, and the name of the current file."""


def read_logs(
    names: Sequence[str], reader: NcclLogReader, stdin: BinaryIO, read_so_far: ReadSoFar | None = None
) -> tuple[LogFile, ...]:
    """Read files ('-' is `stdin`), and all visible files in folders, with `reader`.

    A file that is listed twice is read once. Reading stops at a limit, which `reader.reached` then contains.

    Raises UsageError if a file is missing, unreadable, or in a compressed format other than gzip. Also raises it for an
    endless line or a silent pipe if no file contains NCCL lines.
    """
    found: list[LogFile] = []
    unended: list[UsageError] = []
    files = list(_files(names))
    meter = _Meter(sum(map(_size, files)), read_so_far)
    for name in files:
        if len(found) == limits.MOST_LOG_FILES:
            reader.reached.end(f"{name}, and more", f"{limits.MOST_LOG_FILES} files")
        if reader.reached.ends_reading:
            break
        before, is_damaged, reader.beginning = reader.nccl_lines, False, b""
        try:
            is_damaged = _read_file(name, reader, stdin, meter)
        except EndlessLineError:
            unended.append(_endless(name))
            reader.reached.pass_over(unended[-1].seen, f"{_MIB_WITHOUT_LINE_END} MiB without a line end")
        except SilentPipeError as error:
            unended.append(error)
            reader.reached.pass_over(error.seen, "a pipe until its writer is silent")
        lines = reader.nccl_lines - before
        beginning = "" if lines else reader.beginning.decode("utf-8", "replace")
        found.append(LogFile(name, lines, is_damaged, beginning))
    if unended and not reader.nccl_lines:
        raise unended[0]
    return tuple(found)


def _endless(name: str) -> UsageError:
    return UsageError(
        f"{name} has no line end in {_MIB_WITHOUT_LINE_END} MiB",
        expected=_EXPECTED,
        reason="it is not text but a device, a core dump, or a file that was crafted to block its reader",
        next_step=f"head -c 200 {name} | od -c",
    )


def _size(name: str) -> int:
    """Return the size of a file in bytes. 0 for a pipe."""
    try:
        return 0 if name == STDIN else Path(name).stat().st_size
    except (OSError, ValueError):
        return 0


class _Meter:
    def __init__(self, total: int, read_so_far: ReadSoFar | None) -> None:
        self._done, self._total, self._tell = 0, total, read_so_far
        self.name = ""

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._tell is not None:
            self._tell(self._done, max(self._total, self._done), self.name)


class _Metered(Struct, frozen=True):
    stream: io.BufferedReader
    meter: _Meter

    def read(self, size: int, /) -> bytes:
        found = self.stream.read(size)
        self.meter.add(len(found))
        return found


def _read_file(name: str, reader: NcclLogReader, stdin: BinaryIO, meter: _Meter) -> bool:
    """Read a file or standard input. Return True if its gzip data is damaged."""
    meter.name = name
    if name == STDIN:
        return _read(reader, _waiting(stdin), "standard input", meter)
    try:
        with open_file(Path(name), _EXPECTED) as stream:
            return _read(reader, stream, name, meter)
    except (OSError, ValueError) as error:
        raise unreadable_error(name, error, _EXPECTED) from None


class _WaitingInput(io.RawIOBase):
    """Standard input in non-blocking mode, which the parent process has set.

    Resetting the mode would also change it for the parent, so wait with select instead.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            try:
                return os.readv(self._number, [buffer])
            except BlockingIOError:
                select.select([self._number], [], [])


def _waiting(stdin: BinaryIO) -> io.BufferedReader:
    """Return standard input as a stream that supports peek and blocks until data is available."""
    try:
        is_waiting = os.get_blocking(stdin.fileno())
    except (OSError, ValueError):  # The stream has no file descriptor.
        is_waiting = True
    if not is_waiting:
        return io.BufferedReader(_WaitingInput(stdin.fileno()))
    peekable = io.BufferedReader(stdin) if not hasattr(stdin, "peek") else stdin  # type: ignore[type-var]
    return cast("io.BufferedReader", peekable)


def _files(names: Sequence[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        for file in [name] if name == STDIN else _opened_files(name):
            key = file if file == STDIN else os.path.realpath(file)
            if key not in seen:
                seen.add(key)
                yield file


def _opened_files(name: str) -> list[str]:
    if not name:
        raise UsageError("the name of a log is empty", expected=_EXPECTED, reason="a variable is not set")
    try:
        mode = Path(name).stat().st_mode
        if not stat.S_ISDIR(mode):
            return [name]
        with os.scandir(name) as found:
            entries = sorted((each for each in found if not each.name.startswith(".")), key=lambda each: each.name)
        files = [entry.path for entry in entries if entry.is_file()]
    except (OSError, ValueError) as error:
        raise unreadable_error(name, error, _EXPECTED) from None
    if not files:
        raise UsageError(
            f"{name} is a folder without files" + (", but with folders in it" if entries else ""),
            expected=_EXPECTED,
            reason="only the files in a folder are read, not the folders below",
            next_step=f"ls -R {name} shows where the logs are",
        )
    return files


def _read(reader: NcclLogReader, stream: io.BufferedReader, name: str, meter: _Meter) -> bool:
    magic = stream.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    for beginning, unpacker in _UNPACKERS.items():
        if magic.startswith(beginning):
            raise UsageError(
                f"{name} is neither plain text nor gzip",
                expected=_EXPECTED,
                next_step=f"{unpacker} {name} | gpubench explain -",
            )
    if not magic.startswith(_GZIP):
        if _read_dump(reader, stream, name):
            return False
        reader.read(_Metered(stream, meter), name)
        return False
    unpacked = _Gunzipped(_Metered(stream, meter))
    reader.read(unpacked, name)
    return unpacked.is_damaged


def _read_dump(reader: NcclLogReader, stream: io.BufferedReader, name: str) -> bool:
    if is_dump := is_recorder_dump(stream.peek()):
        reader.records.append(read_recorder_dump(_whole(stream, name), name))
    return is_dump


def _whole(stream: io.BufferedReader, name: str) -> bytes:
    data = stream.read(limits.MOST_DUMP_BYTES + 1)
    if len(data) > limits.MOST_DUMP_BYTES:
        raise UsageError(f"{name} has more than {limits.MOST_DUMP_BYTES} bytes", expected="the dump of one rank")
    return data


class _Gunzipped:
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._packed = b""
        self._unpacker = _unpacker()
        self.is_damaged = False

    def read(self, size: int, /) -> bytes:
        """Return at least `size` bytes, or fewer at the end of the data. Return none at the end or where damage
        starts.
        """
        parts, length = [], 0
        while length < size and (text := self._text()):
            parts.append(text)
            length += len(text)
        return b"".join(parts)

    def _text(self) -> bytes:
        while not self.is_damaged:
            if self._unpacker.eof:
                # Zeros may pad a member. At the end, keep the finished unpacker, because `read` may be called again.
                packed = self._unpacker.unused_data.lstrip(b"\0")
                while not packed and self._more():
                    packed = self._packed.lstrip(b"\0")
                if not packed:
                    return b""
                self._packed, self._unpacker = packed, _unpacker()
            elif not (self._packed or self._more()):
                self.is_damaged = True
                return b""
            try:
                text = self._unpacker.decompress(self._packed, _MOST_AT_ONCE)
            except zlib.error:
                self.is_damaged = True
                return b""
            self._packed = self._unpacker.unconsumed_tail
            if text:
                return text
        return b""

    def _more(self) -> bool:
        self._packed = self._stream.read(_PACKED_BYTES)
        return bool(self._packed)


def _unpacker() -> "zlib._Decompress":
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | _GZIP_HEADER)
