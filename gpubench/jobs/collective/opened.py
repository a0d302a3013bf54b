"""An opened backend of a collective on one rank, what opens it anywhere, and how many GPUs nodes have."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubench.backends.mpi import group as mpi
from gpubench.backends.registry import BackendKind, BackendSetup
from gpubench.errors import UsageError
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.rank import agree
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, gathered, own_process
from gpubench.measure.collective.sweep import ReadCondition
from gpubench.model.facts.process import MpiSupport
from gpubench.model.terms.operation import HOST, MPI, gated
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.verdict import overall
from gpubench.ports.backend import AbortableBackend, MultiGroupBackend
from gpubench.ports.group import Group
from gpubench.ranks.watchdog.rank import RankProgress
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.backends.cuda import CudaDevice
    from gpubench.backends.nccl.library import NcclLibrary
    from gpubench.jobs.collective.opening_gpu import PathWatch
    from gpubench.jobs.machines import Machines
    from gpubench.model.paths.topology import Topology
    from gpubench.model.results.report import Report


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a job: in the job, in the group that it measures with, and on its node."""

    group: Group
    own: Group
    identity: RankIdentity
    ranks_on_node: int
    progress: RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A backend, the rank with its GPU, and what observes both.

    `machines` returns nodes and processes on the first rank; `memory_holders` names other users of the GPU's memory;
    `unverified_variables` are those of a sweep that nothing is known to read.
    """

    kind: BackendKind
    backend: MultiGroupBackend
    identity: RankIdentity
    machines: "Callable[[], Machines | None]"
    device: "CudaDevice | None" = None
    library: "NcclLibrary | None" = None
    path_watch: "PathWatch | None" = None
    read_condition: ReadCondition = lambda: None
    memory_holders: Callable[[], str] = lambda: ""
    mpi_support: MpiSupport | None = None
    nccl_alone: str = ""
    unverified_variables: tuple[str, ...] = ()

    def refusal(self, kind: BackendKind, collective: str) -> str:
        """The reason why a backend cannot run a collective here, where that was found out; else empty."""
        if kind.name != MPI or self.mpi_support is None:
            return ""
        return self.mpi_support.why_not(collective)


def open_kind(
    kind: BackendKind,
    rank: Rank,
    plan: CollectivePlan,
    device: "CudaDevice | None" = None,
    library: "NcclLibrary | None" = None,
    *,
    connect: bool = True,
) -> MultiGroupBackend:
    """A backend on this rank; with `connect`, connected. Raises AgreedError: it cannot reduce a type, or begin."""
    request = plan.request
    ops = request.ops if request.collective.reduces else None
    one_by_one, graph = request.sampling.mode is Mode.LATENCY, request.graph_replays > 0
    agree(rank.group, lambda: _check_mpi(kind, rank.group))
    agree(rank.group, lambda: kind.check_types(request.dtypes, ops))
    setup = BackendSetup(
        group=rank.own,
        ranks_on_node=rank.ranks_on_node,
        progress=rank.progress,
        device=device,
        library=library,
        allocator=plan.buffer_allocator,
        local_rank=rank.identity.local_rank,
        gated=bool(gated((kind.name, *plan.backends), one_by_one=one_by_one, graph=graph)),
    )
    if not kind.refusals:
        return kind.open(setup)

    def opened() -> MultiGroupBackend:
        backend = kind.open(setup)
        if connect:
            _ = backend.calls
        return backend

    return agree(rank.group, opened, place=str(rank.identity))


def _check_mpi(kind: BackendKind, group: Group) -> None:
    if kind.name in (MPI, HOST) and not isinstance(group, mpi.MpiGroup):
        raise UsageError(
            f"--backend {kind.name} under torchrun",
            expected="ranks that MPI started: it moves the data",
            next_step="--backend torch:gloo, or mpirun -n 2 gpubench ...",
        )


def answer_for_all(progress: RankProgress, backends: Sequence[MultiGroupBackend]) -> None:
    """Have the watchdog of a rank that hangs hear of, and abort, the communicators of all backends, not of the last."""
    abortable = [each for each in backends if isinstance(each, AbortableBackend)]
    if len(abortable) < 2:
        return

    def trouble() -> str:
        return next(filter(None, (each.trouble() for each in abortable)), "")

    def abort() -> None:
        for each in abortable:
            each.abort()

    progress.answer_watchdog(trouble, abort)


def read_machines(rank: Rank, plan: CollectivePlan) -> "Machines | None":
    """Nodes and processes for a recording, read here where nobody observes paths, who reads them anyway."""
    if plan.recording.record is None:
        return None
    from gpubench.machine.probe import probe

    own = [probe(SECONDS_TO_READ_A_NODE, os.environ)] if rank.identity.local_rank == 0 else []
    return gathered(rank.group, own, own_process(rank.identity))


def gpus_by_host(identities: Sequence[RankIdentity], listed: Sequence[int]) -> dict[str, int]:
    """GPUs by host: as many as the driver lists to any of its ranks, or as they drive where each is shown its own."""
    found: dict[str, int] = {}
    for identity, gpus in zip(identities, listed, strict=True):
        driven = {each.gpu_uuid for each in identities if each.host == identity.host and each.gpu_uuid}
        found[identity.host] = max(found.get(identity.host, 0), gpus, len(driven))
    return found


def with_machine(report: "Report", nodes: Sequence["Topology"], plan: CollectivePlan) -> "Report":
    """The report with what is wrong with the nodes, unless it is there already as the cause of slow rows."""
    from gpubench.conditions.checks import of_facts, on_machine
    from gpubench.conditions.circumstances import Facts
    from gpubench.conditions.folding import fold
    from gpubench.model.paths.nodes import group
    from gpubench.profiles import profiles_for

    asked = plan.profile is not None
    matches = profiles_for(nodes, os.environ, plan.profile)
    profiles = [None if each is None else each.profile for each in matches]
    facts = Facts(nodes, group(nodes), profiles=profiles, asked=asked)
    found = on_machine(facts)
    known = {(each.id, each.subjects) for each in report.findings}
    more = [each for each in found if (each.id, each.subjects) not in known]
    verdict = overall([report.verdict, *(each.severity for each in more)])
    findings = fold((*report.findings, *more), nodes, of_facts(facts), ends=_ends(report, nodes))
    return replace(report, verdict=verdict, findings=findings)


def _ends(report: "Report", nodes: Sequence["Topology"]) -> dict[str, str]:
    """The GPUs of ranks of one node between which bytes go through host memory, by the name of their path."""
    from gpubench.model.results.report import EvidenceRow

    gpus: dict[tuple[str, str | None], str] = {
        (node.snapshot.host, gpu.bus_id): gpu.device for node in nodes for gpu in node.gpus if gpu.bus_id
    }
    found = {}
    for row in report.rows(EvidenceRow):
        names = [gpus.get((row.source_node, each)) for each in (row.source_bus_id, row.destination_bus_id)]
        if row.host_staged and row.source_node == row.destination_node and None not in names:
            pair = f"{row.source} → {row.destination}".replace("rank ", "")
            found[pair] = f"{row.source_node} {names[0]} → {names[1]}"
    return found


def with_gpu_count(report: "Report", gpus: Mapping[str, int], plan: CollectivePlan) -> "Report":
    """The report with a finding on the hosts that have fewer or more GPUs than were asked for."""
    if plan.expected_gpus is None:
        return report
    from gpubench.conditions.checks import on_count

    found = on_count(gpus, plan.expected_gpus)
    verdict = overall([report.verdict, *(each.severity for each in found)])
    return replace(report, verdict=verdict, findings=(*report.findings, *found))
