"""Opens, decodes and checks files that a user names. Error messages contain the file name and the line or field."""

import codecs
import io
import json
import math
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from msgspec import Struct

from gpubench.errors import UPGRADE, UsageError
from gpubench.model.terms.plain import from_plain, is_nested_deeper, to_plain
from gpubench.readers import limits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a pipe"),
)
_MS = 1000


class SilentPipeError(UsageError):
    """The writer of a pipe has sent nothing for too long."""


@contextmanager
def open_file(path: Path, expected: str, *, pipes: bool = True) -> Iterator[io.BufferedReader]:
    """Open a file for reading, or also a pipe with `pipes`. `expected` describes the expected file in error
    messages.

    Raises:
        OSError: The file cannot be opened, or a later read fails.
        UsageError: The path is a device, a socket, or a pipe that is not allowed.
        SilentPipeError: During a read, the pipe has no writer, or its writer sends nothing.
    """
    name = str(path)
    _check_kind(path.stat().st_mode, name, expected, pipes=pipes)
    # Without O_NONBLOCK, opening a pipe waits for a writer. For files, the flag has no effect.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        _check_kind(mode, name, expected, pipes=pipes)
        is_pipe = stat.S_ISFIFO(mode)
        raw = _Pipe(descriptor, name, expected) if is_pipe else io.FileIO(descriptor, closefd=False)
        with cast("io.BufferedReader", io.BufferedReader(raw)) as stream:
            yield stream
    finally:
        os.close(descriptor)


