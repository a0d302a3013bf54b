"""The collectives gpubench measures, in the order of its help. A new one is one file and one line here."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective

SUMMARIES = {
    "allreduce": "Reduce over all ranks, result on every rank: gradients in data-parallel training.",
    "allgather": "Collect every rank's block on every rank: sharded weights before a layer.",
    "reducescatter": "Reduce over all ranks, each rank keeps one block: sharded gradients.",
    "broadcast": "Copy the root's buffer to every rank: initial weights.",
    "reduce": "Reduce over all ranks, result on the root.",
    "alltoall": "Every rank sends a block to every rank: mixture-of-experts routing.",
    "gather": "Collect every rank's block on the root.",
    "scatter": "Hand each rank its block of the root's buffer.",
    "sendrecv": "Send to the next rank, receive from the previous: pipeline stages.",
}
"""The purpose of each, by its name. The file of that name has its record, under the same name in capitals."""


@cache
def collective_named(name: str) -> "Collective":
    """The record of one, without importing the others."""
    collective: Collective = getattr(import_module(f"gpubench.collectives.{name}"), name.upper())
    return collective


def __getattr__(name: str) -> "tuple[Collective, ...]":
    """`COLLECTIVES`, all of them, on first use."""
    if name != "COLLECTIVES":
        raise AttributeError(name)
    return tuple(map(collective_named, SUMMARIES))
