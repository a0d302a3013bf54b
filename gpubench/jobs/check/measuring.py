"""The measurements of a check, made in one way whatever makes them: child commands, ranks, or a model."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gpubench.collectives.record import Collective
from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.check.plan import Depth
from gpubench.measure.check.documents import together
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import QUICK, Measurements, Need


def _say_nothing(label: str, seconds: float) -> None:
    """Nobody waits."""


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


Waiting = Callable[[str, float], None]
"""Is told what has begun, and about how many seconds it takes."""

SECONDS_TO_READ = 3.0
_SECONDS_TO_START = 4.0
"""Of a command with its ranks, as seen on two to eight H200s."""

_SECONDS_A_PAIR = {Depth.BRIEF: 0.14, Depth.DEFAULT: 0.5, Depth.FULL: 0.6}
_SECONDS_A_COLLECTIVE = {Depth.BRIEF: 1.0, Depth.DEFAULT: 3.0, Depth.FULL: 3.0}


def measured(
    depth: Depth, nodes: Sequence[Topology], by: CheckMeasurer, waiting: Waiting | None = None
) -> Measurements:
    """Copies, then collectives; `waiting` hears of each before it begins."""
    if depth is Depth.QUICK:
        return QUICK
    waiting = waiting or _say_nothing
    gpus = len(nodes[0].gpus)
    if gpus > 1:
        pairs = gpus * (gpus - 1)
        waiting(f"copies between {gpus} GPUs", _SECONDS_TO_START + pairs * _SECONDS_A_PAIR[depth])
    parts = [by.copies()]
    if by.alone:
        return together([*parts, Measurements(left_out={Need.ALL_REDUCE: by.alone})])
    sizes = depth.sizes(on_gpus=any(node.gpus for node in nodes))
    try:
        for collective in depth.collectives:
            ranks = f"{gpus} GPUs" if gpus else "CPU ranks"
            waiting(f"{collective.name} of {ranks}", _SECONDS_TO_START * bool(gpus) + _SECONDS_A_COLLECTIVE[depth])
            parts.append(by.collective(collective, sizes))
    except CouldNotMeasureError as error:
        # A look at a machine without GPUs says what there is: MPI need not be there.
        lacks = Measurements(left_out={Need.ALL_REDUCE: str(error)})
        is_look = depth is Depth.BRIEF and not any(node.gpus for node in nodes)
        parts.append(lacks if is_look else Measurements(failed={Need.ALL_REDUCE: str(error)}))
    return together(parts)
