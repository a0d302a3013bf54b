"""The verdict on fallback in words: a line that says none and how that is known, or lines that say which pairs."""

from collections.abc import Iterator, Sequence

from gpubench.formats.text.columns import Column, lines
from gpubench.model.evidence import Conclusion
from gpubench.model.evidence_rows import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.fallback import shown, slowdown
from gpubench.model.report import Report, Table
from gpubench.model.verdict import Verdict

_MOST_PAIRS = 8
_MARKS = {"present": "+", "absent": ".", "contradicting": "-"}


def fallback_lines(report: Report) -> list[str]:
    """The lines for a report; none where the run had nothing to say of paths."""
    section = report.sections.get(FALLBACK_SECTION)
    rows = [row for row in section.rows() if isinstance(row, FallbackRow)] if isinstance(section, Table) else []
    return [_line(row, rows) for row in rows]


def _line(row: FallbackRow, rows: Sequence[FallbackRow]) -> str:
    pairs = _pairs(row, everybody=len(rows) == 1)
    over = f" over {row.transport}" if row.transport else ""
    simulated = " (simulated)" if row.origin == "simulated" else ""
    lead = f"fallback{simulated}: "
    match Conclusion(row.conclusion):
        case Conclusion.DIRECT if len(rows) == 1:
            return f"{lead}none: {pairs} direct{over} ({row.confidence}): {row.how}"
        case Conclusion.DIRECT:
            return f"{lead}not for {pairs}, direct{over} ({row.confidence})"
        case Conclusion.STAGED:
            kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
            advice = "" if row.verdict == Verdict.SKIP or not row.advice else f"; {row.advice}"
            return f"{lead}{kind}: {pairs} through host memory{over}{slowdown(row)}; {row.cause_seen}{advice}"
        case Conclusion.WRONG:
            return f"{lead}{pairs}{over}: wrong data arrived"
        case Conclusion.DISPUTED:
            return f"{lead}disputed: {pairs}{over}: {row.how}"
        case Conclusion.UNKNOWN:
            return f"{lead}not known{f' for {pairs}' if row.pairs else ''}{over}: {row.how}"


def _pairs(row: FallbackRow, *, everybody: bool) -> str:
    """'all 12 pairs', '0 → 1, 1 → 0'."""
    count = len(row.pairs)
    return f"all {count} pairs" if everybody and count > 1 else shown(row.pairs, _MOST_PAIRS)


def evidence_lines(report: Report) -> Iterator[str]:
    """A table of all evidence: a line a path, + for, - against, . nothing known; below it what was seen."""
    section = report.sections.get(EVIDENCE_SECTION)
    rows = [row for row in section.rows() if isinstance(row, EvidenceRow)] if isinstance(section, Table) else []
    if not rows:
        return
    yield "evidence that a path is direct: + for it, - against it, . nothing known"
    kinds = ("capability", "selection", "measurement", "correctness")
    yield from lines(
        [
            Column("from", [row.source for row in rows]),
            Column("to", [row.destination for row in rows]),
            Column("path", [row.path_class or "?" for row in rows], spare=1),
            *(Column(kind, [_MARKS[getattr(row, kind)] for row in rows]) for kind in kinds),
            Column("over", [row.transport or "?" for row in rows]),
            Column("GB/s", ["?" if row.bandwidth_gb_s is None else f"{row.bandwidth_gb_s:.1f}" for row in rows]),
            Column("limit", ["?" if row.limit_gb_s is None else f"{row.limit_gb_s:g}" for row in rows], spare=2),
            Column("verdict", [f"{row.conclusion} ({row.confidence})" for row in rows]),
        ]
    )
    for kind in kinds:
        for seen, ends in _grouped(rows, f"{kind}_seen").items():
            yield f"  {kind}: {seen} [{ends}]"


def _grouped(rows: Sequence[EvidenceRow], name: str) -> dict[str, str]:
    """What was seen, with the paths of which it was."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if getattr(row, name):
            found.setdefault(getattr(row, name), []).append(f"{row.source} → {row.destination}")
    return {
        seen: "all"
        if len(ends) == len(rows)
        else ", ".join(ends[:_MOST_PAIRS]) + (" …" if len(ends) > _MOST_PAIRS else "")
        for seen, ends in found.items()
    }
