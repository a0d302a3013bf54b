"""What `gpubench p2p` does as one rank of a job: copy to and from every other rank."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations

from gpubench.errors import UsageError, no_gpu
from gpubench.formats.presenter import Presenter, rank_style
from gpubench.hardware import recorded
from gpubench.hardware.copies.between_ranks import CudaRankCopies, Network
from gpubench.hardware.cuda.device import CudaDevice, check_installed
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.nccl.debug_log import NcclLog
from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.hardware.node.nvml.link_counters import NvmlCounters
from gpubench.hardware.node.probe import probe
from gpubench.hardware.process.facts import read_rank_facts
from gpubench.hardware.process.nccl_settings import nccl_settings
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import agree
from gpubench.jobs.gpus import open_gpu
from gpubench.jobs.listeners import NullListener
from gpubench.jobs.metadata import recorded_settings, stamp
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.p2p.here import DEFAULT_BYTES, NVBANDWIDTH_BYTES, describe, profile_of
from gpubench.jobs.p2p.plan import NAME, As, P2pPlan
from gpubench.jobs.rank import own_identity
from gpubench.measure.p2p.bench import NVBANDWIDTH, Method, P2pRequest
from gpubench.measure.p2p.ranks import RankBench, RankRun, Rounds
from gpubench.measure.p2p.recording import FILE, VERSION, RecordedP2p, RecordingRounds
from gpubench.measure.p2p.rows import IPC, NETWORK, RankMachine
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot, bus_id
from gpubench.model.paths.nodes import with_own_names
from gpubench.model.paths.p2p import LATENCY_BYTES, Pair, Series
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.report import PAIR_COLUMNS, Metadata
from gpubench.model.terms.copies import CopyGpu, Direction, Engine
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.verdict import exit_code
from gpubench.profiles.matching import match


class P2pRanksJob:
    """One rank's part in measuring copies between all of them."""

    def __init__(self, group: mpi.MpiGroup, progress: RankProgress, options: P2pPlan, arguments: Sequence[str]) -> None:
        self._group = group
        self._progress = progress
        self._options = options
        self._arguments = arguments
        self._settings = recorded_settings(os.environ)
        self._log: NcclLog | None = None
        self.identity, self._node_by_rank = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - p2p never launches itself
        """Measure with the others, show it on the first rank, and return the exit code.

        Raises:
            AgreedError: the run cannot be, and every rank knows it.
        """
        group, options = self._group, self._options
        pairs = agree(group, lambda: pairs_of_ranks(options, group.size))
        presenter = agree(group, self._presenter)
        listener = presenter or NullListener()
        driver = read_driver(os.environ)
        agree(group, lambda: _check_gpus(driver), place=str(self.identity))
        # The first rank of a node reads it before any rank puts something on its GPUs.
        snapshots = agree(group, self._own_snapshot, place=str(self.identity))
        ranks_on_node = self._node_by_rank.count(self.identity.node)
        facts = read_rank_facts(group.rank, self.identity.node, self.identity.local_rank, self._settings)
        self._progress.enter(Phase.OPENING)
        device, self.identity = open_gpu(group, self.identity, ranks_on_node, driver)
        machine = self._machine(snapshots, facts)
        request = request_for(options, pairs, machine)
        with ExitStack() as stack:
            copies = self._copies(device, request, stack)
            metadata = self._metadata(machine, request, copies.libraries())
            if presenter is not None:
                presenter.begin(metadata, PAIR_COLUMNS)
            counters = NvmlCounters([machine.gpus[group.rank].bus_id])
            bench = RankBench(request, group, copies, counters, self._log, self._progress)
            with self._recorded(bench, request, machine, metadata) as rounds:
                report = RankRun(request, rounds, machine, listener).run(strict=options.strict)
            bench.close()
            counters.close()
        self._progress.enter(Phase.OUTPUT)
        listener.end(report)
        return exit_code(group.broadcast(report.verdict))

    def _presenter(self) -> Presenter | None:
        """Who shows the rows, on the first rank."""
        if self._group.rank != 0:
            return None
        shown = self._options.presentation
        check_writable(shown.outputs, self._options.recording.record)
        return Presenter(shown, rank_style(shown), progress=False)

    def _own_snapshot(self) -> Snapshot | None:
        return probe(self._options.timeout_s, os.environ) if self.identity.local_rank == 0 else None

    def _machine(self, own: Snapshot | None, facts: RankFacts) -> RankMachine:
        """The wiring of all nodes and what is known of all processes, put together by the first rank."""
        gathered = self._group.collect((own, self.identity, facts))
        machine = None
        if gathered is not None:
            snapshots = [snapshot for snapshot, _, _ in gathered if snapshot is not None]
            identities, known = [each[1] for each in gathered], [each[2] for each in gathered]
            machine = machine_of(snapshots, identities, known, Origin.MEASURED)
        return self._group.broadcast(machine)

    def _copies(self, device: CudaDevice, request: P2pRequest, stack: ExitStack) -> CudaRankCopies:
        """What copies, with NCCL where a pair is on two nodes: its log is heard until `stack` ends."""
        group, place = self._group, str(self.identity)
        network = None
        if any(series.network for series in request.series):
            library = agree(group, NcclLibrary, place=place)
            ranks_on_node = self._node_by_rank.count(self.identity.node)
            self._log = stack.enter_context(NcclLog(library, nccl_settings(os.environ), ranks_on_node))
            self._progress.enter(Phase.CONNECTING, "by NCCL")
            network = Network(group, library)
            self._progress.answer_watchdog(network.trouble, network.abort)
        return agree(group, lambda: CudaRankCopies(device, network), place=place)

    def _metadata(self, machine: RankMachine, request: P2pRequest, libraries: Mapping[str, str]) -> Metadata:
        return Metadata(
            **stamp(self._arguments),
            subject=NAME,
            origin=machine.origin,
            hosts=[node.snapshot.host for node in machine.nodes],
            ranks=self._identities(),
            libraries={**libraries, "MPI": mpi.library_version()},
            environment=self._settings,
            options=describe(machine, request, self._options, self._options.like)
            | {"timeout_s": self._options.timeout_s},
            topology=machine.nodes[0].fingerprint(),
            profile=profile_of(machine),
        )

    def _identities(self) -> list[RankIdentity]:
        identities = self._group.gather(self.identity)
        self._progress.name_ranks(identities)
        return identities

    @contextmanager
    def _recorded(
        self, bench: Rounds, request: P2pRequest, machine: RankMachine, metadata: Metadata
    ) -> Iterator[Rounds]:
        """The bench, on the first rank writing down what all measure where that was asked for."""
        directory = self._options.recording.record
        if directory is None or self._group.rank != 0:
            yield bench
            return
        recorded.write_recording(directory, [node.snapshot for node in machine.nodes], machine.facts)
        with recorded.recording_samples(directory, FILE) as write:
            write(
                RecordedP2p(
                    schema_version=VERSION,
                    origin=Origin.MEASURED,
                    request=request,
                    hosts=tuple(node.snapshot.host for node in machine.nodes),
                    ranks=tuple(metadata.ranks),
                    like=self._options.like,
                    strict=self._options.strict,
                    libraries=metadata.libraries,
                    environment=metadata.environment,
                )
            )
            yield RecordingRounds(bench, write)


