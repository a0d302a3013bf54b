"""The metadata of an overlap: those of its collective, and the computation beside it."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.collectives.record import Collective
from gpubench.jobs.collective.metadata import collective_metadata
from gpubench.measure.collective.described import DescribedCollective
from gpubench.model.results.report import OVERLAP_SECTION, Metadata
from gpubench.model.terms.overlap.asked import OverlapAsked
from gpubench.model.terms.overlap.partners import operation_words

COLLECTIVE_OPTION = "collective"


def overlap_metadata(
    found: DescribedCollective,
    collective: Collective,
    asked: OverlapAsked,
    arguments: Sequence[str],
    *,
    topology: str | None = None,
) -> Metadata:
    """The metadata of a run."""
    own = collective_metadata(found, collective, arguments, topology=topology)
    options = {
        COLLECTIVE_OPTION: collective.name,
        **own.options,
        "partners": [each.value for each in asked.partners],
        "partner_operations": {
            each.value: operation_words(each, asked, found.asked.dtypes[0]) for each in asked.partners
        },
        "partner_count": asked.partner_count,
        "ctas": list(asked.ctas),
        "gemm_side": asked.gemm_side,
        "seconds": asked.seconds,
    }
    return replace(own, subject=OVERLAP_SECTION, collective=None, options=options)
