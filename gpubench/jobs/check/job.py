"""Check machines: as one process the one at hand, simulated or recorded ones; as ranks the nodes of a job."""

import os
from collections.abc import Sequence

from gpubench.hardware.node.probe import watch_errors
from gpubench.jobs.check.child_commands import ChildCommands
from gpubench.jobs.check.judging import deliver, matches_of, recorded_measurements
from gpubench.jobs.check.measuring import SECONDS_TO_READ, CheckMeasurer, Waiting, measured
from gpubench.jobs.check.plan import NAME, CheckPlan, Depth
from gpubench.jobs.machines import Machines
from gpubench.jobs.outputs import presenting
from gpubench.jobs.sources import Replayed, Simulated, refuse_under_launcher
from gpubench.measure.check.health import SECTIONS as SECTIONS
from gpubench.model.facts.launched_by import launched_by
from gpubench.model.results.measurements import Measurements


def run(plan: CheckPlan, arguments: Sequence[str]) -> int:
    """Check, alone or as one rank of a job; the exit code.

    Raises GpubenchError: nothing can be checked, or an output cannot be written.
    """
    launch = launched_by(os.environ)
    refuse_under_launcher(NAME, plan.source, launch)
    if launch is None or launch.size == 1:
        return run_alone(plan, arguments)
    from gpubench.jobs import rank
    from gpubench.jobs.check.ranks import CheckRankJob

    defaults = plan.presentation.job_defaults
    return rank.run(
        lambda group, progress: CheckRankJob(group, progress, plan, arguments), launch, plan.timeout_s, defaults
    )


def run_alone(plan: CheckPlan, arguments: Sequence[str]) -> int:
    """Check the machines of the plan's source; the exit code.

    Raises GpubenchError: no GPU where none was said to be, a broken profile, or an output that cannot be written.
    """
    is_here = plan.source.text is None
    with presenting(plan.presentation, plan.recording.record, progress=is_here) as presenter:
        presenter.waiting("reading this machine", SECONDS_TO_READ)
        machines = plan.source.machines()
        matches = matches_of(plan, machines)
        measurements = _measured(plan, machines.given(), presenter.waiting if is_here else None)
        if plan.source.text is None and plan.depth not in (Depth.QUICK, Depth.BRIEF):
            watched = [watch_errors(each, plan.facts_timeout_s, os.environ) for each in machines.snapshots]
            machines = machines.with_snapshots(watched)
        return deliver(plan, arguments, machines, matches, measurements, presenter)


def _measured(plan: CheckPlan, machines: Machines, waiting: Waiting | None) -> Measurements:
    source = plan.source
    if isinstance(source, Replayed):
        return recorded_measurements(source.directory, machines.nodes[0], plan.profile)
    by: CheckMeasurer = ChildCommands(machines.nodes, plan.depth, plan.timeout_s, plan.profile, plan.ranks_per_gpu)
    if isinstance(source, Simulated):
        from gpubench.jobs.check.simulated import SimulatedMeasurer

        by = SimulatedMeasurer(source.simulation, machines.nodes, plan.depth, profile=plan.profile)
    return measured(plan.depth, machines.nodes, by, waiting)
