"""What an MPI did with GPU memory, in the report of a collective."""

from dataclasses import replace

from gpubench.model.facts.mpi_support import MpiSupport
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.verdict import Finding, Verdict, overall


def nothing_measured() -> Report:
    """The report of a run whose only backend cannot run the collective."""
    finding = Finding(
        id="not-measured",
        severity=Verdict.ERROR,
        subject="--backend mpi",
        seen="no row: the operation does not work on GPU memory, and was not begun in this job",
        expected="rows",
        cause="the trial of MPI above",
        next_command="gpubench allreduce --backend nccl; --backend host has MPI on CPU buffers",
    )
    return Report(verdict=Verdict.ERROR, complete=True, findings=(finding,))


def with_mpi_support(report: Report, support: MpiSupport | None) -> Report:
    """The report with every trial of MPI on GPU memory, and the finding on those that failed; the root cause first."""
    if support is None:
        return report
    from gpubench.conditions.mpi import on_support
    from gpubench.model.results.rows.backends import MPI_SUPPORT_SECTION, MpiTrialRow, trial_rows

    found = on_support(support)
    verdict = overall([report.verdict, *(each.severity for each in found)])
    sections = {**report.sections, MPI_SUPPORT_SECTION: Table(MpiTrialRow.columns(), lambda: trial_rows(support))}
    return replace(report, verdict=verdict, findings=(*found, *report.findings), sections=sections)
