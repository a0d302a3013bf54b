"""A collective on a simulated machine: one process, no MPI, no GPU."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.collectives.request import SweepRequest
from gpubench.errors import UsageError
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.jobs.collective.gpu_count import with_gpu_count, with_presence
from gpubench.jobs.collective.metadata import collective_metadata, described_collective
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.speed import judge_of_model
from gpubench.jobs.machines import Machines, check_drivers
from gpubench.jobs.outputs import presenting
from gpubench.jobs.simulation import Simulation
from gpubench.jobs.sources import Simulated
from gpubench.measure.collective.cases import cases, without_data
from gpubench.measure.collective.described import DescribedCollective, Model
from gpubench.measure.collective.path_evidence import simulated
from gpubench.measure.collective.row_collector import Answer, RowSample
from gpubench.measure.collective.simulated import BACKEND, MOST_ROWS, simulate
from gpubench.measure.collective.sweep import check_root, sizes_left
from gpubench.measure.collective.timing import OwnTimes
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.profiles.files import find


def run(plan: CollectivePlan, source: Simulated, arguments: Sequence[str]) -> int:
    """Present the model's figures; the exit code.

    Raises:
        UsageError: ranks that the machine cannot have, a root that is no rank.
        CouldNotMeasureError: a fault leaves nothing to simulate, or a node's driver does not answer.
    """
    simulation = source.simulation
    times = CollectiveTimes(simulation.machine, simulation.faults, simulation.seed)
    nodes = source.machines().snapshots
    check_drivers(nodes, plan.collective.name, simulation.source)
    per_node = _ranks_per_node(plan, simulation, times.gpus)
    identities = list(_identities(nodes, per_node))
    request = plan.at_sizes_for("nccl")
    check_root(request.collective, request.root, len(identities))
    dropped = without_data(request, request.sizes, len(identities))
    request = replace(request, sizes=sizes_left(request.sizes, dropped))
    name = request.collective.name
    times.seconds(name, max(request.sizes), row=0, ranks_per_node=per_node)
    staged = times.staged_pairs(per_node)
    model = Model(source=simulation.source, seed=simulation.seed, profile=simulation.profile, staged=tuple(staged))
    described = described_collective(
        plan,
        replace(request, check=False),
        backend=BACKEND,
        origin=Origin.SIMULATED,
        ranks=tuple(identities),
        hosts=tuple(node.host for node in nodes),
        dropped_sizes=dropped,
        model=model,
    )
    made: list[Sequence[float]] = []

    def seconds(size: int, row: int, attempt: int) -> Sequence[float]:
        return times.seconds(name, size, row=row + attempt * MOST_ROWS, ranks_per_node=per_node)

    with presenting(plan.presentation, plan.recording.record) as presenter:
        topology = Topology(nodes[0]).fingerprint()
        metadata = collective_metadata(described, request.collective, arguments, topology=topology)
        presenter.begin(metadata)
        paths = simulated(staged, identities, lambda node: Topology(nodes[node]), simulation.source)
        judged_by = simulation.machine.profile if plan.profile is None else find(plan.profile, os.environ)
        speed = judge_of_model(request.collective, times, described.hosts, per_node, judged_by)
        report = simulate(request, len(identities), len(nodes), seconds, presenter, paths, speed, made.append)
        working = {node.host: sum(not gpu.lost for gpu in node.gpus) for node in nodes}
        report = with_gpu_count(with_presence(report, [Topology(node) for node in nodes], plan), working, plan)
        if plan.recording.record is not None:
            _record(plan.recording.record, described, nodes, request, made)
        presenter.end(report)
    return presenter.exit_code


def _record(
    directory: Path,
    described: DescribedCollective,
    nodes: Sequence[Snapshot],
    request: SweepRequest,
    made: Sequence[Sequence[float]],
) -> None:
    """Write a recording of what the model said of every row, in seconds by rank."""
    from gpubench.jobs.collective.recorder import written
    from gpubench.measure.collective.recording import RecordedCollective, RecordedRow, RecordingLine

    with written(directory, RecordedCollective.of(described), Machines.of(nodes)) as write:
        for case, seconds in zip(cases(request, len(described.ranks)), made, strict=True):
            own = OwnTimes(seconds[0], request.sampling.least_iterations)
            sample = RowSample(own, tuple(Answer(each) for each in seconds))
            write(RecordingLine(row=RecordedRow(case, BACKEND, sample)))
        write(RecordingLine(rows=len(made)))


def _ranks_per_node(plan: CollectivePlan, simulation: Simulation, gpus: int) -> int:
    """--np spread evenly over the nodes, else one rank a GPU."""
    if plan.ranks is None:
        return gpus
    per_node, rest = divmod(plan.ranks, simulation.machine.nodes)
    if rest or not 1 <= per_node <= gpus:
        raise UsageError(
            f"--np {plan.ranks} on {simulation.machine}",
            expected=f"as many ranks on every node, at most {gpus}",
            next_step=f"--np {simulation.machine.nodes * gpus}",
        )
    return per_node


def _identities(nodes: Sequence[Snapshot], per_node: int) -> list[RankIdentity]:
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
