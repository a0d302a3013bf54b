"""The folders of --record and --replay."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Recording:
    """The folder to write to, and the one to read instead of a machine."""

    record: Path | None = None
    replay: Path | None = None
