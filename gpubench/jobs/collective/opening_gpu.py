"""The backend of a collective on a rank with a GPU, with NCCL's log and the GPU's counters watched."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.environment import nccl_settings
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.node.nvml import Driver
from gpubench.hardware.registry import BackendKind
from gpubench.hardware.traffic import NvmlCondition, NvmlUse
from gpubench.jobs.collective.opened import Opened, Rank, open_kind, read_machines
from gpubench.jobs.collective.path_watch import PathWatch
from gpubench.jobs.plans import CollectivePlan, check_unset
from gpubench.jobs.rank import agree, check_nccl_of_ranks, open_gpu
from gpubench.model.facts.backends import MPI, TORCH
from gpubench.model.facts.process import MpiSupport
from gpubench.model.facts.traffic import holders
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.ranks import Phase
from gpubench.model.terms.units import format_memory
from gpubench.ports.group import Group

_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"


def open_on_gpu(
    kinds: Sequence[BackendKind],
    rank: Rank,
    plan: CollectivePlan,
    driver: Driver,
    use: NvmlUse | None,
    stack: ExitStack,
) -> Opened:
    """The first of some backends on this rank's GPU, once all are loaded, nodes read and NCCL's log listened to."""
    group, kind = rank.group, kinds[0]
    support = mpi_support(rank, plan) if any(each.name == MPI for each in kinds) else None
    path_watch, machines = None, None
    if plan.evidence is EvidenceUse.OFF:
        machines = read_machines(rank, plan)
    else:
        keeps_log = plan.recording.record is not None
        watch = PathWatch(group, rank.identity, strict=plan.strict, keeps_log=keeps_log, use=use)
        path_watch = stack.enter_context(watch)
    rank.progress.enter(Phase.OPENING)
    alone = _asked_alone(kinds, plan, group)
    if plan.nccl_library is None:
        agree(group, lambda: [each.load(driver.cuda) for each in _torch_first(kinds)], place=str(rank.identity))
    device, identity = open_gpu(group, rank.identity, rank.ranks_on_node, driver, shared=True)
    agree(group, lambda: check_unset(plan.variants, nccl_settings(os.environ)))
    condition = NvmlCondition(str(identity.gpu_bus_id))
    stack.callback(condition.close)

    def memory_holders() -> str:
        return "" if use is None else holders(use.read(str(identity.gpu_bus_id), {identity.pid}), format_memory)

    stack.enter_context(naming_holders(memory_holders))
    library = agree(group, lambda: _load(kinds, plan, driver), place=str(identity))
    if any(each.logs_to_nccl for each in kinds):
        check_nccl_of_ranks(group, identity, library, driver, plan.kernels_at_once)
    if path_watch is not None:
        path_watch.begin(library, identity, no_log=kind.no_log, by_design=kind.by_design)
        stack.enter_context(path_watch.naming_refusals(library))
    rank.progress.enter(Phase.CONNECTING)
    return Opened(
        kind=kind,
        backend=open_kind(kind, rank, plan, device, library),
        device=device,
        mpi_support=support,
        nccl_alone=group.broadcast(alone()),
        identity=identity,
        machines=path_watch.machines if path_watch is not None else lambda: machines,
        library=library,
        path_watch=path_watch,
        read_condition=condition.read,
        memory_holders=memory_holders,
    )


def mpi_support(rank: Rank, plan: CollectivePlan) -> MpiSupport:
    """What MPI does with GPU memory, tried before any rank has a GPU. Raises AgreedError without an mpirun."""
    from gpubench.collectives.registry import SUMMARIES
    from gpubench.hardware.mpi.backends import TrialCommand, read_support

    rank.progress.enter(Phase.SET_UP, "trying MPI on GPU memory", len(SUMMARIES))
    asked = plan.collective.name
    operations = [asked, *(each for each in SUMMARIES if each != asked)]

    def tried() -> MpiSupport | None:
        if rank.group.rank:
            return None
        return read_support(operations, TrialCommand.of_launcher(), completed=lambda: rank.progress.completed(1))

    return rank.group.broadcast(agree(rank.group, tried))


def _asked_alone(kinds: Sequence[BackendKind], plan: CollectivePlan, group: Group) -> Callable[[], str]:
    """Asks, on the first rank, for the libnccl that CuPy loads where torch does not come first; '' where it is not."""
    torch_comes_first = plan.nccl_library is None and any(kind.name.startswith(TORCH) for kind in kinds)
    if group.rank or not torch_comes_first:
        return lambda: ""
    from gpubench.hardware.nccl.alone import start_asking

    return start_asking(dict(os.environ))


def _load(kinds: Sequence[BackendKind], plan: CollectivePlan, driver: Driver) -> NcclLibrary:
    """The libnccl that CuPy uses: the one asked for, else that of torch where it is measured.

    A process has one libnccl.so.2, the first that is loaded. Raises CouldNotMeasureError: one cannot be loaded.
    """
    library = None if plan.nccl_library is None else NcclLibrary(plan.nccl_library)
    for kind in _torch_first(kinds):
        kind.load(driver.cuda)
    return library or NcclLibrary(plan.nccl_library)


def _torch_first(kinds: Sequence[BackendKind]) -> list[BackendKind]:
    """Backends in the order in which they are loaded: where torch is still being imported it is waited for."""
    return sorted(kinds, key=lambda kind: not kind.name.startswith(TORCH))


@contextmanager
def naming_holders(memory_holders: Callable[[], str]) -> Iterator[None]:
    """Raise CouldNotMeasureError that says who holds the memory of this GPU which CUDA refuses."""
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
