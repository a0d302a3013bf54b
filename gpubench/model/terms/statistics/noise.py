"""The noise of repeated figures, and the difference that chance does not explain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

FALSE_ALARMS = 0.01
"""The probability that a comparison in which nothing changed names a row, all its rows together."""

_MOST_VALUES = 400
_NORMAL = 2.2219
_SMALL = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
_EFFICIENCY = 0.82


@dataclass(frozen=True, slots=True)
class Noise:
    """A standard deviation and the degrees of freedom with which it is known; infinite where it is given."""

    deviation: float
    freedom: float

    def bound(self, comparisons: int) -> float:
        """The difference that chance exceeds in `FALSE_ALARMS` of all comparisons of so many rows (Bonferroni)."""
        return self.deviation * student_quantile(1 - FALSE_ALARMS / (2 * max(1, comparisons)), self.freedom)


def robust_deviation(values: Sequence[float]) -> Noise | None:
    """The standard deviation of values of which up to half may be anything; None of fewer than two.

    It is Qn of Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993): the k-th smallest
    distance between two values, which needs no centre and is 82 % as sharp as the usual deviation is where nothing is
    odd.
    """
    count = len(values)
    if count > _MOST_VALUES:
        values, count = values[:: -(-count // _MOST_VALUES)], len(values[:: -(-count // _MOST_VALUES)])
    if count < 2:
        return None
    distances = sorted(abs(one - other) for one, other in combinations(values, 2))
    half = count // 2 + 1
    small = _SMALL.get(count, count / (count + (1.4 if count % 2 else 3.8)))
    return Noise(small * _NORMAL * distances[half * (half - 1) // 2 - 1], _EFFICIENCY * (count - 1))


def student_quantile(probability: float, freedom: float) -> float:
    """Student's t: the value below which lies `probability`, by the expansion around the normal quantile.

    Abramowitz and Stegun 26.7.5; within 1 % from 8 degrees of freedom on and 10 % from 4 on, at the probabilities of
    comparisons, and from 2 on at that of a 95 % interval.
    """
    z = NormalDist().inv_cdf(probability)
    if math.isinf(freedom):
        return z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
