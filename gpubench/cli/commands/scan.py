"""`gpubench scan`: its help, what excludes what, and the run."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import exclusive
from gpubench.jobs.plans import ScanPlan

HELP = HelpPage(
    (
        (
            "Scan 64 nodes of eight GPUs, one rank per GPU, and keep every round",
            "mpirun -n 512 --map-by ppr:8:node --enable-recovery gpubench scan --rounds r/",
        ),
        (
            "Try it without a GPU, on 1024 nodes, one of which hangs",
            "gpubench scan --simulate 'hgx-h100-8*1024' --fault node9:hangs=round2",
        ),
        ("Judge the rounds that a job finished before it died", "gpubench scan --replay r/"),
        (
            "Try it without a GPU, on 128 nodes with a leaf that is slow on one rail",
            "gpubench scan --simulate 'hgx-h100-8*128' --fault leaf1.rail2:bandwidth=0.6",
        ),
    ),
    """
All nodes measure each other at once, on all rails, in eleven rounds, however many nodes there are: three rounds of
random pairs, three of suspects with healthy nodes, five to confirm. A node that dies or hangs is a finding, and the
others go on (docs/scan.md says with which MPI). Start one rank per GPU, or one rank per node.
""",
)


def _run(plan: ScanPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import scan

    _check(plan)
    return scan.run(replace(plan, presentation=shown.parse(scan.SECTIONS)), sys.argv[1:])


def _check(plan: ScanPlan) -> None:
    """Raise UsageError for options that exclude each other."""
    folders = {"--rounds": plan.rounds, "--resume": plan.resume, "--replay": plan.replay}
    named = [name for name, value in folders.items() if value is not None]
    if len(named) > 1:
        raise exclusive(named, "one of them: --rounds starts a scan, --resume continues one, --replay judges one")
    if plan.replay is not None and plan.simulation is not None:
        raise exclusive(["--simulate", "--replay"], "one of them")
    elsewhere = {
        "--backend host": plan.backend == "host",
        "--replay": plan.replay is not None,
        "--simulate": plan.simulation is not None,
    }
    unfit = [name for name, is_given in elsewhere.items() if is_given]
    if plan.ranks_per_gpu > 1 and unfit:
        raise exclusive((unfit[0], "--ranks-per-gpu"), "one of them: its ranks measure this machine's GPUs")


app = app_of(HELP, ScanPlan, _run)
