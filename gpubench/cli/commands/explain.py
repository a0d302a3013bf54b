"""`gpubench explain`: its help, and the report on the logs it is given."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import HelpPage, app_of
from gpubench.jobs.plans import ExplainPlan

HELP = HelpPage(
    (
        (
            "Run any NCCL program with its log on, in every rank's environment",
            "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log python train.py",
        ),
        ("Read the logs", "gpubench explain /tmp/nccl.*.log"),
        ("Write the paths as CSV", "gpubench explain logs/ --output paths.csv"),
        ("Read the output of all ranks in one file", "zcat slurm-4711.out.gz | gpubench explain -"),
        ("Find the rank that hangs, in PyTorch's dumps", "gpubench explain dumps/"),
        ("Fail if any path is in doubt", "gpubench explain logs/ --strict"),
    ),
    """
Any program that uses NCCL writes such logs (PyTorch, nccl-tests, ...). One log of all ranks together, as mpirun or srun
collects it, works too, and so does gzip. NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING adds more about the causes.

It also reads dumps of PyTorch's Flight Recorder (TORCH_NCCL_DUMP_ON_TIMEOUT=1; one a rank, named after it), answers of
NCCL's RAS (ncclras -v, as text or JSON), dumps of py-spy beside them and files of NCCL's Inspector, and names the rank
that keeps the others waiting.

If a log is incomplete, a WARN says what is missing, and the result is about the rest.
""",
)


def _run(plan: ExplainPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import explain

    return explain.run(replace(plan, presentation=shown.parse(explain.SECTIONS)), sys.argv[1:])


app = app_of(HELP, ExplainPlan, _run)
