"""`gpubench report`: its options, and the result that it shows."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options import PLOT, PresentationOptions, parse_collective
from gpubench.cli.signature import app_of, completed, flag, option
from gpubench.errors import exclusive

if TYPE_CHECKING:
    from gpubench.jobs.report import JudgePlan, ReportPlan

HELP = """
A result of gpubench's own (.json or .jsonl of --output, of any command) is shown as it was; verdict, findings and exit
code are those of its run.

  gpubench report result.json

  gpubench report result.json -o result.html -o result.csv

  gpubench report node.json --format csv --section nics

A table of nccl-tests, rccl-tests or OSU, matrices of nvbandwidth, or rows in gpubench's CSV, are judged as if gpubench
had measured them: limit, % of expected, verdict. They may be pasted from an issue or a chat. GPUs, ranks and hosts in
the file say which machine it was; --machine says it where they were cut off.

  gpubench report all_reduce.txt

  gpubench report pasted.txt --machine 'hgx-b200-8*2'

  gpubench report p4d.txt --machine 'hgx-a100-8-40gb*2' --nics 4x100 -o p4d.html

Exit code 1 for wrong data, and with --strict where anything is slow; 2 for a file that cannot be read.
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The result to show, and how."""

    result: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A result: gpubench's, nccl-tests', rccl-tests', OSU's, nvbandwidth's."),
    ]
    machine: str | None = option(
        "NAME[/GPUS][*NODES]",
        "The machine of a table that does not say it, by its profile: 'hgx-b200-8*2' for 2 nodes.",
        autocompletion=completed("simulate"),
    )
    nics: str | None = option(
        "NxGBIT", "NICs of each node of that table: 8x400, 4x200e of plain Ethernet. Default: the profile's."
    )
    collective: str | None = option("NAME", "What ran, of a table that does not say it; or which of several to show.")
    strict: bool = flag("Of such a table: exit 1 where anything is slow, 3 where nothing is judged.")
    plot: bool = flag(PLOT)
    presentation: PresentationOptions

    def plan(self) -> "ReportPlan | JudgePlan":
        """The plan that these options ask for; UsageError for a file that is no result, or a section it has not."""
        from gpubench.jobs.report import SECTIONS, JudgePlan, Nics, ReportPlan, machine_named
        from gpubench.readers.documents import read_text
        from gpubench.readers.registry import WANTED
        from gpubench.readers.results.gpubench_json import is_stored, stored_of

        text = read_text(Path(self.result), WANTED)
        if is_stored(text):
            self._refuse_for_own()
            run = stored_of(text, self.result)
            shown = self.presentation.parse(run.sections, plot=self.plot)
            return ReportPlan(run=run, name=self.result, presentation=shown)
        return JudgePlan(
            text=text,
            name=self.result,
            machine=None if self.machine is None else machine_named(self.machine, joined_by_nics=self.nics is not None),
            nics=None if self.nics is None else Nics.of(self.nics),
            collective=parse_collective(self.collective),
            strict=self.strict,
            presentation=self.presentation.parse(SECTIONS, plot=self.plot),
        )

    def _refuse_for_own(self) -> None:
        """Raise UsageError for options of a table that is judged now, given for a run that was judged."""
        given = {
            "--machine": self.machine is not None,
            "--nics": self.nics is not None,
            "--collective": self.collective is not None,
            "--strict": self.strict,
        }
        unfit = [name for name, is_given in given.items() if is_given]
        if unfit:
            raise exclusive((self.result, unfit[0]), "one of them: a result of gpubench's own says it, and was judged")


def _run(options: ReportOptions) -> int:
    from gpubench.jobs import report

    plan = options.plan()
    return report.judge_results(plan, sys.argv[1:]) if isinstance(plan, report.JudgePlan) else report.run(plan)


app = app_of(HELP, ReportOptions, _run)
