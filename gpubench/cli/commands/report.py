"""`gpubench report`: its options, and the result that it shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options.presentation import PLOT, PresentationOptions
from gpubench.cli.signature import app_of, flag

if TYPE_CHECKING:
    from gpubench.jobs.report import ReportPlan

HELP = """
What --output FILE.json or FILE.jsonl wrote, of any command: the same report on the terminal, or in any other format.

  gpubench report result.json

  gpubench report result.json -o result.html -o result.csv

  gpubench report node.json --format csv --section nics

Nothing is measured or judged again: verdict, findings and exit code are those of the run; exit code 2 for a file that
is no result of gpubench's.
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The result to show, and how."""

    result: Annotated[str, typer.Argument(metavar="RESULT", help="A result of gpubench's, .json or .jsonl.")]
    plot: bool = flag(PLOT)
    presentation: PresentationOptions

    def plan(self) -> "ReportPlan":
        """The plan that these options ask for; UsageError for a file that is no result, or a section it has not."""
        from gpubench.jobs.report import ReportPlan
        from gpubench.readers.results.stored import read_stored

        run = read_stored(Path(self.result))
        return ReportPlan(run=run, name=self.result, presentation=self.presentation.parse(run.sections, plot=self.plot))


def _run(options: ReportOptions) -> int:
    from gpubench.jobs import report

    return report.run(options.plan())


app = app_of(HELP, ReportOptions, _run)
