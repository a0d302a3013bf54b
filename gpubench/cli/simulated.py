"""A collective on a simulated machine: one process, no MPI, no GPU."""

import sys
from collections.abc import Sequence

from gpubench.cli.delivery import delivering
from gpubench.cli.job import describe
from gpubench.cli.options import CollectiveOptions
from gpubench.cli.presentation import check_writable
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.cli.run_metadata import stamp
from gpubench.cli.simulation import Simulation
from gpubench.errors import UsageError, no_size_left
from gpubench.hardware.launch import LaunchedBy
from gpubench.hardware.simulated.machine import snapshots
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.measure.cases import without_data
from gpubench.measure.collective import check_root
from gpubench.measure.path_evidence import simulated as simulated_paths
from gpubench.measure.path_report import Outcome
from gpubench.measure.simulated import BACKEND, simulate
from gpubench.model.report import Metadata, Origin, RankIdentity
from gpubench.model.snapshot import Snapshot
from gpubench.model.sweep import describe_dropped
from gpubench.model.topology import Topology
from gpubench.model.wiring import Wiring


def run(
    options: CollectiveOptions, simulation: Simulation, arguments: Sequence[str], launched_by: LaunchedBy | None
) -> int:
    """Present what the model says; the exit code.

    Raises:
        UsageError: under a launcher, ranks that the machine cannot have, a root that is no rank.
        CouldNotMeasureError: a fault leaves nothing to simulate.
    """
    if launched_by is not None:
        raise UsageError(
            f"--simulate under {launched_by.launcher}",
            expected="one process: nothing runs on the simulated machine",
            next_step="leave the launcher out; --simulate 'NAME*NODES' has as many nodes as you want",
        )
    times = CollectiveTimes(simulation.machine, simulation.faults, simulation.seed)
    nodes = snapshots(simulation.machine, simulation.faults, simulation.seed)
    per_node = _ranks_per_node(options, simulation, times.gpus)
    identities = list(_identities(nodes, per_node))
    request = options.request(options.sizes_for("nccl"))
    check_root(request.collective, request.root, len(identities))
    dropped = without_data(request, request.sizes, len(identities))
    kept = tuple(size for size in request.sizes if size not in {each.size_bytes for each in dropped})
    if not kept:
        raise no_size_left("; ".join(describe_dropped(dropped)))
    request = options.request(kept)
    name = request.collective.name
    times.seconds(name, max(kept), row=0, ranks_per_node=per_node)
    check_writable(options.presentation.outputs)
    presenter = Presenter(options.presentation, terminal_style(options.presentation, sys.stdout), progress=False)
    metadata = Metadata(
        **stamp(arguments),
        subject=name,
        collective=name,
        backend=BACKEND,
        origin=Origin.SIMULATED,
        hosts=[node.host for node in nodes],
        ranks=identities,
        options=describe(request)
        | {"allocator": options.allocator.value, "check": False, "seed": simulation.seed}
        | {"evidence": options.evidence.value, "strict": options.strict},
        dropped_sizes=dropped,
        topology=Topology(nodes[0]).fingerprint(),
        profile=simulation.profile,
        source=simulation.source,
    )
    with delivering(presenter):
        presenter.begin(metadata)
        report = simulate(
            request,
            len(identities),
            len(nodes),
            lambda size, row: times.seconds(name, size, row=row, ranks_per_node=per_node),
            presenter,
            _paths(options, simulation, identities, nodes, times.staged_pairs(per_node)),
        )
        presenter.end(report)
    return options.presentation.exit_code(report.verdict)


def _paths(
    options: CollectiveOptions,
    simulation: Simulation,
    identities: Sequence[RankIdentity],
    nodes: Sequence[Snapshot],
    staged: Sequence[tuple[int, int]],
) -> Outcome:
    """What the model says of the paths that faults make go through host memory."""
    used = {identities[rank].node for pair in staged for rank in pair}
    wiring = Wiring(identities, {number: Topology(nodes[number]) for number in used})
    return simulated_paths(staged, wiring, simulation.source, strict=options.strict)


def _ranks_per_node(options: CollectiveOptions, simulation: Simulation, gpus: int) -> int:
    """--np spread evenly over the nodes, else one rank a GPU."""
    if options.ranks is None:
        return gpus
    per_node, rest = divmod(options.ranks, simulation.machine.nodes)
    if rest or not 1 <= per_node <= gpus:
        raise UsageError(
            f"--np {options.ranks} on {simulation.machine}",
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
