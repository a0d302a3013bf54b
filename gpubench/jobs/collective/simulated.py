"""Run a collective without GPUs, on a simulated machine or replayed from a recording."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import SweepRequest
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.collective.metadata import (
    collective_metadata,
    described_collective,
    judge_by_model,
    speed_judge_maker,
)
from gpubench.jobs.collective.opened import add_gpu_count_finding, add_machine_findings
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.machines import Machines, check_drivers
from gpubench.jobs.runner import Place, ReportCollector, Steps
from gpubench.jobs.sources import Simulated, Simulation, note_ignored_variables
from gpubench.machine import recorded
from gpubench.measure.collective import recording
from gpubench.measure.collective.cases import (
    Answer,
    Case,
    DescribedCollective,
    Model,
    OwnTimes,
    drop_empty_sizes,
)
from gpubench.measure.collective.paths import PathObservations, simulated
from gpubench.measure.collective.recording import (
    MOST_SIMULATED_ROWS,
    SIMULATED_BACKEND,
    RecordedCollective,
    RecordedRow,
    RecordedRows,
    RecordingLine,
    RowWriter,
    Write,
    file_name,
    read_recorded,
    replay,
    simulate,
    simulated_cases,
    wrong_elements,
)
from gpubench.measure.collective.report import MeasuredRow, Recorder, RowSample, SpeedJudge
from gpubench.measure.collective.sweep import check_root, sizes_left
from gpubench.measure.collective.variants import NamedRows, PartReport, SiblingJudge, merge_parts
from gpubench.measure.path_outcome import PathOutcome
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.nodes import build_topologies
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.fault import COLLECTIVES, Fault, Subject
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.results.required_path import check_possible, paths_of_model, require_evidence, require_paths
from gpubench.model.terms.ranks import Phase, Progress, RankGroup, RankIdentity, split_ranks
from gpubench.model.terms.settings import MAX_CTAS, NcclSetting
from gpubench.model.terms.statistics import Percentiles
from gpubench.model.terms.verdict import Origin
from gpubench.ports.group import Group, Listener
from gpubench.profiles import find, load
from gpubench.simulated.machine import SimulatedMachine
from gpubench.simulated.settings import job_variables, known_effects
from gpubench.simulated.times import CollectiveTimes


class CollectiveRecorder(Recorder, Struct):
    """Writes a recording on the first rank. Every rank must use it, because it gathers data from all ranks."""

    directory: Path
    described: DescribedCollective
    group: Group
    part: RankGroup | None
    read_machines: Callable[[], Machines | None]
    log_text: Callable[[], bytes] | None
    progress: Progress
    _stack: ExitStack = field(default_factory=ExitStack)
    _writer: RowWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last line if the run ended without an error."""
        with self._stack:
            if kind is None and self._writer is not None:
                self._writer.end()

    def begin(self, observations: PathObservations | None, refused: Sequence[RefusedRow] | None) -> None:
        """Write everything that precedes the rows. With many nodes this takes some time."""
        self.progress.enter(Phase.OUTPUT)
        logs = None if self.log_text is None else self.group.collect(zlib.compress(self.log_text()))
        machines, write = self.read_machines(), None
        if machines is not None:
            first = RecordedCollective.of(
                self.described,
                hosts=tuple(node.host for node in machines.snapshots),
                testimony=None if observations is None else recording.RecordedObservations.of(observations),
                refused=None if refused is None else tuple(refused),
            )
            write = self._stack.enter_context(written(self.directory, first, machines))
            recorded.write_nccl_logs(self.directory, [zlib.decompress(text) for text in logs or ()])
        # With --split, the first rank only has the rows of its own group, so gather the rows of all groups.
        self._writer = RowWriter(write, (lambda row: [row]) if self.part is None else self.group.collect, self.part)

    def row(self, case: Case, measured: MeasuredRow) -> None:
        """Write one line per row. With --split, write one line per row and group."""
        if self._writer is None:
            raise ValueError("what is known before comes first")
        self._writer.row(case, measured)

    def end(self, idle: Sequence[IdleGpu]) -> None:
        """Store the state of idle GPUs after the last row, for the last line of the recording."""
        if self._writer is not None:
            self._writer.after_rows(idle)


@contextmanager
def written(directory: Path, first: RecordedCollective, machines: Machines) -> Iterator[Write]:
    """Write nodes, processes and the first line of a recording. Yield a function that writes further lines."""
    name = recording.file_name(first.collective)
    recorded.write_recording(directory, machines.snapshots, machines.processes)
    with recorded.recording_samples(directory, name) as write:
        write(first)
        yield write


