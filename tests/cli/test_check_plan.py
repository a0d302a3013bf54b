"""What a check measures again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpubench.jobs.check.measuring import measure_with_repeats
from gpubench.jobs.check.plan import HUGE_BYTES, LARGE_BYTES, SMALL_BYTES
from gpubench.model.results.report import CollectiveRow
from gpubench.profiles.files import load
from tests.formats.sample import ROW

SIZES = (SMALL_BYTES, LARGE_BYTES, HUGE_BYTES)
HEALTHY_GB_S, SLOW_GB_S = 365.0, 30.0


def row(size: int, busbw_gb_s: float, *, host_staged: bool) -> CollectiveRow:
    return replace(ROW, collective="allreduce", ranks=8, nodes=1, size_bytes=size, busbw_gb_s=busbw_gb_s, time_us=17.0,
                   algorithm=None, host_staged=host_staged)  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "host_staged", "attempts"),
    [((), False, []), ((HUGE_BYTES,), False, [1, 2]), ((HUGE_BYTES,), True, [])],
    ids=["healthy", "slow and nobody knows why", "slow and seen to go through host memory"],
)
def test_what_is_slow_is_measured_again_unless_it_is_explained(
    slow: tuple[int, ...], host_staged: bool, attempts: list[int]
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def measure(sizes: Sequence[int], attempt: int) -> list[CollectiveRow]:
        asked.append((attempt, tuple(sizes)))
        return [row(size, SLOW_GB_S if size in slow else HEALTHY_GB_S, host_staged=host_staged) for size in sizes]

    rows = measure_with_repeats(SIZES, measure, load("hgx-h200-8"))
    assert [each.size_bytes for each in rows] == list(SIZES)
    assert asked == [(0, SIZES), *((attempt, slow) for attempt in attempts)]
