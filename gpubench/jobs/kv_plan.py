"""The options of `kv`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpubench.errors import UsageError
from gpubench.jobs.plans import MachinePlan, Targets, parse_pair_option
from gpubench.model.paths.ucx import Allocation
from gpubench.model.terms.operation import TransferBackend
from gpubench.model.terms.options import (
    RequiredPath,
    flag,
    one_of,
    option,
    rank_counts,
    require_path_option,
    step_timeout,
)
from gpubench.model.terms.units import parse_sizes


class Visible(StrEnum):
    """Which GPUs each process of `kv` sees: all of them, or only its own."""

    ALL = "all"
    OWN = "own"


class Isolate(StrEnum):
    """The namespaces of Linux that each process of `kv` gets for itself, as in containers."""

    PID = "pid"
    IPC = "ipc"
    NET = "net"


def _parse_blocks(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(f"--blocks {text!r}", expected="numbers of blocks", next_step="--blocks 1,256,4096")
    return counts


def _parse_allocations(text: str) -> tuple[Allocation, ...]:
    choose = one_of("--memory", Allocation)
    return tuple(dict.fromkeys(choose(part) for part in text.split(",")))


def _refuse_hosts(text: str) -> None:
    raise UsageError(
        f"kv --hosts {text}",
        expected="no --hosts, because kv starts both processes of a transfer on its own host",
        next_step="run gpubench kv on each host, or use gpubench p2p --hosts to copy between hosts",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan(MachinePlan):
    """Options of `kv`. `pairs` has GPU indices. None selects all pairs."""

    backend: TransferBackend = option(
        "|".join(TransferBackend),
        "Library that moves the data.",
        default=TransferBackend.UCX.value,
        read=one_of("--backend", TransferBackend),
        common=True,
    )
    sizes: tuple[int, ...] = option(
        "SIZES", "Total sizes of a transfer, over all its blocks.", default="4K:256M:16", read=parse_sizes, common=True
    )
    blocks: tuple[int, ...] = option(
        "COUNTS",
        "Numbers of blocks per transfer. Blocks below 1 KiB are skipped.",
        default="1,256,4096",
        read=_parse_blocks,
        common=True,
    )
    memory: tuple[Allocation, ...] | None = option(
        ",".join(Allocation),
        "How both processes allocate GPU memory: malloc (cudaMalloc), expandable (like PyTorch's "
        "expandable_segments), async (cudaMallocAsync) or managed (cudaMallocManaged). Default: malloc, and the kind "
        "that PYTORCH_CUDA_ALLOC_CONF selects.",
        read=_parse_allocations,
        common=True,
    )
    visible: Visible = option(
        "|".join(Visible),
        "GPUs that each process sees.",
        default=Visible.ALL.value,
        read=one_of("--visible", Visible),
        common=True,
    )
    isolate: Isolate | None = option(
        "|".join(Isolate),
        "Give each process its own namespace, as containers have. Needs root.",
        read=one_of("--isolate", Isolate),
    )
    pairs: tuple[tuple[int, int], ...] | None = option(
        "I-J", "Measure only these pairs of GPUs: 0-1,2-3.", read=parse_pair_option, several=True, common=True
    )
    rank_counts: tuple[int, ...] = rank_counts(
        "Measure only between the first N GPUs. 2,4,8 shows how the slowest pair changes."
    )
    host: bool = flag("Also transfer from a GPU to host memory.", name="--host/--no-host", default=True)
    targets: Targets = field(default_factory=Targets)
    require_path: tuple[RequiredPath, ...] = require_path_option(common=False)
    several_hosts: None = option("FILE|A,B", "", name="--hosts", hidden=True, read=_refuse_hosts)
    timeout_s: float = step_timeout("one transfer", default=30.0)

    def allocations(self, environment: Mapping[str, str]) -> tuple[Allocation, ...]:
        """Return the kinds of memory to measure: by default plain memory, and what PyTorch would allocate."""
        from gpubench.conditions.kv import ALLOCATORS, EXPANDABLE, POOL

        if self.memory is not None:
            return self.memory
        settings = ",".join(environment.get(name, "") for name in ALLOCATORS).lower()
        of_torch = {EXPANDABLE: Allocation.EXPANDABLE, POOL: Allocation.ASYNC}
        return (Allocation.MALLOC, *(kind for word, kind in of_torch.items() if word in settings))
