"""A collective on a simulated machine: one process, no MPI, no GPU."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from gpubench.model.profiles.fault import COLLECTIVES
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.overlap.asked import OVERLAP
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.ports.listener import Listener
from gpubench.profiles.files import find


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledCollective:
    """A collective on a simulated machine: the request with the sizes that are left, ranks, and what their times are.

    `staged` are pairs of ranks that faults make go through host memory.
    """

    request: SweepRequest
    identities: Sequence[RankIdentity]
    nodes: Sequence[Snapshot]
    times: CollectiveTimes
    per_node: int
    described: DescribedCollective
    staged: Sequence[tuple[int, int]]
    simulation: Simulation

    def report(
        self, listener: Listener[CollectiveRow], plan: CollectivePlan, keep: Callable[[Sequence[float]], object]
    ) -> Report:
        """The rows of the model, with paths and speed judged; `keep` gets the times of every row."""
        name, source = self.request.collective.name, self.simulation.source

        def seconds(size: int, row: int, attempt: int) -> Sequence[float]:
            return self.times.seconds(name, size, row=row + attempt * MOST_ROWS, ranks_per_node=self.per_node)

        paths = simulated(self.staged, self.identities, lambda node: Topology(self.nodes[node]), source)
        judged_by = self.simulation.machine.profile if plan.profile is None else find(plan.profile, os.environ)
        collective = self.request.collective
        nodes = [Topology(node) for node in self.nodes]
        speed = judge_of_model(collective, self.times, nodes, self.per_node, judged_by)
        ranks = len(self.identities)
        report = simulate(self.request, ranks, len(self.nodes), seconds, listener, paths, speed, keep)
        working = {node.host: sum(not gpu.lost for gpu in node.gpus) for node in self.nodes}
        return with_gpu_count(with_presence(report, nodes, plan), working, plan)


def modelled(plan: CollectivePlan, source: Simulated) -> ModelledCollective:
    """The collective of a plan on a simulated machine.

    Raises:
        UsageError: ranks that the machine cannot have, a root that is no rank.
        CouldNotMeasureError: a fault leaves nothing to simulate, or a node's driver does not answer.
    """
    simulation = source.simulation
    simulation.check_effects(plan.collective.name if plan.overlap is None else OVERLAP, COLLECTIVES)
    times = CollectiveTimes(simulation.machine, simulation.faults, simulation.seed)
    nodes = source.machines().snapshots
    check_drivers(nodes, plan.collective.name, simulation.source)
    per_node = _ranks_per_node(plan, simulation, times.gpus)
    identities = list(_identities(nodes, per_node))
    request = plan.at_sizes_for("nccl")
    check_root(request.collective, request.root, len(identities))
    dropped = without_data(request, request.sizes, len(identities))
    request = replace(request, sizes=sizes_left(request.sizes, dropped))
    times.seconds(request.collective.name, max(request.sizes), row=0, ranks_per_node=per_node)
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
    return ModelledCollective(
        request=request,
        identities=identities,
        nodes=nodes,
        times=times,
        per_node=per_node,
        described=described,
        staged=staged,
        simulation=simulation,
    )


def run(plan: CollectivePlan, source: Simulated, arguments: Sequence[str]) -> int:
    """Present the model's figures; the exit code. Raises as `modelled`."""
    found = modelled(plan, source)
    made: list[Sequence[float]] = []
    with presenting(plan.presentation, plan.recording.record) as presenter:
        topology = Topology(found.nodes[0]).fingerprint()
        presenter.begin(collective_metadata(found.described, plan.collective, arguments, topology=topology))
        report = found.report(presenter, plan, made.append)
        if plan.recording.record is not None:
            _record(plan.recording.record, found.described, found.nodes, found.request, made)
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
