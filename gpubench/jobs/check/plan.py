"""The plan of a check: depth, profile, time-outs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.formats.presentation import Presentation
from gpubench.jobs.simulation import Simulation

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective
    from gpubench.model.paths.topology import Topology


SMALL_BYTES, LARGE_BYTES, HUGE_BYTES = 2**10, 256 * 2**20, 4 * 2**30


class Depth(StrEnum):
    """How much is measured: nothing, what takes a minute, or all."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CheckMeasurements:
    """What a depth means. Three sizes: a latency, and two bandwidths, of which the larger is what profiles have."""

    depth: Depth

    @property
    def full(self) -> bool:
        """Whether everything is measured."""
        return self.depth is Depth.FULL

    @property
    def measures(self) -> bool:
        """Whether anything is."""
        return self.depth is not Depth.QUICK

    @property
    def collectives(self) -> "tuple[Collective, ...]":
        """All-reduce alone, or all of them."""
        return tuple(map(collective_named, SUMMARIES if self.full else ("allreduce",)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes, as nccl-tests counts them."""
        return (SMALL_BYTES, LARGE_BYTES, HUGE_BYTES)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """The same for CPU ranks, which move their data with CPUs."""
        return (SMALL_BYTES, 2**20, 16 * 2**20)

    def limit_gb_s(self, nodes: Sequence["Topology"]) -> float | None:
        """What the links of the weakest GPU carry towards all others on its node; None across nodes, or unknown."""
        if len(nodes) != 1:
            return None
        totals = [(nodes[0].nvlink_total(gpu).gb_s, nodes[0].pcie_total(gpu).gb_s) for gpu in nodes[0].gpus]
        best = [nvlink or pcie for nvlink, pcie in totals]
        return min((each for each in best if each), default=None) if all(best) else None


NAME = "check"

FACTS_TIMEOUT_S = 20.0
"""What answers later than this hangs; a prolog has no more time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """What the user asked for; `profile` as written, None for the one that matches."""

    plan: CheckMeasurements
    profile: str | None
    strict: bool
    timeout_s: float
    simulation: Simulation | None
    replay: Path | None
    record: Path | None
    presentation: Presentation

    @property
    def facts_timeout_s(self) -> float:
        """Seconds in which a driver has to answer."""
        return min(self.timeout_s, FACTS_TIMEOUT_S)
