"""The verdict on fallback in words: a line that says none and how that is known, or lines that say which pairs."""

from collections.abc import Collection, Sequence

from gpubench.formats.text.columns import Column, fitting, lines
from gpubench.formats.text.machine.prospects import lead, prospect_lines, was_looked_at
from gpubench.model.paths.evidence import Conclusion
from gpubench.model.results.fallback import shown, slowdown
from gpubench.model.results.report import Report
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.terms.verdict import Verdict

_MOST_PAIRS = 8
_KINDS = {"capability": "could", "selection": "chosen", "measurement": "moved", "correctness": "right"}
_MARKS = {"present": "+", "absent": ".", "contradicting": "-"}


def fallback_lines(report: Report) -> list[str]:
    """The lines for a report; none where the run had nothing to say of paths."""
    return [line for _, line in judged_lines(report)]


def judged_lines(report: Report, said: Collection[str] = ()) -> list[tuple[Verdict, str]]:
    """The same lines, each with its verdict. Of the causes in `said` no more is told than their names."""
    if was_looked_at(report):
        return prospect_lines(report, said)
    rows = report.rows(FALLBACK_SECTION, FallbackRow)
    if rows and all(row.conclusion == Conclusion.DIRECT for row in rows):
        return [(Verdict.PASS, _none(rows))]
    if len(rows) == 1 and rows[0].conclusion == Conclusion.UNKNOWN and rows[0].count > 1:
        return [(Verdict(rows[0].verdict), _line(rows[0], f"all {rows[0].count} pairs", said))]
    return [(Verdict(row.verdict), _line(row, shown(row, _MOST_PAIRS), said)) for row in rows]


def _none(rows: Sequence[FallbackRow]) -> str:
    pairs = sum(row.count for row in rows)
    over = " and ".join(dict.fromkeys(row.transport for row in rows if row.transport))
    most = max(rows, key=lambda row: row.count)
    sure = "/".join(dict.fromkeys(row.confidence for row in rows))
    subject = f"all {pairs} pairs" if pairs > 1 else shown(most)
    return f"{lead(most.origin)}none: {subject} direct{f' over {over}' if over else ''} ({sure}): {most.how}"


def _line(row: FallbackRow, pairs: str, said: Collection[str]) -> str:
    begin = lead(row.origin)
    over = f" over {row.transport}" if row.transport else ""
    kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
    advice = "" if row.verdict == Verdict.SKIP or not row.advice else f"; {row.advice}"
    why = str(row.cause) if row.cause in said else f"{row.cause_seen}{advice}"
    match Conclusion(row.conclusion):
        case Conclusion.DIRECT:
            return f"{begin}not for {pairs}, direct{over} ({row.confidence})"
        case Conclusion.STAGED:
            return f"{begin}{kind}: {pairs} through host memory{over}{slowdown(row)}; {why}"
        case Conclusion.WRONG:
            return f"{begin}{pairs}{over}: wrong data arrived"
        case Conclusion.DISPUTED:
            return f"{begin}disputed: {pairs}{over}: {row.how}"
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}{over}: {row.how}"


def evidence_table(report: Report, width: int) -> list[str]:
    """All evidence, a line a path: + for, - against, . nothing known."""
    rows = report.rows(EVIDENCE_SECTION, EvidenceRow)
    if not rows:
        return ["evidence: none, no path between GPUs was watched"]
    table = [
        Column("from", [row.source for row in rows]),
        Column("to", [row.destination for row in rows]),
        Column("path", [row.path_class or "?" for row in rows], spare=1),
        *(Column(head, [_MARKS[getattr(row, kind)] for row in rows]) for kind, head in _KINDS.items()),
        Column("over", [row.transport or "?" for row in rows]),
        Column("GB/s", ["?" if row.bandwidth_gb_s is None else f"{row.bandwidth_gb_s:.1f}" for row in rows], spare=2),
        Column("limit", ["?" if row.limit_gb_s is None else f"{row.limit_gb_s:g}" for row in rows], spare=3),
        Column("verdict", [f"{row.conclusion}, {row.confidence}" for row in rows]),
    ]
    return ["evidence that a path is direct: + for it, - against it, . nothing known", *lines(fitting(table, width))]


def evidence_notes(report: Report) -> list[str]:
    """The evidence of each kind, with its paths."""
    rows = report.rows(EVIDENCE_SECTION, EvidenceRow)
    found: dict[str, list[str]] = {}
    for kind in _KINDS:
        for row in rows:
            seen = getattr(row, f"{kind}_seen")
            if seen:
                found.setdefault(f"{kind}: {seen}", []).append(f"{row.source} → {row.destination}")
    return [f"  {seen} [{_named(ends, len(rows))}]" for seen, ends in found.items()]


def _named(ends: Sequence[str], total: int) -> str:
    if len(ends) == total:
        return "all"
    return ", ".join(ends[:_MOST_PAIRS]) + (" …" if len(ends) > _MOST_PAIRS else "")