def _check_kind(mode: int, name: str, expected: str, *, pipes: bool) -> None:
    for is_kind, kind in _KINDS:
        if is_kind(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise UsageError(
                f"{name} is {kind}, not a file",
                expected=expected,
                reason="the name is wrong, or the file was crafted to block its reader",
                next_step=f"ls -lL {name}",
            )


class _Pipe(io.RawIOBase):
    def __init__(self, descriptor: int, name: str, expected: str) -> None:
        self._descriptor, self._name, self._expected = descriptor, name, expected
        self._has_sent = False
        self._given_up: SilentPipeError | None = None
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        # The pipe of a shell's <(...) has no name, so no other process can open it for writing. Without a writer it has
        # ended.
        self._had_writer = str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("pipe:")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        if self._given_up:
            raise self._given_up
        begun = time.monotonic()
        while True:
            try:
                text = os.read(self._descriptor, memoryview(buffer).nbytes)
            except BlockingIOError:
                self._had_writer, text = True, None
            if text or (text is not None and self._had_writer):
                self._had_writer = self._has_sent = True
                memoryview(buffer)[: len(text)] = text
                return len(text)
            most = limits.SECONDS_SILENT if self._had_writer else limits.SECONDS_WITHOUT_WRITER
            left = begun + most - time.monotonic()
            if left <= 0:
                error = self._silent(most)
                if not self._has_sent:
                    raise error
                # Report the end of the file once, so that buffered bytes are not lost. Every later read raises the
                # error.
                self._given_up = error
                return 0
            for _, event in self._poll.poll(left * _MS):
                # For a named pipe, the kernel reports POLLHUP once its writer has closed it.
                self._had_writer = self._had_writer or bool(event & select.POLLHUP)

    def _silent(self, seconds: float) -> SilentPipeError:
        what = "whose writer sends nothing" if self._had_writer else "without a writer"
        return SilentPipeError(
            f"{self._name} is a pipe {what}: waited for {seconds:g} s",
            expected=self._expected,
            reason="its writer hangs" if self._had_writer else "its writer ended, or was never started",
            next_step=f"fuser {self._name} shows who has it open",
        )


_OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


class Wanted(Struct, frozen=True):
    """The file formats that a reader accepts.

    - `kinds`: names of the formats, for error messages
    - `how_to_make_one`: a command that writes such a file
    - `most_bytes`: the size of the largest file that is read
    - `example`: a file name for suggested commands
    """

    kinds: str
    how_to_make_one: str
    most_bytes: int
    example: str

    def unfit(self, seen: str, *, reason: str, next_step: str = "") -> UsageError:
        """Return the error for a file that the reader does not accept."""
        return UsageError(seen, expected=self.kinds, reason=reason, next_step=next_step or self.how_to_make_one)

    def unknown(self, text: str, name: str) -> UsageError:
        """Return the error for a text in an unknown format."""
        first = next(number for number, line in enumerate(text.split("\n"), 1) if line.strip())
        beginning = text.strip().split("\n")[0][:60]
        seen = f"{name}, line {first}: {beginning!r} is not the start of a file that gpubench can read"
        for sign, reason, command in _OTHER_COMMANDS:
            if sign.search(text):
                return self.unfit(seen, reason=reason, next_step=f"gpubench {command} {name}")
        return self.unfit(seen, reason="it is another program's output")


_OTHER_COMMANDS = (
    (re.compile(r"NCCL (?:INFO|WARN) "), "it is NCCL's log", "explain"),
    (re.compile(r"^\s*GPU0\s+X\s", re.MULTILINE), "it is a matrix of nvidia-smi topo", "topo --from"),
    (
        re.compile(r"(?i)link type (?:between two gpus|table:)|\"link_type\":"),
        "it is a topology of AMD GPUs",
        "topo --from",
    ),
    (re.compile(r"\balgbw\b.*\bbusbw\b|\bmemcpy (?:CE|SM) [CG]PU\(row\)|# OSU "), "it is a table of results", "report"),
)
"""Patterns that identify a text for another gpubench command, the reason for the error, and that command."""


def unreadable_error(name: str, error: Exception, expected: str, next_step: str = "") -> UsageError:
    """Return the error for a file that does not exist or cannot be read."""
    if isinstance(error, FileNotFoundError):
        seen, reason = f"{name} does not exist", "the path is mistyped, or relative to another directory"
    else:
        seen = f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        reason = "its owner or mode forbids it, or its disk is failing"
    return UsageError(seen, expected=expected, reason=reason, next_step=next_step)


def read_text(path: Path, wanted: Wanted) -> str:
    """Return the text of a file. It has at least one non-blank line.

    Raises UsageError if the file is missing, empty or too large, or is not text.
    """
    name = str(path)
    text = _decoded(_bytes_of(path, name, wanted), name, wanted)
    if not text.strip():
        raise wanted.unfit(f"{name} is empty", reason="the program that writes it failed, or was not started")
    return text


STDIN = "/dev/stdin"  # The name of standard input in messages and in suggested commands, which accept it


def result_path(name: str | Path) -> Path:
    """Return the path of a result that a user names. '-' is standard input."""
    return Path(STDIN if str(name) == "-" else name)


def _bytes_of(path: Path, name: str, wanted: Wanted) -> bytes:
    if name == STDIN:
        # Opening it by its name fails if it is a socket
        content = sys.stdin.buffer.read(wanted.most_bytes + 1)
        if len(content) > wanted.most_bytes:
            raise _too_large(name, f"more than {wanted.most_bytes // 2**20} MiB", wanted)
        return content
    try:
        if path.is_dir():
            raise wanted.unfit(
                f"{name} is a directory", reason="it should be a file in this directory", next_step=f"ls {name}"
            )
        with open_file(path, wanted.kinds) as file:
            size_bytes = path.stat().st_size
            if size_bytes > wanted.most_bytes:
                raise _too_large(name, f"{size_bytes / 2**20:.0f} MiB", wanted)
            # A pipe, as in `--from <(nvidia-smi topo -m)`, has no size.
            content = file.read(wanted.most_bytes + 1)
            # If a pipe became silent after its last bytes, this read raises the error.
            content += file.read(1)
    except (OSError, ValueError) as error:
        raise unreadable_error(name, error, wanted.kinds, wanted.how_to_make_one) from None
    if len(content) > wanted.most_bytes:
        raise _too_large(name, f"more than {wanted.most_bytes // 2**20} MiB", wanted)
    return content


def _too_large(name: str, size: str, wanted: Wanted) -> UsageError:
    return wanted.unfit(
        f"{name} has {size}, but gpubench reads at most {wanted.most_bytes // 2**20} MiB",
        reason="it is a log or a binary file",
    )


def _decoded(content: bytes, name: str, wanted: Wanted) -> str:
    if content.startswith(_OTHER_ENCODINGS):
        raise wanted.unfit(
            f"{name}, line 1: the text is UTF-16 or UTF-32",
            reason="Windows PowerShell's > writes UTF-16",
            next_step=f"iconv -f UTF-16 -t UTF-8 {name} > {wanted.example}",
        )
    content = content.rstrip(b"\0")  # After a power failure, files can end with NULs
    wrong, what = content.find(b"\0"), "a NUL byte"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0)
        if wrong < 0 or start < wrong:
            wrong, what = start, "bytes that are not UTF-8"
        text = ""
    if wrong < 0:
        return text
    line = content.count(b"\n", 0, wrong) + 1
    raise wanted.unfit(f"{name}, line {line}: {what}", reason="it is a binary, compressed or damaged file")


