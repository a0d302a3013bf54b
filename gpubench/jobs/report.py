"""Show a stored result again."""

from dataclasses import dataclass, replace

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.formats.presentation import Presentation
from gpubench.jobs.outputs import presenting
from gpubench.readers.results.gpubench_document import EXPECTED
from gpubench.readers.results.stored import StoredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPlan:
    """The result to show, the name of its file, and how to show it."""

    run: StoredRun
    name: str
    presentation: Presentation


def run(plan: ReportPlan) -> int:
    """Show it; the exit code, which is that of the run.

    Raises GpubenchError: an output cannot be written, a monitoring system asks for the verdict of half a run, or the
    file lacks what is shown.
    """
    stored = plan.run
    if plan.presentation.exit_style is not None and not stored.report.complete:
        raise CouldNotMeasureError(f"{plan.name}: the run was cut short, or has not ended")
    # The options of this command are no options of the run.
    shown = replace(plan.presentation, defaults={}, defaults_file=None)
    try:
        with presenting(shown) as presenter:
            presenter.begin(stored.metadata, stored.columns)
            for row in stored.rows:
                presenter.row(row)
            presenter.end(stored.report)
        return presenter.exit_code
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{plan.name} cannot be shown: {type(error).__name__}: {error}",
            expected=EXPECTED,
            reason="it was edited by hand, or an older gpubench wrote it, which did not write all that is shown",
            next_step="the same command again, with --output",
        ) from None
