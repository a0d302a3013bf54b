"""A GPU over a moment in which this job did nothing: what passes, runs and is held there is somebody else's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.facts.gpu_process import GpuProcess

FOREIGN_GB_S = 0.5
"""So much over a link, while this job is idle, is somebody else's. On four H200s idle NVLinks carried 0.0 and idle PCIe
links up to 0.02 GB/s; copies of another process 371 to 396 and 59.
"""

FOREIGN_SHARE = 0.1
"""Of what links carry: by so much of somebody else's traffic, their counters may have moved instead of by ours."""

LEAST_HELD_BYTES = 2**30
"""A process without data holds some 500 MiB of a GPU: its context."""

BUSY_PERCENT = 50
"""Of the time in which something ran on a GPU: so much, while this job is idle, is somebody else's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """GB/s that the NVLinks of a GPU, all together, and its PCIe link carried; None where they are not counted."""

    nvlink_sent: float | None = None
    nvlink_received: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None

    def together(self, later: "LinkRates") -> "LinkRates":
        """The greater rate of each."""
        pairs = {each.name: (getattr(self, each.name), getattr(later, each.name)) for each in fields(self)}
        return LinkRates(**{name: _greatest(rates) for name, rates in pairs.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """The use that others make of a GPU: the part of the time in which it computes, and their processes.

    `held_bytes` is the memory that was taken before this job opened the GPU.
    """

    utilization_percent: int | None = None
    users: tuple[GpuProcess, ...] = ()
    held_bytes: int | None = None

    def together(self, later: "GpuUse") -> "GpuUse":
        """The greater use, by the processes of both."""
        percent = _greatest((self.utilization_percent, later.utilization_percent))
        users = {each.pid: each for each in (*self.users, *later.users)}
        held = later.held_bytes if self.held_bytes is None else self.held_bytes
        return GpuUse(
            utilization_percent=None if percent is None else int(percent), users=tuple(users.values()), held_bytes=held
        )

    @property
    def is_busy(self) -> bool:
        """True where the GPU computes."""
        return (self.utilization_percent or 0) >= BUSY_PERCENT


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGpu:
    """What the links of a GPU carried and who used it while this job was idle.

    `at_work` is its condition just before, right after operations of this job, and `waited` the share of the time since
    the first of them that its rank was ready to run and waited for a CPU; None where there were none, or nobody looked.
    """

    rates: LinkRates = field(default_factory=LinkRates)
    use: GpuUse = field(default_factory=GpuUse)
    at_work: GpuCondition | None = None
    waited: float | None = None

    def together(self, later: "IdleGpu") -> "IdleGpu":
        """Two moments as one: the worse of each."""
        return IdleGpu(
            rates=self.rates.together(later.rates),
            use=self.use.together(later.use),
            at_work=later.at_work or self.at_work,
            waited=_greatest((self.waited, later.waited)),
        )


def both(earlier: Sequence[IdleGpu], later: Sequence[IdleGpu]) -> tuple[IdleGpu, ...]:
    """The GPUs of a job over two moments; over one where only that is known."""
    if not earlier or not later:
        return tuple(earlier or later)
    return tuple(one.together(other) for one, other in zip(earlier, later, strict=True))


def is_foreign(gb_s: float | None) -> bool:
    """True if a rate is more than an idle link has."""
    return gb_s is not None and gb_s >= FOREIGN_GB_S


def holders(use: GpuUse, words: Callable[[int], str]) -> str:
    """Who holds the memory of a GPU, in words; empty where nobody does. `words` are those for a number of bytes."""
    if use.held_bytes is not None and any(each.memory_bytes is None for each in use.users):
        return f"{', '.join(each.label for each in use.users)}: {words(use.held_bytes)}"
    named = [f"{each.label}: {words(each.memory_bytes)}" for each in use.users if each.memory_bytes]
    unseen = (use.held_bytes or 0) - sum(each.memory_bytes or 0 for each in use.users)
    if use.held_bytes is not None and unseen > LEAST_HELD_BYTES:
        named.append(f"a process that is not visible here: {words(unseen)}")
    return ", ".join(named)


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((each for each in values if each is not None), default=None)
