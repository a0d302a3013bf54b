"""The backend of a collective on one rank, opened together with what observes it."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.node.nvml.condition import NvmlCondition
from gpubench.hardware.node.nvml.gpu_use import NvmlUse
from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.hardware.node.probe import probe
from gpubench.hardware.process.nccl_settings import nccl_settings
from gpubench.hardware.registry import BackendKind, BackendSetup, backend_named, default_backend
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import agree
from gpubench.jobs.collective.path_watch import PathWatch
from gpubench.jobs.collective.plan import CollectivePlan, check_unset
from gpubench.jobs.gpus import open_gpu
from gpubench.jobs.machines import Machines
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, gathered, own_process
from gpubench.measure.collective.observers import ReadCondition
from gpubench.model.facts.idle_gpu import holders
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.units import format_memory
from gpubench.ports.backend import MultiGroupBackend

_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a job: in the job, in the group that it measures with, and on its node."""

    group: mpi.MpiGroup
    own: mpi.MpiGroup
    identity: RankIdentity
    ranks_on_node: int
    progress: RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A backend, the rank with its GPU, and what observes both.

    `machines` returns nodes and processes on the first rank, for a recording, once all was tried out; `memory_holders`
    who else holds memory of this rank's GPU, in words.
    """

    backend: MultiGroupBackend
    identity: RankIdentity
    machines: Callable[[], Machines | None]
    library: NcclLibrary | None = None
    path_watch: PathWatch | None = None
    read_condition: ReadCondition = lambda: None
    memory_holders: Callable[[], str] = lambda: ""


def open_backend(rank: Rank, plan: CollectivePlan, stack: ExitStack) -> Opened:
    """The backend asked for, else nccl where any rank sees a GPU, so that a node without one is not passed over.

    What is begun beside it ends with `stack`. Raises AgreedError where a rank cannot.
    """
    driver = read_driver(os.environ)
    # Before any rank has a context: the gather below makes sure of that.
    use = NvmlUse()
    stack.callback(use.close)
    sees_gpus = any(rank.group.gather(driver.visible > 0))
    asked = plan.backend
    kind = default_backend(gpus=sees_gpus) if asked is None else agree(rank.group, lambda: backend_named(asked))
    if kind.needs_gpus:
        return _open_on_gpu(kind, rank, plan, driver, use, stack)
    agree(rank.group, lambda: plan.refuse_gpu_options("no rank sees one"))
    machines = _read_machines(rank, plan)
    return Opened(backend=open_kind(kind, rank, plan), identity=rank.identity, machines=lambda: machines)


def open_kind(
    kind: BackendKind,
    rank: Rank,
    plan: CollectivePlan,
    device: CudaDevice | None = None,
    library: NcclLibrary | None = None,
) -> MultiGroupBackend:
    """A backend on this rank. Raises AgreedError: it cannot reduce a type that was asked for."""
    request = plan.request
    ops = request.ops if request.collective.reduces else None
    agree(rank.group, lambda: kind.check_types(request.dtypes, ops))
    return kind.open(
        BackendSetup(
            group=rank.own,
            ranks_on_node=rank.ranks_on_node,
            progress=rank.progress,
            device=device,
            library=library,
            allocator=plan.allocator,
        )
    )


def _open_on_gpu(
    kind: BackendKind, rank: Rank, plan: CollectivePlan, driver: Driver, use: NvmlUse, stack: ExitStack
) -> Opened:
    """NCCL on this rank's GPU. Nodes are read, and NCCL's log is listened to, before its first call."""
    group = rank.group
    path_watch, machines = None, None
    if plan.evidence is EvidenceUse.OFF:
        machines = _read_machines(rank, plan)
    else:
        keeps_log = plan.recording.record is not None
        watch = PathWatch(group, rank.identity, strict=plan.strict, keeps_log=keeps_log, use=use)
        path_watch = stack.enter_context(watch)
    rank.progress.enter(Phase.OPENING)
    device, identity = open_gpu(group, rank.identity, rank.ranks_on_node, driver)
    agree(group, lambda: check_unset(plan.variants, nccl_settings(os.environ)))
    condition = NvmlCondition(str(identity.gpu_bus_id))
    stack.callback(condition.close)

    def memory_holders() -> str:
        return holders(use.read(str(identity.gpu_bus_id), {identity.pid}), format_memory)

    stack.enter_context(naming_holders(memory_holders))
    library = agree(group, lambda: NcclLibrary(plan.nccl_library), place=str(identity))
    if path_watch is not None:
        path_watch.begin(library, identity)
        stack.enter_context(path_watch.naming_refusals(library))
    rank.progress.enter(Phase.CONNECTING)
    return Opened(
        backend=open_kind(kind, rank, plan, device, library),
        identity=identity,
        machines=path_watch.machines if path_watch is not None else lambda: machines,
        library=library,
        path_watch=path_watch,
        read_condition=condition.read,
        memory_holders=memory_holders,
    )


@contextmanager
def naming_holders(memory_holders: Callable[[], str]) -> Iterator[None]:
    """Turn CUDA's error for memory that it does not get into one that says who holds it, where others do.

    Raises CouldNotMeasureError: others hold memory of this rank's GPU.
    """
    try:
        yield
    except Exception as error:
        held = memory_holders() if _OUT_OF_MEMORY in str(error) else ""
        if not held:
            raise
        raise CouldNotMeasureError(
            str(error),
            expected="memory for the largest of --sizes, and for NCCL",
            reason=f"others hold memory of this GPU: {held}",
            next_step="end them, or give smaller --sizes",
        ) from error


def _read_machines(rank: Rank, plan: CollectivePlan) -> Machines | None:
    """Nodes and processes for a recording, read here where nobody observes paths, who reads them anyway."""
    if plan.recording.record is None:
        return None
    own = [probe(SECONDS_TO_READ_A_NODE, os.environ)] if rank.identity.local_rank == 0 else []
    return gathered(rank.group, own, own_process(rank.identity))
