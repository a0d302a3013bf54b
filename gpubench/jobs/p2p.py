"""Measure copies between GPUs in this process or between ranks. Simulate or replay such a measurement."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpubench.backends.copies import CudaRankCopies, Network
from gpubench.backends.cuda import CudaDevice
from gpubench.backends.mpi import group as mpi
from gpubench.backends.nccl.debug_log import NcclLog
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs import runner
from gpubench.jobs.machines import Machines
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import P2P_NAME, MemoryKind, P2pPlan
from gpubench.jobs.rank import agree, open_gpu, usable_driver
from gpubench.jobs.runner import Place, RankPlace, Steps
from gpubench.jobs.sources import Replayed, Simulated, first_node, gathered, own_process
from gpubench.machine import recorded
from gpubench.machine.environment import nccl_settings
from gpubench.machine.nvml import NvmlCounters
from gpubench.machine.probe import watch_errors
from gpubench.machine.traffic import NvmlUse
from gpubench.measure.p2p.copies import CopyBench, RankBench, unreachable_pairs
from gpubench.measure.p2p.request import (
    FILE,
    IPC,
    NETWORK,
    NVBANDWIDTH,
    VERSION,
    Bench,
    CopyMachine,
    Method,
    P2pRequest,
    RecordedP2p,
    RecordingBench,
    ReplayedBench,
    add_latency_series,
    default_series,
    find_pairs,
    machine_of_ranks,
    read_samples,
    sweep_series,
    wiring_of_process,
)
from gpubench.measure.p2p.run import SECTIONS as SECTIONS
from gpubench.measure.p2p.run import P2pRun, ReadErrors
from gpubench.measure.paths import IdleWindow
from gpubench.model.facts.environment import detect_launcher, refuse_several_ranks
from gpubench.model.paths.p2p import LATENCY_BYTES, Pair, Series
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.fault import COPIES
from gpubench.model.results.report import PAIR_COLUMNS, Metadata, PairRow, Report
from gpubench.model.results.required_path import MEASURE_PAIRS, check_possible, require_evidence
from gpubench.model.terms.operation import CopyGpu, CopyPattern, Direction, Engine, ManagedSupport
from gpubench.model.terms.ranks import Phase, RankIdentity
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Origin
from gpubench.ports.copies import Copies, LinkCounters, ManagedMemory
from gpubench.ports.group import Listener
from gpubench.profiles import ProfileMatch, match_node
from gpubench.simulated.links import NoCounters, SimulatedCopies, SimulatedManaged

# Few, because a sample of managed memory is a single copy. A sample of plain memory is a batch of copies
_MANAGED_SAMPLES = 5
_BYTES, _NVBANDWIDTH_BYTES = 256 * 2**20, 512 * 2**20

_HOST_BYTES = 64 * 2**20  # Smaller than between GPUs, because the host fills and verifies its own buffer


def _request_for_process(
    plan: P2pPlan, gpus: Sequence[CopyGpu], wiring: Wiring, managed: Sequence[ManagedSupport] = ()
) -> P2pRequest:
    """Return the copies to measure on the GPUs of one process.

    Raises UsageError if --pairs names a missing GPU, and CouldNotMeasureError if a single GPU has nothing to measure.
    """
    if plan.memory is MemoryKind.MANAGED:
        return _request_for_managed(plan, gpus, wiring, managed)
    size_bytes, method = _size_and_method(plan)
    if plan.like is not None:
        ways = [(engine, way) for engine in Engine for way in (Direction.WRITE, Direction.READ)]
        series = tuple(Series(engine, way, peer=True, size_bytes=size_bytes) for engine, way in ways)
    else:
        series = default_series(size_bytes) if plan.sizes is None else sweep_series(plan.sizes)
    whole, several = plan.sizes is None and plan.pairs is None, len(gpus) > 1
    host_bytes = _HOST_BYTES if plan.like is None else size_bytes
    if not several and not (plan.host and whole):
        raise CouldNotMeasureError(
            f"{plural(len(gpus), 'GPU')}, but copies need two",
            expected="two GPUs, for copies between them",
            reason="--gpus or CUDA_VISIBLE_DEVICES hides the others, or this machine has one",
            next_step="gpubench p2p, which copies between a single GPU and host memory",
        )
    pairs = _pairs_of_gpus(plan, gpus)
    return P2pRequest(
        pairs=pairs,
        series=add_latency_series(series, pairs, wiring) if several else (),
        host_bytes=host_bytes if plan.host and whole else None,
        patterns=tuple(CopyPattern) if plan.patterns and whole and plan.like is None and several else (),
        pattern_bytes=size_bytes,
        method=method,
        check=plan.check,
    )


def _request_for_managed(
    plan: P2pPlan, gpus: Sequence[CopyGpu], wiring: Wiring, managed: Sequence[ManagedSupport]
) -> P2pRequest:
    size_bytes = _HOST_BYTES if plan.sizes is None else plan.sizes[0]
    ways = ((Engine.CE, Direction.WRITE), (Engine.SM, Direction.READ))
    series = tuple(Series(engine, way, peer=True, size_bytes=size_bytes) for engine, way in ways)
    pairs = _pairs_of_gpus(plan, gpus)
    return P2pRequest(
        pairs=pairs,
        series=add_latency_series(series, pairs, wiring) if len(gpus) > 1 else (),
        host_bytes=size_bytes if plan.host and plan.pairs is None else None,
        pattern_bytes=size_bytes,
        method=Method(samples=_MANAGED_SAMPLES),
        check=plan.check,
        managed_bytes=size_bytes,
        managed=tuple(managed),
    )


def request_for_ranks(plan: P2pPlan, pairs: Sequence[Pair], machine: CopyMachine) -> P2pRequest:
    """Return the copies to measure between ranks: by copy engine within a node, by NCCL between nodes, and 16 bytes
    for latency.
    """
    size_bytes, method = _size_and_method(plan)
    ways = [(Direction.WRITE, size_bytes), (Direction.READ, size_bytes)]
    if plan.sizes is not None:
        ways = [(Direction.WRITE, size) for size in plan.sizes]
    elif plan.like is None:
        ways.append((Direction.WRITE, LATENCY_BYTES))
    scopes = {machine.scope(pair) for pair in pairs}
    series = [Series(Engine.CE, way, peer=True, size_bytes=size) for way, size in ways if IPC in scopes]
    series += [
        Series(Engine.CE, way, peer=True, size_bytes=size, network=True)
        for way, size in ways
        if NETWORK in scopes and way is Direction.WRITE
    ]
    return P2pRequest(
        pairs=tuple(pairs),
        series=tuple(series),
        pattern_bytes=size_bytes,
        method=method,
        check=plan.check,
    )


def _pairs_of_ranks(plan: P2pPlan, ranks: int) -> tuple[Pair, ...]:
    """Return the ordered pairs of ranks to measure. Raises UsageError if --pairs names a missing rank."""
    for one, other in plan.pairs or ():
        if max(one, other) >= ranks:
            raise UsageError(
                f"--pairs {one}-{other}: there is no rank {max(one, other)}",
                expected=f"ranks from 0 to {ranks - 1}, because under a launcher --pairs are ranks",
                next_step=f"start more of them: mpirun -n {max(one, other) + 1} ...",
            )
    return tuple(permutations(range(ranks), 2)) if plan.pairs is None else plan.pairs


def _size_and_method(plan: P2pPlan) -> tuple[int, Method]:
    return (_BYTES, Method()) if plan.like is None else (_NVBANDWIDTH_BYTES, NVBANDWIDTH)


def _pairs_of_gpus(plan: P2pPlan, gpus: Sequence[CopyGpu]) -> tuple[Pair, ...]:
    return tuple(permutations(range(len(gpus)), 2)) if plan.pairs is None else find_pairs(plan.pairs, gpus)


def check_managed(support: Sequence[ManagedSupport]) -> None:
    """Raise CouldNotMeasureError for --memory managed if no GPU has managed memory."""
    if support and all(each.managed is False for each in support):
        raise CouldNotMeasureError(
            support[0].missing_feature,
            expected="a GPU with unified memory",
            reason="a vGPU without unified memory, or a driver without its kernel module nvidia-uvm",
            next_step="gpubench p2p measures plain memory",
        )


class CopySetup(Struct, frozen=True, kw_only=True):
    """The machines, request and bench of a run that is ready to measure. `ranks` is empty if a single process
    measures.
    """

    plan: P2pPlan
    machines: Machines
    machine: CopyMachine
    request: P2pRequest
    bench: Bench
    libraries: Mapping[str, str]
    ranks: Sequence[RankIdentity] = ()

    def metadata(self, arguments: Sequence[str]) -> Metadata:
        machine, request, plan = self.machine, self.request, self.plan
        managed: dict[str, Any] = {}
        if request.managed_bytes:
            managed = {"memory": "managed", "managed": list(map(asdict, request.managed))}
        return build_metadata(
            arguments,
            P2P_NAME,
            machines=self.machines,
            matched=machine.matched,
            asked_profile=plan.profile is not None,
            origin=machine.origin,
            ranks=self.ranks,
            libraries=self.libraries,
            options={
                "pairs": [[machine.label(gpu) for gpu in pair] for pair in request.pairs],
                "sizes": sorted({one_series.size_bytes for one_series in request.series}),
                "warmup": request.method.warmup,
                "samples": request.method.samples,
                "repeats": request.method.repeats,
                "sample_seconds": request.method.sample_seconds,
                "as": plan.like,
                **managed,
                "check": request.check,
                "strict": plan.strict,
                "evidence": plan.evidence.value,
                "gpus": {machine.label(gpu): machine.describe(gpu) for gpu in range(len(machine.gpus))},
                **({"timeout_s": plan.timeout_s} if machine.is_ranks and plan.source.text is None else {}),
            },
        )

    @contextmanager
    def recorded_bench(self, metadata: Metadata) -> Iterator[Bench]:
        """Yield the bench. With --record, it also writes its samples to the recording."""
        directory, machine = self.plan.recording.record, self.machine
        if directory is None:
            yield self.bench
            return
        recorded.write_recording(directory, self.machines.snapshots, machine.processes)
        with recorded.recording_samples(directory, FILE) as write:
            write(
                RecordedP2p(
                    schema_version=VERSION,
                    origin=machine.origin,
                    request=self.request,
                    hosts=tuple(metadata.hosts),
                    gpus=() if machine.is_ranks else tuple(machine.gpus),
                    ranks=tuple(self.ranks),
                    unreachable=tuple(sorted(machine.unreachable)),
                    like=self.plan.like,
                    strict=self.plan.strict,
                    libraries=self.libraries,
                    environment=metadata.environment,
                )
            )
            yield RecordingBench(self.bench, write)


def replayed(plan: P2pPlan, source: Replayed) -> CopySetup:
    """Read a recorded run. It is strict if --strict was used for the recording or is used now. Raises UsageError."""
    machines = source.machines()
    found, samples = read_samples(recorded.read_samples(source.directory, FILE, P2P_NAME), source.text)
    machines = _nodes_of_samples(machines, found, source.directory)
    matched = match_node(machines.nodes[0], os.environ, plan.profile)
    origin = Origin.RECORDED if found.origin is Origin.MEASURED else found.origin
    if found.ranks:
        machine = machine_of_ranks(machines.nodes, found.ranks, machines.processes, matched, origin)
    else:
        wiring, apart = wiring_of_process(machines.nodes[0], found.gpus), frozenset(found.unreachable)
        machine = CopyMachine(wiring, found.gpus, machines.processes, matched, origin, apart)
    machine = replace(machine, profile_asked_for=plan.profile is not None, expected_gpus=plan.expected_gpus)
    return CopySetup(
        plan=dataclasses.replace(plan, strict=plan.strict or found.strict, like=found.like),
        machines=machines,
        machine=machine,
        request=found.request,
        bench=ReplayedBench(found, samples),
        libraries=found.libraries,
        ranks=found.ranks,
    )


def _nodes_of_samples(machines: Machines, found: RecordedP2p, directory: Path) -> Machines:
    """Return the nodes on which the samples were measured, in order. Raises UsageError if the recording lacks one
    of them.
    """
    by_host = {node.snapshot.host: node for node in machines.nodes}
    missing = [host for host in found.hosts if host not in by_host]
    if not missing and not found.ranks:
        known = {gpu.device for gpu in by_host[found.hosts[0]].gpus}
        missing = [gpu.device for gpu in found.gpus if gpu.device not in known]
    if missing:
        raise UsageError(
            f"--replay {directory}: samples of {', '.join(missing)}, which no node in the recording has",
            expected="nodes and samples of one run",
            reason="the folder was assembled from several recordings",
        )
    return replace(machines, nodes=[by_host[host] for host in found.hosts], environment=found.environment)


@contextmanager
def _open_rank_copies(rank: RankPlace) -> Iterator[CopySetup]:
    """Open the copies between this rank and the others. Raises AgreedError."""
    group, plan, progress = rank.group, rank.plan, rank.progress
    pairs = agree(group, lambda: _pairs_of_ranks(plan, group.size))
    driver = agree(group, lambda: usable_driver(P2P_NAME), place=str(rank.identity))
    # Start this before any rank has a CUDA context. The next collective call synchronizes all ranks.
    use = NvmlUse()
    # The first rank of a node reads its facts before any rank creates a CUDA context on its GPUs.
    reads, ranks_on_node = rank.identity.local_rank == 0, rank.node_by_rank.count(rank.identity.node)
    snapshots = agree(group, lambda: plan.source.machines().snapshots if reads else [], place=str(rank.identity))
    read = gathered(group, snapshots, own_process(rank.identity))
    progress.enter(Phase.OPENING)
    device, rank.identity = open_gpu(group, rank.identity, ranks_on_node, driver)
    identities = group.gather(rank.identity)
    progress.name_ranks(identities)
    # All ranks must use the profile of the first rank. Otherwise they would repeat different pairs and deadlock.
    matching = agree(
        group, lambda: None if read is None else (read, match_node(read.nodes[0], os.environ, plan.profile))
    )
    machines, matched = group.broadcast(matching)
    machine = replace(
        machine_of_ranks(machines.nodes, identities, machines.processes, matched, Origin.MEASURED),
        profile_asked_for=plan.profile is not None,
        expected_gpus=plan.expected_gpus,
    )
    with ExitStack() as stack:
        request = request_for_ranks(plan, pairs, machine)
        copies, log = _copies_of_rank(rank, device, request, stack)
        counters = NvmlCounters([machine.gpus[group.rank].bus_id])
        pids = {identity.pid for identity in identities if identity.node == rank.identity.node}
        window = IdleWindow(counters, use.other_users([machine.gpus[group.rank].bus_id], pids))
        bench = RankBench(request, group, copies, counters, log, progress, window)
        yield CopySetup(
            plan=plan,
            machines=machines,
            machine=machine,
            request=request,
            bench=bench,
            libraries={**copies.libraries(), "MPI": mpi.library_version()},
            ranks=identities,
        )
        bench.close()
        counters.close()
        use.close()


def _copies_of_rank(
    rank: RankPlace, device: CudaDevice, request: P2pRequest, stack: ExitStack
) -> tuple[CudaRankCopies, NcclLog | None]:
    """Open copies by CUDA IPC within a node and by NCCL between nodes. Also return NCCL's log, or None without NCCL."""
    group, place = rank.group, str(rank.identity)
    network, log = None, None
    if any(series.network for series in request.series):
        library = agree(group, NcclLibrary, place=place)
        ranks_on_node = rank.node_by_rank.count(rank.identity.node)
        log = stack.enter_context(NcclLog(library, nccl_settings(os.environ), ranks_on_node))
        rank.progress.enter(Phase.CONNECTING, "through NCCL")
        network = Network(group, library)
        rank.progress.answer_watchdog(network.trouble, network.abort)
    return agree(group, lambda: CudaRankCopies(device, network), place=place), log


