"""The plan of a run of copies."""

from dataclasses import dataclass
from enum import StrEnum

from gpubench.formats.presentation import Presentation
from gpubench.jobs.recording import Recording
from gpubench.jobs.simulation import Simulation
from gpubench.model.paths.evidence import EvidenceUse

NAME = "p2p"


class As(StrEnum):
    """Whose parameters to use."""

    NVBANDWIDTH = "nvbandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pPlan:
    """What the user asked for. `pairs` are driver indices; None is all. `sizes` of None is the default."""

    sizes: tuple[int, ...] | None
    pairs: tuple[tuple[int, int], ...] | None
    like: As | None
    host: bool
    patterns: bool
    check: bool
    strict: bool
    evidence: EvidenceUse
    timeout_s: float
    simulation: Simulation | None
    recording: Recording
    presentation: Presentation
