"""Measure a collective: launch ranks here, be one of them, ask a model, or replay a recording."""

import os
from collections.abc import Sequence

from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.sources import Replayed, Simulated, refuse_under_launcher
from gpubench.model.facts.launched_by import launched_by


def run(plan: CollectivePlan, arguments: Sequence[str]) -> int:
    """The exit code.

    Raises GpubenchError: nothing can be measured, the measurement broke, or an output cannot be written.
    """
    launch, source = launched_by(os.environ), plan.source
    refuse_under_launcher(plan.collective.name, source, launch)
    if isinstance(source, Replayed):
        from gpubench.jobs.collective import replayed

        return replayed.run(plan, source, arguments)
    if isinstance(source, Simulated):
        from gpubench.jobs.collective import simulated

        return simulated.run(plan, source, arguments)
    if launch is None:
        from gpubench.jobs.collective import launch as launching

        return launching.run(plan, arguments)
    from gpubench.jobs.collective.rank_plan import run_as_rank

    return run_as_rank(plan, arguments, launch)
