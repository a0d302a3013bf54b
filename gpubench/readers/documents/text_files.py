"""Files of text that a person names, with the errors of those that are none."""

import codecs
from dataclasses import dataclass
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.readers.documents.opened import opened

_OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The kinds of files that are wanted, in words for errors: how to make one, and the most bytes that are read."""

    kinds: str
    how_to_make_one: str
    most_bytes: int
    example: str

    def unfit(self, seen: str, *, reason: str, next_step: str = "") -> UsageError:
        """The error of a file that is something else."""
        return UsageError(seen, expected=self.kinds, reason=reason, next_step=next_step or self.how_to_make_one)

    def unknown(self, text: str, name: str) -> UsageError:
        """The error of a text that begins no kind of file that is wanted."""
        first = next(number for number, line in enumerate(text.split("\n"), 1) if line.strip())
        beginning = text.strip().split("\n")[0][:60]
        return self.unfit(
            f"{name}, line {first}: {beginning!r} begins no kind of file that gpubench reads",
            reason="it is another program's output",
        )


def unreadable(name: str, error: Exception, expected: str, next_step: str = "") -> UsageError:
    """The error of a file that is not there, or that its rights or its disk keep from being read."""
    if isinstance(error, FileNotFoundError):
        seen, reason = f"{name} does not exist", "the path is mistyped, or relative to another directory"
    else:
        seen = f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        reason = "its owner or mode forbids it, or its disk fails"
    return UsageError(seen, expected=expected, reason=reason, next_step=next_step)


def read_text(path: Path, wanted: Wanted) -> str:
    """The text of a file, which has at least one line.

    Raises UsageError where there is no such file, it is no text, it is empty, or larger than what is wanted can be.
    """
    name = str(path)
    text = _decoded(_bytes_of(path, name, wanted), name, wanted)
    if not text.strip():
        raise wanted.unfit(
            f"{name} is empty", reason="the program that should have written it failed, or was not started"
        )
    return text


def _bytes_of(path: Path, name: str, wanted: Wanted) -> bytes:
    try:
        if path.is_dir():
            raise wanted.unfit(f"{name} is a directory", reason="a file in it was meant", next_step=f"ls {name}")
        with opened(path, wanted.kinds) as file:
            size_bytes = path.stat().st_size
            if size_bytes > wanted.most_bytes:
                raise _too_large(name, f"{size_bytes / 2**20:.0f} MiB", wanted)
            # A pipe, as `--from <(nvidia-smi topo -m)` gives one, has no size to ask for.
            content = file.read(wanted.most_bytes + 1)
            # Behind the last bytes of a pipe whose writer fell silent this is the error.
            content += file.read(1)
    except (OSError, ValueError) as error:
        raise unreadable(name, error, wanted.kinds, wanted.how_to_make_one) from None
    if len(content) > wanted.most_bytes:
        raise _too_large(name, f"more than {wanted.most_bytes // 2**20} MiB", wanted)
    return content


def _too_large(name: str, size: str, wanted: Wanted) -> UsageError:
    return wanted.unfit(
        f"{name} has {size}, and {wanted.most_bytes // 2**20} MiB are the most that is read",
        reason="it is a log or a binary file",
    )


def _decoded(content: bytes, name: str, wanted: Wanted) -> str:
    if content.startswith(_OTHER_ENCODINGS):
        raise wanted.unfit(
            f"{name}, line 1: the text is UTF-16 or UTF-32",
            reason="Windows PowerShell's > writes UTF-16",
            next_step=f"iconv -f UTF-16 -t UTF-8 {name} > {wanted.example}",
        )
    content = content.rstrip(b"\0")  # what a power cut leaves of bytes that were promised and not written
    wrong, what = content.find(b"\0"), "a NUL byte"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0)
        if wrong < 0 or start < wrong:
            wrong, what = start, "bytes that are no UTF-8"
        text = ""
    if wrong < 0:
        return text
    line = content.count(b"\n", 0, wrong) + 1
    raise wanted.unfit(f"{name}, line {line}: {what}", reason="it is a binary or a compressed file, or a damaged one")
