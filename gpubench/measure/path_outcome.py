"""The verdict on paths as parts of a report; ranks that judge none make it without the conditions that explain them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubench.model.results.fallback import KnownPath, evidence_rows, findings, unknown_row
from gpubench.model.results.report import CauseRow, EvidenceRow, FallbackRow, Report, Section, Table
from gpubench.model.terms.verdict import Finding, Origin
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.measure.paths import Explained


@dataclass(frozen=True, slots=True)
class PathOutcome:
    """The verdict on paths: three sections, findings, and the causes of the run; None where nothing was looked at."""

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]
    explained: "Explained | None" = None


def report_on(
    paths: Sequence[KnownPath], rows: Sequence[FallbackRow], origin: Origin, causes: Sequence[CauseRow]
) -> PathOutcome:
    """The verdict on all paths, whose sections `fallback` and `causes` have these rows."""
    return PathOutcome(_path_sections(evidence_rows(paths, origin), rows, causes), findings(rows, paths))


def unwatched(report: Report, why: str, origin: Origin = Origin.MEASURED) -> Report:
    """The report of a run whose paths were not observed: with the reason, empty where there are no paths to observe."""
    sections = _path_sections((), [unknown_row(origin, why)] if why else (), ())
    return replace(report, sections={**sections, **report.sections})


def _path_sections(
    evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow], causes: Sequence[CauseRow]
) -> dict[str, Section]:
    return Table.by_section({EvidenceRow: evidence, FallbackRow: fallback, CauseRow: causes})
