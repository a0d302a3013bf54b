"""The observers of a measurement, which take no part in what is timed."""

from collections.abc import Callable
from dataclasses import dataclass

from gpubench.measure.collective.path_observer import PathObserver
from gpubench.measure.collective.row_collector import NO_RECORDER, Recorder
from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.terms.progress import UNWATCHED, Progress

ReadCondition = Callable[[], GpuCondition | None]
"""Reads the condition of this rank's GPU; None where there is no GPU."""


def no_gpu_to_read() -> None:
    """The condition of CPU buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The observers of a sweep, each with a stand-in that does nothing.

    `path_observer` finds out over which paths the bytes go, `progress` is told of every phase, so that a hang is seen,
    `read_condition` is called between rows, `recorder` gets the samples that rows and verdicts are made of.
    """

    path_observer: PathObserver | None = None
    progress: Progress = UNWATCHED
    read_condition: ReadCondition = no_gpu_to_read
    recorder: Recorder = NO_RECORDER


NO_OBSERVERS = Observers()
