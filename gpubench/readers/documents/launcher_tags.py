"""What launchers and terminals put before and into the lines of a program: tags, labels, clocks, colours."""

import re
from collections.abc import Iterator

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1f]")
_TAG = re.compile(r"(\[[^\]\[\s]{1,80},\d{1,7}\]<std(?:out|err)>:)")
"""Open MPI's --tag-output puts one before every piece of output, and a piece may be the middle of a line."""


def pieces(line: str) -> Iterator[tuple[str, str]]:
    """The text of a line by launcher's tag, "" without one: pieces of one process that follow each other are one."""
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


def prefix_shape(prefix: str) -> str:
    """What a launcher or a clock puts before a line, with all numbers alike."""
    return re.sub(r"\d+", "0", " ".join(prefix.split()))


def behind_prefix(text: str, shape: str) -> list[str] | None:
    """The words of a line behind a prefix of a shape; None where it has another."""
    words = text.split()
    count = len(shape.split())
    return words[count:] if prefix_shape(" ".join(words[:count])) == shape else None
