"""The plan of a watch."""

from dataclasses import dataclass, replace

from gpubench.formats.presentation import Presentation
from gpubench.jobs.recording import Recording
from gpubench.jobs.sources import Here, Replayed, Simulated
from gpubench.measure.watch.report import SECTIONS as SECTIONS
from gpubench.measure.watch.selection import WatchedJobs as WatchedJobs

NAME = "watch"
SAMPLES = "watch.jsonl"

INTERVAL_SECONDS, LONGER_INTERVAL_SECONDS = 1.0, 2.0
"""Between two readings where nobody asks for another time; the longer one of nodes with more GPUs than these four."""

_MOST_GPUS_A_SECOND = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """What is watched, how long, and how it is shown.

    `interval_s` is that of `with_interval_of` where nobody asked for one. `seconds` is how long, None until somebody
    ends it; with `until_traffic` from the first bytes on. `gpus` are indices of the driver's, None for all.
    """

    source: Here | Simulated | Replayed
    recording: Recording
    selection: WatchedJobs
    gpus: tuple[int, ...] | None
    interval_s: float
    seconds: float | None
    until_traffic: bool
    strict: bool
    timeout_s: float
    presentation: Presentation
    has_own_interval: bool = True

    def with_interval_of(self, gpus: int) -> "WatchPlan":
        """With the interval of a node that has so many GPUs: a reading of eight at 1 s would take over 1 % of a core.

        An alarm takes two intervals, and shall not take over 5 s.
        """
        if self.has_own_interval or min(gpus, len(self.gpus or range(gpus))) <= _MOST_GPUS_A_SECOND:
            return self
        return replace(self, interval_s=min(LONGER_INTERVAL_SECONDS, self.seconds or LONGER_INTERVAL_SECONDS))
