"""The measurements of a check, made in one way whatever makes them: child commands, ranks, or a model."""

from collections.abc import Sequence
from typing import Protocol

from gpubench.collectives.record import Collective
from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.check.plan import Depth
from gpubench.measure.check.documents import together
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import QUICK, Measurements, Need


class CheckMeasurer(Protocol):
    """A way to measure what a check judges."""

    @property
    def alone(self) -> str:
        """The reason why no collective can be measured, as with a single GPU; else empty."""

    def copies(self) -> Measurements:
        """Copies between the GPUs of every node, and with host memory; copies within host memory."""

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """A collective over all GPUs, or over CPU ranks where there are none.

        Raises CouldNotMeasureError: it has no whole report.
        """


def measured(depth: Depth, nodes: Sequence[Topology], by: CheckMeasurer) -> Measurements:
    """Copies, then collectives."""
    if depth is Depth.QUICK:
        return QUICK
    parts = [by.copies()]
    if by.alone:
        return together([*parts, Measurements(left_out={Need.ALL_REDUCE: by.alone})])
    sizes = depth.sizes(on_gpus=any(node.gpus for node in nodes))
    try:
        for collective in depth.collectives:
            parts.append(by.collective(collective, sizes))  # noqa: PERF401 - what was measured before an error stays
    except CouldNotMeasureError as error:
        parts.append(Measurements(failed={Need.ALL_REDUCE: str(error)}))
    return together(parts)
