"""What is known of paths as parts of a report: the sections `evidence` and `fallback`, and findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.evidence_rows import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.fallback import KnownPath, evidence_rows, findings
from gpubench.model.report import Origin, Section, Table
from gpubench.model.verdict import Finding


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on paths: two sections, and findings."""

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]


def report_on(paths: Sequence[KnownPath], rows: Sequence[FallbackRow], origin: Origin, *, strict: bool) -> Outcome:
    """The verdict on all paths, whose section `fallback` has these rows."""
    return Outcome(path_sections(evidence_rows(paths, origin), rows), findings(rows, strict=strict))


def path_sections(evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow]) -> dict[str, Section]:
    """Both sections."""
    return {
        EVIDENCE_SECTION: Table(EvidenceRow.columns(), lambda: evidence),
        FALLBACK_SECTION: Table(FallbackRow.columns(), lambda: fallback),
    }