def _check_gpus(driver: Driver) -> None:
    if not driver.visible:
        raise no_gpu(driver.hidden_gpus() or driver.absent or "the driver finds none on this host", for_what=NAME)
    check_installed(driver)


def machine_of(
    snapshots: Sequence[Snapshot], identities: Sequence[RankIdentity], facts: Sequence[RankFacts], origin: Origin
) -> RankMachine:
    """The machine that ranks run on. `snapshots` are of the nodes in their order."""
    nodes = tuple(Topology(snapshot) for snapshot in with_own_names(snapshots))
    models = sorted({gpu.name for node in nodes for gpu in node.gpus if gpu.name})
    found = match(models, len(nodes[0].gpus))
    return RankMachine(
        wiring=Wiring(identities, dict(enumerate(nodes))),
        facts=tuple(facts),
        profile=None if found is None else found.profile,
        busy=_busy(nodes, identities),
        origin=origin,
        gpus=tuple(
            CopyGpu(
                device=f"rank {identity.rank}",
                index=identity.gpu_index or 0,
                bus_id=bus_id(identity.gpu_bus_id or ""),
                uuid=identity.gpu_uuid or "",
                name=identity.gpu or "",
            )
            for identity in identities
        ),
    )


def _busy(nodes: Sequence[Topology], identities: Sequence[RankIdentity]) -> dict[int, str]:
    """Who else has work on the ranks' GPUs; an MPI that knows CUDA may have put these ranks there already."""
    ranks = {(identity.node, identity.pid) for identity in identities}
    busy = {}
    for identity in identities:
        facts = [gpu for gpu in nodes[identity.node].gpus if gpu.bus_id == bus_id(identity.gpu_bus_id or "")]
        others = [
            f"process {each.pid}" + (f" ({each.name})" if each.name else "")
            for gpu in facts
            for each in gpu.processes or ()
            if (identity.node, each.pid) not in ranks
        ]
        if others:
            busy[identity.rank] = ", ".join(others)
    return busy


def pairs_of_ranks(options: P2pPlan, ranks: int) -> tuple[Pair, ...]:
    """The ordered pairs to measure.

    Raises:
        UsageError: `--pairs` names a rank that is not there.
    """
    if options.pairs is None:
        return tuple(permutations(range(ranks), 2))
    for one, other in options.pairs:
        if max(one, other) >= ranks:
            raise UsageError(
                f"--pairs {one}-{other}: there is no rank {max(one, other)}",
                expected=f"ranks from 0 to {ranks - 1}: under a launcher --pairs counts ranks",
                next_step=f"start more of them: mpirun -n {max(one, other) + 1} ...",
            )
    return options.pairs


def request_for(options: P2pPlan, pairs: Sequence[Pair], machine: RankMachine) -> P2pRequest:
    """What to measure: copy engines on a node, written and read; NCCL between nodes; 16 bytes of each for the latency.

    Copies with host memory, by kernels and without peer access are for one process.
    """
    size_bytes, method = (
        (NVBANDWIDTH_BYTES, NVBANDWIDTH) if options.like is As.NVBANDWIDTH else (DEFAULT_BYTES, Method())
    )
    ways = [(Direction.WRITE, size_bytes), (Direction.READ, size_bytes)]
    if options.sizes is not None:
        ways = [(Direction.WRITE, size) for size in options.sizes]
    elif options.like is None:
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
        host_bytes=None,
        patterns=(),
        pattern_bytes=size_bytes,
        method=method,
        check=options.check,
    )
