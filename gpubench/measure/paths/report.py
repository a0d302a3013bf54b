"""The verdict on paths as parts of a report: the sections `evidence`, `fallback` and `causes`, and findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpubench.measure.paths.diagnosis import Explained
from gpubench.model.results.fallback import KnownPath, evidence_rows, findings
from gpubench.model.results.report import Section, Table
from gpubench.model.results.rows.causes import CAUSES_SECTION, CauseRow
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Finding


@dataclass(frozen=True, slots=True)
class PathOutcome:
    """The verdict on paths: three sections, findings, and the causes of the run; None where nothing was looked at."""

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]
    explained: Explained | None = None


def report_on(
    paths: Sequence[KnownPath], rows: Sequence[FallbackRow], origin: Origin, causes: Sequence[CauseRow]
) -> PathOutcome:
    """The verdict on all paths, whose sections `fallback` and `causes` have these rows."""
    return PathOutcome(path_sections(evidence_rows(paths, origin), rows, causes), findings(rows))


def path_sections(
    evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow], causes: Sequence[CauseRow]
) -> dict[str, Section]:
    """All three sections."""
    return {
        EVIDENCE_SECTION: Table(EvidenceRow.columns(), lambda: evidence),
        FALLBACK_SECTION: Table(FallbackRow.columns(), lambda: fallback),
        CAUSES_SECTION: Table(CauseRow.columns(), lambda: causes),
    }
