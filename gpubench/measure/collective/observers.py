"""Who goes along with a measurement, and takes no part in what is timed."""

from collections.abc import Callable
from dataclasses import dataclass

from gpubench.measure.collective.path_observer import PathObserver
from gpubench.measure.collective.row_collector import NO_RECORDER, Recorder
from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.terms.progress import UNWATCHED, Progress

ReadCondition = Callable[[], GpuCondition | None]
"""What the GPU of this rank is like; None where there is no GPU."""


def no_gpu_to_read() -> None:
    """The condition of CPU buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """All of them, each with a stand-in that does nothing.

    A witness finds out which ways the bytes go; `progress` hears of every phase, so that a hang is seen;
    `read_condition` is asked between rows; `keeper` gets what rows and verdicts are made of.
    """

    witness: PathObserver | None = None
    progress: Progress = UNWATCHED
    read_condition: ReadCondition = no_gpu_to_read
    keeper: Recorder = NO_RECORDER


NO_OBSERVERS = Observers()
