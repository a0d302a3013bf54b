"""`gpubench report`: its options, and the result that it shows."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from gpubench.cli.options import PresentationOptions, parse_collective, plotting
from gpubench.cli.signature import INPUT, JUDGE, HelpPage, app_of, completed, flag, option
from gpubench.errors import exclusive
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.report import JudgePlan, ReportPlan

HELP = HelpPage(
    (
        ("Show a result of gpubench as a page", "gpubench report result.json -o result.html"),
        ("Judge the output of nccl-tests", "gpubench report all_reduce.txt"),
        ("Show one section as CSV", "gpubench report node.json --format csv --section nics"),
        ("Judge a pasted table, whose machine is not in it", "gpubench report pasted.txt --machine 'hgx-b200-8*2'"),
        (
            "Judge a table of two nodes with four NICs of 100 Gbit/s each",
            "gpubench report p4d.txt --machine 'hgx-a100-8-40gb*2' --nics 4x100 -o p4d.html",
        ),
    ),
    """
A result of gpubench (.json or .jsonl of --output, of any command) keeps the verdict, findings and exit code of its run.

A table of nccl-tests, rccl-tests or OSU, matrices of nvbandwidth, or rows in gpubench's CSV are judged as if gpubench
had measured them: limit, % of expected, verdict. They may be pasted from an issue or a chat. GPUs, ranks and hosts are
read from the file; use --machine if they were cut off.

Exit codes: those of the run, for a result of gpubench. For a table: 0 done; 1 wrong data, or with --strict anything is
slow; 2 the file cannot be read; 3 with --strict, nothing is judged.
""",
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The result to show, and how."""

    help_group: ClassVar = INPUT

    result: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A result of gpubench, nccl-tests, rccl-tests, OSU or nvbandwidth."),
    ]
    machine: str | None = option(
        "MACHINE",
        "Machine of a table that does not name it, by its profile: hgx-b200-8, or 'hgx-b200-8*2' for 2 nodes.",
        autocompletion=completed("simulate"),
        common=True,
    )
    nics: str | None = option(
        "NxGBIT",
        "NICs of each node of the table: 8x400, or 4x200e for plain Ethernet (default: the profile's).",
        common=True,
    )
    collective: str | None = option(
        "NAME", "Collective of a table that does not name it, or the one to show of several.", common=True
    )
    strict: bool = flag("Exit 1 if anything in the table is slow, 3 if nothing is judged.", common=True, group=JUDGE)
    plot: bool = plotting()
    presentation: PresentationOptions

    def plan(self) -> "ReportPlan | JudgePlan":
        """The plan of these options. Raises UsageError for a file that is no result, or a section it has not."""
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
        given = {
            "--machine": self.machine is not None,
            "--nics": self.nics is not None,
            "--collective": self.collective is not None,
            "--strict": self.strict,
        }
        unfit = [name for name, is_given in given.items() if is_given]
        if unfit:
            raise exclusive((self.result, unfit[0]), "one of them: a result of gpubench has all this, and its verdict")


def _run(options: ReportOptions) -> int:
    from gpubench.jobs import report

    plan = options.plan()
    return report.judge_results(plan, sys.argv[1:]) if isinstance(plan, report.JudgePlan) else report.run(plan)


app = app_of(HELP, ReportOptions, _run)
