"""The collectives that gpubench measures, in the order of the help text. To add one, add its module and one line
here.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective

SUMMARIES = {
    "allreduce": "Measure all-reduce: every rank gets the reduction over all ranks (gradients).",
    "allgather": "Measure all-gather: every rank gets the blocks of all ranks (sharded weights).",
    "reducescatter": "Measure reduce-scatter: every rank gets a block of the reduction (sharded gradients).",
    "broadcast": "Measure broadcast: every rank gets the root's buffer (initial weights).",
    "reduce": "Measure reduce: the root gets the reduction over all ranks.",
    "alltoall": "Measure all-to-all: every rank sends a block to every rank (mixture of experts).",
    "gather": "Measure gather: the root gets the blocks of all ranks.",
    "scatter": "Measure scatter: every rank gets a block of the root's buffer.",
    "sendrecv": "Measure send and receive around a ring: every rank sends to the next (pipelines).",
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
