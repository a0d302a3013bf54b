"""The plan of a watch."""

from dataclasses import dataclass

from gpubench.formats.presentation import Presentation
from gpubench.jobs.recording import Recording
from gpubench.jobs.sources import Here, Replayed, Simulated
from gpubench.measure.watch.report import SECTIONS as SECTIONS
from gpubench.measure.watch.selection import WatchedJobs as WatchedJobs

NAME = "watch"
SAMPLES = "watch.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """What is watched, how long, and how it is shown.

    `seconds` is how long, None until somebody ends it; with `until_traffic` from the first bytes on. `gpus` are indices
    of the driver's, None for all.
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
