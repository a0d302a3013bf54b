"""Measure an overlap: launch ranks here, be one of them, or ask a model."""

import os
from collections.abc import Sequence

from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.sources import Simulated, refuse_under_launcher
from gpubench.model.facts.launched_by import launched_by
from gpubench.model.results.report import OVERLAP_SECTION
from gpubench.model.terms.overlap.asked import OverlapAsked


def run(plan: CollectivePlan, asked: OverlapAsked, arguments: Sequence[str]) -> int:
    """The exit code. Raises GpubenchError: nothing can be measured, the measurement broke, an output not be written."""
    launch, source = launched_by(os.environ), plan.source
    refuse_under_launcher(OVERLAP_SECTION, source, launch)
    if isinstance(source, Simulated):
        from gpubench.jobs.overlap import simulated

        return simulated.run(plan, asked, source, arguments)
    if launch is None:
        from gpubench.jobs.collective import launch as launching

        return launching.run(plan, arguments)
    from gpubench.jobs.collective.rank_plan import run_as_rank

    return run_as_rank(plan, arguments, launch)
