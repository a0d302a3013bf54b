"""Measure a collective during computation: launch ranks, run as one rank, or simulate."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.jobs.sources import Simulated, refuse_under_launcher
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.terms.options import plan_from
from gpubench.model.terms.overlap import OVERLAP
from gpubench.training.overlap_options import OverlapPlan

if TYPE_CHECKING:
    from gpubench.model.facts.environment import LaunchedRank
    from gpubench.ports.group import Group
    from gpubench.ranks.watchdog.rank import RankProgress
    from gpubench.training.overlap_rank import OverlapRankJob


def run(plan: OverlapPlan, arguments: Sequence[str]) -> int:
    """Measure the overlap and return the exit code.

    Raises GpubenchError if nothing is measured, the measurement fails, or an output cannot be written.
    """
    launch, collective = detect_launcher(os.environ), plan.collective_plan
    refuse_under_launcher(OVERLAP, collective.source, launch)
    if isinstance(collective.source, Simulated):
        from gpubench.jobs import runner
        from gpubench.jobs.collective.scaling import in_counts
        from gpubench.training.overlap_simulated import simulation_steps

        return runner.run_alone(in_counts(simulation_steps(plan), collective), collective, arguments)
    if launch is None:
        from gpubench.jobs.collective import job

        return job.launch_ranks(collective, arguments)
    return _run_as_rank(plan, arguments, launch)


def run_launched(typed: Mapping[str, Any], launch: "LaunchedRank") -> int:
    """Run as a rank, with the option values that the launching process has parsed. Return the exit code."""
    return _run_as_rank(plan_from(OverlapPlan, typed, OVERLAP), sys.argv[1:], launch)


def _run_as_rank(plan: OverlapPlan, arguments: Sequence[str], launch: "LaunchedRank") -> int:
    from gpubench.jobs.collective import job

    def make_job(group: "Group", progress: "RankProgress") -> "OverlapRankJob":
        from gpubench.training.overlap_rank import OverlapRankJob

        return OverlapRankJob(group, progress, plan, arguments)

    return job.run_as_rank(plan.collective_plan, arguments, launch, make_job)
