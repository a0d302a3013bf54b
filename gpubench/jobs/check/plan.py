"""The plan of a check: how much is measured, of which machines, judged by which profile."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.formats.presentation import Presentation
from gpubench.jobs.recording import Recording
from gpubench.jobs.sources import Source
from gpubench.model.terms.statistics.sampling import Sampling

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective

NAME = "check"

SMALL_BYTES, LARGE_BYTES, HUGE_BYTES = 2**10, 256 * 2**20, 4 * 2**30
GPU_SIZES = (SMALL_BYTES, LARGE_BYTES, HUGE_BYTES)
"""A latency and two bandwidths, of which the larger is the one that profiles have; bytes as nccl-tests counts them."""

_BUDGET_SECONDS = 1.0
"""Of a row on GPUs: few sizes stand for all, and the first rows of a job are those in which hosts stall. On two H200s
1 KiB read 7.3 to 10.5 µs within 0.1 s, 7.3 within 1.5 s, and 6.9 to 7.0 from the tenth row of a job on."""

HOST_SIZES = (SMALL_BYTES, 2**20, 16 * 2**20)
"""The same for CPU ranks, which move their data with CPUs."""

FACTS_TIMEOUT_S = 20.0
"""What answers later than this hangs; a prolog has no more time."""


def sampling(*, on_gpus: bool) -> Sampling:
    """How often the operations of a collective run: until their mean is known, among CPU ranks as by default."""
    return Sampling(iterations=None, budget_seconds=_BUDGET_SECONDS if on_gpus else Sampling().budget_seconds)


class Depth(StrEnum):
    """The amount of measuring: none, half a minute of it, a minute, or everything."""

    QUICK = "quick"
    BRIEF = "brief"
    DEFAULT = "default"
    FULL = "full"

    @property
    def collectives(self) -> "tuple[Collective, ...]":
        """All-reduce alone, or all of them."""
        return tuple(map(collective_named, SUMMARIES if self is Depth.FULL else ("allreduce",)))

    def sizes(self, *, on_gpus: bool) -> tuple[int, ...]:
        """The sizes of a collective: of GPUs, or of CPU ranks."""
        if self is Depth.BRIEF:
            return (SMALL_BYTES, LARGE_BYTES) if on_gpus else HOST_SIZES[1:2]
        return GPU_SIZES if on_gpus else HOST_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """The machines to check and how; `profile` is the name or file of the one to judge by, None for a match.

    `brief` is whether the answer is one of ten lines, which a machine without GPUs gets too.
    """

    depth: Depth
    source: Source
    recording: Recording
    profile: str | None
    expected_gpus: int | None = None
    ranks_per_gpu: int = 1
    strict: bool
    timeout_s: float
    brief: bool = False
    presentation: Presentation

    @property
    def facts_timeout_s(self) -> float:
        """Seconds in which a driver has to answer."""
        return min(self.timeout_s, FACTS_TIMEOUT_S)
