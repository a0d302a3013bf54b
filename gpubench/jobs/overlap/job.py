"""Measure an overlap: launch ranks here, be one of them, or ask a model."""

import os
from collections.abc import Sequence

from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.gpus import usable_driver
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
    usable_driver(OVERLAP_SECTION)
    raise CouldNotMeasureError(
        "overlap measures no GPUs yet", expected="--simulate", next_step="gpubench overlap --simulate hgx-h200-4"
    )
