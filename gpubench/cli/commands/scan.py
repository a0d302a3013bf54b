"""`gpubench scan`: its options, and the run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import PresentationOptions, SimulationOptions
from gpubench.cli.signature import MEASURE, app_of, flag, option, sharing_ranks, step_timeout
from gpubench.errors import exclusive, invalid_choice

if TYPE_CHECKING:
    from gpubench.jobs.rounds import ScanPlan

HELP = """
Names every slow or dead node, GPU, NIC, rail and leaf of a job. All nodes measure each other at once, on all rails, in
eleven rounds whatever their number: three of random pairs, three of suspects with known good nodes, five that confirm.
A node that dies or hangs is a finding, and the others go on; docs/scan.md says with which MPI. Start a rank a GPU, or
a rank a node.
Exit 0 all are well, 1 something is bad, 3 not measured, or too noisy to tell.

  mpirun -n 512 --map-by ppr:8:node --enable-recovery gpubench scan --rounds r/

  gpubench scan --replay r/       # of a job that died: the rounds it finished

  gpubench scan --simulate 'hgx-h100-8*1024' --fault node9:hangs=round2

  gpubench scan --simulate 'hgx-h100-8*128' --fault leaf1.rail2:bandwidth=0.6
"""

_BACKENDS = ("nccl", "host")


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The nodes to scan, and how."""

    help_group: ClassVar = MEASURE

    backend: str | None = option(
        "|".join(_BACKENDS),
        "What moves the data: NCCL between GPUs (default where there are any), or TCP between CPU buffers.",
        default=None,
    )
    quick: bool = flag("Three rounds: suspects, and nothing confirmed.")
    leaves: str | None = option(
        "FILE", "Which leaf each node hangs on: Slurm's topology.conf, ibnetdiscover's output, or NODE LEAF."
    )
    rounds: str | None = option("DIR", "Keep every round there as it ends.")
    resume: str | None = option("DIR", "Go on with the rounds that are there, and the nodes that are left.")
    replay: str | None = option("DIR", "Judge the rounds that are there; nothing is measured.")
    hostfile: str | None = option("FILE", "Write the good nodes there, a line each, as mpirun --hostfile reads them.")
    ranks_as_nodes: bool = flag("Every rank is a node of its own: tries a scan on one host, or on its GPUs.")
    ranks_per_gpu: int = sharing_ranks("Each is a node of its own, by NCCL_HOSTID, with any NCCL")
    timeout: float = step_timeout("a round", default=10.0, least=0.5)
    strict: bool = flag("Exit 1 also where there is a suspect or another doubt.")
    simulation: SimulationOptions
    presentation: PresentationOptions

    def plan(self) -> "ScanPlan":
        """The plan that these options ask for; UsageError for any that cannot be."""
        from gpubench.jobs.rounds import ScanPlan
        from gpubench.jobs.scan import SECTIONS
        from gpubench.readers.leaves import read_leaves

        folders = {"--rounds": self.rounds, "--resume": self.resume, "--replay": self.replay}
        given = [name for name, value in folders.items() if value is not None]
        if len(given) > 1:
            raise exclusive(given, "one of them: --rounds begins, --resume goes on, --replay measures nothing")
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