_SECONDS_TO_READ = 3.0  # Estimated time to read facts and create CUDA contexts for a few GPUs
# Time per matrix cell on an H200: one warm-up, three samples of 10 ms, and filling and verifying the buffers.
_SECONDS_A_CELL = 0.07


@contextmanager
def _open(place: Place) -> Iterator[CopySetup]:
    plan: P2pPlan = place.plan
    if place.rank is not None:
        with _open_rank_copies(place.rank) as setup:
            yield setup
        return
    place.presenter.waiting("reading this machine", _SECONDS_TO_READ)
    if isinstance(plan.source, Replayed):
        yield replayed(plan, plan.source)
    elif isinstance(plan.source, Simulated):
        yield _simulated(plan, plan.source)
    else:
        with _own_gpus(plan) as setup:
            yield setup


def _measure(place: Place, setup: CopySetup) -> Report:
    from gpubench.jobs.compare import find_past, past_bandwidth_finder

    plan, machine, metadata = setup.plan, setup.machine, setup.metadata(place.arguments)
    if place.rank is None:
        check_possible(plan.require_path, machine.wiring)
    else:
        agree(place.rank.group, lambda: check_possible(plan.require_path, machine.wiring))
    past = find_past(plan.presentation.history, metadata) if place.is_first else None
    if place.rank is not None:
        # Every rank decides which copies near a threshold to repeat, so all ranks need the same past results.
        (past,) = place.rank.group.broadcast((past,))
    read_errors: ReadErrors | None = partial(_read_errors, plan) if place.is_here and place.rank is None else None
    with setup.recorded_bench(metadata) if place.is_first else nullcontext(setup.bench) as bench:
        place.listener.begin(metadata, PAIR_COLUMNS)
        if read_errors is not None:
            cells = setup.request.steps(len(machine.gpus))
            place.presenter.waiting(f"{cells} copies to time", cells * _SECONDS_A_CELL)
        report = P2pRun(setup.request, bench, machine, place.listener, read_errors, past_bandwidth_finder(past)).run()
    return require_evidence(report, plan.require_path, machine.nodes, MEASURE_PAIRS)


