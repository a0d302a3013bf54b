"""Blocking launches made one after another in Python, with progress reports or times between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from time import perf_counter

from gpubench.model.terms.progress import Progress
from gpubench.ports.launch import Launch


def in_order(launches: Sequence[Launch]) -> Launch:
    """One launch that issues several; a single one is returned as it is, to add nothing to its time."""
    if len(launches) == 1:
        return launches[0]

    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all


@dataclass(eq=False)
class HostClockedLaunch:
    """Launches in groups of so many, which knows how long each group took."""

    launches: Sequence[Launch]
    groups: Sequence[int]
    progress: Progress

    def __call__(self) -> None:
        """Make them."""
        rest = iter(self.launches)
        self._times: list[float] = []
        for count in self.groups:
            for launch in islice(rest, count):
                launch()
            self._times.append(perf_counter())
            self.progress.completed(count)

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every group but the first."""
        return [end - start for start, end in pairwise(self._times)]
