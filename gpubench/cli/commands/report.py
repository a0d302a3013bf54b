"""`gpubench report`: its help, and the result that it shows."""

import sys
from dataclasses import replace
from pathlib import Path

from gpubench.cli.options import PresentationOptions, given_options
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import exclusive
from gpubench.jobs.plans import ReportPlan

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
""",
)


def _run(plan: ReportPlan, shown: PresentationOptions) -> int:
    """Raises UsageError for a file that is no result, or a section it has not."""
    from gpubench.jobs import report
    from gpubench.readers.documents import read_text
    from gpubench.readers.registry import WANTED
    from gpubench.readers.results.gpubench_json import is_stored, stored_of

    text = read_text(Path(plan.name), WANTED)
    if is_stored(text):
        unfit = [*given_options(plan)]
        if unfit:
            raise exclusive((plan.name, unfit[0]), "one of them: a result of gpubench has all this, and its verdict")
        run = stored_of(text, plan.name)
        return report.run(run, plan.name, shown.parse(run.sections))
    return report.judge_results(replace(plan, presentation=shown.parse(report.SECTIONS)), text, sys.argv[1:])


app = app_of(HELP, ReportPlan, _run, plots=True)
