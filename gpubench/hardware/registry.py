"""The backends of collectives, by their names on the command line; each is imported when it is opened."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpubench.errors import invalid_choice, no_gpu
from gpubench.model.terms.allocator import Allocator
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.backend import MultiGroupBackend

if TYPE_CHECKING:
    from gpubench.hardware.cuda.device import CudaDevice
    from gpubench.hardware.mpi.group import MpiGroup
    from gpubench.hardware.nccl.backend import NcclLibrary
    from gpubench.hardware.watchdog.rank import RankProgress


@dataclass(frozen=True, kw_only=True)
class BackendSetup:
    """The means with which a rank opens a backend; those of GPUs are None on a rank without one."""

    group: "MpiGroup"
    ranks_on_node: int
    progress: "RankProgress"
    device: "CudaDevice | None" = None
    library: "NcclLibrary | None" = None
    allocator: Allocator = Allocator.CUDA


@dataclass(frozen=True, kw_only=True)
class BackendKind:
    """A backend: what it needs, what it can do, and how a rank opens it.

    `default_sizes` is the sweep where `--sizes` gives none. `lacks` has the reason for each option that it cannot
    follow. `check_types` raises UsageError for types that it cannot reduce; reductions of None only move data.
    """

    name: str
    summary: str
    needs_gpus: bool
    default_sizes: str
    open: Callable[[BackendSetup], MultiGroupBackend]
    check_types: Callable[[Sequence[DataType], Sequence[ReduceOp] | None], None] = lambda _types, _ops: None
    lacks: Mapping[str, str] = field(default_factory=dict)


def _open_nccl(setup: BackendSetup) -> MultiGroupBackend:
    from gpubench.hardware.nccl.backend import NcclBackend

    if setup.device is None or setup.library is None:
        raise no_gpu("this rank opened none")
    backend = NcclBackend(setup.group, setup.device, setup.library, setup.allocator, setup.progress)
    setup.progress.answer_watchdog(backend.trouble, backend.abort)
    return backend


def _open_host(setup: BackendSetup) -> MultiGroupBackend:
    from gpubench.hardware.mpi.host import HostBackend

    return HostBackend(setup.group, setup.ranks_on_node, progress=setup.progress)


def _check_host_types(dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    from gpubench.hardware.mpi.host import check_types

    check_types(dtypes, ops)


_NO_NCCL = "MPI moves the data, not NCCL"

BACKENDS = (
    BackendKind(
        name="nccl",
        summary="nccl drives GPUs (default where there are any)",
        needs_gpus=True,
        default_sizes="8:4G",
        open=_open_nccl,
    ),
    BackendKind(
        name="host",
        summary="host is MPI on CPU buffers",
        needs_gpus=False,
        default_sizes="8:16M",  # on a laptop it ends within ten seconds
        open=_open_host,
        check_types=_check_host_types,
        lacks={
            "--graph": "CPUs have no CUDA graphs",
            **dict.fromkeys(("--nccl-library", "--allocator nccl", "--algo", "--proto"), _NO_NCCL),
        },
    ),
)
"""The first whose needs are met is the default."""


def backend_named(name: str) -> BackendKind:
    """The backend of that name; UsageError where there is none."""
    for each in BACKENDS:
        if each.name == name:
            return each
    raise invalid_choice("--backend", name, [each.name for each in BACKENDS])


def default_backend(*, gpus: bool) -> BackendKind:
    """The backend where none is named; `gpus` is true where any rank sees a GPU."""
    return next(each for each in BACKENDS if gpus or not each.needs_gpus)
