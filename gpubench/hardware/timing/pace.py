"""The groups of a timed loop after which it reports progress, so that reporting costs no time worth naming."""

from collections.abc import Sequence

from gpubench.ports.launch import Launch


class Pace:
    """Cuts loops into groups of operations that take about so many seconds; the warm-up tells how long one takes.

    Operations are known by the first launch of a loop, which a warm-up and the timed loop behind it have in common.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first: Launch | None = None
        self._operations = 0
        self._single = True
        self._known: tuple[Launch | None, float] = (None, 0.0)

    def groups(self, launches: Sequence[Launch], replays: int = 0) -> list[int]:
        """The launches of each group, or, where they are replayed, the replays of them all.

        A single group is a loop that is short, or of which nothing is known.
        """
        self._first = launches[0] if launches else None
        count, each = (replays, len(launches)) if replays else (len(launches), 1)
        self._operations = count * each
        known, seconds = self._known
        self._single = self._first is None or known is not self._first or seconds * self._operations <= self._seconds
        if self._single:
            return [count]
        together = max(1, int(self._seconds / (seconds * each)))
        return [min(together, count - start) for start in range(0, count, together)]

    def every(self, launches: Sequence[Launch], operations: int) -> list[int]:
        """Groups of so many launches each, whatever they take; the last may have fewer."""
        self._first, self._operations, self._single = launches[0], len(launches), False
        return [min(operations, len(launches) - start) for start in range(0, len(launches), operations)]

    def measured(self, seconds: float) -> int:
        """Note what the last loop took in all; the number of its operations that no group has reported."""
        if self._operations:
            self._known = (self._first, seconds / self._operations)
        return self._operations if self._single else 0
