"""A line on stderr from a process that must not wait for its reader."""

import os
import select
from contextlib import suppress

_SECONDS_TO_WRITE = 2.0
_STDERR = 2


def write_stderr_line(text: str) -> None:
    """Print it as gpubench's, unless stderr is full and nobody reads it."""
    _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
    if writable:
        with suppress(OSError):
            os.write(_STDERR, f"gpubench: {text}\n".encode(errors="replace"))
