"""Measure a collective: launch ranks here, be one of them, ask a model, or replay a recording."""

import os
from collections.abc import Sequence

from gpubench.hardware.launch.started_by import launched_by
from gpubench.jobs.collective.plan import CollectivePlan


def run(plan: CollectivePlan, arguments: Sequence[str]) -> int:
    """The exit code.

    Raises:
        GpubenchError: nothing can be measured, the measurement broke, or an output cannot be written.
    """
    launch = launched_by(os.environ)
    if plan.recording.replay is not None:
        from gpubench.jobs.collective import replayed

        return replayed.run(plan, plan.recording.replay, arguments, launch)
    if plan.simulation is not None:
        from gpubench.jobs.collective import simulated

        return simulated.run(plan, plan.simulation, arguments, launch)
    if launch is None:
        from gpubench.jobs.collective import launch as launching

        return launching.run(plan, arguments)
    from gpubench.jobs import rank
    from gpubench.jobs.collective.rank_job import CollectiveRankJob

    return rank.run(lambda group, progress: CollectiveRankJob(group, progress, plan, arguments), launch, plan.timeout_s)
