"""The report of a recorded collective, made as if it were measured now."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.errors import UsageError
from gpubench.hardware import recorded
from gpubench.hardware.simulated.machine import SimulatedMachine
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.jobs.collective.gpu_count import with_gpu_count, with_presence
from gpubench.jobs.collective.metadata import collective_metadata
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.speed import judge_of_model, speed_judge_of
from gpubench.jobs.machines import Machines
from gpubench.jobs.outputs import presenting
from gpubench.jobs.sources import Replayed
from gpubench.measure.collective.recording import RecordedCollective, file_of
from gpubench.measure.collective.replay import read_recorded, replay
from gpubench.measure.collective.speed_judge import SpeedJudge
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.profiles.files import load


def run(plan: CollectivePlan, source: Replayed, arguments: Sequence[str]) -> int:
    """Show what was recorded; the exit code.

    Raises GpubenchError: there is no recording of this collective, or an output cannot be written.
    """
    collective = plan.collective
    with presenting(plan.presentation) as presenter:
        machines = source.machines()
        lines = recorded.read_samples(source.directory, file_of(collective.name), collective.name)
        found, rows = read_recorded(lines, collective, source.text)
        found = _as_asked(found, plan)
        circumstances = _circumstances(found, machines, source.text)
        topology = None if found.model is None else circumstances.wiring.nodes[0].fingerprint()
        metadata = collective_metadata(found, collective, arguments, topology=topology, replayed=source.text)
        presenter.begin(metadata)

        def speed_judge(ranks: Sequence[RankIdentity]) -> SpeedJudge:
            if found.model is None:
                return speed_judge_of(collective, ranks, found.libraries.get("NCCL"), plan.profile)(circumstances)
            machine = SimulatedMachine(load(found.model.profile["name"]), len(found.hosts))
            per_node = len(found.ranks) // len(found.hosts)
            nodes = list(circumstances.nodes.values())
            return judge_of_model(collective, CollectiveTimes(machine), nodes, per_node, machine.profile)

        report = replay(found, rows, collective, circumstances, presenter, speed_judge)
        working = {node.snapshot.host: sum(not gpu.lost for gpu in node.gpus) for node in machines.nodes}
        report = with_gpu_count(with_presence(report, machines.nodes, plan), working, plan)
        presenter.end(report)
    return presenter.exit_code


def _as_asked(found: RecordedCollective, plan: CollectivePlan) -> RecordedCollective:
    """The recording with what may be asked of it anew: to be stricter, and to show evidence where there is any."""
    evidence = found.options.evidence
    if plan.evidence is EvidenceUse.SHOWN and evidence is not EvidenceUse.OFF:
        evidence = plan.evidence
    return replace(found, options=replace(found.options, strict=found.options.strict or plan.strict, evidence=evidence))


def _circumstances(found: RecordedCollective, machines: Machines, source: str) -> Circumstances:
    """Nodes and processes as they were. Raises UsageError: they and the samples do not belong together."""
    by_host = {node.snapshot.host: node for node in machines.nodes}
    facts = machines.processes
    missing = [f"samples of {host}, which no node of the recording is" for host in found.hosts if host not in by_host]
    if found.model is None and [each.rank for each in facts] != [each.rank for each in found.ranks]:
        missing.append(f"samples of {len(found.ranks)} ranks, and processes of {len(facts)}")
    if missing:
        raise UsageError(
            f"{source}: {missing[0]}",
            expected="nodes, ranks and samples of one run",
            reason="the folder was put together from several recordings, or is not whole",
            next_step="copy the whole folder again, or record it again: --record DIR",
        )
    nodes = {number: by_host[host] for number, host in enumerate(found.hosts)}
    return Circumstances(wiring=Wiring(found.ranks, nodes), facts=facts)
