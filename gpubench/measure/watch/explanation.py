"""Why a job is staged: the conditions that hold for its processes and its node, by the list that all commands read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances, users_settings
from gpubench.conditions.ranking import UNKNOWN
from gpubench.measure.paths.diagnosis import first_cause
from gpubench.measure.watch.jobs import RunningJob
from gpubench.model.facts.traffic import TaskFacts
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Transport, parse_transport
from gpubench.model.paths.wiring import GpuPlace, Located, Wiring
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.rows.watch import Way
from gpubench.model.terms.rank_identity import RankIdentity

_TRANSPORTS = {Way.STAGED: parse_transport("SHM/direct/direct"), Way.SOCKETS: parse_transport("NET/Socket/0")}
"""What NCCL calls the ways that it takes then."""

_WITHOUT_NCCL = Explanation(
    UNKNOWN.id,
    "NCCL has no communicator in this process: it copies without peer access, which may be its wish",
    "gpubench p2p compares both on this machine; cudaDeviceEnablePeerAccess, in the program, takes the direct way",
)

_UNREAD = "the environment and files of its processes cannot be read: {}"


Ends = tuple[tuple[str, ...], tuple[str, ...]]
"""The GPUs that send through host memory, and those that receive it, by name; empty where all of a job's may."""


def explain(job: RunningJob, way: Way, node: Topology, ends: Ends = ((), ())) -> Explanation:
    """The likeliest cause of the way that a job takes; without evidence none is named.

    What other users' processes have set cannot be read, and is said instead.
    """
    if way is Way.STAGED and job.one_process and not job.by_nccl:
        return _WITHOUT_NCCL
    found = first_cause(_pairs(job, way, ends), _circumstances(job, node))
    unread = next((task.unread for task in job.tasks if task.facts is None and task.unread), "")
    if found.id == UNKNOWN.id and unread:
        return replace(found, evidence=_UNREAD.format(unread), advice="gpubench watch as that user, or as root")
    return found


def _pairs(job: RunningJob, way: Way, ends: Ends) -> Mapping[Pair, Sequence[Transport]]:
    """The ordered pairs of its GPUs, by position, between which host memory carries bytes; all, where not known."""
    senders, receivers = (
        [position for position, gpu in enumerate(job.gpus) if gpu.device in side or not all(ends)] for side in ends
    )
    return {(one, other): (_TRANSPORTS[way],) for one in senders for other in receivers if one != other}


def _circumstances(job: RunningJob, node: Topology) -> Circumstances:
    """The run as the job's processes have it: each the rank of its own GPU, where it has one alone."""
    places: list[Located] = []
    facts = []
    host = node.snapshot.host
    owners = [_owner(job, position) for position in range(len(job.gpus))]
    alone = len({task.pid for task in owners if task is not None}) == len(job.gpus)
    for position, (gpu, task) in enumerate(zip(job.gpus, owners, strict=True)):
        if alone and task is not None:
            places.append(
                RankIdentity(rank=position, host=host, node=0, local_rank=position, pid=task.pid, gpu_bus_id=gpu.bus_id)
            )
            if task.facts is not None:
                facts.append(replace(task.facts, rank=position, host=host, node=0, local_rank=position))
        else:
            places.append(GpuPlace(host, 0, gpu.bus_id))
    if not alone:
        known = (task.facts for task in job.tasks if task.facts is not None)
        facts = [replace(each, rank=number, host=host, node=0) for number, each in enumerate(known)]
    return Circumstances(wiring=Wiring(places, {0: node}), facts=facts, settings=users_settings(facts))


def _owner(job: RunningJob, position: int) -> TaskFacts | None:
    """The process of the job on a GPU; of several the one with the most of its memory."""
    on_gpu = {each.pid: each.memory_bytes or 0 for each in job.gpus[position].processes or ()}
    having = [task for task in job.tasks if task.pid in on_gpu]
    return max(having, key=lambda task: on_gpu[task.pid], default=None)
