"""Scan the nodes of a job, or simulated nodes, for faulty nodes, rails and leaf switches."""

import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

from msgspec import Struct

from gpubench.backends.mpi import group as mpi
from gpubench.backends.scan_worker import PAIR
from gpubench.errors import CouldNotMeasureError, GpubenchError, UsageError, shared_gpu_under_launcher
from gpubench.formats.delivery import say, tell
from gpubench.jobs.collective.plan import SHARING_OPTION
from gpubench.jobs.metadata import recorded_settings
from gpubench.jobs.plans import ScanPlan
from gpubench.jobs.rank import usable_driver
from gpubench.jobs.rounds import (
    HOST,
    NAME,
    KeptScan,
    RenumberedRounds,
    ResumedRounds,
    RoundsFolder,
    check_backend,
    check_node_count,
    check_placement,
    check_same,
    deliver,
    each_once,
    fact_findings,
    is_quick,
    numbered,
    numbers_of_kept,
    read_rounds,
    telling,
    whole_node_environment,
)
from gpubench.jobs.runner import check_file_writable, check_writable
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, Simulated, Simulation, refuse_under_launcher
from gpubench.machine.environment import NODE_VARIABLE
from gpubench.machine.host import cost_of_turns, count_gpus, is_mps_running, sharing_settings
from gpubench.machine.nvml import visible_count
from gpubench.machine.probe import probe
from gpubench.measure.scan import judging
from gpubench.measure.scan.report import SECTIONS as SECTIONS
from gpubench.measure.scan.report import ScanResult, clock_findings
from gpubench.measure.scan.rounds import (
    NOTHING_BEFORE,
    InsideNodes,
    MeasureCollective,
    RoundMeasurer,
    collectives,
    scan,
)
from gpubench.measure.scan.verdicts import decode, nic_names, rail_rates
from gpubench.model.facts.environment import SECONDS_FOR_THE_FIRST_RANK, LaunchedRank, detect_launcher
from gpubench.model.paths.nodes import build_topologies, rename_duplicates
from gpubench.model.paths.topology import Topology
from gpubench.model.results.scan import RANK_OF_HOST, BeforeRounds, LocalFigure, RingFailure, ScanFabric, StoredFabric
from gpubench.model.terms.ranks import Phase
from gpubench.model.terms.verdict import Finding, Origin
from gpubench.profiles import find_node_profiles
from gpubench.ranks.launch import OWN_SETTINGS_VARIABLE, find_launcher, own_settings
from gpubench.ranks.scan.coordinator import Coordinator, NodeRanks
from gpubench.ranks.scan.supervisor import RankCard, Supervisor
from gpubench.ranks.watchdog import rank as watchdog
from gpubench.ranks.watchdog.peers import offered_addresses
from gpubench.readers.leaves import find_leaves
from gpubench.simulated.scan import (
    SimulatedRounds,
    host_names,
    simulated_local_figures,
    simulated_model,
    simulated_scan_fabric,
)

SECONDS_TO_START = 120.0
"""Timeout for MPI_Init and the exchange of addresses. After it, the watchdogs abort the job."""

SECONDS_TO_GATHER = 60.0
"""Timeout for the supervisors of all ranks to connect to rank 0."""

SECONDS_TO_FINALIZE = 10.0
"""Timeout for MPI_Finalize when no node is gone. It is called because mpirun complains about ranks that exit
without it.
"""

_FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"
"""Open MPI sets this variable to 1 for mpirun --with-ft ulfm. Such an mpirun does not end if ranks exit without
MPI_Finalize. MPI_Finalize works there even if a rank has died.
"""

_SECRET_BYTES = 32
_NOT_HERE = "it is not in the resumed job"


class ScanMembers(Struct, frozen=True):
    """What every rank of a scan has after setup: addresses, placement and the shared secret.

    `nodes` has the facts of every host, and is empty on all ranks except rank 0.
    """

    cards: tuple[RankCard, ...]
    placement: NodeRanks
    secret: bytes
    backend: str
    nodes: tuple[Topology, ...] = ()


