"""What is known of paths as parts of a report: the sections `evidence` and `fallback`, and findings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpubench.model.evidence_rows import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.fallback import KnownPath, evidence_rows, fallback_rows, findings
from gpubench.model.report import Origin, Section, Table
from gpubench.model.staging_causes import Cause
from gpubench.model.verdict import Finding


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on paths: two sections, and findings."""

    sections: Mapping[str, Section]
    findings: tuple[Finding, ...]


def report_on(
    paths: Sequence[KnownPath],
    origin: Origin,
    cause_of: Callable[[Sequence[KnownPath]], Cause],
    unheard: str = "",
    remark: str = "",
    *,
    strict: bool,
) -> Outcome:
    """The verdict on all paths; `cause_of` and `unheard` as for `fallback_rows`, `remark` is added to the first row."""
    rows = fallback_rows(paths, origin, cause_of, unheard)
    if rows and remark:
        rows[0] = replace(rows[0], how=f"{rows[0].how}; {remark}")
    return Outcome(path_sections(evidence_rows(paths, origin), rows), findings(rows, strict=strict))


def path_sections(evidence: Sequence[EvidenceRow], fallback: Sequence[FallbackRow]) -> dict[str, Section]:
    """Both sections."""
    return {
        EVIDENCE_SECTION: Table(EvidenceRow.columns(), lambda: evidence),
        FALLBACK_SECTION: Table(FallbackRow.columns(), lambda: fallback),
    }
