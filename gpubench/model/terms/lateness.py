"""Who comes late to an operation that all ranks have to enter: how late, how often, and how sure that is.

A collective ends when the last rank has entered it and done its part. The ranks that came earlier see a long operation;
the one that they wait for sees a short one. So times of operations name the wrong rank, and times of entering the right
one, once the clocks of all ranks are made comparable.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_OPERATIONS = 30
"""Fewer say nothing of who is late as a rule."""

LEAST_SHARE = 0.05
"""Of the time of an operation: who costs less is not worth naming."""

LEAST_SECONDS = 20e-6
"""Ranks do not leave a barrier at once: less is nobody's fault."""

MOST_CHANCE = 1e-6
"""Neighbouring operations are not independent, so the odds have to be long."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What to add to a rank's clock to have the first rank's, in seconds, and by how much that may be wrong."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class EntryTimes:
    """When a rank entered the operations of a row, as all ranks know it afterwards.

    `late_seconds` is the median of how long after the first rank it came, `last` the number of operations in which it
    was the last, out of `operations`. Differences below `uncertainty` seconds are the clocks'.
    """

    operations: int
    last: int
    late_seconds: float
    uncertainty: float

    @classmethod
    def of(
        cls, own: Sequence[float], first: Sequence[float], last: Sequence[float], uncertainty: float
    ) -> "EntryTimes":
        """From this rank's times of entering, and those of the first and of the last rank, by one clock."""
        return cls(
            operations=len(own),
            last=sum(each >= latest for each, latest in zip(own, last, strict=True)),
            late_seconds=median(each - earliest for each, earliest in zip(own, first, strict=True)),
            uncertainty=uncertainty,
        )


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that are late as a rule: one, or all of a node. `chance` is how likely that would be of ranks that are not.

    They were last in `last` of `operations`, and later than the others usually are by `late_seconds` (the median row),
    where an operation takes `operation_seconds`.
    """

    ranks: tuple[int, ...]
    late_seconds: float
    operation_seconds: float
    last: int
    operations: int
    chance: float


def straggler(rows: Sequence[tuple[Sequence[EntryTimes], float]], nodes: Sequence[int]) -> Straggler | None:
    """Who is late as a rule: a rank, else a node; None where nobody is, or nobody can know.

    A row is the entries of every rank and the seconds of an operation; `nodes` are the ranks' nodes.
    """
    if not rows or len(nodes) < 2:
        return None
    alone = [(rank,) for rank in range(len(nodes))]
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    together = [tuple(ranks) for ranks in members.values() if 1 < len(ranks) < len(nodes)]
    for groups in (alone, together):
        found = [each for ranks in groups if (each := _late_group(rows, ranks, len(nodes))) is not None]
        if found:
            return max(found, key=lambda each: each.last)
    return None


def _late_group(
    rows: Sequence[tuple[Sequence[EntryTimes], float]], ranks: tuple[int, ...], size: int
) -> Straggler | None:
    """These ranks, where they are late more often than by chance, by more than clocks may be wrong, and it costs."""
    operations = sum(entries[0].operations for entries, _ in rows)
    last = min(operations, sum(entries[rank].last for entries, _ in rows for rank in ranks))
    if operations < LEAST_OPERATIONS or 2 * last <= operations:
        return None
    late, costs = [], []
    for entries, seconds in rows:
        usual = median(each.late_seconds for rank, each in enumerate(entries) if rank not in ranks)
        own = min(entries[rank].late_seconds for rank in ranks) - usual
        clocks = median(each.uncertainty for each in entries)
        doubt = max(clocks, *(entries[rank].uncertainty for rank in ranks))
        late.append(own if own > doubt else 0.0)
        costs.append(seconds)
    late_seconds, operation_seconds = median(late), median(costs)
    chance = chance_of_at_least(last, operations, len(ranks) / size)
    if chance > MOST_CHANCE or late_seconds <= max(LEAST_SECONDS, LEAST_SHARE * operation_seconds):
        return None
    return Straggler(ranks, late_seconds, operation_seconds, last, operations, chance)


def chance_of_at_least(successes: int, trials: int, probability: float) -> float:
    """How likely at least so many successes are, at most: Hoeffding's bound, exp(-n D(k/n || p)), 1 below the mean."""
    share = successes / trials
    if share <= probability:
        return 1.0
    divergence = share * math.log(share / probability)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - probability))
    return math.exp(-trials * divergence)


def common_clock(
    own: Iterable[float], before: ClockOffset, after: ClockOffset, start: float, end: float
) -> list[float]:
    """Times of this rank by the first rank's clock; it was compared with that at `start` and at `end`.

    Clocks drift apart by up to some 50 µs a second, evenly over a short while.
    """
    slope = (after.seconds - before.seconds) / (end - start) if end > start else 0.0
    return [each + before.seconds + slope * (each - start) for each in own]
