"""`gpubench p2p`: its help, what excludes what, and the run."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions, check_profile, check_replay
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import UsageError, exclusive
from gpubench.formats.presentation import Presentation
from gpubench.jobs.plans import MemoryKind, P2pPlan

HELP = HelpPage(
    (
        ("Measure all pairs of GPUs of this host", "gpubench p2p"),
        ("Measure some pairs at several sizes", "gpubench p2p --pairs 0-1,1-0 --sizes 8:1G"),
        ("Copy as nvbandwidth does, and write CSV", "gpubench p2p --as nvbandwidth --format csv > p2p.csv"),
        ("Measure unified memory too", "gpubench p2p --memory managed"),
        (
            "Start a program without peer access where that is broken or slow",
            'eval "$(gpubench p2p --veto)" && vllm serve MODEL -tp 2',
        ),
        ("Copy between ranks", "mpirun -n 4 gpubench p2p"),
        ("Try it without a GPU", "gpubench p2p --simulate hgx-h100-8 --fault link0-3:staged=yes"),
    ),
    """
Copies run with peer access off, then on: written and read by copy engines, by a kernel, in both directions at once,
with 16 bytes for the latency, to and from host memory, and between many pairs at once. Every destination verifies the
data. Each pair is compared with its limit, with its siblings, and with healthy machines of the type.

Under mpirun or srun, copies run between ranks: through CUDA IPC within a node, by NCCL's send and receive between
nodes, disjoint pairs at the same time. Host memory, kernels, patterns and peer access off are not measured then.
""",
)


def checked(plan: P2pPlan, shown: PresentationOptions) -> P2pPlan:
    """The plan with its presentation. Raises UsageError for options that exclude each other, or a broken profile."""
    from gpubench.jobs.p2p import SECTIONS

    if plan.like is not None and plan.sizes is not None:
        raise exclusive(("--as nvbandwidth", "--sizes"), "one of them: nvbandwidth copies 512M")
    if plan.memory is MemoryKind.MANAGED:
        _check_managed(plan.like, plan.sizes)
    check_profile(plan.profile)
    beside = {"--simulate": plan.simulation, "--record": plan.recording.record, "--sizes": plan.sizes}
    check_replay(plan.recording, beside | {"--pairs": plan.pairs, "--as": plan.like})
    return replace(plan, presentation=_presentation(plan, shown.parse(SECTIONS)))


def _presentation(plan: P2pPlan, parsed: Presentation) -> Presentation:
    if not plan.veto:
        return parsed
    from gpubench.formats.registry import TABLE, VETO

    if parsed.format is not TABLE:
        raise exclusive(("--veto", f"--format {parsed.format.name}"), "one of them: both write to stdout")
    return replace(parsed, format=VETO, show_progress=False)


def _check_managed(like: str | None, sizes: tuple[int, ...] | None) -> None:
    if like is not None:
        raise exclusive((f"--as {like}", "--memory managed"), f"one of them: {like} does not copy managed memory")
    if sizes is not None and len(sizes) != 1:
        raise UsageError(
            f"--memory managed with {len(sizes)} sizes",
            expected="one size, for pinned and managed memory",
            next_step="--sizes 256M",
        )


def _run(plan: P2pPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import p2p

    return p2p.run(checked(plan, shown), sys.argv[1:])


app = app_of(HELP, P2pPlan, _run, plots=True)
