"""`gpubench scan`: its options, and the run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import PresentationOptions, SimulationOptions
from gpubench.cli.signature import (
    INPUT,
    JUDGE,
    MEASURE,
    OUTPUT,
    SIMULATE,
    HelpPage,
    app_of,
    flag,
    option,
    sharing_ranks,
    step_timeout,
)
from gpubench.errors import exclusive, invalid_choice
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.rounds import ScanPlan

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

Exit codes: 0 all parts are healthy; 1 a part is slow, dead or hangs; 2 wrong usage; 3 could not measure, or the
measurements vary too much.
""",
)

_BACKENDS = ("nccl", "host")


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The nodes to scan, and how."""

    help_group: ClassVar = MEASURE

    backend: str | None = option(
        "|".join(_BACKENDS),
        "Measure with NCCL between GPUs (default if there are any), or with TCP between CPU buffers.",
        default=None,
    )
    quick: bool = flag("Stop after three rounds, with suspects that are not confirmed.", common=True)
    leaves: str | None = option(
        "FILE",
        "Leaf switch of each node: Slurm's topology.conf, the output of ibnetdiscover, or lines of NODE LEAF.",
        common=True,
        group=INPUT,
    )
    rounds: str | None = option("DIR", "Write every round to this folder as it ends.", common=True, group=OUTPUT)
    resume: str | None = option(
        "DIR", "Continue the rounds in this folder with the nodes that are left.", common=True, group=INPUT
    )
    replay: str | None = option("DIR", "Judge the rounds in this folder, measure nothing.", common=True, group=SIMULATE)
    hostfile: str | None = option(
        "FILE", "Write the healthy nodes to this file, one per line, for mpirun --hostfile.", common=True, group=OUTPUT
    )
    ranks_as_nodes: bool = flag("Treat every rank as a node: to try a scan on one host.")
    ranks_per_gpu: int = sharing_ranks("Each rank counts as a node. Works with any NCCL")
    timeout: float = step_timeout("one round", default=10.0, least=0.5)
    strict: bool = flag("Exit 1 if there is a suspect or any other doubt.", common=True, group=JUDGE)
    simulation: SimulationOptions
    presentation: PresentationOptions

    def plan(self) -> "ScanPlan":
        """The plan of these options. Raises UsageError for any that cannot be."""
        from gpubench.jobs.rounds import ScanPlan
        from gpubench.jobs.scan import SECTIONS
        from gpubench.readers.leaves import read_leaves

        folders = {"--rounds": self.rounds, "--resume": self.resume, "--replay": self.replay}
        given = [name for name, value in folders.items() if value is not None]
        if len(given) > 1:
            raise exclusive(given, "one of them: --rounds starts a scan, --resume continues one, --replay judges one")
        if self.replay is not None and self.simulation.simulate is not None:
            raise exclusive(["--simulate", "--replay"], "one of them")
        elsewhere = {"--backend host": self.backend == "host", "--replay": self.replay is not None}
        elsewhere["--simulate"] = self.simulation.simulate is not None
        unfit = [name for name, given in elsewhere.items() if given]
        if self.ranks_per_gpu > 1 and unfit:
            raise exclusive((unfit[0], "--ranks-per-gpu"), "one of them: its ranks measure this machine's GPUs")
        if self.backend is not None and self.backend not in _BACKENDS:
            raise invalid_choice("--backend", self.backend, _BACKENDS)
        return ScanPlan(
            simulation=self.simulation.parse(command="scan"),
            backend=self.backend,
            quick=self.quick,
            leaves=None if self.leaves is None else read_leaves(Path(self.leaves)),
            leaves_file=self.leaves,
            rounds=None if self.rounds is None else Path(self.rounds),
            resume=None if self.resume is None else Path(self.resume),
            replay=None if self.replay is None else Path(self.replay),
            hostfile=None if self.hostfile is None else Path(self.hostfile),
            ranks_as_nodes=self.ranks_as_nodes or self.ranks_per_gpu > 1,
            ranks_per_gpu=self.ranks_per_gpu,
            seed=self.simulation.seed,
            strict=self.strict,
            round_timeout_s=self.timeout,
            presentation=self.presentation.parse(SECTIONS),
        )


def _run(options: ScanOptions) -> int:
    from gpubench.jobs import scan

    return scan.run(options.plan(), sys.argv[1:])


app = app_of(HELP, ScanOptions, _run)
