"""Copies of one process: open what a source has to copy with, measure or replay it, and present it."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from gpubench.errors import UsageError
from gpubench.formats.delivery import delivering
from gpubench.formats.presenter import Presenter, terminal_style
from gpubench.hardware import recorded
from gpubench.hardware.node.probe import watch_errors
from gpubench.hardware.simulated.copies import NoCounters, SimulatedCopies
from gpubench.hardware.simulated.managed import SimulatedManaged
from gpubench.jobs.gpus import usable_driver
from gpubench.jobs.machines import Machines, check_drivers
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.p2p.plan import NAME, MemoryKind, P2pPlan
from gpubench.jobs.p2p.replayed import replayed
from gpubench.jobs.p2p.requests import check_managed, request_for_process
from gpubench.jobs.p2p.setup import CopySetup
from gpubench.jobs.past import bandwidth_of, past_of
from gpubench.jobs.simulation import Simulation
from gpubench.jobs.sources import Here, Replayed, Simulated, refuse_under_launcher
from gpubench.measure.p2p.machine import CopyMachine, wiring_of_process
from gpubench.measure.p2p.one_process import CopyBench, unreachable_pairs
from gpubench.measure.p2p.request import P2pRequest
from gpubench.measure.p2p.run import SECTIONS as SECTIONS
from gpubench.measure.p2p.run import LookAgain, P2pRun
from gpubench.measure.paths.idle_window import IdleWindow
from gpubench.model.facts.launched_by import launched_by
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import COPIES
from gpubench.model.results.report import PAIR_COLUMNS, PairRow, Report
from gpubench.model.terms.origin import Origin
from gpubench.ports.copies import Copies
from gpubench.ports.link_counters import LinkCounters
from gpubench.ports.listener import Listener
from gpubench.ports.managed import ManagedMemory
from gpubench.profiles.matching import ProfileMatch
from gpubench.profiles.nodes import profile_for

_SECONDS_TO_READ = 3.0
"""What facts and contexts take on a few GPUs: an estimate for whoever waits."""

_SECONDS_A_CELL = 0.07
"""What a cell of a matrix takes on H200: warm-up, three samples of 10 ms, filling and checking."""


def run(plan: P2pPlan, arguments: Sequence[str]) -> int:
    """Copy, alone or as one rank of a job; the exit code.

    Raises:
        GpubenchError: nothing can be measured, or an output cannot be written.
    """
    launch, source = launched_by(os.environ), plan.source
    if launch is None or launch.size == 1:
        return run_alone(plan, arguments)
    refuse_under_launcher(NAME, source, launch)
    if plan.memory is MemoryKind.MANAGED:
        raise UsageError(
            f"p2p --memory managed under {launch.launcher}",
            expected="one process: managed memory belongs to one",
            next_step="gpubench p2p --memory managed without the launcher",
        )
    from gpubench.jobs import rank
    from gpubench.jobs.p2p.ranks import P2pRanksJob

    defaults = plan.presentation.job_defaults
    return rank.run(
        lambda group, progress: P2pRanksJob(group, progress, plan, arguments), launch, plan.timeout_s, defaults
    )


def run_alone(plan: P2pPlan, arguments: Sequence[str]) -> int:
    """Measure the GPUs of this host or a simulated one's, or replay a recording; the exit code.

    Raises:
        GpubenchError: no GPU, a pair that does not exist, a recording or an output that cannot be used.
    """
    shown = plan.presentation
    check_writable(shown.outputs, plan.recording.record)
    is_here = isinstance(plan.source, Here)
    shows_progress = shown.show_progress and is_here
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=shows_progress)
    with delivering(presenter), _opened(plan, presenter) as setup:
        metadata = setup.metadata(arguments)
        with setup.recorded_bench(metadata) as bench:
            presenter.begin(metadata, PAIR_COLUMNS)
            if shows_progress:
                cells = setup.request.steps(len(setup.machine.gpus))
                presenter.waiting(f"{cells} copies to time", cells * _SECONDS_A_CELL)
            look_again = _looking_again(plan) if is_here else None
            past = bandwidth_of(past_of(shown.history, metadata))
            run = P2pRun(setup.request, bench, setup.machine, presenter, look_again, past)
            report = run.run()
        presenter.end(report)
    return presenter.exit_code


def measured(
    copies: SimulatedCopies,
    node: Topology,
    matched: ProfileMatch | None,
    request: P2pRequest,
    listener: Listener[PairRow],
) -> Report:
    """Copies of a simulated node that are part of another job: rows go to the listener."""
    wiring = wiring_of_process(node, copies.gpus)
    machine = CopyMachine(wiring, copies.gpus, (), matched, Origin.SIMULATED, unreachable_pairs(copies))
    return P2pRun(request, CopyBench(request, copies, NoCounters()), machine, listener).run()


@contextmanager
def _opened(plan: P2pPlan, presenter: Presenter) -> Iterator[CopySetup]:
    presenter.waiting("reading this machine", _SECONDS_TO_READ)
    if isinstance(plan.source, Replayed):
        yield replayed(plan, plan.source)
    elif isinstance(plan.source, Simulated):
        simulation, machines = plan.source.simulation, plan.source.machines()
        _check_first_node(simulation, machines.nodes[0])
        first = replace(machines, nodes=machines.nodes[:1])
        simulation.check_effects(NAME, COPIES)
        copies = SimulatedCopies(simulation.machine, simulation.faults, simulation.seed)
        managed = SimulatedManaged(copies) if plan.memory is MemoryKind.MANAGED else None
        yield _setup(
            replace(plan, check=plan.check and copies.corrupts), first, copies, NoCounters(), {}, managed=managed
        )
    else:
        with _own_gpus(plan) as setup:
            yield setup


def _check_first_node(simulation: Simulation, node: Topology) -> None:
    """Check that the node that one process measures, the first, can be measured, and that no other is broken.

    Raises:
        UsageError: a fault is on another node, which nobody would look at.
        CouldNotMeasureError: as `check_drivers`.
    """
    elsewhere = next((each for each in simulation.faults if each.node_number > 0), None)
    if elsewhere is not None:
        raise UsageError(
            f"--fault {elsewhere} is on a node that p2p does not measure",
            expected="node0: one process measures the GPUs of one host",
            next_step=f"gpubench check {simulation.source}",
        )
    check_drivers([node.snapshot], NAME, simulation.source)


@contextmanager
def _own_gpus(plan: P2pPlan) -> Iterator[CopySetup]:
    """The GPUs of this process; facts are read before anything is put on them."""
    from gpubench.hardware.copies.managed import open_managed
    from gpubench.hardware.copies.one_process import open_copies
    from gpubench.hardware.node.nvml.gpu_use import NvmlUse
    from gpubench.hardware.node.nvml.link_counters import NvmlCounters

    driver = usable_driver(NAME)
    machines = plan.source.machines()
    use = NvmlUse()
    names = {gpu.bus_id: gpu.device for gpu in machines.nodes[0].gpus if gpu.bus_id}
    copies = open_copies(driver, names)
    counters = NvmlCounters([gpu.bus_id for gpu in copies.gpus])
    try:
        users = use.of([gpu.bus_id for gpu in copies.gpus], {os.getpid()})
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
    """A run of one process; `window` looks at its GPUs while it does not copy.

    Raises:
        UsageError: `--pairs` names a GPU that is not there, or a profile cannot be used.
        CouldNotMeasureError: managed memory is asked for and no GPU has any.
    """
    (node,) = machines.nodes
    matched = profile_for(node, os.environ, plan.profile)
    support = () if managed is None else managed.support()
    check_managed(support)
    wiring, apart = wiring_of_process(node, copies.gpus), unreachable_pairs(copies)
    request = request_for_process(plan, copies.gpus, wiring, support)
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


def _looking_again(plan: P2pPlan) -> LookAgain:
    """Reads what devices have counted since; a recording gets it too."""

    def look_again(machine: CopyMachine) -> CopyMachine:
        (node,) = machine.nodes
        snapshot = watch_errors(node.snapshot, plan.timeout_s, os.environ)
        if plan.recording.record is not None:
            recorded.write_recording(plan.recording.record, [snapshot], machine.processes)
        return replace(machine, wiring=replace(machine.wiring, nodes={0: Topology(snapshot)}))

    return look_again
