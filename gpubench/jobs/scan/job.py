"""Scan: simulated nodes and kept rounds in one process, real nodes as ranks of a job."""

import os
import sys
from collections.abc import Mapping, Sequence

from gpubench.errors import UsageError
from gpubench.formats.delivery import say
from gpubench.hardware.launch.launcher import find_launcher
from gpubench.hardware.process.mps import cost_of_turns, mps_serves, sharing_settings
from gpubench.hardware.process.nccl_settings import NODE_VARIABLE
from gpubench.hardware.simulated.scan_fabric import (
    host_names,
    simulated_local_figures,
    simulated_model,
    simulated_scan_fabric,
)
from gpubench.hardware.simulated.scan_rounds import SimulatedRounds
from gpubench.jobs.collective.plan import SHARING_OPTION
from gpubench.jobs.gpus import usable_driver
from gpubench.jobs.outputs import check_file_writable, check_writable
from gpubench.jobs.scan.checks import check_node_count
from gpubench.jobs.scan.delivery import deliver
from gpubench.jobs.scan.facts import fact_findings
from gpubench.jobs.scan.plan import ScanPlan
from gpubench.jobs.scan.progress import telling
from gpubench.jobs.scan.rounds_folder import (
    KeptScan,
    ResumedRounds,
    RoundsFolder,
    check_same,
    each_once,
    is_quick,
    read_rounds,
)
from gpubench.jobs.simulation import Simulation
from gpubench.jobs.sources import Simulated
from gpubench.measure.scan.decoding import decode
from gpubench.measure.scan.inside_findings import below_profile
from gpubench.measure.scan.local_figures import better_of, slow_figures, slowest_of, still_slow
from gpubench.measure.scan.prediction import collectives
from gpubench.measure.scan.report import SECTIONS as SECTIONS
from gpubench.measure.scan.report import ScanResult
from gpubench.measure.scan.rounds import NOTHING_BEFORE, scan
from gpubench.model.facts.launched_by import LaunchedBy, launched_by
from gpubench.model.results.stored_scan import StoredFabric
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Finding
from gpubench.profiles.nodes import matched_profiles
from gpubench.readers.leaves import leaves_of

SIMULATED = "simulated"


def run(plan: ScanPlan, arguments: Sequence[str]) -> int:
    """Scan; the exit code. Raises GpubenchError: nothing can be scanned, or an output cannot be written."""
    launch = launched_by(os.environ)
    if launch is None or launch.rank == 0:
        check_writable(plan.presentation.outputs)
        if plan.hostfile is not None:
            check_file_writable(plan.hostfile)
    if plan.simulation is not None:
        _refuse_under_launcher("--simulate", launch)
        return _run_simulated(plan, plan.simulation, arguments)
    if plan.replay is not None:
        _refuse_under_launcher("--replay", launch)
        return _run_replayed(plan, read_rounds(plan.replay), arguments)
    if launch is None and plan.ranks_per_gpu > 1:
        _become_launcher(plan.ranks_per_gpu, arguments)
    if launch is not None:
        from gpubench.jobs.scan.ranks import run as run_ranks

        if plan.ranks_per_gpu > 1:
            os.environ.setdefault(NODE_VARIABLE, f"rank{launch.rank}")
        return run_ranks(plan, arguments, launch)
    raise UsageError(
        "scan without ranks",
        expected="a job with a rank a node, or a rank a GPU: nodes are scanned by measuring each other",
        next_step=f"{_launch(os.environ)}, or gpubench scan --simulate 'hgx-h100-8*64'",
    )


def _become_launcher(ranks: int, arguments: Sequence[str]) -> None:
    """Become the mpirun of so many ranks on this host, each of which measures all its GPUs as a node of its own.

    Raises GpubenchError: too few ranks to tell apart, no GPU, or no mpirun.
    """
    check_node_count(ranks)
    usable_driver(f"scan {SHARING_OPTION} {ranks}")
    mpirun = find_launcher()
    environment = mpirun.environment(os.environ, "", sharing_settings(ranks))
    if not mps_serves(environment):
        say(f"gpubench: {cost_of_turns(ranks)}", to=sys.stderr)
    os.execve(mpirun.path, mpirun.command(ranks, arguments), environment)


