"""`gpubench explain`: its options, and the report on the logs it is given."""

import sys
from typing import Annotated, Any

import typer

from gpubench.cli.options import presentation
from gpubench.cli.options.presentation import parse_presentation
from gpubench.jobs.explain import ExplainPlan, run_explain

SUMMARY = "Read NCCL's logs of any job: who talks to whom over what, what is host-staged, why."
HELP = f"""{SUMMARY}

Any program that uses NCCL (PyTorch, nccl-tests, ...) writes them when these are in every rank's environment:

  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log

NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING says more about why. A log of all ranks together, as mpirun or srun
collect it, will do too, and so will gzip.

  gpubench explain /tmp/nccl.*.log

  gpubench explain logs/ --output paths.csv

  zcat slurm-4711.out.gz | gpubench explain -

Exit codes: 0 nothing goes through host memory, or only by design; 1 something does and need not; 3 the logs do not
say enough.
"""

LOGS = Annotated[
    list[str],
    typer.Argument(metavar="LOG", help="Files, folders of files, or - for standard input.", show_default=False),
]


def parse_explain_options(given: dict[str, Any]) -> ExplainPlan:
    """The options of `explain` from what typer read.

    Raises:
        UsageError: an option of presentation that cannot be read.
    """
    from gpubench.measure.explain.report import SECTIONS

    return ExplainPlan(logs=tuple(given["logs"]), presentation=parse_presentation(given, SECTIONS))


def run(given: dict[str, Any]) -> None:
    """Be the command."""
    raise typer.Exit(run_explain(parse_explain_options(given), sys.argv[1:]))


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("logs", LOGS, ...),
    *presentation.PARAMETERS,
)
