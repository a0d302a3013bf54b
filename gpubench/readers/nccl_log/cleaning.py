"""What terminals and collectors put into the lines of a log, taken away."""

import re

_COLOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LOST_COLOR = re.compile(rb"\[(?:\d{1,3}(?:;\d{1,3})*)?m")
"""The same where the escape character got lost on the way."""

_STAMP = re.compile(rb"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+-]{0,20}Z?\]? ", re.M)
_STAMPED_BYTES = 4096
"""True if lines begin with a clock's time is seen in that many."""

_BARE = re.compile(rb"^(?=NCCL (?:INFO|WARN) )", re.M)
"""The beginning of a line of which nothing but the level is left."""


def cleaned(block: bytes) -> bytes:
    """Lines without carriage returns, colours and timestamps."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x1b" in block:
        block = _COLOR.sub(b"", block)
    if _STAMP.search(block, 0, _STAMPED_BYTES):
        block = _STAMP.sub(b"", block)
    return _BARE.sub(b" ", block) if block.startswith(b"NCCL ") or b"\nNCCL " in block else block


def without_colors(line: bytes) -> bytes:
    """A line without colours, also those that lost their escape character."""
    return _LOST_COLOR.sub(b"", _COLOR.sub(b"", line))
