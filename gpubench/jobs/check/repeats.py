"""What `gpubench check` measures: which collectives at which sizes, and what is measured again."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpubench.collectives.record import Collective
from gpubench.model.results.report import CollectiveRow

if TYPE_CHECKING:
    from gpubench.model.profiles.profile import Profile


_REPEATS = 2

Measure = Callable[[Collective, Sequence[int], int], Sequence[CollectiveRow]]
"""The rows of a collective at some sizes; the number tells attempts apart."""


def measure_with_repeats(
    collective: Collective, sizes: Sequence[int], measure: Measure, profile: "Profile | None"
) -> list[CollectiveRow]:
    """Every size measured; twice more where it is near the line or beyond it, of which the middle one counts.

    What was seen to go through host memory is explained, and measured once: there a size takes a minute.
    """
    from gpubench.model.profiles.expectation import is_near_line, middle_row

    rows = {row.size_bytes: [row] for row in measure(collective, sizes, 0)}
    for attempt in range(1, _REPEATS + 1):
        near = [size for size, found in rows.items() if not found[0].host_staged and is_near_line(profile, found[0])]
        for row in measure(collective, near, attempt) if near else ():
            rows[row.size_bytes].append(row)
    return [middle_row(found) for found in rows.values()]
