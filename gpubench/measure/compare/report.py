"""The comparison of two sets of results, row by row: slower beyond noise, missing, or changed in another way."""

from collections.abc import Sequence

from gpubench.measure.compare.circumstances import are_other_hosts, check_same_machine, circumstance_rows
from gpubench.measure.compare.findings import findings_of, nothing_compared, worse_result
from gpubench.measure.compare.health import all_have_findings, finding_changes, health_findings
from gpubench.measure.compare.judge import JudgedRow, Rules, judge, judge_added, judge_missing
from gpubench.measure.compare.noise import ChangeNoise
from gpubench.measure.compare.ranges import slower_ranges
from gpubench.measure.compare.rows import RunsByRow, gather
from gpubench.model.results.report import FINDINGS_SECTION, Report, Table
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.comparison import (
    CIRCUMSTANCES_SECTION,
    COMPARISON_SECTION,
    FINDING_CHANGES_SECTION,
    CircumstanceRow,
    ComparisonRow,
    FindingChangeRow,
    Status,
)
from gpubench.model.terms.verdict import Verdict, gravity, overall

OTHER_MACHINE = "--other-machine"
SECTIONS = (COMPARISON_SECTION, FINDING_CHANGES_SECTION, CIRCUMSTANCES_SECTION, FINDINGS_SECTION)


def compare(
    base: Sequence[ResultFile], new: Sequence[ResultFile], rules: Rules, *, other_machine: bool = False
) -> Report:
    """The report on new results against old ones, the worst row first; several files of a side are its runs.

    UsageError for machines with other GPUs, and for simulated against measured ones, without `other_machine`.
    """
    if not other_machine:
        check_same_machine(base, new, OTHER_MACHINE)
    before, after = gather(base, new)
    noise = ChangeNoise(before, after, other_hosts=are_other_hosts(base, new), files=(len(base), len(new)))
    judged = sorted(_judged(before, after, noise, rules), key=_worst_first)
    circumstances = circumstance_rows(base, new)
    ranges = list(slower_ranges(before, after, noise, judged, rules))
    findings = findings_of(judged, ranges, (base, new), circumstances)
    have_findings = all_have_findings(base, new)
    changes = finding_changes(base, new) if have_findings else []
    findings = [*health_findings(base, new, changes), *findings]
    findings = sorted([*worse_result(base, new, findings), *findings], key=lambda each: gravity(each.severity))
    if not before.keys() & after.keys() and not have_findings:
        findings = [nothing_compared(before, after)]
        verdict = Verdict.ERROR
    else:
        verdicts = [each.row.verdict for each in judged if each.row.verdict != Verdict.SKIP]
        verdict = overall([Verdict.PASS, *map(Verdict, verdicts), *(each.severity for each in findings)])
    rows = [each.row for each in judged]
    sections = {
        COMPARISON_SECTION: Table(ComparisonRow.columns(), lambda: rows),
        FINDING_CHANGES_SECTION: Table(FindingChangeRow.columns(), lambda: changes),
        CIRCUMSTANCES_SECTION: Table(CircumstanceRow.columns(), lambda: circumstances),
    }
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=COMPARISON_SECTION)


def _judged(before: RunsByRow, after: RunsByRow, noise: ChangeNoise, rules: Rules) -> list[JudgedRow]:
    return [
        *(judge(key, before[key], after[key], noise, rules) for key in before if key in after),
        *(judge_missing(key, before[key]) for key in before if key not in after),
        *(judge_added(key, after[key]) for key in after if key not in before),
    ]


def _worst_first(judged: JudgedRow) -> tuple[int, bool, float]:
    """By verdict; then what was compared, by how much it is beyond noise, slowest first."""
    row = judged.row
    beyond = (row.slower_percent or 0) / (row.noise_percent or 1)
    return gravity(row.verdict), row.status != Status.COMPARED, -beyond
