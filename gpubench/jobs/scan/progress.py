"""How far a scan is: the round that ended, of those that there are at most, and what is left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gpubench.formats.delivery import say
from gpubench.formats.progress import NoProgress, ProgressDisplay, progress_on
from gpubench.jobs.scan.plan import ScanPlan
from gpubench.measure.scan.rounds import Keep
from gpubench.model.results.scan_rounds import ROUNDS, PlannedRound, RoundOutcome, ScanPhase


@contextmanager
def telling(plan: ScanPlan, keep: Keep, *, is_rank: bool = False) -> Iterator[Keep]:
    """`keep`, that also tells how far the scan is, on stderr, until the scan is over."""
    display = _display(plan, is_rank=is_rank)
    display.update(0, ROUNDS[ScanPhase.SCREENING], ScanPhase.SCREENING)

    def kept(planned: PlannedRound, outcome: RoundOutcome) -> None:
        keep(planned, outcome)
        display.update(planned.number, most_rounds(planned.phase), f"rounds at most, after {planned.phase}")

    try:
        yield kept
    finally:
        display.stop()


def most_rounds(phase: ScanPhase) -> int:
    """The rounds that a scan in this phase has at most; one whose screening finds nothing ends with it."""
    if phase is ScanPhase.SCREENING:
        return ROUNDS[phase]
    return sum(ROUNDS[each] for each in (ScanPhase.SCREENING, ScanPhase.SUSPECTS, ScanPhase.CONFIRMATION))


def _display(plan: ScanPlan, *, is_rank: bool) -> ProgressDisplay:
    if not plan.presentation.show_progress:
        return NoProgress()
    return progress_on(sys.stderr, is_rank=is_rank, say=partial(say, to=sys.stderr))
