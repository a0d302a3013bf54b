"""Simulates answers of NCCL's RAS service: the launched all-reduces of every rank, some of which may hang."""

from collections.abc import Iterable, Sequence

from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.hang import RasCommunicator, RasRank
from gpubench.model.profiles.fault import Fault

HANG = "hang"
_FIRST_PID = 4000
_BEFORE, _PER_ANSWER = 6650, 500  # Operations before the first answer, and between answers


def ras_answer(nodes: Sequence[Snapshot], faults: Iterable[Fault], number: int) -> tuple[RasCommunicator, ...]:
    """Return one communicator of all ranks. If a rank hangs, the others wait in the next operation."""
    hanging = {(fault.node_number, fault.index) for fault in faults if fault.get(HANG)}
    launched = _BEFORE if hanging else _BEFORE + number * _PER_ANSWER
    places = [(node, gpu.index) for node, own in enumerate(nodes) for gpu in own.gpus if not gpu.lost]
    ranks = tuple(
        RasRank(
            rank=rank,
            host=nodes[node].host,
            pid=_FIRST_PID + index,
            counts={"AllReduce": launched - ((node, index) in hanging)},
        )
        for rank, (node, index) in enumerate(places)
    )
    return (RasCommunicator("0x51a1", len(ranks), ranks),)
