"""The plan of a run of copies."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpubench.formats.presentation import Presentation
from gpubench.jobs.recording import Recording
from gpubench.model.paths.evidence import EvidenceUse

if TYPE_CHECKING:
    from gpubench.jobs.sources import Source

NAME = "p2p"


class MemoryKind(StrEnum):
    """The memory that is copied: plain allocations, or managed memory beside them."""

    PLAIN = "plain"
    MANAGED = "managed"


class As(StrEnum):
    """Programs whose parameters can be used."""

    NVBANDWIDTH = "nvbandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pPlan:
    """The machine to measure and how; `pairs` are the driver's indices or ranks, and None is all.

    `sizes` of None are the default; `like` is one of As. `profile` is the name or file of the one to judge by, None for
    a match. Of managed memory one size is measured.
    """

    source: "Source"
    recording: Recording
    sizes: tuple[int, ...] | None
    pairs: tuple[tuple[int, int], ...] | None
    like: str | None
    host: bool
    patterns: bool
    check: bool
    strict: bool
    evidence: EvidenceUse
    timeout_s: float
    memory: MemoryKind = MemoryKind.PLAIN
    profile: str | None = None
    expected_gpus: int | None = None
    presentation: Presentation
