"""`gpubench topo` and `p2p`: the hardware and software of this machine, and how fast its GPUs copy."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import typer

from gpubench.cli.exclusions import check_profile
from gpubench.cli.signature import HelpPage, check_presentation, job_runner, make_app
from gpubench.errors import UsageError
from gpubench.jobs.plans import MemoryKind, P2pPlan, TopoPlan
from gpubench.model.terms.commands import Command

_TOPO = HelpPage(
    (
        ("Show this machine", "gpubench topo"),
        (
            "Show a simulated cluster of 16 nodes with a fault",
            "gpubench topo --simulate 'hgx-h100-8*16' --fault node3.gpu5:nvlink=12",
        ),
        ("Show causes of slow paths", "gpubench topo --causes"),
        ("Show the libraries of this environment", "gpubench topo --software"),
        ("Show a file, e.g. of NCCL_TOPO_DUMP_FILE", "gpubench topo --from topo.xml"),
        ("Read two nodes of eight GPUs and keep the result", "mpirun -n 16 gpubench topo --output cluster.json"),
    ),
    """
topo measures nothing. It shows GPUs, NVLinks and NICs, how they are wired, which GPUs can access each other's memory,
and the limit of each pair. Under mpirun every node is read once, and nodes that differ from the others are named.

With --software it shows NCCL, MPI, UCX, NVSHMEM, MSCCL++, PyTorch, nccl4py, CuPy, NIXL, Mooncake, and the kernel
modules that let a NIC reach GPU memory. It loads each library in a separate process, except PyTorch, NIXL and
Mooncake, whose files it only reads. Two NCCL versions in one environment are a finding.
""",
)

_P2P = HelpPage(
    (
        ("Measure all pairs of GPUs of this host", "gpubench p2p"),
        ("Measure some pairs at several sizes", "gpubench p2p --pairs 0-1,1-0 --sizes 8:1G"),
        ("Write CSV", "gpubench p2p --format csv > p2p.csv"),
        ("Measure unified memory too", "gpubench p2p --memory managed"),
        (
            "Start a program, without peer access if that is broken or slow",
            'eval "$(gpubench p2p --veto)" && vllm serve MODEL -tp 2',
        ),
        ("Copy between ranks", "mpirun -n 4 gpubench p2p"),
        ("Try it without a GPU", "gpubench p2p --simulate hgx-h100-8 --fault link0-3:staged=yes"),
    ),
    """
Copies run with peer access off, then on. Copy engines and a kernel write and read, in one direction and in both, and
with 16 bytes for the latency. More copies run to and from host memory, and between many pairs at once. Every
destination verifies the data. Each pair is compared with its limit, with its siblings, and with healthy machines of
the same type.

Under mpirun or srun, copies run between ranks, with disjoint pairs at the same time. They use CUDA IPC within a node,
and NCCL send and receive between nodes. Host memory, kernels, patterns and copies without peer access are not measured
then.
""",
)


def checked_topo(plan: TopoPlan) -> TopoPlan:
    """Return the plan with its presentation checked. Raises UsageError for a missing or invalid profile."""
    from gpubench.model.results.backends import LIBRARY_SECTIONS
    from gpubench.model.results.topo import TOPO_SECTIONS

    check_profile(plan.profile)
    return check_presentation(plan, LIBRARY_SECTIONS if plan.software else TOPO_SECTIONS)


def checked_p2p(plan: P2pPlan) -> P2pPlan:
    """Return the plan with its presentation checked.

    Raises: UsageError for managed memory with several sizes, and for a missing or invalid profile.
    """
    from gpubench.formats.registry import VETO
    from gpubench.jobs.p2p import SECTIONS

    if plan.memory is MemoryKind.MANAGED and plan.sizes is not None and len(plan.sizes) != 1:
        raise UsageError(
            f"--memory managed with {len(plan.sizes)} sizes",
            expected="one size, used for pinned and managed memory",
            next_step="--sizes 256M",
        )
    check_profile(plan.profile)
    plan = check_presentation(plan, SECTIONS)
    if plan.veto:
        return replace(plan, presentation=replace(plan.presentation, format=VETO, no_progress=True))
    return plan


_APPS: Mapping[str, Callable[[Command], typer.Typer]] = {
    "topo": make_app(_TOPO, TopoPlan, job_runner("gpubench.jobs.topo", checked_topo)),
    "p2p": make_app(_P2P, P2pPlan, job_runner("gpubench.jobs.p2p", checked_p2p), plots=True),
}


def app(command: Command) -> typer.Typer:
    return _APPS[command.name](command)
