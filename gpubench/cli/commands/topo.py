"""`gpubench topo`: its options, where its machines come from, and the report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import (
    PROFILE,
    PresentationOptions,
    RecordingOptions,
    SimulationOptions,
    check_profile,
    expected_gpus,
)
from gpubench.cli.signature import MEASURE, app_of, completed, flag, option, step_timeout
from gpubench.errors import exclusive

if TYPE_CHECKING:
    from gpubench.jobs.topo import TopoPlan

HELP = """
One look at what the links should be able to do: GPUs, NVLinks, NICs, how they are wired, who can reach whose memory,
and what each pair can carry at most. Under mpirun every node is read once, and nodes that differ from their kind are
named.

  gpubench topo

  gpubench topo --causes

  gpubench topo --from topo.xml

  gpubench topo --simulate 'hgx-h100-8*16' --fault node3.gpu5:nvlink=12

  mpirun -n 16 gpubench topo --output cluster.json
"""


@dataclass(frozen=True, kw_only=True)
class TopoOptions:
    """The machines to show, and how."""

    help_group: ClassVar = MEASURE

    from_file: str | None = option(
        "FILE",
        "Show an NCCL topology XML, the text of `nvidia-smi topo -m` or -p2p, or a recorded snapshot.",
        name="--from",
    )
    simulation: SimulationOptions
    recording: RecordingOptions
    strict: bool = flag("Exit 1 for what is not PASS, 3 where nothing was judged: for CI and node gates.")
    causes: bool = flag(
        "Show what would make bytes go through host memory, or slowly, each with its cure, and what could not "
        "be read; in place of the devices."
    )
    timeout: float = step_timeout("a node's driver that does not answer", default=20.0)
    profile: str | None = option("NAME|FILE", PROFILE, autocompletion=completed("profile"))
    expect_gpus: int | None = expected_gpus()
    presentation: PresentationOptions

    def plan(self) -> "TopoPlan":
        """The plan that these options ask for; UsageError for two sources of machines."""
        from gpubench.jobs.sources import source_of
        from gpubench.jobs.topo import TopoPlan
        from gpubench.model.results.report import TOPO_SECTIONS

        named = {"--from": self.from_file, "--replay": self.recording.replay, "--simulate": self.simulation.simulate}
        sources = [option for option, value in named.items() if value is not None]
        if len(sources) > 1:
            raise exclusive(sources, "one machine, or the one at hand")
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