class SimulatedSettings(Struct, frozen=True):
    """The simulated times of each setting, by the setting's name in rows, and the settings that NCCL rejects."""

    times: dict[str, CollectiveTimes]
    refused: tuple[RefusedRow, ...] = ()


def simulated_settings(
    plan: CollectivePlan, simulation: Simulation, request: SweepRequest, per_node: int
) -> SimulatedSettings:
    """Simulate the times of all settings in a plan. Raises UsageError if the effect of a setting is not modeled."""
    plan.check_unset({name: value for fault in simulation.faults for name, value in fault.variables.items()})
    times, refused, machine = dict[str, CollectiveTimes](), list[RefusedRow](), simulation.machine
    for name in plan.setting_names(SIMULATED_BACKEND):
        faults = (*simulation.faults, *job_variables(_known_variables(name, plan, simulation), machine.nodes))
        found = CollectiveTimes(machine, faults, simulation.seed, root=request.root)
        try:
            found.seconds(request.collective.name, max(request.sizes), row=0, ranks_per_node=per_node)
        except CouldNotMeasureError as error:
            refused.append(
                RefusedRow(
                    collective=request.collective.name,
                    backend=SIMULATED_BACKEND,
                    setting=name,
                    dtype=None,
                    op=None,
                    size_bytes=None,
                    reason=str(error),
                )
            )
        else:
            times[name] = found
    return SimulatedSettings(times, tuple(refused))


def _known_variables(name: str, plan: CollectivePlan, simulation: Simulation) -> dict[str, str]:
    setting, machine = NcclSetting.parse(name), simulation.machine
    variables = dict(setting.variables)
    if MAX_CTAS in setting.requests:
        variables["NCCL_MAX_CTAS"] = setting.requests[MAX_CTAS]
    known = known_effects(machine.profile, variables, machine.nodes)
    if not variables or known != variables or not setting.requests.keys() <= {MAX_CTAS}:
        raise UsageError(
            f"{' '.join(plan.comparison_options)} with --simulate {simulation.text}: {name}",
            expected="a setting with a known effect: ring, tree and protocols on one node of H100s or H200s, and the "
            "variables of docs/reference/faults.md",
            reason=f"the speed of {machine.profile.name} with {name} is not known",
            next_step="gpubench allreduce --algo ring,tree --proto ll,ll128,simple --simulate hgx-h100-8",
        )
    return variables


class SimulatedGroup(Struct, frozen=True):
    """A group of ranks with its simulated times and node numbers. `per_node` is its number of ranks per node."""

    part: RankGroup
    times: CollectiveTimes
    nodes: tuple[int, ...]
    per_node: int


def simulated_groups(
    parts: Sequence[RankGroup], ranks: Sequence[RankIdentity], simulation: Simulation, seed: int
) -> list[SimulatedGroup]:
    """Return each group, simulated as a separate machine. Raises UsageError if groups share a path."""
    found = []
    for number, part in enumerate(parts):
        own = [ranks[rank] for rank in part.ranks]
        nodes = tuple(dict.fromkeys(rank.node for rank in own))
        places = {node: frozenset(rank.local_rank for rank in own if rank.node == node) for node in nodes}
        local = places[nodes[0]]
        whole = {node: frozenset(rank.local_rank for rank in ranks if rank.node == node) for node in nodes}
        why = _why_shared(simulation.machine, nodes, whole, places)
        if why:
            raise UsageError(
                f"--split with --simulate {simulation.text}: {part.name}",
                expected="groups that share no path, such as whole nodes, GPUs connected by NVLinks, or rails with "
                "one NIC each",
                reason=why,
                next_step="gpubench allreduce --split node --simulate 'hgx-h100-8*4'",
            )
        machine = replace(simulation.machine, nodes=len(nodes))
        shape = list(_left_out(simulation, nodes, local, len(whole[nodes[0]])))
        kept = [
            replace(fault, node=nodes.index(fault.node_number))
            for fault in simulation.faults
            if fault.node_number in nodes
        ]
        times = CollectiveTimes(machine, kept, seed + number, shape=shape)
        found.append(SimulatedGroup(part, times, nodes, len(local)))
    return found