def run_ranks(plan: ScanPlan, arguments: Sequence[str], launch: LaunchedRank) -> int:
    """Run as one rank of a scan. Return the exit code, or exit the process with this code.

    If a node is gone, exit without MPI_Finalize, unless Open MPI runs with fault tolerance.
    """
    progress = watchdog.start(launch.rank, launch.size, mpi.host_name(), SECONDS_TO_START, None)
    progress.enter(Phase.MPI_INIT)
    try:
        group = mpi.start(launch)
    except GpubenchError as error:
        progress.leave()
        _tell_first(error, launch.rank)
        mpi.abort(None, error.exit_code)
    progress.exchange_addresses(group)
    progress.enter(Phase.SET_UP)
    coordinator: Coordinator | None = None
    supervisor: Supervisor | None = None
    try:
        meeting, supervisor, coordinator = _meet(plan, group)
    except GpubenchError as error:  # All ranks raise the same error
        progress.close()
        _tell_first(error, group.rank)
        mpi.finish()
        return error.exit_code
    progress.close()
    is_whole, code = _scan(plan, arguments, group.rank, meeting, supervisor, coordinator)
    sys.stdout.flush()
    sys.stderr.flush()
    if is_whole or os.environ.get(_FAULT_TOLERANT) == "1":
        _finish_within(SECONDS_TO_FINALIZE, code)
    os._exit(code)


def _tell_first(error: GpubenchError, rank: int) -> None:
    if rank == 0 and sys.__stderr__ is not None:
        tell(error, sys.__stderr__)
    elif rank:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)


