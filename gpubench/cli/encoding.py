"""Terminals and files that cannot show every character."""

import codecs
import io
import sys

_HANDLER = "gpubench"
_SPELLED = str.maketrans(
    {"×": "x", "µ": "u", "→": "->", "…": "...", "✓": "+", "✗": "!", "│": "|", "├": "|", "└": "`"}
    | dict.fromkeys("─━╸╺–", "-")
    | dict.fromkeys("✅❌⚠🟣⏭\ufe0f", "")
)


def spell_out_what_cannot_be_shown() -> None:
    """Have stdout and stderr write 'x' for '×' and so on where their encoding has no such character, '?' for others."""
    codecs.register_error(_HANDLER, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


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
