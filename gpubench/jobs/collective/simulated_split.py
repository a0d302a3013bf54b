"""--split on a simulated machine: every group of ranks is a machine of its own, as far as groups share no path."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpubench.collectives.record import SweepRequest
from gpubench.errors import UsageError
from gpubench.jobs.collective.metadata import judge_of_model
from gpubench.jobs.outputs import ReportCollector
from gpubench.jobs.sources import Simulation
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.recording import MOST_SIMULATED_ROWS, simulate
from gpubench.measure.collective.variants import NamedRows, PartReport, SiblingJudge, together
from gpubench.measure.path_outcome import PathOutcome
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.ranks import RankGroup, RankIdentity
from gpubench.ports.group import Listener
from gpubench.records import dataclass
from gpubench.simulated.machine import SimulatedMachine
from gpubench.simulated.times import CollectiveTimes


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A group of ranks: its times, its nodes by number, and its ranks per node."""

    part: RankGroup
    times: CollectiveTimes
    nodes: tuple[int, ...]
    per_node: int


def simulated_groups(
    parts: Sequence[RankGroup], ranks: Sequence[RankIdentity], simulation: Simulation, seed: int
) -> list[SimulatedGroup]:
    """The groups as machines. Raises UsageError if groups share paths, and by how much is not known."""
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
                expected="groups that share no path: whole nodes, GPUs joined by NVLinks, or rails with a NIC each",
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
    """Why the times of a group depend on the other groups; empty if they do not."""
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
    """The GPUs, and on several nodes the NICs, of other groups, as parts that are missing."""
    visible = simulation.machine.profile.match.visible
    missing = (("missing", "yes"),)
    for number, node in enumerate(nodes):
        on_gpus = [each for each in simulation.faults if each.subject is Subject.GPU and each.node_number == node]
        gone = {fault.index for fault in on_gpus if fault.get("missing") or fault.get("lost")}
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
    """Simulate every group, and hand their rows on case by case, held against each other."""
    parts, rows = [], []
    for group in groups:
        collector = ReportCollector()
        parts.append(PartReport.of(_report(group, request, nodes, simulation, NamedRows(group.part, collector))))
        rows.append(collector.collectives)
    siblings = SiblingJudge()
    for of_case in zip(*rows, strict=True):
        for row in siblings.judged(of_case):
            listener.row(row)
    return siblings.report(together(parts))


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

    speed = judge_of_model(collective, group.times, own, group.per_node, simulation.machine.profile)
    ranks = group.per_node * len(group.nodes)
    return simulate(request, ranks, len(group.nodes), seconds, listener, PathOutcome({}, ()), speed)
