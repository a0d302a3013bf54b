"""Stragglers: ranks that enter operations later than the others, by how much, how often, and how likely by chance.

A collective ends when the last rank has entered it and done its part. Ranks that entered earlier measure a long
operation, the late one a short one. So the duration of operations names the wrong rank; the time of entering names the
right one, once the clocks of all ranks are made comparable.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gpubench.model.terms.grouping import grouped

LEAST_OPERATIONS = 30
"""Of fewer operations no straggler is named."""

LEAST_SHARE = 0.05
"""Of the time of an operation: a delay below it is not worth naming."""

LEAST_SECONDS = 20e-6
"""Ranks do not leave a barrier at the same time: a shorter delay is normal."""

MOST_CHANCE = 1e-6
"""The bound on the chance is this small because neighbouring operations are not independent."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to a rank's clock to have the first rank's, and the uncertainty of them."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class EntryTimes:
    """Times at which a rank entered the operations of a row, compared with those of the others.

    `late_seconds` is the median delay after the first rank, `last` the number of operations, out of `operations`, that
    it entered as the last. Differences below `uncertainty` seconds are those of the clocks.
    """

    operations: int
    last: int
    late_seconds: float
    uncertainty: float

    @classmethod
    def of(
        cls, own: Sequence[float], first: Sequence[float], last: Sequence[float], uncertainty: float
    ) -> "EntryTimes":
        """From this rank's times, and those of the first and of the last rank, all by one clock."""
        return cls(
            operations=len(own),
            last=sum(each >= latest for each, latest in zip(own, last, strict=True)),
            late_seconds=median(each - earliest for each, earliest in zip(own, first, strict=True)),
            uncertainty=uncertainty,
        )


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that are late as a rule: one, or all of a node. `chance` is the probability of that without a cause.

    They were last in `last` of `operations`, `late_seconds` later than the others usually are (the median row); an
    operation takes `operation_seconds`.
    """

    ranks: tuple[int, ...]
    late_seconds: float
    operation_seconds: float
    last: int
    operations: int
    chance: float


def straggler(rows: Sequence[tuple[Sequence[EntryTimes], float]], nodes: Sequence[int]) -> Straggler | None:
    """The rank that is late as a rule, else all ranks of a node; None where there are none, or it is unknown.

    A row is the entry times of every rank and the seconds of an operation; `nodes` are the ranks' nodes.
    """
    if not rows or len(nodes) < 2:
        return None
    alone = [(rank,) for rank in range(len(nodes))]
    members = grouped(range(len(nodes)), lambda rank: nodes[rank])
    together = [tuple(ranks) for ranks in members.values() if 1 < len(ranks) < len(nodes)]
    for groups in (alone, together):
        found = [each for ranks in groups if (each := _late_group(rows, ranks, len(nodes))) is not None]
        if found:
            return max(found, key=lambda each: each.last)
    return None


def _late_group(
    rows: Sequence[tuple[Sequence[EntryTimes], float]], ranks: tuple[int, ...], size: int
) -> Straggler | None:
    """These ranks, if they are late more often than by chance, by more than the clocks' uncertainty, at a cost."""
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
    """An upper bound on the probability of so many successes or more: Hoeffding's, exp(-n D(k/n || p))."""
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
