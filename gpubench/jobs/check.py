"""Run `gpubench check` on this machine, the nodes of a job, a simulated machine or a recording."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpubench import errors
from gpubench.backends.timing import copy_seconds
from gpubench.collectives.record import Collective, SweepRequest
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.conditions.circumstances import Facts
from gpubench.conditions.measured import HOST_MEMORY_SLOW
from gpubench.jobs import runner, sources
from gpubench.jobs.library import run_child
from gpubench.jobs.machines import Machines, check_any_gpu
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import CheckPlan, Depth
from gpubench.jobs.rank import AgreedError, agree
from gpubench.jobs.runner import NullListener, Place, ReportCollector, Steps
from gpubench.machine import recorded
from gpubench.machine.children import module_command
from gpubench.machine.probe import probe, watch_errors
from gpubench.measure.check import health
from gpubench.measure.check.health import SECTIONS as SECTIONS
from gpubench.model.facts.health import HIDDEN_GPUS
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.profile import Generic
from gpubench.model.results.figures import QUICK, Measurements, Need, Transferred, host_copy_row
from gpubench.model.results.report import EvidenceRow, FallbackRow, PatternRow, Report
from gpubench.model.results.required_path import (
    TakenPath,
    check_possible,
    paths_of_evidence,
    paths_of_model,
    require_paths,
)
from gpubench.model.results.topo import device_sections
from gpubench.model.terms.operation import CopyPattern, TransferBackend
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import AUTO, Mode, Sampling
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.ports.group import Group
from gpubench.profiles import ProfileMatch, match_node, match_nodes
from gpubench.ranks.watchdog.rank import RankProgress
from gpubench.readers.documents import read_json_line

NAME = "check"
_WITHOUT_GPU = f"Use --profile host to check NICs, libraries and CPUs. {errors.SIMULATED_INSTEAD}"

SMALL_BYTES, LARGE_BYTES, HUGE_BYTES = 2**10, 256 * 2**20, 4 * 2**30
# One size for latency and two for bandwidth. Profiles have expected values for the larger sizes too.
GPU_SIZES = (SMALL_BYTES, LARGE_BYTES, HUGE_BYTES)
_BUDGET_SECONDS = 1.0
"""Time budget per row on GPUs. It is long because a check has few rows, and the host is slowest in the first rows
of a job. On two H200s, 1 KiB took 7.3 to 10.5 µs with a budget of 0.1 s and 7.3 µs with 1.5 s. From the tenth
row on it took 6.9 to 7.0 µs.
"""

HOST_SIZES = (SMALL_BYTES, 2**20, 16 * 2**20)  # CPU ranks are slower than GPUs, so they use smaller sizes


def sampling(*, on_gpus: bool) -> Sampling:
    """Return how to time a collective: automatic iterations, with a larger time budget on GPUs."""
    return Sampling(iterations=None, budget_seconds=_BUDGET_SECONDS if on_gpus else Sampling().budget_seconds)


class CheckMeasurer(Protocol):
    """Measures copies and collectives for a check."""

    @property
    def why_alone(self) -> str:
        """The reason why no collective can be measured, such as a single GPU. Empty if collectives can be measured."""

    def copies(self) -> Measurements:
        """Measure copies between the GPUs of every node, to and from host memory, and within host memory."""

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """Measure a collective on all GPUs, or on CPU ranks. Raises CouldNotMeasureError if there is no complete
        report.
        """


# Called when a step begins, with the step's label and its estimated time in seconds
Waiting = Callable[[str, float], None]
SECONDS_TO_READ = 3.0
_SECONDS_TO_START = 4.0  # Time to start a gpubench command with its ranks, on two to eight H200s
_SECONDS_TO_TRANSFER = 15.0
_SECONDS_A_PAIR = {Depth.BRIEF: 0.14, Depth.DEFAULT: 0.5, Depth.FULL: 0.6}
_SECONDS_A_COLLECTIVE = {Depth.BRIEF: 1.0, Depth.DEFAULT: 3.0, Depth.FULL: 3.0}


def measured(
    depth: Depth, nodes: Sequence[Topology], by: CheckMeasurer, waiting: Waiting | None = None
) -> Measurements:
    """Measure copies, then collectives. `waiting` is called before each step with the estimated time in seconds."""
    if depth is Depth.QUICK:
        return QUICK
    waiting = waiting or (lambda _label, _seconds: None)
    gpus = len(nodes[0].gpus)
    if gpus > 1:
        pairs = gpus * (gpus - 1)
        waiting(f"copies between {gpus} GPUs", _SECONDS_TO_START + pairs * _SECONDS_A_PAIR[depth])
    parts = [by.copies()]
    if by.why_alone:
        return health.merge([*parts, Measurements(left_out={Need.ALL_REDUCE: by.why_alone})])
    sizes: tuple[int, ...] = GPU_SIZES if any(node.gpus for node in nodes) else HOST_SIZES
    if depth is Depth.BRIEF:
        sizes = sizes[:2] if sizes is GPU_SIZES else sizes[1:2]
    try:
        for collective in map(collective_named, SUMMARIES if depth is Depth.FULL else ("allreduce",)):
            ranks = f"{gpus} GPUs" if gpus else "CPU ranks"
            waiting(f"{collective.name} of {ranks}", _SECONDS_TO_START * bool(gpus) + _SECONDS_A_COLLECTIVE[depth])
            parts.append(by.collective(collective, sizes))
    except errors.CouldNotMeasureError as error:
        # A brief check without GPUs only describes the machine, so a missing MPI is not a failure.
        lacks = Measurements(left_out={Need.ALL_REDUCE: str(error)})
        is_look = depth is Depth.BRIEF and not any(node.gpus for node in nodes)
        parts.append(lacks if is_look else Measurements(failed={Need.ALL_REDUCE: str(error)}))
    return health.merge(parts)


# Larger than the caches of one core, so the copy reads main memory. Nodes with the same CPU are compared
MEMORY_BYTES = 64 * 2**20
_MEMORY_SAMPLES = 20
_MEMORY_ROUNDS = 3

_COPIES = {Depth.FULL: (), Depth.DEFAULT: ("--no-patterns",), Depth.BRIEF: ("--no-patterns",)}
_BRIEF_COPIES = ("--sizes", format_size(LARGE_BYTES))
"""Copies for a brief check: one size, with peer access off and on. On eight H200s this takes a quarter of the time
that the default copies take.
"""

_MOST_WORDS = 300


class ChildCommands:
    """Measures one host by running gpubench commands in child processes. Each child may take `timeout_s` seconds."""

    def __init__(
        self,
        nodes: Sequence[Topology],
        depth: Depth,
        timeout_s: float,
        profile: str | None = None,
        ranks_per_gpu: int = 1,
    ) -> None:
        self._nodes, self._depth, self._timeout_s = nodes, depth, timeout_s
        self._judged_by = () if profile is None else ("--profile", profile)
        node = nodes[0]
        self._gpus = sum(gpu.cuda_index is not None for gpu in node.gpus) or len(node.gpus)
        self._sharing = () if ranks_per_gpu == 1 else ("--ranks-per-gpu", str(ranks_per_gpu))
        self.why_alone = "one GPU, but a collective needs two" if self._gpus == 1 and not self._sharing else ""

    def copies(self) -> Measurements:
        """Run `gpubench p2p`. Host memory is not measured, because there is no other host to compare it with."""
        from gpubench.backends.mpi.group import AloneGroup as OneProcessGroup

        return health.merge([_measured_memory(OneProcessGroup(), self._nodes, 0), self.peer_and_host_copies()])

    def peer_and_host_copies(self) -> Measurements:
        """Copy between all GPUs of this host, and between GPUs and host memory, with `gpubench p2p`."""
        needs = (Need.PEER_COPIES, Need.HOST_COPIES)
        gpus = self._gpus
        if not gpus:
            return Measurements(left_out=dict.fromkeys(needs, "no GPU"))
        brief = self._depth is Depth.BRIEF and gpus > 1
        arguments = ["p2p", "--strict", *self._judged_by, *(_BRIEF_COPIES if brief else _COPIES[self._depth])]
        try:
            found = health.p2p_measurements(_document(arguments, self._timeout_s))
        except errors.CouldNotMeasureError as error:
            return Measurements(failed=dict.fromkeys(needs, str(error)))
        if gpus == 1:
            return replace(found, left_out={Need.PEER_COPIES: "one GPU, but copies need two"})
        return replace(found, left_out={Need.HOST_COPIES: "gpubench check measures them"} if brief else {})

    def transfers(self) -> Measurements:
        """Make a KV transfer between the first two GPUs, with `gpubench kv`."""
        from gpubench.jobs.kv import CHECK_BYTES, choose_library

        if not self._gpus:
            return _no_transfers("no GPU")
        try:
            choose_library(TransferBackend.UCX)
        except errors.CouldNotMeasureError as error:
            return _no_transfers(f"not measured: {error.seen}")
        known = [gpu for gpu in self._nodes[0].gpus if gpu.cuda_index is not None]
        ends = [gpu.device.removeprefix("GPU") for gpu in (known or self._nodes[0].gpus)[:2]]
        pair = ("--pairs", "-".join(ends)) if len(ends) > 1 else ()
        try:
            found = _document(["kv", *pair, "--sizes", str(CHECK_BYTES), "--blocks", "1", "--no-host"], self._timeout_s)
        except errors.CouldNotMeasureError as error:
            return Measurements(transferred=Transferred(verdict=Verdict.ERROR, note=str(error)))
        return health.kv_measurements(found)

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """Run the gpubench command for a collective on all GPUs of this host, or on two CPU ranks.

        Raises CouldNotMeasureError.
        """
        budget = sampling(on_gpus=self._gpus > 0).budget_seconds
        timed = ("--mode", Mode.THROUGHPUT, "--iters", AUTO, "--budget", f"{budget:g}")
        options = ["--sizes", ",".join(map(str, sizes)), "--out-of-place", *timed, *self._judged_by, *self._sharing]
        return health.collective_measurements(_document([collective.name, *options], self._timeout_s))


def _no_transfers(reason: str) -> Measurements:
    return Measurements(transferred=Transferred(verdict=Verdict.SKIP, note=reason))


def _measured_memory(group: Group, nodes: Sequence[Topology], node: int | None) -> Measurements:
    """Copy within host memory on all nodes at the same time, and keep the fastest time per node. `node` is None on
    ranks that do not copy.
    """
    if len(nodes) == 1:
        return Measurements(left_out={Need.HOST_MEMORY: "one node, so there is none to compare it with"})
    fastest = dict.fromkeys(range(len(nodes)), float("inf"))
    found = Measurements()
    for _ in range(_MEMORY_ROUNDS):
        own = None if node is None else (node, min(copy_seconds(MEMORY_BYTES, _MEMORY_SAMPLES)))
        for number, seconds in filter(None, group.gather(own)):
            fastest[number] = min(seconds, fastest[number])
        rows = [host_copy_row(nodes[each].snapshot.host, MEMORY_BYTES, fastest[each]) for each in fastest]
        found = Measurements(pairs=tuple(rows))
        if not any(HOST_MEMORY_SLOW.look(Facts(nodes, measurements=found).circumstances)):
            break
    return found


def _document(arguments: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """Run a gpubench command and return its JSON document. Raises CouldNotMeasureError on a timeout or without a
    complete report.
    """
    name = f"gpubench {arguments[0]}"
    ended = run_child(module_command("gpubench", *arguments, "--format", "json", "--no-progress"), timeout_s)
    if ended is None:
        raise errors.CouldNotMeasureError(f"{name} did not end within {timeout_s:g} s")
    try:
        document: Mapping[str, Any] = json.loads(ended.output)
    except ValueError:
        document = {}
    if document.get("complete"):
        return document
    words = "; ".join(" ".join(line.split()) for line in ended.own_words.splitlines() if line.strip())
    if len(words) > _MOST_WORDS:  # gpubench's messages begin with the cause, but messages of other programs end with it
        words = f"{words[:_MOST_WORDS]} ..." if ended.own_words != ended.said else f"... {words[-_MOST_WORDS:]}"
    raise errors.CouldNotMeasureError(f"{name} ended with exit code {ended.code}: {words or 'without output'}")


_PAIR_BYTES, _HOST_BYTES = 256 * 2**20, 64 * 2**20


class SimulatedMeasurer:
    """Measures a simulated machine. `noise` is the relative spread of samples. None selects the model's default
    noise.
    """

    def __init__(
        self,
        simulation: sources.Simulation,
        nodes: Sequence[Topology],
        depth: Depth,
        noise: float | None = None,
        profile: str | None = None,
    ) -> None:
        from gpubench.simulated.times import CollectiveTimes

        self._profile, self._simulation = profile, simulation
        self._machine, self._faults, self._seed = simulation.machine, simulation.faults, simulation.seed
        self._nodes, self._depth, self._noise = nodes, depth, noise
        self._times = CollectiveTimes(self._machine, self._faults, self._seed, noise=noise)
        self._ranks = self._times.gpus * self._machine.nodes
        self.why_alone = "" if self._ranks > 1 else f"{'one' if self._ranks else 'no'} GPU, but a collective needs two"
        if not self._times.has_network:
            self.why_alone = f"profile {self._machine.profile.name} has no NIC with a known rate between its nodes"

    def copies(self) -> Measurements:
        """Simulate copies on every faulty node and on one healthy node, whose result is used for all healthy nodes."""
        faulty, healthy = {fault.node_number for fault in self._faults if fault.breaks_hardware}, None
        hosts = {}
        for number, node in enumerate(self._nodes):
            own = None if number in faulty or self._noise is not None else healthy
            own = own or self._node_copies(number, node)
            if number not in faulty:
                healthy = own
            host = node.snapshot.host
            hosts[host] = health.add_host(own, host) if len(self._nodes) > 1 else own
        no_data = "a simulated machine moves no data"
        return health.merge(
            [
                health.merge_nodes(hosts),
                Measurements(left_out=dict.fromkeys((Need.VERIFIED_DATA, Need.HOST_MEMORY), no_data)),
            ]
        )

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """Simulate a collective on all GPUs. Raises CouldNotMeasureError if a driver does not respond, or no model
        applies.
        """
        from gpubench.jobs.collective.metadata import judge_by_model
        from gpubench.jobs.collective.simulated import rank_identities
        from gpubench.measure.collective.paths import simulated
        from gpubench.measure.collective.recording import MOST_SIMULATED_ROWS, simulate

        if any(node.snapshot.failures or node.snapshot.driver.absent for node in self._nodes):
            raise errors.CouldNotMeasureError("the driver of a node does not answer")
        collector = ReportCollector()
        speed = judge_by_model(collective, self._times, self._nodes, self._times.gpus, self._machine.profile)
        snapshots = [node.snapshot for node in self._nodes]
        ranks = list(rank_identities(snapshots, self._times.gpus))
        processes = sources.Simulated(self._simulation).processes([(rank.node, snapshots[rank.node]) for rank in ranks])
        try:
            staged = self._times.staged_pairs(self._times.gpus)
            report = simulate(
                SweepRequest(collective=collective, sizes=tuple(sizes), check=False),
                self._ranks,
                self._machine.nodes,
                lambda case, row, attempt: self._times.seconds(
                    collective.name, case.size_bytes, row=row + attempt * MOST_SIMULATED_ROWS
                ),
                collector,
                simulated(staged, ranks, self._nodes.__getitem__, processes),
                speed,
            )
        except errors.GpubenchError as error:
            raise errors.CouldNotMeasureError(error.seen) from error
        return Measurements(
            collectives=tuple(collector.collectives),
            findings=health.drop_path_findings(health.findings_beside_speed(report.findings)),
        )

    def transfers(self) -> Measurements:
        """Simulate a KV transfer between the first two GPUs of the first node."""
        from gpubench.jobs.kv import simulate_pair

        collector = ReportCollector()
        try:
            report = simulate_pair(sources.Simulated(self._simulation), collector)
        except errors.CouldNotMeasureError as error:
            return _no_transfers(f"not measured: {error.seen}")
        outcome = Transferred(verdict=report.verdict, rows=tuple(collector.transfers))
        return Measurements(findings=health.findings_beside_speed(report.findings), transferred=outcome)

    def _node_copies(self, number: int, node: Topology) -> Measurements:
        from gpubench.jobs import p2p as p2p_job
        from gpubench.measure.p2p.request import (
            Method,
            P2pRequest,
            add_latency_series,
            default_series,
            sweep_series,
            wiring_of_process,
        )
        from gpubench.simulated.links import SimulatedCopies

        snapshot = node.snapshot
        if snapshot.failures or snapshot.driver.absent:
            return Measurements(
                failed=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "its driver does not answer")
            )
        spread = {} if self._noise is None else {"noise": self._noise}
        copies = SimulatedCopies(self._machine, self._faults, self._seed, node=number, **spread)
        if not copies.gpus:
            return Measurements(left_out=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "no GPU"))
        full = self._depth is Depth.FULL
        gpus = range(len(copies.gpus))
        several = len(copies.gpus) > 1
        brief = self._depth is Depth.BRIEF and several
        series = sweep_series((_PAIR_BYTES,)) if brief else default_series(_PAIR_BYTES)
        pairs = tuple((one, other) for one in gpus for other in gpus if one != other)
        request = P2pRequest(
            pairs=pairs,
            series=add_latency_series(series, pairs, wiring_of_process(node, copies.gpus)) if several else (),
            host_bytes=None if brief else _HOST_BYTES,
            patterns=tuple(CopyPattern) if full and several else (),
            pattern_bytes=_PAIR_BYTES,
            method=Method(repeats=1),
            check=copies.corrupts,
        )
        collector = ReportCollector()
        report = p2p_job.measured(copies, node, match_node(node, os.environ, self._profile), request, collector)
        return Measurements(
            pairs=tuple(collector.pairs),
            evidence=tuple(report.rows(EvidenceRow)),
            patterns=tuple(report.rows(PatternRow)),
            findings=health.p2p_findings(report.findings, report.rows(FallbackRow), report.rows(EvidenceRow)),
            left_out={Need.HOST_COPIES: "gpubench check measures them"}
            if brief
            else {}
            if several
            else {Need.PEER_COPIES: "one GPU, but copies need two"},
        )


FILE = "check.jsonl"  # File name of a check's measurements in a recording

_OF_ANOTHER_COMMAND = "the recording is from a command other than check"


def _match_profiles(plan: CheckPlan, machines: Machines) -> list[ProfileMatch | None]:
    """Return the profile of every node. Raises CouldNotMeasureError if there is no GPU, and UsageError for an
    invalid profile.
    """
    visible = machines.visible()
    has_gpus = any(node.gpus or node.snapshot.failures for node in visible.nodes)
    asked = Generic.HOST if plan.brief and not has_gpus and plan.profile is None else plan.profile
    matches = match_nodes(machines.nodes, os.environ, asked)
    is_host = any(match is not None and match.profile.match.generic is Generic.HOST for match in matches)
    check_any_gpu(visible.nodes, plan.expected_gpus, NAME, machines.why_no_gpu, _WITHOUT_GPU)
    if plan.require_path:
        check_possible(plan.require_path, Facts(visible.nodes).circumstances.wiring)
    if not has_gpus and not is_host:
        raise errors.no_gpu(machines.why_no_gpu, NAME, _WITHOUT_GPU)
    return matches


def _judged(
    place: Place, machines: Machines, matches: Sequence[ProfileMatch | None], measurements: Measurements
) -> Report:
    """Write the recording if --record is used. Then judge the GPUs that are visible to processes, and return the
    report.
    """
    from gpubench.model.results.result_file import MODELS

    plan: CheckPlan = place.plan
    if plan.recording.record is not None:
        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        with recorded.recording_samples(plan.recording.record, FILE) as write:
            write(measurements)
    visible = machines.visible()
    nodes, hidden = visible.nodes, machines.gpus - visible.gpus
    measurements = health.mark_missing(measurements)
    profiles = [None if found is None else found.profile for found in matches]
    facts = Facts(
        nodes,
        group_nodes(nodes),
        machines.processes,
        profiles,
        measurements,
        plan.profile is not None,
        plan.expected_gpus,
    )
    report = health.judge(facts)
    report = require_paths(report, plan.require_path, _taken_paths(plan, nodes, measurements))
    unmeasured = set(measurements.left_out.values()) == {_OF_ANOTHER_COMMAND} and plan.depth is not Depth.QUICK
    if unmeasured and report.verdict is Verdict.PASS:
        report = replace(report, verdict=Verdict.SKIP)
    if plan.brief:
        if report.verdict is Verdict.PASS and not any(node.gpus for node in facts.nodes):
            report = replace(report, verdict=Verdict.SKIP)
        report = replace(report, sections={**report.sections, **device_sections(facts.nodes, facts.kinds)})
    metadata = build_metadata(
        place.arguments,
        NAME,
        machines=machines,
        matched=matches[0],
        asked_profile=plan.profile is not None,
        options={
            "depth": plan.depth.value,
            "strict": plan.strict,
            "timeout_s": plan.timeout_s,
            **({"brief": True} if plan.brief else {}),
            **({HIDDEN_GPUS: hidden} if hidden else {}),
            MODELS: sorted({gpu.name for node in nodes for gpu in node.gpus if gpu.name}),
        },
    )
    place.presenter.begin(metadata, ())
    return report


def _taken_paths(plan: CheckPlan, nodes: Sequence[Topology], measurements: Measurements) -> Iterator[TakenPath]:
    """Yield the paths of copies and collectives, which in a simulation are those of its model."""
    yield from paths_of_evidence((*measurements.evidence, *measurements.collective_evidence), nodes)
    if plan.simulation is not None:
        from gpubench.jobs.collective.simulated import rank_identities
        from gpubench.simulated.times import CollectiveTimes

        simulation = plan.simulation
        times = CollectiveTimes(simulation.machine, simulation.faults, simulation.seed)
        ranks = rank_identities([node.snapshot for node in nodes], times.gpus)
        yield from paths_of_model(times.staged_pairs(times.gpus), Wiring(ranks, dict(enumerate(nodes))))


def _recorded_measurements(directory: Path, machines: Machines, asked: str | None) -> Measurements:
    """Read the measurements of a recorded check, and judge its collectives by the profile `asked`. Raises
    UsageError.
    """
    if not (directory / FILE).exists():
        return replace(QUICK, left_out=dict.fromkeys(QUICK.left_out, _OF_ANOTHER_COMMAND))
    lines = recorded.read_samples(directory, FILE, NAME)
    found = health.merge([read_json_line(Measurements, line, where) for line, where in lines])
    from gpubench.jobs.collective.recorded_rows import judge_again

    transferred = found.transferred
    if transferred is not None:
        rows = tuple(replace(row, origin=_recorded_origin(row.origin)) for row in transferred.rows)
        transferred = replace(transferred, rows=rows)
    return replace(
        found,
        transferred=transferred,
        pairs=tuple(replace(row, origin=_recorded_origin(row.origin)) for row in found.pairs),
        collectives=tuple(
            replace(row, origin=_recorded_origin(row.origin))
            for row in judge_again(found.collectives, machines.nodes, machines.processes, found.ranks, asked)
        ),
    )


def _recorded_origin(origin: str) -> str:
    return Origin.RECORDED if origin == Origin.MEASURED else origin


class RankMeasurer(Struct, frozen=True):
    """Measures the nodes of a job: copies on the first rank of each node, collectives on all ranks. Every rank must
    call it.
    """

    why_alone = ""
    group: Group
    progress: RankProgress
    identity: RankIdentity
    nodes: Sequence[Topology]
    plan: CheckPlan

    def copies(self) -> Measurements:
        """Copy on all nodes at the same time, in child processes. Meanwhile the ranks of the job have no CUDA
        context.
        """
        identity, own = self.identity, None
        memory = _measured_memory(self.group, self.nodes, identity.node if identity.local_rank == 0 else None)
        if identity.local_rank == 0:
            node = self.nodes[identity.node]
            commands = ChildCommands([node], self.plan.depth, self.plan.timeout_s, self.plan.profile)
            own = health.add_host(commands.peer_and_host_copies(), node.snapshot.host)
        parts = [part for part in self.group.gather(own) if part is not None]
        hosts = [node.snapshot.host for node in self.nodes]
        return health.merge([memory, health.merge_nodes(dict(zip(hosts, parts, strict=True)))])

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """Measure a collective on all ranks. Raises GpubenchError on all ranks if one of them fails."""
        from gpubench.jobs.collective.plan import CollectivePlan
        from gpubench.jobs.collective.rank_job import CollectiveRankJob

        collector = ReportCollector() if self.group.rank == 0 else NullListener()
        timed = sampling(on_gpus=any(node.gpus for node in self.nodes))
        plan = CollectivePlan(
            command=collective.name,
            sizes=tuple(sizes),
            out_of_place=True,
            budget=timed.budget_seconds,
            profile=self.plan.profile,
        )
        try:
            CollectiveRankJob(self.group, self.progress, plan, (), collector).run(None)
        except AgreedError as agreed:
            raise agreed.error from agreed
        found = None
        if isinstance(collector, ReportCollector):
            metadata, report = collector.metadata, collector.report
            found = Measurements(
                collectives=tuple(collector.collectives),
                ranks=() if metadata is None else tuple(metadata.ranks),
                collective_evidence=() if report is None else tuple(report.rows(EvidenceRow)),
                findings=()
                if report is None
                else health.drop_wrong_data(health.findings_beside_speed(report.findings)),
            )
        return self.group.broadcast(found)


@contextmanager
def _open(place: Place) -> Iterator[Machines]:
    """Yield the machines that the plan selects. Under a launcher, yield all nodes of the job on every rank."""
    plan: CheckPlan = place.plan
    if place.rank is None:
        place.presenter.waiting("reading this machine", SECONDS_TO_READ)
        sources.note_ignored_variables(plan.source, place.presenter)
        yield plan.source.machines()
        return
    group, identity = place.rank.group, place.rank.identity
    if plan.ranks_per_gpu > 1:
        raise AgreedError(errors.shared_gpu_under_launcher(plan.ranks_per_gpu, group.size))
    # The first rank of a node reads its facts before any rank creates a CUDA context on its GPUs.
    reads = identity.local_rank == 0
    own = agree(group, lambda: [probe(plan.facts_timeout_s, os.environ)] if reads else [], place=str(identity))
    yield group.broadcast(sources.gathered(group, own, sources.own_process(identity)))


def _measure(place: Place, machines: Machines) -> Report | None:
    plan, rank = place.plan, place.rank
    watches = place.is_here and plan.depth not in (Depth.QUICK, Depth.BRIEF)
    if rank is None:
        matches = _match_profiles(plan, machines)
        measurements = _measured(plan, machines.visible(), place.presenter.waiting if place.is_here else None)
        before = machines.snapshots
    else:
        matches = agree(rank.group, lambda: _match_profiles(plan, machines))
        nodes = machines.visible().nodes
        measurements = measured(plan.depth, nodes, RankMeasurer(rank.group, rank.progress, rank.identity, nodes, plan))
        if plan.kv:
            measurements = health.merge(
                [measurements, _no_transfers("not measured under a launcher. Try: gpubench kv")]
            )
        before = [machines.snapshots[rank.identity.node]] if rank.identity.local_rank == 0 else []
    if watches:
        own = [watch_errors(node, plan.facts_timeout_s, os.environ) for node in before]
        every = [own] if rank is None else rank.group.gather(own)
        machines = machines.replace_snapshots([node for found in every for node in found])
    return _judged(place, machines, matches, measurements) if place.is_first else None


STEPS = Steps(NAME, _open, _measure, shows_progress=True)


def run(plan: CheckPlan, arguments: Sequence[str]) -> int:
    """Check in one process or as one rank of a job; return the exit code. Raises GpubenchError if nothing is
    checked.
    """
    simulation = plan.simulation
    if simulation is not None and not plan.kv and any(fault.command for fault in simulation.faults):
        raise errors.UsageError(
            "--fault of a KV transfer without --kv",
            expected="--kv, which measures such a transfer",
            next_step=f"gpubench check --kv {simulation.source}",
        )
    return runner.run(STEPS, plan, arguments)


def _measured(plan: CheckPlan, machines: Machines, waiting: Waiting | None) -> Measurements:
    source = plan.source
    if isinstance(source, sources.Replayed):
        return _recorded_measurements(source.directory, machines, plan.profile)
    by: ChildCommands | SimulatedMeasurer
    by = ChildCommands(machines.nodes, plan.depth, plan.timeout_s, plan.profile, plan.ranks_per_gpu)
    if isinstance(source, sources.Simulated):
        by = SimulatedMeasurer(source.simulation, machines.nodes, plan.depth, profile=plan.profile)
    found = measured(plan.depth, machines.nodes, by, waiting)
    if not plan.kv:
        return found
    if waiting is not None:
        waiting("a KV transfer between two processes", _SECONDS_TO_TRANSFER)
    return health.merge([found, by.transfers()])
