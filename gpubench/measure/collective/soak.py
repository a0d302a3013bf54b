"""A sweep that is repeated, a number of times or until somebody ends it: a soak, with a line a minute."""

import time
from collections.abc import Callable
from dataclasses import field

from gpubench.measure.collective.cases import Case
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.units import counted
from gpubench.records import dataclass

SECONDS_BETWEEN_LINES = 60.0


@dataclass
class Soak:
    """What the first rank knows of a soak. `cycles` of 0 have no end of their own; `say` gets the lines.

    `asked_to_end` is whether somebody has asked for the end.
    """

    cycles: int
    say: Callable[[str], None]
    asked_to_end: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    wrong: int = 0
    rows: int = 0
    cycle: int = 1
    _first: dict[Case, float] = field(default_factory=dict)
    _slowest: tuple[float, str] | None = None
    _began: float | None = None
    _said: float = 0.0

    def begin(self, case: Case, row: CollectiveRow) -> None:
        """A row of the first cycle, which the others are held against."""
        if self._began is None:
            self._began = self._said = self.clock()
        self._first[case] = row.time_us
        self._count(row)

    def is_over(self) -> bool:
        """True once all cycles are done, or somebody has asked for the end."""
        return self.asked_to_end() or 0 < self.cycles < self.cycle

    def add(self, case: Case, row: CollectiveRow) -> None:
        """A row of a further cycle; says a line where the last one is a minute old."""
        self._count(row)
        slower = row.time_us / self._first[case]
        if self._slowest is None or slower > self._slowest[0]:
            label = f"{case.label} {_time(row.time_us)}, {_time(self._first[case])} in the first cycle"
            self._slowest = slower, label
        if self.clock() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = self.clock()
            self.say(self.line())
            self._slowest = None

    def line(self) -> str:
        """'soak: 3 min, 120 cycles, 1440 rows, 0 wrong elements; slowest since the last line: ...'."""
        minutes = (self.clock() - (self._began or 0.0)) / 60
        slowest = "" if self._slowest is None else f"; slowest since the last line: {self._slowest[1]}"
        wrong = counted(self.wrong, "wrong element")
        done = f"{counted(self.cycle - 1, 'cycle')}, {counted(self.rows, 'row')}"
        return f"soak: {minutes:.0f} min, {done}, {wrong}{slowest}"

    def _count(self, row: CollectiveRow) -> None:
        self.rows += 1
        self.wrong += row.wrong or 0


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"
