"""`gpubench p2p`: its options, and the run."""

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.cli.options import presentation, recording, simulation
from gpubench.cli.options.presentation import parse_choices, parse_presentation
from gpubench.cli.options.recording import parse_recording
from gpubench.cli.options.simulation import parse_simulation
from gpubench.errors import UsageError, exclusive
from gpubench.hardware.launch.started_by import launched_by
from gpubench.jobs.p2p.plan import As, P2pPlan
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.sweep import parse_sizes

if TYPE_CHECKING:
    from gpubench.hardware.mpi.group import MpiGroup
    from gpubench.hardware.watchdog.rank import RankProgress

SUMMARY = "Every ordered pair of GPUs: bandwidth, latency, peer access off and on."
HELP = f"""{SUMMARY}

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


SIZES = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="SIZES",
        help="Copy these sizes, written by copy engines, peer access off and on: 8:1G or 1K,64K,1M. Default: 256M in "
        "every way, and 16 bytes for the latency.",
        show_default=False,
    ),
]
PAIRS = Annotated[
    list[str] | None,
    typer.Option(
        "--pairs",
        metavar="I-J",
        help="Only these, from GPU I to GPU J (between ranks: from rank I to rank J): 0-1,3-5. Default: all.",
        show_default=False,
    ),
]
LIKE = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="|".join(As),
        help="With nvbandwidth's parameters: 512M, 16 copies after 4, median of 3.",
        show_default=False,
    ),
]
HOST = Annotated[bool, typer.Option("--host/--no-host", help="Also between host memory and every GPU.")]
PATTERNS = Annotated[bool, typer.Option("--patterns/--no-patterns", help="Also many pairs at once.")]
CHECK = Annotated[bool, typer.Option("--check/--no-check", help="Have destinations check what arrived.")]
EVIDENCE = Annotated[
    bool, typer.Option("--evidence", help="Show all that is known of every pair's path.", show_default=False)
]
STRICT = Annotated[
    bool, typer.Option("--strict", help="Exit 1 also for slow and host-staged pairs.", show_default=False)
]
TIMEOUT = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="S",
        min=0.1,
        help="Seconds in which the driver has to describe the GPUs, and a step of a run between ranks has to end.",
    ),
]


def parse_p2p_options(given: dict[str, Any]) -> P2pPlan:
    """The options of `p2p` from what typer read.

    Raises:
        UsageError: anything that cannot be, with the next step.
    """
    from gpubench.jobs.sources import source_of
    from gpubench.measure.p2p.run import SECTIONS
    from gpubench.model.paths.p2p import parse_pairs

    like = None if given["like"] is None else parse_choices("--as", [given["like"]], As)[0]
    if like is not None and given["sizes"] is not None:
        raise exclusive(("--as nvbandwidth", "--sizes"), "one of them: nvbandwidth copies 512M")
    try:
        pairs = None if given["pairs"] is None else parse_pairs(given["pairs"])
    except ValueError as error:
        raise UsageError(
            f"--pairs {str(error)!r} is no pair",
            expected="two different GPUs, as nvidia-smi numbers them: 0-1,3-5",
            next_step="nvidia-smi -L lists them; --pairs 0-1",
        ) from None
    recording = parse_recording(
        given, {f"--{name}": given[name] for name in ("simulate", "record", "sizes", "pairs")} | {"--as": given["like"]}
    )
    return P2pPlan(
        source=source_of(given["timeout"], simulation=parse_simulation(given), replay=recording.replay),
        recording=recording,
        sizes=None if given["sizes"] is None else parse_sizes(given["sizes"]),
        pairs=pairs,
        like=like,
        host=given["host"],
        patterns=given["patterns"],
        check=given["check"],
        strict=given["strict"],
        evidence=EvidenceUse.SHOWN if given["evidence"] else EvidenceUse.KEPT,
        timeout_s=given["timeout"],
        presentation=parse_presentation(given, SECTIONS),
    )


def run(given: dict[str, Any]) -> None:
    """Be the command."""
    options = parse_p2p_options(given)
    launch = launched_by(os.environ)
    if launch is None or launch.size == 1:
        from gpubench.jobs.p2p.job import run_alone

        raise typer.Exit(run_alone(options, sys.argv[1:]))
    if options.source.text is not None:
        raise UsageError(
            f"p2p {options.source.text.split()[0]} under {launch.launcher}",
            expected="one process, which shows all GPUs of that machine",
            reason="ranks measure what is there; pairs of ranks of a simulated machine are not measured yet",
            next_step="the same without the launcher",
        )
    from gpubench.jobs import rank
    from gpubench.jobs.p2p.ranks import P2pRanksJob

    def make_job(group: "MpiGroup", progress: "RankProgress") -> P2pRanksJob:
        return P2pRanksJob(group, progress, options, sys.argv[1:])

    raise typer.Exit(rank.run(make_job, launch, options.timeout_s))


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("sizes", SIZES, None),
    ("pairs", PAIRS, None),
    ("like", LIKE, None),
    ("host", HOST, True),
    ("patterns", PATTERNS, True),
    ("check", CHECK, True),
    ("evidence", EVIDENCE, False),
    ("strict", STRICT, False),
    ("timeout", TIMEOUT, 20.0),
    ("plot", presentation.PLOT, False),
    *simulation.PARAMETERS,
    *recording.PARAMETERS,
    *presentation.PARAMETERS,
)
