"""`gpubench libraries`: its help, and the report."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions, check_replay
from gpubench.cli.signature import HelpPage, app_of
from gpubench.jobs.plans import LibrariesPlan

HELP = HelpPage(
    (
        ("List the libraries of this environment", "gpubench libraries"),
        ("Check all nodes of a job, and fail unless the verdict is PASS", "mpirun -n 16 gpubench libraries --strict"),
        ("Write JSON", "gpubench libraries --format json"),
        ("Show what --record wrote", "gpubench libraries --replay node7/"),
    ),
    """
Libraries are NCCL, MPI, UCX, NVSHMEM, MSCCL++, PyTorch, nccl4py, CuPy, and the kernel modules that let a NIC reach GPU
memory. The report has the version and place of each, and which program would load which. Two NCCLs of different
versions in one environment are a finding. Nothing is measured, and each library is loaded in a process of its own;
PyTorch is not loaded, its files are read.
""",
)


def _run(plan: LibrariesPlan, shown: PresentationOptions) -> int:
    check_replay(plan.recording, {"--record": plan.recording.record})
    from gpubench.jobs import libraries

    return libraries.run(replace(plan, presentation=shown.parse(libraries.SECTIONS)), sys.argv[1:])


app = app_of(HELP, LibrariesPlan, _run)
