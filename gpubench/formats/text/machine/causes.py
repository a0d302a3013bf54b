"""Causes in words: what explains the paths, how sure that is, what follows from it, and the cure."""

from collections.abc import Iterator
from typing import NamedTuple

from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.report import Report
from gpubench.model.results.rows.causes import CAUSES_SECTION, UNREAD_SECTION, CauseRow, UnreadRow
from gpubench.model.results.rows.evidence import FALLBACK_SECTION, FallbackRow
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Verdict

_MOST_CAUSES = 3


class CauseText(NamedTuple):
    """A cause by its id and in words: its first line with its verdict, and what is said below it, by label."""

    id: str
    verdict: Verdict
    line: str
    details: tuple[tuple[str, str], ...]


def named_causes(report: Report) -> frozenset[str]:
    """The ids of the causes that are printed below the verdict on fallback, which need not be said in it."""
    return frozenset(row.id for row in _top(report))


def top_causes(report: Report) -> Iterator[CauseText]:
    """The causes that explain what the verdict on fallback says, with their cures: the first few."""
    return (_text(report, row, whole=False) for row in _top(report))


def all_causes(report: Report) -> Iterator[CauseText]:
    """All causes that hold, with everything that the catalogue says of them."""
    return (_text(report, row, whole=True) for row in report.rows(CAUSES_SECTION, CauseRow) if not row.implied_by)


def unread_lines(report: Report) -> list[str]:
    """Of which causes it is not known whether they hold, and why; those of one reason together."""
    ids: dict[str, dict[str, None]] = {}
    subjects: dict[str, dict[str, None]] = {}
    for row in report.rows(UNREAD_SECTION, UnreadRow):
        ids.setdefault(row.reason, {})[row.id] = None
        subjects.setdefault(row.reason, {})[row.subject] = None
    return [f"not known: {', '.join(ids[reason])} on {some_of(list(subjects[reason]))}: {reason}" for reason in ids]


def _top(report: Report) -> list[CauseRow]:
    """Those that explain paths; of what was only looked at, those that the verdict names."""
    blamed = {row.cause for row in report.rows(FALLBACK_SECTION, FallbackRow)}
    rows = [row for row in report.rows(CAUSES_SECTION, CauseRow) if not row.implied_by]
    return [row for row in rows if row.paths or row.id in blamed][:_MOST_CAUSES] if blamed else []


def _text(report: Report, row: CauseRow, *, whole: bool) -> CauseText:
    verdict = Verdict(row.verdict)
    sure = f"by design, {row.confidence}" if verdict is Verdict.SKIP else row.confidence
    implied = [each.id for each in report.rows(CAUSES_SECTION, CauseRow) if each.implied_by == row.id]
    details = [("what", f"{row.title}: {', '.join(row.effects)}")] if whole else []
    details += [("on", row.subject)] if whole else []
    details += [("implies", ", ".join(implied))] if implied else []
    details += [("cure", row.advice)]
    details += [("settle", row.settles)] if whole or row.confidence != Confidence.PROVEN else []
    details += [("see", row.link)] if whole else []
    return CauseText(row.id, verdict, f"cause {row.id} ({sure}): {row.evidence}", tuple(details))
