"""Copies one after another on one stream."""

from dataclasses import dataclass

from gpubench.model.terms.copies import Engine
from gpubench.ports.memory import Region


@dataclass(frozen=True, slots=True)
class CopyStream:
    """Copies from one region to another, one after another, on a stream of the GPU at position `by`."""

    by: int
    engine: Engine
    source: Region
    destination: Region
    size_bytes: int
