"""The verdict on all paths, as sections and findings of a report.

This module imports no conditions at run time, so that ranks without a verdict start faster.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results.fallback import KnownPath, evidence_rows, make_findings, unknown_row
from gpubench.model.results.report import CauseRow, EvidenceRow, FallbackRow, Report, Section, Table
from gpubench.model.terms.verdict import Finding, Origin

if TYPE_CHECKING:
    from gpubench.measure.paths import Explained


class PathOutcome(Struct, frozen=True):
    """The verdict on paths: three report sections, findings, and their causes.

    `explained` is None if no paths were observed.
    """

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]
    explained: "Explained | None" = None


def report_on(
    paths: Sequence[KnownPath], rows: Sequence[FallbackRow], origin: Origin, causes: Sequence[CauseRow]
) -> PathOutcome:
    """Return the verdict on all paths. `rows` become the fallback section, and `causes` the causes section."""
    return PathOutcome(_path_sections(evidence_rows(paths, origin), rows, causes), make_findings(rows, paths))


def unwatched(report: Report, why: str, origin: Origin = Origin.MEASURED) -> Report:
    """Add path sections to the report of a run whose paths were not observed.

    `why` is the reason, or empty if the run uses no paths.
    """
    sections = _path_sections((), [unknown_row(origin, why)] if why else (), ())
    return replace(report, sections={**sections, **report.sections})


def _path_sections(
    evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow], causes: Sequence[CauseRow]
) -> dict[str, Section]:
    return Table.group_by_section({EvidenceRow: evidence, FallbackRow: fallback, CauseRow: causes})
