"""Small files of /sys, /proc and /dev, of which any may be missing, unreadable or odd."""

import re
from pathlib import Path

_LONGEST = 300
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)", re.ASCII | re.IGNORECASE)


def text_of(path: Path) -> str | None:
    """What the file says, without the white space around it; None where it cannot be read or says nothing."""
    return UnknownFields().text("", path)


def number_of(path: Path) -> int | None:
    """The number a file holds, decimal or 0x...; None where it holds none."""
    text = text_of(path) or ""
    if not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if "x" in text.lower() else 10)


def printable(text: str) -> str:
    """A text from a file that anyone may have written, fit to be shown: no control characters, and not too long."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text[:_LONGEST])


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none where it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


class UnknownFields:
    """Reads facts and keeps, by the name of the fact, why one could not be had."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def text(self, field: str, path: Path) -> str | None:
        """What the file says; None, with the reason kept, where it says nothing."""
        try:
            text = path.read_bytes().decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.reasons[field] = f"{path.name}: {reason or error}"
            return None
        if not text:
            self.reasons[field] = f"{path.name} is empty"
        return text or None