def _meet(plan: ScanPlan, group: mpi.MpiGroup) -> tuple[ScanMembers, Supervisor, Coordinator | None]:
    """Exchange placement, GPUs and the shared secret. Ranks communicate by MPI only during this setup.

    Raises GpubenchError on every rank if the placement does not allow a scan.
    """
    if plan.ranks_per_gpu > 1 and OWN_SETTINGS_VARIABLE not in os.environ:
        raise shared_gpu_under_launcher(plan.ranks_per_gpu, group.size)
    own_nodes, local_rank = mpi.nodes(group)
    nodes = list(range(group.size)) if plan.ranks_as_nodes else own_nodes
    secret = bytes.fromhex(group.broadcast(secrets.token_hex(_SECRET_BYTES) if group.rank == 0 else None))
    hosts = group.gather(mpi.host_name())
    check_node_count(len(set(nodes)))
    gpus = count_gpus()
    visible = visible_count(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # NCCL only detects that two ranks use the same GPU if their host names are equal.
    hosts_of_nccl = group.gather(os.environ.get("NCCL_HOSTID") or mpi.host_name())
    backend = check_backend(plan.backend, group.gather(gpus if visible else 0), hosts_of_nccl)
    if backend == HOST:
        placement = check_placement(nodes, hosts)
    else:
        placement = check_placement(nodes, hosts_of_nccl, group.gather(visible))
    rails = placement.rails_by_rank[group.rank]
    devices = {rail: local_rank if len(rails) == 1 else rail for rail in rails}
    read = group.collect([probe(SECONDS_TO_READ_A_NODE, whole_node_environment(os.environ))] if local_rank == 0 else [])
    snapshots = rename_duplicates([each for own in read or () for each in own])
    supervisor = Supervisor(backend, group.rank, devices, secret)
    coordinator = Coordinator(placement, secret, plan.round_timeout_s) if group.rank == 0 else None
    card = RankCard(
        group.rank,
        mpi.host_name(),
        tuple(offered_addresses()),
        {rail: worker.port for rail, worker in supervisor.workers.items()},
        0 if coordinator is None else coordinator.port,
    )
    cards = tuple(group.gather(card))
    return ScanMembers(cards, placement, secret, backend, tuple(build_topologies(snapshots))), supervisor, coordinator


def _scan(
    plan: ScanPlan,
    arguments: Sequence[str],
    rank: int,
    meeting: ScanMembers,
    supervisor: Supervisor,
    coordinator: Coordinator | None,
) -> tuple[bool, int]:
    if coordinator is None:
        try:
            return supervisor.serve(meeting.cards, plan.round_timeout_s), 0
        except OSError:
            return False, CouldNotMeasureError.exit_code
        finally:
            supervisor.close()

    def serve() -> None:
        with suppress(OSError):
            supervisor.serve(meeting.cards, plan.round_timeout_s)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    try:
        coordinator.accept(SECONDS_TO_GATHER)
        code = _directed(plan, arguments, meeting, coordinator)
    except GpubenchError as error:
        _tell_first(error, rank)
        code = error.exit_code
    finally:
        coordinator.close()
        serving.join(SECONDS_TO_FINALIZE)
        supervisor.close()
    if coordinator.gone:
        say(
            "gpubench: a node is gone, so mpirun or srun may wait for it. The report is complete. If they do, end "
            "the job.",
            to=sys.stderr,
        )
    return not coordinator.gone, code


def _directed(plan: ScanPlan, arguments: Sequence[str], meeting: ScanMembers, coordinator: Coordinator) -> int:
    fabric = _fabric(plan, meeting)
    seed, measurer, kept = plan.seed, cast("RoundMeasurer", coordinator), None
    gone: dict[int, str] = {}
    numbers = {node: node for node in range(len(fabric.hosts))}
    if plan.resume is not None:
        kept = read_rounds(plan.resume)
        numbers = numbers_of_kept(kept, fabric.hosts, plan.resume)
        absent = set(range(len(kept.fabric.hosts))) - set(numbers.values())
        rounds = RenumberedRounds(coordinator, numbers)
        fabric, seed = kept.fabric, kept.stored.seed
        gone = dict.fromkeys(sorted(absent), _NOT_HERE)
        measurer = ResumedRounds(kept.outcomes, rounds, gone)
    folder = RoundsFolder(plan.resume or plan.rounds, kept)
    folder.begin(StoredFabric.of(fabric, seed, meeting.backend, Origin.MEASURED))
    folder.found(BeforeRounds(gone))
    inside = InsideNodes(coordinator, range(len(numbers)), fabric.rails)
    passes = []
    before = BeforeRounds() if kept is None else kept.before
    for _ in range(2):
        passes.append([each._replace(node=numbers[each.node]) for each in (*coordinator.local(), *inside.figures())])
        failed = numbered(coordinator.failed(), numbers)
        folder.found(failed.without(before))
        before = failed.beside(before)
    first, second = passes
    local: dict[LocalFigure, float] = judging.still_slow(judging.slow_figures(first), second)
    clocks = {numbers[node]: seconds for node, seconds in coordinator.clock_offsets().items()}
    profiles = find_node_profiles(meeting.nodes, os.environ)
    findings = [
        *fact_findings(meeting.nodes, profiles),
        *clock_findings(fabric, clocks),
        *judging.wrong_data_inside(fabric, (*first, *second)),
        *judging.not_measured_inside(fabric, (first, second), list(local)),
    ]
    if not plan.ranks_as_nodes and meeting.backend != HOST:
        of_nodes = {numbers[node]: profile for node, profile in enumerate(profiles) if node in numbers}
        findings += judging.find_nodes_below_profile(fabric, (first, second), of_nodes, list(local))
    folder.phase_0(judging.better_of(first, second), findings)
    if kept is not None:
        local, findings = judging.find_slowest(kept.local(), local), each_once([*kept.findings(), *findings])
    quick = is_quick(plan.quick, kept)
    with telling(plan, folder.keep, is_rank=True) as keep:
        course = scan(fabric, seed, measurer, quick=quick, keep=keep, before=before)
    groups = [] if quick else list(collectives(course, seed, _rings(coordinator, numbers, fabric)))
    result = ScanResult(course, decode(course, local), groups, Origin.MEASURED, findings)
    environment = recorded_settings(os.environ)
    return deliver(plan, arguments, result, backend=meeting.backend, seed=seed, environment=environment, is_rank=True)


def _rings(coordinator: Coordinator, numbers: Mapping[int, int], fabric: ScanFabric) -> MeasureCollective:
    """Return a function that measures a collective on a ring of nodes.

    `numbers` maps node numbers of this job to node numbers of the original scan.
    """
    now = {then: number for number, then in numbers.items()}

    def measure(nodes: Sequence[int]) -> tuple[float | None, str]:
        if len(nodes) < PAIR:
            return None, "fewer than two nodes are left"
        found = coordinator.collective([now[node] for node in nodes])
        return (
            (None, f"{fabric.hosts[numbers[found.node]]}: {found.seen}")
            if isinstance(found, RingFailure)
            else (found, "")
        )

    return measure


def _fabric(plan: ScanPlan, meeting: ScanMembers) -> ScanFabric:
    cards, placement = meeting.cards, meeting.placement
    names = [cards[ranks[0]].host for ranks in placement.ranks_by_node]
    if plan.ranks_as_nodes:
        names = [f"{cards[ranks[0]].host}{RANK_OF_HOST}{ranks[0]}" for ranks in placement.ranks_by_node]
    leaves: Sequence[str | None] = [None] * len(names)
    if plan.leaves is not None:
        leaves = find_leaves(names, plan.leaves.leaves, plan.leaves.name)
    first = placement.ranks_by_node[0]
    rails = sum(len(placement.rails_by_rank[rank]) for rank in first)
    between_nodes = not plan.ranks_as_nodes and meeting.backend != HOST
    rates = rail_rates(meeting.nodes, rails) if between_nodes else ()
    return ScanFabric(tuple(names), rails, tuple(leaves), nic_names(meeting.nodes, rails), rates)


def _finish_within(seconds: float, code: int) -> None:
    """Call MPI_Finalize, but exit after some seconds, because MPI_Finalize hangs if a rank has died."""
    timer = threading.Timer(seconds, lambda: os._exit(code))
    timer.daemon = True
    timer.start()
    mpi.finish()
    timer.cancel()


SIMULATED = "simulated"


def run(plan: ScanPlan, arguments: Sequence[str]) -> int:
    """Scan and return the exit code. Raises GpubenchError if nothing can be scanned, or an output cannot be written."""
    launch = detect_launcher(os.environ)
    if launch is None or launch.rank == 0:
        check_writable(plan.presentation.outputs)
        if plan.hostfile is not None:
            check_file_writable(plan.hostfile)
    refuse_under_launcher(NAME, plan.source, launch)
    if plan.simulation is not None:
        return _run_simulated(plan, plan.simulation, arguments)
    if plan.replay is not None:
        return _run_replayed(plan, read_rounds(plan.replay), arguments)
    if launch is None and plan.ranks_per_gpu > 1:
        _become_launcher(plan.ranks_per_gpu, arguments)
    if launch is not None:
        if plan.ranks_per_gpu > 1 and NODE_VARIABLE not in os.environ and OWN_SETTINGS_VARIABLE in os.environ:
            os.environ[NODE_VARIABLE] = f"rank{launch.rank}"
            os.environ[OWN_SETTINGS_VARIABLE] = ",".join((*own_settings(os.environ), NODE_VARIABLE))
        return run_ranks(plan, arguments, launch)
    raise UsageError(
        "scan without ranks",
        expected="a job with one rank per node or per GPU, because the nodes measure each other",
        next_step=f"{_launch(os.environ)}, or gpubench scan --simulate 'hgx-h100-8*64'",
    )


def _become_launcher(ranks: int, arguments: Sequence[str]) -> None:
    """Replace this process with an mpirun that starts `ranks` ranks on this host. Each rank is treated as a node.

    Raises GpubenchError if there are too few ranks, no GPU, or no mpirun.
    """
    check_node_count(ranks)
    usable_driver(f"scan {SHARING_OPTION} {ranks}")
    mpirun = find_launcher()
    environment = mpirun.environment(os.environ, "", sharing_settings(ranks))
    if not is_mps_running(environment):
        say(f"gpubench: {cost_of_turns(ranks)}", to=sys.stderr)
    os.execve(mpirun.path, mpirun.command(ranks, arguments), environment)


def _launch(environment: Mapping[str, str]) -> str:
    """Return the command that starts one rank per node. In a Slurm allocation it uses srun, otherwise mpirun."""
    if environment.get("SLURM_JOB_ID"):
        return "srun --mpi=pmix --ntasks-per-node=1 gpubench scan"
    return "mpirun --hostfile hosts --map-by ppr:1:node gpubench scan with one host per line in the file hosts"


def _run_simulated(plan: ScanPlan, simulation: Simulation, arguments: Sequence[str]) -> int:
    machine, faults, seed = simulation.machine, simulation.faults, simulation.seed
    if simulation.note:
        say(f"gpubench: {simulation.note}", to=sys.stderr)
    check_node_count(machine.nodes)
    named = None if plan.leaves is None else find_leaves(host_names(machine), plan.leaves.leaves, plan.leaves.name)
    fabric = simulated_scan_fabric(machine, named, faults)
    rounds = SimulatedRounds(fabric, simulated_model(machine, faults, fabric), seed)
    first, second = (
        list(simulated_local_figures(machine, faults, range(machine.nodes), seed + repeat)) for repeat in (0, 1)
    )
    stored = StoredFabric.of(fabric, seed, SIMULATED, Origin.SIMULATED)
    kept = None if plan.resume is None else check_same(read_rounds(plan.resume), stored, plan.resume)
    folder = RoundsFolder(plan.resume or plan.rounds, kept)
    folder.begin(stored)
    local = judging.still_slow(judging.slow_figures(first), second)
    profiles = dict.fromkeys(range(machine.nodes), machine.profile)
    findings = [
        *_facts(simulation),
        *judging.wrong_data_inside(fabric, (*first, *second)),
        *judging.find_nodes_below_profile(fabric, (first, second), profiles, list(local)),
    ]
    folder.phase_0(judging.better_of(first, second), findings)
    before = NOTHING_BEFORE
    if kept is not None:
        local, findings = judging.find_slowest(kept.local(), local), each_once([*kept.findings(), *findings])
        before = kept.before
    quick = is_quick(plan.quick, kept)
    measurer = rounds if kept is None else ResumedRounds(kept.outcomes, rounds)
    with telling(plan, folder.keep) as keep:
        course = scan(fabric, seed, measurer, quick=quick, keep=keep, before=before)
    groups = [] if quick else list(collectives(course, seed, rounds.collective))
    result = ScanResult(course, decode(course, local), groups, Origin.SIMULATED, findings)
    return deliver(
        plan, arguments, result, backend=SIMULATED, seed=seed, source=simulation.source, profile=simulation.profile
    )


def _facts(simulation: Simulation) -> list[Finding]:
    """Return the findings from the facts of simulated nodes, or none if all faults affect only the scan itself."""
    if all(fault.command == "scan" for fault in simulation.faults):
        return []
    machines = Simulated(simulation).machines()
    nodes = machines.nodes
    return fact_findings(nodes, find_node_profiles(nodes, os.environ), machines.processes)


def _run_replayed(plan: ScanPlan, kept: KeptScan, arguments: Sequence[str]) -> int:
    rounds = ResumedRounds(kept.outcomes, None)
    quick = is_quick(plan.quick, kept)
    course = scan(kept.fabric, kept.stored.seed, rounds, quick=quick, keep=lambda *_: None, before=kept.before)
    origin = Origin.SIMULATED if kept.stored.origin == Origin.SIMULATED else Origin.RECORDED
    result = ScanResult(course, decode(course, kept.local()), (), origin, kept.findings())
    source = f"--replay {plan.replay}"
    return deliver(plan, arguments, result, backend=kept.stored.backend, seed=kept.stored.seed, source=source)