def _why_shared(
    machine: SimulatedMachine,
    nodes: Sequence[int],
    whole: dict[int, frozenset[int]],
    places: dict[int, frozenset[int]],
) -> str:
    """Return why other groups would affect the times of a group, or an empty text if they share no path."""
    profile = machine.profile
    if machine.domain_nodes > 1 and 1 < len(nodes) < machine.nodes:
        return "its groups share the NVLinks between nodes"
    if places == whole:
        return ""
    if len(nodes) == 1:
        return "" if profile.nvlink is not None else "its groups share PCIe and host memory"
    if any(len(own) > 1 for own in places.values()) or len(profile.nic) != len(whole[nodes[0]]):
        return "its groups share NICs"
    return ""


def _left_out(simulation: Simulation, nodes: Sequence[int], local: frozenset[int], ranks: int) -> Iterable[Fault]:
    """Yield faults that remove the GPUs of other groups. If a group has several nodes, also remove the NICs of
    these GPUs.
    """
    visible = simulation.machine.profile.match.visible
    missing = (("missing", "yes"),)
    for number, node in enumerate(nodes):
        on_gpus = [each for each in simulation.faults if each.subject is Subject.GPU and each.node_number == node]
        gone = {
            fault.index for fault in on_gpus if fault.get("missing") or fault.get("lost")
        } | simulation.machine.hidden
        there = [index for index in range(visible) if index not in gone]
        for place, index in enumerate(there):
            if place not in local:
                yield Fault(Subject.GPU, missing, number, index)
                if len(nodes) > 1 and len(local) < ranks:
                    yield Fault(Subject.NIC, missing, number, index)


def report_on_groups(
    groups: Sequence[SimulatedGroup],
    request: SweepRequest,
    nodes: Sequence[Snapshot],
    simulation: Simulation,
    listener: Listener[CollectiveRow],
) -> Report:
    """Simulate all groups and pass their rows to `listener`. Each row is compared with the same row of the other
    groups.
    """
    parts, rows = [], []
    for group in groups:
        collector = ReportCollector()
        parts.append(PartReport.of(_report(group, request, nodes, simulation, NamedRows(group.part, collector))))
        rows.append(collector.collectives)
    siblings = SiblingJudge()
    for of_case in zip(*rows, strict=True):
        for row in siblings.judge(of_case):
            listener.row(row)
    return siblings.report(merge_parts(parts))


def _report(
    group: SimulatedGroup,
    request: SweepRequest,
    nodes: Sequence[Snapshot],
    simulation: Simulation,
    listener: Listener[CollectiveRow],
) -> Report:
    collective, own = request.collective, [Topology(nodes[node]) for node in group.nodes]

    def seconds(case: Case, row: int, attempt: int) -> Sequence[float]:
        number = row + attempt * MOST_SIMULATED_ROWS
        return group.times.seconds(collective.name, case.size_bytes, row=number, ranks_per_node=group.per_node)

    speed = judge_by_model(collective, group.times, own, group.per_node, simulation.machine.profile)
    ranks = group.per_node * len(group.nodes)
    return simulate(request, ranks, len(group.nodes), seconds, listener, PathOutcome({}, ()), speed)


class ModelledCollective(Struct, frozen=True, kw_only=True):
    """A collective on a simulated machine. `staged` has the pairs of ranks that a fault forces through host memory."""

    request: SweepRequest
    identities: Sequence[RankIdentity]
    nodes: Sequence[Snapshot]
    times: CollectiveTimes
    per_node: int
    described: DescribedCollective
    staged: Sequence[tuple[int, int]]
    corrupted: Sequence[int]
    simulation: Simulation
    processes: Sequence[RankFacts]
    settings: SimulatedSettings
    groups: Sequence[SimulatedGroup] = ()

    def report(
        self,
        listener: Listener[CollectiveRow],
        plan: CollectivePlan,
        keep: Callable[[Sequence[float], Percentiles | None], object],
    ) -> Report:
        """Simulate the collective and return the report. `keep` is called with the times of each row."""
        name = self.request.collective.name

        def seconds(case: Case, row: int, attempt: int) -> Sequence[float]:
            times = self.settings.times.get(case.setting or "", self.times)
            number = row + attempt * MOST_SIMULATED_ROWS
            return times.seconds(name, case.size_bytes, row=number, ranks_per_node=self.per_node)

        nodes = build_topologies(self.nodes)
        paths = simulated(self.staged, self.identities, nodes.__getitem__, self.processes)
        judged_by = self.simulation.machine.profile if plan.profile is None else find(plan.profile, os.environ)
        collective = self.request.collective
        speed = judge_by_model(collective, self.times, nodes, self.per_node, judged_by)
        ranks = len(self.identities)
        if self.groups:
            report = report_on_groups(self.groups, self.request, self.nodes, self.simulation, listener)
            return add_machine_findings(report, nodes, plan)
        report = simulate(
            self.request,
            ranks,
            len(self.nodes),
            seconds,
            listener,
            paths,
            speed,
            keep,
            settings=list(self.settings.times),
            refused=self.settings.refused,
            identities=self.identities,
            corrupted=self.corrupted,
        )
        modelled = paths_of_model(self.staged, Wiring(self.identities, dict(enumerate(nodes))))
        report = require_paths(report, plan.require_path, modelled)
        working = {node.host: sum(not gpu.lost for gpu in node.gpus) for node in self.nodes}
        return add_gpu_count_finding(add_machine_findings(report, nodes, plan), working, plan)