_QUOTED = re.compile(r"(?:\s*>)+ ?|\s*\|(?=[^|]*\|)")  # Markdown quote marks, or the first bar of a table row


_IN_CELLS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|\*\*")  # Thousands separators, and Markdown's bold marks
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2212"), "-")


def split_lines(text: str, name: str) -> list[str]:
    """Split a text at LF, CR LF or CR, and remove Markdown from each line. Raises UsageError for too many lines."""
    count = text.count("\n") + text.count("\r")
    if count > limits.MOST_RESULT_LINES:
        raise UsageError(
            f"{name} has {count} lines",
            expected=f"at most {limits.MOST_RESULT_LINES}",
            reason="it is the log of a whole job, or it was crafted to block its reader",
            next_step=f"grep '^[# ]' {name} > shorter.txt keeps the lines of nccl-tests and OSU",
        )
    return [remove_quotes(line) for line in re.split(r"\r?\n|\r", text)]


def remove_quotes(line: str) -> str:
    """Remove Markdown quote marks and table bars from a line, and replace typographic dashes by hyphens."""
    plain = line if line.isascii() else line.translate(_DASHES)
    return _IN_CELLS.sub("", _QUOTED.sub("", plain, count=1).replace("|", " ")) if _QUOTED.match(plain) else plain


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1f]")
_TAG = re.compile(r"(\[[^\]\[\s]{1,80},\d{1,7}\]<std(?:out|err)>:)")
"""Open MPI's --tag-output writes this tag before every piece of output, also in the middle of a line."""


def split_by_tag(line: str) -> Iterator[tuple[str, str]]:
    """Split a line at the launcher's tags, and yield each tag with its text. Text without a tag gets the tag ''.

    Consecutive pieces of the same process are joined.
    """
    head, *tagged = _TAG.split(_CONTROL.sub("", line))
    if head.strip() or not tagged:
        yield "", head
    tag, text = "", ""
    for next_tag, piece in zip(tagged[::2], tagged[1::2], strict=True):
        if next_tag != tag and tag:
            yield tag, text
            text = ""
        tag, text = next_tag, text + piece
    if tag:
        yield tag, text


def output_lines(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of program output with their numbers, without colors, Markdown and launchers' tags."""
    for number, line in enumerate(split_lines(text, name), 1):
        for _, piece in split_by_tag(line):
            yield number, remove_quotes(piece)


_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,9})?(?:e[+-]?\d{1,3})?|-?nan|-?inf")


def last_numbers(text: str) -> list[float]:
    """Return the numbers at the end of a line. Words before them, such as the host name of a launcher, are ignored."""
    words = takewhile(_NUMBER.fullmatch, reversed(text.split()))
    return [float(word) for word in words][::-1]


def is_row(text: str) -> bool:
    """Return True if a line has two numbers or more, and nothing else."""
    return len(text.split()) == len(last_numbers(text)) > 1


def prefix_shape(prefix: str) -> str:
    """Return a line prefix with every number replaced by 0, so that prefixes of different processes compare equal."""
    return re.sub(r"\d+", "0", " ".join(prefix.split()))


