"""The plan of a collective on its way to the ranks that are launched for it, and one of these ranks."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.formats.presentation import Presentation
from gpubench.jobs.collective.plan import CollectivePlan

if TYPE_CHECKING:
    from gpubench.hardware.mpi.group import MpiGroup
    from gpubench.hardware.watchdog.rank import RankProgress
    from gpubench.model.facts.launched_by import LaunchedBy


def write_plan(channel: str, plan: CollectivePlan, arguments: Sequence[str]) -> None:
    """Lay the plan beside the socket of the channel, in its private directory, for ranks of this very program."""
    of_ranks = replace(plan, presentation=Presentation())
    _beside(channel).write_bytes(pickle.dumps((of_ranks, tuple(arguments))))


def run_launched(channel: str, launch: "LaunchedBy") -> int:
    """Be a rank with the plan that the gpubench at the other end of the channel wrote; the exit code."""
    plan, arguments = pickle.loads(_beside(channel).read_bytes())
    return run_as_rank(plan, arguments, launch)


def run_as_rank(plan: CollectivePlan, arguments: Sequence[str], launch: "LaunchedBy") -> int:
    """Be a rank of a collective; the exit code."""
    from gpubench.jobs import rank
    from gpubench.jobs.collective.rank_job import CollectiveRankJob

    def make_job(group: "MpiGroup", progress: "RankProgress") -> CollectiveRankJob:
        return CollectiveRankJob(group, progress, plan, arguments)

    return rank.run(make_job, launch, plan.timeout_s)


def _beside(channel: str) -> Path:
    return Path(channel).with_name("plan")
