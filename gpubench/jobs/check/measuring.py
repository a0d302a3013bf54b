"""The measurements of a check, made in one way whatever makes them: child commands, ranks, or a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gpubench.collectives.record import Collective
from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.check.plan import GPU_SIZES, HOST_SIZES, Depth
from gpubench.measure.check.documents import together
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.expectation import is_near_line, middle_row
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measurements import QUICK, Measurements, Need
from gpubench.model.results.report import CollectiveRow

_REPEATS = 2

MeasureRows = Callable[[Sequence[int], int], Sequence[CollectiveRow]]
"""The rows of a collective at some sizes; the number tells attempts apart."""


class CheckMeasurer(Protocol):
    """A way to measure what a check judges."""

    @property
    def alone(self) -> str:
        """The reason why no collective can be measured, as with a single GPU; else empty."""

    def copies(self) -> Measurements:
        """Copies between the GPUs of every node, and with host memory; copies within host memory."""

    def collective(self, collective: Collective, sizes: Sequence[int], attempt: int) -> Measurements:
        """A collective over all GPUs, or over CPU ranks where there are none.

        Raises CouldNotMeasureError: it has no whole report.
        """


def measured(depth: Depth, nodes: Sequence[Topology], profile: Profile | None, by: CheckMeasurer) -> Measurements:
    """Copies, then collectives, of which rows near the line of the profile are measured again."""
    if depth is Depth.QUICK:
        return QUICK
    parts = [by.copies()]
    if by.alone:
        return together([*parts, Measurements(left_out={Need.ALL_REDUCE: by.alone})])
    limit = _limit_gb_s(nodes)
    sizes = GPU_SIZES if any(node.gpus for node in nodes) else HOST_SIZES
    rows: list[CollectiveRow] = []
    try:
        for collective in depth.collectives:

            def measure(asked: Sequence[int], attempt: int, which: Collective = collective) -> list[CollectiveRow]:
                part = by.collective(which, asked, attempt)
                if not attempt:
                    parts.append(replace(part, collectives=()))
                return [replace(row, limit_gb_s=limit) for row in part.collectives]

            rows += measure_with_repeats(sizes, measure, profile)
    except CouldNotMeasureError as error:
        return together([*parts, Measurements(failed={Need.ALL_REDUCE: str(error)})])
    return together([*parts, Measurements(collectives=tuple(rows))])


def measure_with_repeats(sizes: Sequence[int], measure: MeasureRows, profile: Profile | None) -> list[CollectiveRow]:
    """Every size measured once, and twice more where it is near the line or beyond it: then the middle row counts.

    What was seen to go through host memory is explained, and measured once: there a size takes a minute.
    """
    rows = {row.size_bytes: [row] for row in measure(sizes, 0)}
    for attempt in range(1, _REPEATS + 1):
        near = [size for size, found in rows.items() if not found[0].host_staged and is_near_line(profile, found[0])]
        for row in measure(near, attempt) if near else ():
            rows[row.size_bytes].append(row)
    return [middle_row(found) for found in rows.values()]


def _limit_gb_s(nodes: Sequence[Topology]) -> float | None:
    """GB/s that the links of the weakest GPU carry towards all others on its node; None across nodes, or unknown."""
    if len(nodes) != 1:
        return None
    node = nodes[0]
    best = [node.nvlink_total(gpu).gb_s or node.pcie_total(gpu).gb_s for gpu in node.gpus]
    return min((each for each in best if each), default=None) if all(best) else None