def strip_prefix(text: str, shape: str) -> list[str] | None:
    """Remove a prefix of this shape from a line, and return the remaining words. None if the line has another
    prefix.
    """
    words = text.split()
    count = len(shape.split())
    return words[count:] if prefix_shape(" ".join(words[:count])) == shape else None


_SURROGATE = re.compile("[\ud800-\udfff]")


def walk_values(plain: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield every key and every scalar in plain data, each with its path, for example `snapshot.gpus[0].name`."""
    if isinstance(plain, dict):
        for key, held in plain.items():
            yield f"a name in {where}", key
            yield from walk_values(held, f"{where}.{key}")
    elif isinstance(plain, list):
        for number, held in enumerate(plain):
            yield from walk_values(held, f"{where}[{number}]")
    else:
        yield where, plain


def check_printable(plain: Any, where: str) -> None:
    """Raise UsageError for a string with unprintable characters. `where` is the path of the value in error messages."""
    for place, text in walk_values(plain, where):
        if isinstance(text, str) and not text.isprintable():
            raise UsageError(f"{place} is {text[:40]!a}", expected="printable characters")


T = TypeVar("T")


def json_line(value: object) -> str:
    """Convert a record to one line of JSON."""
    return json.dumps(to_plain(value), allow_nan=False) + "\n"


def read_json_line(kind: type[T], line: str, where: str) -> T:
    """Parse a record from one line of JSON. `where` is the file and line for error messages.

    Raises UsageError if the line is not JSON or is another kind of record.
    """
    try:
        plain = load_json(line)
    except ValueError as error:
        raise UsageError(
            f"{where}: no JSON ({error})",
            expected=f"{kind.__name__} as JSON, as written by --record",
            reason="the file was cut off, or edited by hand",
        ) from None
    return from_plain(kind, plain, where)


def check_version(version: int, known: int, where: str) -> None:
    """Raise UsageError if a recording has another schema version than `known`."""
    if version != known:
        raise UsageError(
            f"{where}: schema_version {version}",
            expected=f"{known}, which this gpubench reads",
            reason="it was recorded by a newer gpubench",
            next_step=UPGRADE,
        )


def load_json(text: str) -> Any:
    """Parse JSON, but reject NaN and infinity, which Python would accept.

    Raises ValueError for invalid JSON, and for NaN, infinity, lone surrogates or numbers with too many digits. Also
    raises it if the nesting is too deep or the values need too much memory.
    """
    # Smallest memory of each value in CPython: a dictionary with one key, an empty list, and a number in a list.
    size_bytes = text.count("{") * 232 + text.count("[") * 64 + text.count(",") * 36
    if size_bytes > limits.MOST_JSON_BYTES:
        most = limits.MOST_JSON_BYTES // 2**20
        raise ValueError(f"some {size_bytes // 2**20} MiB of values in memory, but gpubench reads at most {most} MiB")
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=parse_finite, parse_int=parse_whole)
    except RecursionError:
        raise _too_deep() from None
    if is_nested_deeper(value, limits.MOST_DEPTH):
        raise _too_deep()
    # JSON can contain lone surrogates as escapes, but no output can encode them. Most texts have no such escapes.
    if "\\ud" in text or "\\uD" in text or not (text.isascii() or _SURROGATE.search(text) is None):
        for _, leaf in walk_values(value, ""):
            if isinstance(leaf, str) and _SURROGATE.search(leaf):
                raise ValueError(f"a lone surrogate in {leaf[:40]!a}")
    return value


def _too_deep() -> ValueError:
    return ValueError(f"lists nested more than {limits.MOST_DEPTH} deep")


def parse_whole(text: str) -> int:
    """Parse an integer. Raises ValueError, also for too many digits."""
    if len(text) > limits.MOST_DIGITS + text.startswith("-"):
        raise ValueError(f"a number of {len(text)} digits, but gpubench reads at most {limits.MOST_DIGITS}")
    return int(text)


def parse_finite(text: str) -> float:
    """Parse a floating-point number. Raises ValueError, also for NaN and infinity."""
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is not a number")
