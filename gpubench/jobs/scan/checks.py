"""What a scan cannot be made of: too few nodes, ranks placed differently on different nodes, nodes without GPUs."""

from collections import Counter
from collections.abc import Sequence

from gpubench.errors import UsageError
from gpubench.hardware.scan.seats import NodeRanks
from gpubench.model.results.stored_scan import MOST_RAILS
from gpubench.model.terms.units import counted, some_of

LEAST_NODES = 3
HOST, NCCL = "host", "nccl"

_RANKS_ALIKE = "mpirun --map-by ppr:1:node, or srun --ntasks-per-node=1"


def check_node_count(nodes: int) -> None:
    """Raise UsageError for fewer nodes than can be told apart."""
    if nodes == 1:
        raise UsageError(
            "scan of one node",
            expected="three nodes or more: it compares what passes between them",
            next_step="gpubench check, which looks at one node; --ranks-as-nodes tries a scan on one",
        )
    if nodes < LEAST_NODES:
        raise UsageError(
            "scan of two nodes",
            expected="three nodes or more",
            reason="where two measure each other, no third tells which of them is slow",
            next_step="add a node that is known to be good, or hold gpubench allreduce on the two against its limit",
        )


def check_placement(nodes: Sequence[int], hosts: Sequence[str], gpus: Sequence[int] = ()) -> NodeRanks:
    """Which rank has which rails: every rank of a node is one, but of a rank alone on its host every GPU is.

    Node, host and GPUs that it sees are by rank; no GPUs with the host backend.
    Raises UsageError for nodes with different numbers of ranks or GPUs, and for GPUs that no rank would measure.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    _check_alike({hosts[ranks[0]]: len(ranks) for ranks in members.values()}, "rank", _RANKS_ALIKE)
    if gpus:
        _check_alike(dict(zip(hosts, gpus, strict=True)), "GPU", "leave these nodes out, or set CUDA_VISIBLE_DEVICES")
    if gpus and len(set(hosts)) == len(members) == len(nodes):
        return NodeRanks(tuple(map(tuple, members.values())), (tuple(range(gpus[0])),) * len(nodes))
    ranks_a_node = len(nodes) // len(members)
    if gpus and 1 < ranks_a_node < gpus[0]:
        raise UsageError(
            f"{counted(ranks_a_node, 'rank')} on nodes of {counted(gpus[0], 'GPU')}",
            expected="a rank a GPU, or a rank a node",
            reason="the other GPUs would not be measured",
            next_step=f"mpirun --map-by ppr:{gpus[0]}:node, or ppr:1:node",
        )
    own = {rank: place for ranks in members.values() for place, rank in enumerate(ranks)}
    if max(own.values()) >= MOST_RAILS:
        raise UsageError(
            f"{max(own.values()) + 1} ranks on each node",
            expected=f"{MOST_RAILS} at most",
            next_step="mpirun --map-by ppr:1:node",
        )
    return NodeRanks(tuple(map(tuple, members.values())), tuple((own[rank],) for rank in range(len(nodes))))


def check_backend(asked: str | None, gpus: Sequence[int], hosts: Sequence[str]) -> str:
    """What moves the data: NCCL where there are GPUs. GPUs of its host, and host, are by rank.

    Raises UsageError where some hosts have fewer GPUs than ranks.
    """
    if asked == HOST or (asked is None and not any(gpus)):
        return HOST
    ranks = Counter(hosts)
    short = {host: count for host, count in zip(hosts, gpus, strict=True) if count < ranks[host]}
    if short:
        each = [f"{host} {counted(count, 'GPU')} for {counted(ranks[host], 'rank')}" for host, count in short.items()]
        named = some_of(each)
        raise UsageError(
            f"fewer GPUs than ranks: {named}",
            expected="a GPU for every rank",
            reason="a rail is a GPU with the NIC that it uses",
            next_step="mpirun --map-by ppr:GPUS:node, or --backend host, which measures TCP between CPU buffers",
        )
    return NCCL


def _check_alike(counts: dict[str, int], what: str, next_step: str) -> None:
    usual = max(set(counts.values()), key=list(counts.values()).count)
    odd = {host: count for host, count in counts.items() if count != usual}
    if odd:
        named = some_of([f"{host} {count}" for host, count in odd.items()])
        raise UsageError(
            f"nodes with {counted(usual, what)}, and others: {named}",
            expected=f"as many {what}s on every node",
            reason="rails are compared with the same rail of other nodes",
            next_step=next_step,
        )