def modelled(plan: CollectivePlan, source: Simulated) -> ModelledCollective:
    """Return the collective of a plan on a simulated machine. Raises UsageError or CouldNotMeasureError."""
    simulation = source.simulation
    request = plan.request_for("nccl")
    times = CollectiveTimes(simulation.machine, simulation.faults, simulation.seed, root=request.root)
    nodes = source.machines().snapshots
    check_drivers(nodes, plan.collective.name, simulation.source)
    per_node = _ranks_per_node(plan, simulation, times.gpus)
    identities = list(rank_identities(nodes, per_node))
    check_root(request.collective, request.root, len(identities))
    dropped = drop_empty_sizes(request, request.sizes, len(identities))
    request = replace(request, sizes=sizes_left(request.sizes, dropped))
    times.seconds(request.collective.name, max(request.sizes), row=0, ranks_per_node=per_node)
    parts = () if plan.split is None else split_ranks(plan.split, identities)
    settings = simulated_settings(plan, simulation, request, per_node)
    staged, corrupted = times.staged_pairs(per_node), times.corrupted(request.collective.name, per_node)
    simulation.note_effects(COLLECTIVES)
    if not corrupted:
        simulation.note_effects(COLLECTIVES, "corrupts", request.collective.name)
    model = Model(source=simulation.source, seed=simulation.seed, profile=simulation.profile, staged=tuple(staged))
    described = described_collective(
        plan,
        replace(request, check=False),
        settings=list(settings.times),
        split=plan.split,
        parts=parts,
        backend=SIMULATED_BACKEND,
        origin=Origin.SIMULATED,
        ranks=tuple(identities),
        hosts=tuple(node.host for node in nodes),
        dropped_sizes=dropped,
        environment=simulation.environment,
        model=model,
    )
    return ModelledCollective(
        request=request,
        identities=identities,
        nodes=nodes,
        times=times,
        per_node=per_node,
        described=described,
        staged=staged,
        corrupted=corrupted,
        simulation=simulation,
        settings=settings,
        groups=simulated_groups(parts, identities, simulation, simulation.seed),
        processes=source.processes([(rank.node, nodes[rank.node]) for rank in identities]),
    )


@contextmanager
def open_model(place: Place) -> Iterator[ModelledCollective]:
    yield modelled(place.plan, place.plan.source)


def _measure_model(place: Place, found: ModelledCollective) -> Report:
    plan, presenter = place.plan, place.presenter
    made: list[tuple[Sequence[float], Percentiles | None]] = []
    if plan.require_path:
        check_possible(plan.require_path, Wiring(found.identities, dict(enumerate(build_topologies(found.nodes)))))
    note_ignored_variables(plan.source, presenter)
    topology = Topology(found.nodes[0]).fingerprint()
    presenter.begin(collective_metadata(found.described, plan.collective, place.arguments, topology=topology))
    report = found.report(presenter, plan, lambda *times: made.append(times))
    if plan.recording.record is not None:
        _record(plan.recording.record, found, made)
    return report


SIMULATION = Steps("", open_model, _measure_model)


def _record(
    directory: Path, found: ModelledCollective, made: Sequence[tuple[Sequence[float], Percentiles | None]]
) -> None:
    request, ranks = found.request, len(found.identities)
    machines = Machines.of(found.nodes, found.processes)
    with written(directory, RecordedCollective.of(found.described), machines) as write:
        every_case = simulated_cases(request, ranks, found.described.options.settings)
        for case, (seconds, percentiles) in zip(every_case, made, strict=True):
            own = OwnTimes(seconds[0], request.sampling.least_iterations, percentiles=percentiles)
            wrong = wrong_elements(case, ranks, found.corrupted)
            answers = tuple(Answer(each, wrong=lost) for each, lost in zip(seconds, wrong, strict=True))
            sample = RowSample(own, answers)
            write(RecordingLine(row=RecordedRow(case, SIMULATED_BACKEND, sample)))
        write(RecordingLine(rows=len(made)))


