"""`gpubench topo`: its options, where its machines come from, and the report."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import (
    PresentationOptions,
    RecordingOptions,
    SimulationOptions,
    check_profile,
    expected_gpus,
    judging_profile,
)
from gpubench.cli.signature import INPUT, JUDGE, MEASURE, OUTPUT, HelpPage, app_of, flag, option, step_timeout
from gpubench.errors import exclusive
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.topo import TopoPlan

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

Exit codes: 0 done; 1 with --strict, the verdict is not PASS; 2 wrong usage; 3 facts could not be read, or with --strict
nothing was judged.
""",
)


@dataclass(frozen=True, kw_only=True)
class TopoOptions:
    """The machines to show, and how."""

    help_group: ClassVar = MEASURE

    from_file: str | None = option(
        "FILE",
        "Show a file: an NCCL topology XML, the text of nvidia-smi topo -m or -p2p, or a recorded snapshot.",
        name="--from",
        common=True,
        group=INPUT,
    )
    simulation: SimulationOptions
    recording: RecordingOptions
    strict: bool = flag("Exit 1 unless the verdict is PASS, 3 if nothing was judged.", common=True, group=JUDGE)
    causes: bool = flag(
        "Show, in place of the devices, what would make data go through host memory or a slow path, how to fix it, and "
        "what could not be read.",
        common=True,
        group=OUTPUT,
    )
    timeout: float = step_timeout("reading the driver of a node", default=20.0)
    profile: str | None = judging_profile()
    expect_gpus: int | None = expected_gpus()
    presentation: PresentationOptions

    def plan(self) -> "TopoPlan":
        """The plan of these options. Raises UsageError for two sources of machines."""
        from gpubench.jobs.sources import source_of
        from gpubench.jobs.topo import TopoPlan
        from gpubench.model.results.report import TOPO_SECTIONS

        named = {"--from": self.from_file, "--replay": self.recording.replay, "--simulate": self.simulation.simulate}
        sources = [option for option, value in named.items() if value is not None]
        if len(sources) > 1:
            raise exclusive(sources, "one of them, or none for this machine")
        check_profile(self.profile)
        recording, simulation = self.recording.parse({}), self.simulation.parse()
        file = None if self.from_file is None else Path(self.from_file)
        return TopoPlan(
            source=source_of(self.timeout, simulation=simulation, replay=recording.replay, file=file),
            recording=recording,
            strict=self.strict,
            causes=self.causes,
            timeout_s=self.timeout,
            profile=self.profile,
            expected_gpus=self.expect_gpus,
            presentation=self.presentation.parse(TOPO_SECTIONS),
        )


def _run(options: TopoOptions) -> int:
    from gpubench.jobs import topo

    return topo.run(options.plan(), sys.argv[1:])


app = app_of(HELP, TopoOptions, _run)
