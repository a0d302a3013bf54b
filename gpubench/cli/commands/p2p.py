"""`gpubench p2p`: its options, and the run."""

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.options.presentation import PLOT, PresentationOptions
from gpubench.cli.options.profile import PROFILE, check_profile
from gpubench.cli.options.recording import RecordingOptions
from gpubench.cli.options.simulation import SimulationOptions
from gpubench.cli.signature import app_of
from gpubench.cli.table import Command
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.p2p.plan import As, P2pPlan
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.sweep import parse_sizes

HELP = """
Copies between all GPUs of this host, as nvbandwidth and p2pBandwidthLatencyTest make them: with peer access off, then
on; written and read by copy engines, by a kernel, both ways at once; 16 bytes for the latency; to and from host memory;
many pairs at once. Every destination checks what arrived. Each pair is compared with its limit, with its siblings, and
with healthy machines of the type.

Under mpirun or srun, copies between ranks: through CUDA IPC on a node, by NCCL's send and receive between nodes,
disjoint pairs at the same time. Host memory, kernels, patterns and peer access off are for one process.

  gpubench p2p

  gpubench p2p --pairs 0-1,1-0 --sizes 8:1G

  gpubench p2p --as nvbandwidth --format csv > p2p.csv

  gpubench p2p --simulate hgx-h100-8 --fault link0-3:staged=yes

  mpirun -n 4 gpubench p2p
"""


@dataclass(frozen=True, kw_only=True)
class P2pOptions:
    """Which pairs to copy between, in which ways, and how to show it."""

    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="SIZES",
            help="Copy these sizes, written by copy engines, peer access off and on: 8:1G or 1K,64K,1M. Default: 256M "
            "in every way, and 16 bytes for the latency.",
        ),
    ] = None
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--pairs",
            metavar="I-J",
            help="Only these, from GPU I to GPU J (between ranks: from rank I to rank J): 0-1,3-5. Default: all.",
        ),
    ] = None
    like: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="|".join(As), help="With nvbandwidth's parameters: 512M, 16 copies after 4, median of 3."
        ),
    ] = None
    host: Annotated[bool, typer.Option("--host/--no-host", help="Also between host memory and every GPU.")] = True
    patterns: Annotated[bool, typer.Option("--patterns/--no-patterns", help="Also many pairs at once.")] = True
    check: Annotated[bool, typer.Option("--check/--no-check", help="Have destinations check what arrived.")] = True
    evidence: Annotated[bool, typer.Option("--evidence", help="Show all that is known of every pair's path.")] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 also for slow and host-staged pairs.")] = False
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="S",
            min=0.1,
            help="Seconds in which the driver has to describe the GPUs, and a step of a run between ranks has to end.",
        ),
    ] = 20.0
    plot: PLOT = False
    profile: PROFILE = None
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self) -> P2pPlan:
        """What these options ask for.

        Raises:
            UsageError: anything that cannot be, with the next step.
        """
        from gpubench.jobs.p2p.job import SECTIONS
        from gpubench.jobs.sources import source_of

        like = None if self.like is None else parse_choices("--as", [self.like], As)[0]
        if like is not None and self.sizes is not None:
            raise exclusive(("--as nvbandwidth", "--sizes"), "one of them: nvbandwidth copies 512M")
        pairs, sizes = self._pairs(), None if self.sizes is None else parse_sizes(self.sizes)
        check_profile(self.profile)
        recording = self.recording.parse(
            {
                "--simulate": self.simulation.simulate,
                "--record": self.recording.record,
                "--sizes": self.sizes,
                "--pairs": self.pairs,
                "--as": self.like,
            }
        )
        return P2pPlan(
            source=source_of(self.timeout, simulation=self.simulation.parse(), replay=recording.replay),
            recording=recording,
            sizes=sizes,
            pairs=pairs,
            like=like,
            host=self.host,
            patterns=self.patterns,
            check=self.check,
            strict=self.strict,
            evidence=EvidenceUse.SHOWN if self.evidence else EvidenceUse.KEPT,
            timeout_s=self.timeout,
            profile=self.profile,
            presentation=self.presentation.parse(SECTIONS, plot=self.plot),
        )

    def _pairs(self) -> tuple[tuple[int, int], ...] | None:
        from gpubench.model.paths.p2p import parse_pairs

        try:
            return None if self.pairs is None else parse_pairs(self.pairs)
        except ValueError as error:
            raise UsageError(
                f"--pairs {str(error)!r} is no pair",
                expected="two different GPUs, as nvidia-smi numbers them: 0-1,3-5",
                next_step="nvidia-smi -L lists them; --pairs 0-1",
            ) from None


def run(options: P2pOptions) -> None:
    """Be the command: alone, or as one rank of a job."""
    from gpubench.jobs.p2p import job

    raise typer.Exit(job.run(options.plan(), sys.argv[1:]))


def app(command: Command) -> typer.Typer:
    """The command for typer."""
    return app_of(command, HELP, P2pOptions, run)
