"""The collectives that gpubench measures, in the order of the help text. To add one, add its module and one line
here.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective

SUMMARIES = {
    "allreduce": "Measure all-reduce: the reduction over all ranks, on every rank (gradients).",
    "allgather": "Measure all-gather: every rank's block, on every rank (sharded weights).",
    "reducescatter": "Measure reduce-scatter: the reduction over all ranks, a block per rank (sharded gradients).",
    "broadcast": "Measure broadcast: the root's buffer, on every rank (initial weights).",
    "reduce": "Measure reduce: the reduction over all ranks, on the root.",
    "alltoall": "Measure all-to-all: a block from every rank to every rank (mixture of experts).",
    "gather": "Measure gather: every rank's block, on the root.",
    "scatter": "Measure scatter: a block of the root's buffer, on each rank.",
    "sendrecv": "Measure send and receive around a ring: to the next rank, from the previous (pipelines).",
}
"""Help texts by name. The collective is defined in the module of that name, as a constant in capitals."""


@cache
def collective_named(name: str) -> "Collective":
    """Import one collective's module and return the collective."""
    collective: Collective = getattr(import_module(f"gpubench.collectives.{name}"), name.upper())
    return collective


def __getattr__(name: str) -> "tuple[Collective, ...]":
    """Import all collectives on first use of `COLLECTIVES`."""
    if name != "COLLECTIVES":
        raise AttributeError(name)
    return tuple(map(collective_named, SUMMARIES))
