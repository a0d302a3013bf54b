"""The fabric of a plan as network files of other programs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpubench.errors import GpubenchError, naming_output
from gpubench.formats.networks.fabric import DATA, EXPERT, PIPELINE, TENSOR, ExportedFabric
from gpubench.formats.networks.registry import network_text
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.jobs.plan.plan import TrainingPlan
from gpubench.measure.plan.curves import CollectiveTimesFound, CommunicatorRanks
from gpubench.measure.plan.report import PlanOutcome, curve_rows
from gpubench.model.results.rows.plan import CurveRow
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND

_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "sendrecv")
_ANY_BYTES = 2**20


def write_exports(plan: TrainingPlan, machine: PlannedMachine, outcome: PlanOutcome) -> None:
    """Write every file that was asked for; OutputError where one cannot be written."""
    fabric = exported_fabric(machine, outcome)
    for target in plan.exports:
        with naming_output(target.path):
            target.path.write_text(network_text(target.program, fabric), encoding="utf-8")


def exported_fabric(machine: PlannedMachine, outcome: PlanOutcome) -> ExportedFabric:
    """The curves of a node and, of several nodes, between them; by what the chosen layout uses where it has more."""
    inside = CommunicatorRanks(min(machine.gpus_per_node, outcome.chosen.layout.gpus))
    across = inside if machine.nodes == 1 else _across(machine)
    job = outcome.advice.best.job
    groups = {TENSOR: inside, DATA: across, EXPERT: job.expert_group(), PIPELINE: CommunicatorRanks(2)}
    if groups[EXPERT].ranks == 1:
        groups[EXPERT] = inside
    curves = {role: dict(_curves(outcome.times, group)) for role, group in groups.items()}
    slowdowns = [each.contention.compute for each in job.contention.measured]
    # While a collective runs, computation is slowed by the share of the multiprocessors that it takes.
    usage = 1 - len(slowdowns) / sum(slowdowns) if slowdowns else 0.0
    profile = machine.profile
    nics = profile.nics_gb_s if profile is not None else 0.0
    link = profile.link_gb_s if profile is not None else 0.0
    return ExportedFabric(
        curves=curves,
        link_gb_s=link or 1.0,
        gpus_per_node=inside.ranks,
        nodes=machine.nodes,
        processor_usage=max(0.0, usage),
        nic_gb_s=nics / machine.gpus_per_node if nics else None,
    )


def _across(machine: PlannedMachine) -> CommunicatorRanks:
    """A GPU of every node, while all others do the same: these programs let every GPU have such a bandwidth at once."""
    return CommunicatorRanks(machine.nodes, machine.nodes, machine.gpus_per_node)


def _curves(times: CollectiveTimesFound, group: CommunicatorRanks) -> Mapping[str, Sequence[CurveRow]]:
    """The curves of a group; what nothing is known of is left out."""
    found: dict[str, Sequence[CurveRow]] = {}
    for name in _COLLECTIVES:
        own = CollectiveTimesFound(times.source)
        try:
            own.seconds(name, group, _ANY_BYTES)
        except GpubenchError:
            continue
        rows = [
            replace(row, time_us=own.seconds(name, group, row.size_bytes) * MICROSECONDS_PER_SECOND)
            for row in list(curve_rows(own))
        ]
        if rows:
            found[name] = rows
    return found
