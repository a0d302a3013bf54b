"""The files of libraries that this process has mapped."""

import re
from pathlib import Path

from gpubench.hardware.system_files import text_of


def mapped_files(pattern: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files whose names match a pattern from their start on, each once, in the order of their addresses."""
    found: dict[str, None] = {}
    for line in (text_of(maps) or "").splitlines():
        columns = line.split(maxsplit=5)
        path = columns[5].removesuffix(" (deleted)") if len(columns) == 6 else ""
        if path.startswith("/") and re.match(pattern, path.rpartition("/")[2]):
            found[path] = None
    return list(found)
