"""The loop of a watch: readings at every interval, until its time is up or somebody ends it."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gpubench.jobs.watch.pace import Interrupts, WatchPace
from gpubench.jobs.watch.plan import WatchPlan
from gpubench.measure.watch.intervals import Interval, Intervals
from gpubench.measure.watch.report import jobs_now
from gpubench.measure.watch.rows import Limits, traffic_rows
from gpubench.model.facts.traffic import NodeReading
from gpubench.model.results.report import Row
from gpubench.model.results.watch.frame import WatchFrame
from gpubench.model.terms.origin import Origin

_SLACK = 0.25
"""Of an interval: a watch of 30 s ends after its thirtieth second, though the clock was read a moment before that."""

ReadAll = Callable[[bool], Sequence[NodeReading] | None]
"""Readings of all nodes, None where there are no more; it is told whether this is the last time."""


class Screen(Protocol):
    """Shows intervals as they come."""

    def show(self, frame: WatchFrame) -> None:
        """One interval more."""


class WatchLoop:
    """Reads, counts, shows. `limits` are those of every host, `hand_on` takes every row."""

    def __init__(
        self,
        plan: WatchPlan,
        pace: WatchPace,
        intervals: Intervals,
        limits: Callable[[str], Limits],
        origin: Origin,
        screen: Screen,
        hand_on: Callable[[Row], None],
    ) -> None:
        self._plan, self._pace, self._intervals = plan, pace, intervals
        self._limits, self._origin = limits, origin
        self._screen, self._hand_on = screen, hand_on

    def run(self, read_all: ReadAll) -> None:
        """Until the time is up, nothing is left to read, or Ctrl-C, which ends a watch as its time does."""
        with suppress(KeyboardInterrupt), Interrupts() as interrupts:
            self._run(read_all, interrupts)

    def _run(self, read_all: ReadAll, interrupts: Interrupts) -> None:
        plan, begun = self._plan, self._pace.now()
        next_moment = begun
        counted_from = None if plan.until_traffic else begun
        ended = False
        while True:
            end = math.inf if counted_from is None or plan.seconds is None else counted_from + plan.seconds
            ended = ended or end - next_moment < _SLACK * plan.interval_s
            readings = read_all(ended)
            if readings is None:
                return
            interval = self._intervals.add(readings)
            if interval is not None:
                self._show(interval, waiting=counted_from is None)
                if counted_from is None and self._intervals.course.traffic_seen:
                    counted_from = self._pace.now()
            if ended:
                return
            next_moment = max(min(next_moment + plan.interval_s, end), self._pace.now())
            ended = self._pace.wait_until(next_moment) or interrupts.asked

    def _show(self, interval: Interval, *, waiting: bool) -> None:
        rows = [
            row
            for rates, observed in interval.nodes
            for row in traffic_rows(rates, observed, self._limits(rates.host), self._origin, interval.seconds)
        ]
        for row in rows:
            self._hand_on(row)
        silences = [(rates.host, rates.driver_silent) for rates, _ in interval.nodes if rates.driver_silent]
        self._screen.show(
            WatchFrame(
                seconds=interval.seconds,
                rows=rows,
                jobs=list(jobs_now(interval, self._intervals.course, self._origin)),
                silences=silences,
                waiting=waiting and not self._intervals.course.traffic_seen,
            )
        )
