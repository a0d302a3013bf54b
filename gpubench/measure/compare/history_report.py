"""The report on dated results: the newest of every kind against those before it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gpubench.measure.compare.judge import Rules
from gpubench.measure.compare.report import SECTIONS, compare
from gpubench.measure.compare.series import HistorySelection
from gpubench.model.results.report import Report, Table
from gpubench.model.results.rows.comparison import (
    CIRCUMSTANCES_SECTION,
    COMPARISON_SECTION,
    FINDING_CHANGES_SECTION,
    HISTORY_SECTION,
    CircumstanceRow,
    ComparisonRow,
    FindingChangeRow,
    HistoryRow,
)
from gpubench.model.terms.verdict import Finding, Verdict, gravity, overall

SECTIONS_OF_HISTORY = (*SECTIONS, HISTORY_SECTION)

R = TypeVar("R", ComparisonRow, CircumstanceRow, FindingChangeRow)


def compare_history(chosen: HistorySelection, folder: Path, rules: Rules) -> Report:
    """The report on all comparisons of a folder, each as `compare` makes it, and on what was left out."""
    reports = {each.name: compare(each.base, [each.new], rules, other_machine=True) for each in chosen.series}
    findings = sorted([*_labelled(reports, folder), *_doubts(chosen)], key=lambda each: gravity(each.severity))
    if not reports:
        findings.append(_nothing(chosen, folder))
    comparison = _of_all(reports, COMPARISON_SECTION, ComparisonRow)
    changes = _of_all(reports, FINDING_CHANGES_SECTION, FindingChangeRow)
    circumstances = _of_all(reports, CIRCUMSTANCES_SECTION, CircumstanceRow)
    return Report(
        verdict=overall([*(each.verdict for each in reports.values()), *(each.severity for each in findings)]),
        complete=True,
        findings=findings,
        sections={
            COMPARISON_SECTION: Table(ComparisonRow.columns(), lambda: comparison),
            FINDING_CHANGES_SECTION: Table(FindingChangeRow.columns(), lambda: changes),
            CIRCUMSTANCES_SECTION: Table(CircumstanceRow.columns(), lambda: circumstances),
            HISTORY_SECTION: Table(HistoryRow.columns(), lambda: chosen.files),
        },
        main=COMPARISON_SECTION,
    )


def _labelled(reports: Mapping[str, Report], folder: Path) -> Iterator[Finding]:
    """The findings of all comparisons, each with which one it is of where there are several.

    What would be another file of a side is one more run into the folder.
    """
    for name, report in reports.items():
        for finding in report.findings:
            subject = f"{name}: {finding.subject}" if len(reports) > 1 else finding.subject
            again = (
                f"the same command again, --output {folder}/"
                if "--new " in finding.next_command
                else finding.next_command
            )
            yield replace(finding, subject=subject, next_command=again)


def _doubts(chosen: HistorySelection) -> Iterator[Finding]:
    for name, reason in chosen.doubts:
        yield Finding(
            id="newest-left-out",
            severity=Verdict.WARN,
            subject=name,
            seen=reason,
            expected="a result that is whole, of the same GPUs and options as those before it",
            cause="the run was killed or still goes on, or was asked for something else",
            next_command="look at that file; run the command again as before",
        )


def _nothing(chosen: HistorySelection, folder: Path) -> Finding:
    return Finding(
        id="nothing-before",
        severity=Verdict.ERROR,
        subject=f"{folder}",
        seen="no two results of one command, machine and set of options"
        if chosen.files
        else "no results: the folder is empty",
        expected="a newest result, and one before it",
        cause="it is the first run, or runs differ in what was asked for; the section history says of each",
        next_command="the same command again, with the same --output",
    )


def _of_all(reports: Mapping[str, Report], section: str, kind: type[R]) -> list[R]:
    """The rows of a section of all comparisons, each with which one it is of."""
    return [replace(row, series=name) for name, report in reports.items() for row in report.rows(section, kind)]
