"""The clock of a backend whose operations keep the host until they are done."""

from collections.abc import Sequence
from time import perf_counter

from gpubench.errors import UsageError
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.hardware.timing.loops import HostClockedLaunch, in_order
from gpubench.hardware.timing.pace import Pace
from gpubench.model.terms.progress import Progress
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch

_SECONDS_BETWEEN_REPORTS = 1e-4
"""Reporting each of many operations of 1 µs would add 8 % to them."""


class BlockingClock:
    """Times launches that return when their operation is done, by the clock of the host."""

    def __init__(self, group: Group, progress: Progress, no_graphs: str) -> None:
        self._ranks = group
        self._reports = progress
        self._no_graphs = no_graphs
        self._pace = Pace(_SECONDS_BETWEEN_REPORTS)

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several, which block."""
        return in_order(launches)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order; UsageError where replays are asked for: nothing here can be captured in a graph."""
        if graph_replays:
            raise UsageError(f"--graph needs GPUs: {self._no_graphs}", next_step="leave --graph out")
        groups = self._pace.groups(launches)
        return in_order(launches) if len(groups) == 1 else HostClockedLaunch(launches, groups, self._reports)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order, with a look at the clock after each so many of them."""
        return HostClockedLaunch(launches, self._pace.every(launches, operations), self._reports)

    def seconds(self, launch: Launch) -> float:
        """Wall time of blocking calls."""
        with no_garbage_collection():
            start = perf_counter()
            launch()
            seconds = perf_counter() - start
        self._reports.completed(self._pace.measured(seconds))
        return seconds

    def once(self, launch: Launch) -> None:
        """Run one operation; it blocks."""
        launch()

    def together(self, launch: Launch) -> float:
        """The wall time behind a barrier."""
        self._ranks.barrier()
        return self.seconds(launch)
