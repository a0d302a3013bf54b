"""The opened backend of a collective on one rank, and findings about its node for the report."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpubench.backends.mpi import group as mpi
from gpubench.backends.registry import BackendKind, BackendSetup
from gpubench.errors import UsageError
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.rank import agree
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, gathered, own_process
from gpubench.measure.collective.sweep import ReadCondition
from gpubench.model.facts.process import MpiSupport
from gpubench.model.terms.operation import HOST, MPI, gated_backends
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Mode
from gpubench.ports.backend import AbortableBackend, MultiGroupBackend
from gpubench.ports.group import Group
from gpubench.ranks.watchdog.rank import RankProgress

if TYPE_CHECKING:
    from gpubench.backends.cuda import CudaDevice
    from gpubench.backends.nccl.library import NcclLibrary
    from gpubench.jobs.collective.opening_gpu import PathWatch
    from gpubench.jobs.machines import Machines
    from gpubench.model.paths.topology import Topology
    from gpubench.model.results.report import Report


class Rank(Struct, frozen=True):
    """One rank, with its node. `group` has all ranks of the job, `own` has the ranks that measure together."""

    group: Group
    own: Group
    identity: RankIdentity
    ranks_on_node: int
    progress: RankProgress


class Opened(Struct, frozen=True, kw_only=True):
    """An opened backend, the rank with its GPU, and functions that observe both.

    - `machines` returns nodes and processes on the first rank.
    - `memory_holders` names other processes that use memory of the GPU.
    - `unverified_variables` are variables of --set that NCCL may not read.
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
        """Return why a trial showed that a backend does not support a collective here. Empty if it does."""
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
    """Open a backend on this rank. If `connect` is true, also open its connections.

    Raises AgreedError if the backend cannot start or does not support a data type.
    """
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
        gated=bool(gated_backends((kind.name, *plan.backends), one_by_one=one_by_one, graph=graph)),
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
            expected="ranks started by MPI, which moves the data",
            next_step="--backend torch:gloo, or mpirun -n 2 gpubench ...",
        )


def answer_for_all(progress: RankProgress, backends: Sequence[MultiGroupBackend]) -> None:
    """Let the watchdog query and abort the communicators of all backends. By default it only handles the last one."""
    abortable = [backend for backend in backends if isinstance(backend, AbortableBackend)]
    if len(abortable) < 2:
        return

    def trouble() -> str:
        return next(filter(None, (each.trouble() for each in abortable)), "")

    def abort() -> None:
        for each in abortable:
            each.abort()

    progress.answer_watchdog(trouble, abort)


def read_machines(rank: Rank, plan: CollectivePlan) -> "Machines | None":
    """Read nodes and processes if the run is recorded. If paths are observed, PathWatch already reads both."""
    if plan.recording.record is None:
        return None
    from gpubench.machine.probe import probe

    own = [probe(SECONDS_TO_READ_A_NODE, os.environ)] if rank.identity.local_rank == 0 else []
    return gathered(rank.group, own, own_process(rank.identity))


def count_gpus_by_host(identities: Sequence[RankIdentity], listed: Sequence[int]) -> dict[str, int]:
    """Return the number of GPUs per host. Count the GPUs that the driver lists, or that ranks use if this is more."""
    found: dict[str, int] = {}
    for identity, gpus in zip(identities, listed, strict=True):
        driven = {each.gpu_uuid for each in identities if each.host == identity.host and each.gpu_uuid}
        found[identity.host] = max(found.get(identity.host, 0), gpus, len(driven))
    return found


def add_machine_findings(report: "Report", nodes: Sequence["Topology"], plan: CollectivePlan) -> "Report":
    """Add findings about the nodes to the report, except findings that it already has."""
    from gpubench.conditions.checks import fact_findings, machine_findings
    from gpubench.conditions.circumstances import Facts
    from gpubench.conditions.folding import fold
    from gpubench.model.paths.nodes import group_nodes
    from gpubench.profiles import match_nodes

    asked = plan.profile is not None
    matches = match_nodes(nodes, os.environ, plan.profile)
    profiles = [None if match is None else match.profile for match in matches]
    facts = Facts(nodes, group_nodes(nodes), profiles=profiles, asked=asked)
    found = machine_findings(facts)
    known = {(finding.id, finding.subjects) for finding in report.findings}
    report = report.add_findings(last=[finding for finding in found if (finding.id, finding.subjects) not in known])
    return replace(
        report, findings=fold(report.findings, nodes, fact_findings(facts), ends=_gpus_of_staged_pairs(report, nodes))
    )


def _gpus_of_staged_pairs(report: "Report", nodes: Sequence["Topology"]) -> dict[str, str]:
    """Map each host-staged pair of ranks on the same node to its two GPUs."""
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


def add_gpu_count_finding(report: "Report", gpus: Mapping[str, int], plan: CollectivePlan) -> "Report":
    """Add a finding for hosts whose number of GPUs differs from --expect-gpus."""
    if plan.expected_gpus is None:
        return report
    from gpubench.conditions.checks import gpu_count_findings

    return report.add_findings(last=gpu_count_findings(gpus, plan.expected_gpus))