def _launch(environment: Mapping[str, str]) -> str:
    """The command that starts a rank a node: on the nodes of this Slurm allocation, else on those of a file."""
    if environment.get("SLURM_JOB_ID"):
        return "srun --mpi=pmix --ntasks-per-node=1 gpubench scan"
    return "mpirun --hostfile hosts --map-by ppr:1:node gpubench scan with a host a line in the file hosts"


def _refuse_under_launcher(option: str, launch: LaunchedBy | None) -> None:
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"scan {option} under {launch.launcher}",
            expected="one process: nothing is measured here",
            next_step=launch.without_it,
        )


def _run_simulated(plan: ScanPlan, simulation: Simulation, arguments: Sequence[str]) -> int:
    machine, faults, seed = simulation.machine, simulation.faults, simulation.seed
    check_node_count(machine.nodes)
    named = None if plan.leaves is None else leaves_of(host_names(machine), plan.leaves, plan.leaves_file or "")
    fabric = simulated_scan_fabric(machine, named, faults)
    rounds = SimulatedRounds(fabric, simulated_model(machine, faults, fabric), seed)
    first, again = (
        list(simulated_local_figures(machine, faults, range(machine.nodes), seed + repeat)) for repeat in (0, 1)
    )
    stored = StoredFabric.of(fabric, seed, SIMULATED, Origin.SIMULATED)
    kept = None if plan.resume is None else check_same(read_rounds(plan.resume), stored, plan.resume)
    folder = RoundsFolder(plan.resume or plan.rounds, kept)
    folder.begin(stored)
    local = still_slow(slow_figures(first), again)
    profiles = dict.fromkeys(range(machine.nodes), machine.profile)
    findings = [*_facts(simulation), *below_profile(fabric, (first, again), profiles, list(local))]
    folder.phase_0(better_of(first, again), findings)
    before = NOTHING_BEFORE
    if kept is not None:
        local, findings = slowest_of(kept.local(), local), each_once([*kept.findings(), *findings])
        before = kept.before
    quick = is_quick(plan.quick, kept)
    measurer = rounds if kept is None else ResumedRounds(kept.outcomes, rounds)
    with telling(plan, folder.keep) as keep:
        course = scan(fabric, seed, measurer, quick=quick, keep=keep, before=before)
    groups = [] if quick else list(collectives(course, seed, rounds.collective))
    result = ScanResult(course, decode(course, local), groups, Origin.SIMULATED, findings)
    return deliver(
        plan, arguments, result, backend=SIMULATED, seed=seed, source=simulation.source, profile=simulation.profile
    )


def _facts(simulation: Simulation) -> list[Finding]:
    """What the facts of the nodes show, where a fault is planted that they do."""
    if all(fault.command == "scan" for fault in simulation.faults):
        return []
    machines = Simulated(simulation).machines()
    nodes = machines.nodes
    return fact_findings(nodes, matched_profiles(nodes, os.environ), machines.processes)


def _run_replayed(plan: ScanPlan, kept: KeptScan, arguments: Sequence[str]) -> int:
    """Judge the rounds of a folder again."""
    rounds = ResumedRounds(kept.outcomes, None)
    quick = is_quick(plan.quick, kept)
    course = scan(kept.fabric, kept.stored.seed, rounds, quick=quick, keep=lambda *_: None, before=kept.before)
    origin = Origin.SIMULATED if kept.stored.origin == Origin.SIMULATED else Origin.RECORDED
    result = ScanResult(course, decode(course, kept.local()), (), origin, kept.findings())
    source = f"--replay {plan.replay}"
    return deliver(plan, arguments, result, backend=kept.stored.backend, seed=kept.stored.seed, source=source)
