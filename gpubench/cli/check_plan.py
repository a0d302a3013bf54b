"""What `gpubench check` measures: which collectives at which sizes, and what is measured again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.results.report import CollectiveRow

if TYPE_CHECKING:
    from gpubench.model.paths.topology import Topology
    from gpubench.model.profiles.profile import Profile

SMALL_BYTES, LARGE_BYTES, HUGE_BYTES = 2**10, 256 * 2**20, 4 * 2**30

_REPEATS = 2

Measure = Callable[[Collective, Sequence[int], int], Sequence[CollectiveRow]]
"""The rows of a collective at some sizes; the number tells attempts apart."""


class Depth(StrEnum):
    """How much is measured: nothing, what takes a minute, or all."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CheckPlan:
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
    def collectives(self) -> tuple[Collective, ...]:
        """All-reduce alone, or all of them."""
        return tuple(each for each in COLLECTIVES if self.full or each.name == "allreduce")

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


def measure_with_repeats(
    collective: Collective, sizes: Sequence[int], measure: Measure, profile: "Profile | None"
) -> list[CollectiveRow]:
    """Every size measured; twice more where it is near the line or beyond it, of which the middle one counts.

    What was seen to go through host memory is explained, and measured once: there a size takes a minute.
    """
    from gpubench.model.profiles.expectation import is_near_line, middle_row

    rows = {row.size_bytes: [row] for row in measure(collective, sizes, 0)}
    for attempt in range(1, _REPEATS + 1):
        near = [size for size, found in rows.items() if not found[0].host_staged and is_near_line(profile, found[0])]
        for row in measure(collective, near, attempt) if near else ():
            rows[row.size_bytes].append(row)
    return [middle_row(found) for found in rows.values()]