STEPS = Steps(P2P_NAME, _open, _measure, shows_progress=True)


def run(plan: P2pPlan, arguments: Sequence[str]) -> int:
    """Measure copies in one process or as one rank of a job; return the exit code. Raises GpubenchError if nothing
    is measured.
    """
    if plan.memory is MemoryKind.MANAGED:
        expected = "one process, because managed memory belongs to one process"
        refuse_several_ranks(detect_launcher(os.environ), "p2p --memory managed", expected)
    return runner.run(STEPS, plan, arguments)


def measured(
    copies: SimulatedCopies,
    node: Topology,
    matched: ProfileMatch | None,
    request: P2pRequest,
    listener: Listener[PairRow],
) -> Report:
    """Simulate the copies of one node for another command."""
    wiring = wiring_of_process(node, copies.gpus)
    machine = CopyMachine(wiring, copies.gpus, (), matched, Origin.SIMULATED, unreachable_pairs(copies))
    return P2pRun(request, CopyBench(request, copies, NoCounters()), machine, listener).run()


def _simulated(plan: P2pPlan, source: Simulated) -> CopySetup:
    simulation, machines = source.simulation, source.machines()
    first = first_node(simulation, machines, P2P_NAME)
    simulation.note_effects(COPIES)
    copies = SimulatedCopies(simulation.machine, simulation.faults, simulation.seed)
    managed = SimulatedManaged(copies) if plan.memory is MemoryKind.MANAGED else None
    plan = dataclasses.replace(plan, check=plan.check and copies.corrupts)
    return _setup(plan, first, copies, NoCounters(), {}, managed=managed)


