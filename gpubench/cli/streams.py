"""Standard streams as the program needs them: open, with errors that name stdout, and fit for every character."""

import codecs
import io
import os
import sys

from gpubench.errors import naming_output

_HANDLER = "gpubench"
_SPELLED = str.maketrans(
    {"×": "x", "µ": "u", "→": "->", "…": "...", "✓": "+", "✗": "!", "│": "|", "├": "|", "└": "`"}
    | dict.fromkeys("─━╸╺–", "-")
    | dict.fromkeys("✅❌⚠🟣⏭\ufe0f", "")
)


class _Stdout(io.TextIOWrapper):
    """stdout, whose failures are told from those of other files by their name."""

    def write(self, text: str, /) -> int:
        """Write; OutputError where the disk is full, BrokenPipeError where the reader is gone."""
        with naming_output("stdout"):
            return super().write(text)

    def flush(self) -> None:
        """Pass on what was written; the same errors."""
        with naming_output("stdout"):
            super().flush()


def prepare_streams() -> None:
    """Open closed streams on nothing, name the errors of stdout, and spell out what an encoding cannot show.

    A shell's `>&-` closes a stream. Its number would be given to the next file that is opened, which then gets what
    this process, or one that it starts, prints; Python itself has None in its place, and prints elsewhere.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # noqa: FBT003
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    codecs.register_error(_HANDLER, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        by_line, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        sys.stdout = _Stdout(open(1, "wb", closefd=False), encoding, _HANDLER, line_buffering=by_line)  # noqa: SIM115


def showable(text: str) -> str:
    """A text as stdout can show it; what prints help writes past the stream's own encoding."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_SPELLED)
    return text


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    spelled = error.object[error.start : error.end].translate(_SPELLED)
    return spelled.encode("ascii", "replace").decode("ascii"), error.end
