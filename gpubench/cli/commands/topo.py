"""`gpubench topo`: its help, what excludes what, and the report."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions, check_profile
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import exclusive
from gpubench.jobs.plans import TopoPlan

HELP = HelpPage(
    (
        ("Show this machine", "gpubench topo"),
        (
            "Show a simulated cluster of 16 nodes with a fault",
            "gpubench topo --simulate 'hgx-h100-8*16' --fault node3.gpu5:nvlink=12",
        ),
        ("Show what would make data take a slow path", "gpubench topo --causes"),
        ("Show a file, e.g. of NCCL_TOPO_DUMP_FILE", "gpubench topo --from topo.xml"),
        ("Read two nodes of eight GPUs and keep the result", "mpirun -n 16 gpubench topo --output cluster.json"),
    ),
    """
topo measures nothing. It shows GPUs, NVLinks and NICs, how they are wired, which GPU can access whose memory, and the
limit of each pair. Under mpirun every node is read once, and nodes that differ from the others are named.
""",
)


def checked(plan: TopoPlan, shown: PresentationOptions) -> TopoPlan:
    """The plan with its presentation. Raises UsageError for two sources of machines."""
    from gpubench.model.results.topo import TOPO_SECTIONS

    named = {"--from": plan.from_file, "--replay": plan.recording.replay, "--simulate": plan.simulation}
    sources = [option for option, value in named.items() if value is not None]
    if len(sources) > 1:
        raise exclusive(sources, "one of them, or none for this machine")
    check_profile(plan.profile)
    return replace(plan, presentation=shown.parse(TOPO_SECTIONS))


def _run(plan: TopoPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import topo

    return topo.run(checked(plan, shown), sys.argv[1:])


app = app_of(HELP, TopoPlan, _run)
