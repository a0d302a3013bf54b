"""`gpubench explain`: its options, and the report on the logs it is given."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import app_of, flag

if TYPE_CHECKING:
    from gpubench.jobs.explain import ExplainPlan

HELP = """
Any program that uses NCCL (PyTorch, nccl-tests, ...) writes them when these are in every rank's environment:

  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log

NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING says more about why. A log of all ranks together, as mpirun or srun
collect it, will do too, and so will gzip.

  gpubench explain /tmp/nccl.*.log

  gpubench explain logs/ --output paths.csv

  zcat slurm-4711.out.gz | gpubench explain -

What holds of a part of a log holds of that part: WARN says what is missing.

  gpubench explain logs/ --strict

Exit codes: 0 nothing goes through host memory, or only by design; 1 something does and need not, the job failed, or
with --strict there is any doubt; 3 the logs do not say enough.
"""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The logs to read, and how to show what they say."""

    logs: Annotated[list[str], typer.Argument(metavar="LOG", help="Files, folders of files, or - for standard input.")]
    strict: bool = flag("Exit 1 also where there is a doubt: for gates.")
    presentation: PresentationOptions

    def plan(self) -> "ExplainPlan":
        """The plan that these options ask for; UsageError for an option of presentation that cannot be read."""
        from gpubench.jobs.explain import SECTIONS, ExplainPlan

        return ExplainPlan(logs=tuple(self.logs), presentation=self.presentation.parse(SECTIONS), strict=self.strict)


def _run(options: ExplainOptions) -> int:
    from gpubench.jobs import explain

    return explain.run(options.plan(), sys.argv[1:])


app = app_of(HELP, ExplainOptions, _run)
