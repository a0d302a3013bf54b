"""Converts the verdict on paths to parts of a report. Ranks that judge no paths do not import the conditions for it."""

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
    """The verdict on paths: three sections, findings, and the causes of the run. None if paths were not observed."""

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]
    explained: "Explained | None" = None


def report_on(
    paths: Sequence[KnownPath], rows: Sequence[FallbackRow], origin: Origin, causes: Sequence[CauseRow]
) -> PathOutcome:
    """Return the verdict on all paths. `rows` and `causes` are the sections of the same names."""
    return PathOutcome(_path_sections(evidence_rows(paths, origin), rows, causes), make_findings(rows, paths))


def unwatched(report: Report, why: str, origin: Origin = Origin.MEASURED) -> Report:
    """Return the report of a run with unobserved paths, with the reason, or '' if there are no paths."""
    sections = _path_sections((), [unknown_row(origin, why)] if why else (), ())
    return replace(report, sections={**sections, **report.sections})


def _path_sections(
    evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow], causes: Sequence[CauseRow]
) -> dict[str, Section]:
    return Table.group_by_section({EvidenceRow: evidence, FallbackRow: fallback, CauseRow: causes})