def _ranks_per_node(plan: CollectivePlan, simulation: Simulation, gpus: int) -> int:
    if plan.ranks is None:
        return gpus
    per_node, rest = divmod(plan.ranks, simulation.machine.nodes)
    if rest or not 1 <= per_node <= gpus:
        raise UsageError(
            f"--np {plan.ranks} on {simulation.machine}",
            expected=f"the same number of ranks on every node, at most {gpus}",
            next_step=f"--np {simulation.machine.nodes * gpus}",
        )
    return per_node


def rank_identities(nodes: Sequence[Snapshot], per_node: int) -> list[RankIdentity]:
    """Return the identities of the ranks on simulated nodes, one rank per working GPU and at most `per_node` per
    node.
    """
    return [
        RankIdentity(
            rank=number * per_node + local,
            host=node.host,
            node=number,
            local_rank=local,
            pid=0,
            gpu=gpu.name,
            gpu_index=gpu.index,
            gpu_bus_id=gpu.bus_id,
            gpu_uuid=gpu.uuid,
        )
        for number, node in enumerate(nodes)
        for local, gpu in enumerate([gpu for gpu in node.gpus if not gpu.lost][:per_node])
    ]


@contextmanager
def _open_recording(place: Place) -> Iterator[tuple[RecordedCollective, RecordedRows, Machines]]:
    """Read a recorded run. It is strict if --strict was used for the recording or is used now."""
    plan: CollectivePlan = place.plan
    source, collective = place.plan.source, plan.collective
    machines = source.machines()
    lines = recorded.read_samples(source.directory, file_name(collective.name), collective.name)
    found, rows = read_recorded(lines, collective, source.text)
    evidence = found.options.evidence
    if plan.evidence is EvidenceUse.SHOWN and evidence is not EvidenceUse.OFF:
        evidence = plan.evidence
    options = replace(found.options, strict=found.options.strict or plan.strict, evidence=evidence)
    yield replace(found, options=options), rows, machines


def _replay(place: Place, opened: tuple[RecordedCollective, RecordedRows, Machines]) -> Report:
    (found, rows, machines), plan = opened, place.plan
    collective, source = plan.collective, plan.source.text
    circumstances = _circumstances(found, machines, source)
    check_possible(plan.require_path, circumstances.wiring)
    topology = None if found.model is None else circumstances.wiring.nodes[0].fingerprint()
    metadata = collective_metadata(found, collective, place.arguments, topology=topology, replayed=source)
    place.presenter.begin(metadata)

    def speed_judge(ranks: Sequence[RankIdentity]) -> SpeedJudge:
        if found.model is None:
            return speed_judge_maker(collective, ranks, found.libraries.get("NCCL"), plan.profile)(circumstances)
        machine = SimulatedMachine(load(found.model.profile["name"]), len(found.hosts))
        per_node = len(found.ranks) // len(found.hosts)
        nodes = list(circumstances.nodes.values())
        return judge_by_model(collective, CollectiveTimes(machine), nodes, per_node, machine.profile)

    report = replay(found, rows, collective, circumstances, place.presenter, speed_judge)
    if found.model is None:
        report = require_evidence(report, plan.require_path, machines.nodes)
    else:
        paths = paths_of_model(found.model.staged, circumstances.wiring)
        report = require_paths(report, plan.require_path, paths)
    working = {node.snapshot.host: sum(not gpu.lost for gpu in node.gpus) for node in machines.nodes}
    return add_gpu_count_finding(add_machine_findings(report, machines.nodes, plan), working, plan)


REPLAY = Steps("", _open_recording, _replay)


def _circumstances(found: RecordedCollective, machines: Machines, source: str) -> Circumstances:
    by_host = {node.snapshot.host: node for node in machines.nodes}
    facts = machines.processes
    missing = [f"samples of {host}, which is not in the recording" for host in found.hosts if host not in by_host]
    if found.model is None and [fact.rank for fact in facts] != [rank.rank for rank in found.ranks]:
        missing.append(f"samples of {len(found.ranks)} ranks, and processes of {len(facts)}")
    if missing:
        raise UsageError(
            f"{source}: {missing[0]}",
            expected="nodes, ranks and samples of one run",
            reason="the folder was assembled from several recordings, or it is incomplete",
            next_step="copy the whole folder again, or record again with --record DIR",
        )
    nodes = {number: by_host[host] for number, host in enumerate(found.hosts)}
    return Circumstances(wiring=Wiring(found.ranks, nodes), facts=facts)
