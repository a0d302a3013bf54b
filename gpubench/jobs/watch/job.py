"""Watch: the machines of a source, readings of them, the loop, and the report."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubench.formats.presentation import Presentation
from gpubench.formats.registry import TABLE
from gpubench.jobs.outputs import presenting
from gpubench.jobs.sources import Here, Replayed, Simulated, refuse_under_launcher
from gpubench.jobs.watch.pace import LeapingPace, RealPace, RecordedPace, Wait, WatchPace, sleep
from gpubench.jobs.watch.plan import NAME, WatchPlan
from gpubench.jobs.watch.watching import check_watchable, watch
from gpubench.model.facts.launched_by import launched_by
from gpubench.model.terms.origin import Origin

if TYPE_CHECKING:
    from gpubench.jobs.machines import Machines
    from gpubench.jobs.watch.loop import Screen
    from gpubench.ports.traffic import TrafficReader


def run(plan: WatchPlan, arguments: Sequence[str]) -> int:
    """Watch, alone or as one rank of a job; the exit code.

    Raises GpubenchError: nothing can be read, or an output cannot be written.
    """
    launch = launched_by(os.environ)
    if launch is not None and launch.size > 1:
        refuse_under_launcher(NAME, plan.source, launch)
        from gpubench.jobs.watch.ranks import run_ranks

        return run_ranks(plan, arguments, launch)
    is_terminal = launch is None and sys.stdout.isatty()
    with presenting(plan.presentation, plan.recording.record, is_rank=launch is not None) as presenter:
        machines = plan.source.machines()
        check_watchable(plan, machines)
        with shown(plan, machines, is_terminal=is_terminal) as (screen, wait):
            plan, pace, readers = _paced(plan, machines, wait, is_terminal=is_terminal)
            report, _ = watch(plan, arguments, machines, pace, screen, presenter, readers=readers)
        presenter.end(report)
        return presenter.exit_code


def _paced(
    plan: WatchPlan, machines: "Machines", wait: Wait, *, is_terminal: bool
) -> "tuple[WatchPlan, WatchPace, Sequence[TrafficReader]]":
    """Readings and their clock; of a recording the plan has the interval at which it was made."""
    from gpubench.jobs.watch import readers

    if isinstance(plan.source, Replayed):
        recorded = readers.recorded_readers(plan.source.directory)
        interval_s = max(each.interval_s for each in recorded) or plan.interval_s
        return (
            replace(plan, interval_s=interval_s),
            RecordedPace(lambda: max(each.elapsed for each in recorded)),
            recorded,
        )
    pace: WatchPace = RealPace(wait) if _is_real(plan, is_terminal=is_terminal) else LeapingPace()
    if isinstance(plan.source, Simulated):
        return plan, pace, readers.simulated_readers(plan.source.simulation, machines.snapshots, pace.now)
    plan = plan.with_interval_of(len(machines.nodes[0].gpus))
    return plan, pace, [readers.reader_here(plan, machines.nodes[0].snapshot.host)]


def _is_real(plan: WatchPlan, *, is_terminal: bool) -> bool:
    """True where intervals take their time: of real machines, and on a terminal of simulated ones, to be looked at."""
    if isinstance(plan.source, Here):
        return True
    return isinstance(plan.source, Simulated) and _is_live(plan.presentation, is_terminal=is_terminal)


def _is_live(shown: Presentation, *, is_terminal: bool) -> bool:
    return shown.format is TABLE and is_terminal and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def shown(plan: WatchPlan, machines: "Machines", *, is_terminal: bool) -> "Iterator[tuple[Screen, Wait]]":
    """Where intervals are shown, and what waits for them."""
    from gpubench.formats.presenter import chosen_width, terminal_style
    from gpubench.formats.text.watch_screen import NoScreen, PlainScreen, live_screen

    presentation = plan.presentation
    if isinstance(plan.source, Replayed) or not _is_live(presentation, is_terminal=is_terminal):
        yield (PlainScreen(chosen_width(presentation)) if presentation.format is TABLE else NoScreen()), sleep
        return
    color = terminal_style(presentation, sys.stdout).color
    with live_screen(sys.stdout, _header(plan, machines), color=color) as (screen, wait):
        yield screen, wait


def _header(plan: WatchPlan, machines: "Machines") -> Callable[[float], str]:
    hosts = [node.snapshot.host for node in machines.nodes]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
    origin = "" if machines.origin is Origin.MEASURED else f" ({machines.origin.upper()})"
    until = "" if plan.seconds is None else f" of {plan.seconds:g}"
    return lambda seconds: f"gpubench watch  {where}{origin}  {seconds:.0f}{until} s"