@contextmanager
def _own_gpus(plan: P2pPlan) -> Iterator[CopySetup]:
    from gpubench.backends.copies import open_copies
    from gpubench.backends.managed import open_managed

    driver = usable_driver(P2P_NAME)
    machines = plan.source.machines()
    use = NvmlUse()
    names = {gpu.bus_id: gpu.device for gpu in machines.nodes[0].gpus if gpu.bus_id}
    copies = open_copies(driver, names)
    counters = NvmlCounters([gpu.bus_id for gpu in copies.gpus])
    try:
        users = use.other_users([gpu.bus_id for gpu in copies.gpus], {os.getpid()})
        managed = open_managed(copies) if plan.memory is MemoryKind.MANAGED else None
        window = IdleWindow(counters, users)
        yield _setup(plan, machines, copies, counters, copies.libraries(), window, managed)
    finally:
        use.close()
        counters.close()
        copies.close()


def _setup(
    plan: P2pPlan,
    machines: Machines,
    copies: Copies,
    counters: LinkCounters,
    libraries: Mapping[str, str],
    window: IdleWindow | None = None,
    managed: ManagedMemory | None = None,
) -> CopySetup:
    """Prepare a run in one process. `window` reads the link counters while the GPUs are idle.

    Raises UsageError and CouldNotMeasureError.
    """
    (node,) = machines.nodes
    matched = match_node(node, os.environ, plan.profile)
    support = () if managed is None else managed.support()
    check_managed(support)
    wiring, apart = wiring_of_process(node, copies.gpus), unreachable_pairs(copies)
    request = _request_for_process(plan, copies.gpus, wiring, support)
    origin = Origin.SIMULATED if machines.source is not None else Origin.MEASURED
    return CopySetup(
        plan=plan,
        machines=machines,
        machine=CopyMachine(
            wiring,
            copies.gpus,
            machines.processes,
            matched,
            origin,
            apart,
            profile_asked_for=plan.profile is not None,
            expected_gpus=plan.expected_gpus,
        ),
        request=request,
        bench=CopyBench(request, copies, counters, window, managed),
        libraries=libraries,
    )


def _read_errors(plan: P2pPlan, machine: CopyMachine) -> CopyMachine:
    (node,) = machine.nodes
    snapshot = watch_errors(node.snapshot, plan.timeout_s, os.environ)
    if plan.recording.record is not None:
        recorded.write_recording(plan.recording.record, [snapshot], machine.processes)
    return replace(machine, wiring=replace(machine.wiring, nodes={0: Topology(snapshot)}))
