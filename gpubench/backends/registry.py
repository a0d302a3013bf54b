"""Registry of the backends for collectives. The module of a backend is imported when the backend is opened."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct, field

from gpubench.errors import invalid_choice, no_gpu
from gpubench.model.terms.operation import HOST, NCCL, TORCH, TORCH_SYMM, Allocator, DataType, ReduceOp
from gpubench.model.terms.options import REQUIRE_PATH
from gpubench.ports.backend import MultiGroupBackend

if TYPE_CHECKING:
    from gpubench.backends.cuda import CudaDevice
    from gpubench.backends.mpi.group import MpiGroup
    from gpubench.backends.nccl.library import NcclLibrary
    from gpubench.backends.torch.distributed import TorchDistributed
    from gpubench.ports.group import Group
    from gpubench.ranks.watchdog.rank import RankProgress


class BackendSetup(Struct, frozen=True, kw_only=True):
    """Arguments for opening a backend on one rank. `device` and `library` are None without a GPU.

    With `gated`, operations are timed from the opening of a gate if the backend supports it.
    """

    group: "Group"
    ranks_on_node: int
    progress: "RankProgress"
    device: "CudaDevice | None" = None
    library: "NcclLibrary | None" = None
    allocator: Allocator = Allocator.CUDA
    local_rank: int = 0
    gated: bool = False


class GpuNeed(StrEnum):
    """Whether a backend uses GPU memory on NVIDIA GPUs."""

    NEEDED = "always"
    USED = "on machines with GPUs"
    NONE = "never"


class BackendKind(Struct, frozen=True, kw_only=True):
    """A backend: its requirements, its capabilities, and the function that opens it on a rank."""

    name: str
    summary: str
    gpus: GpuNeed
    default_sizes: str
    collectives: tuple[str, ...] = ()  # Empty if it supports all
    open: Callable[[BackendSetup], MultiGroupBackend]
    check_types: Callable[[Sequence[DataType], Sequence[ReduceOp] | None], None] = lambda _types, _ops: None
    """Raises UsageError for a type or reduction that the backend does not support."""
    check_installed: Callable[[], None] = lambda: None
    """Raises CouldNotMeasureError if the backend's packages are missing."""
    # Called before NCCL is loaded, with the driver's CUDA version
    load: Callable[[int], object] = lambda _driver_cuda: None
    lacks: Mapping[str, str] = field(default_factory=dict)  # Unsupported options, with the reason for each
    logs_to_nccl: bool = False  # True if NCCL's log shows the paths of this backend
    no_log: str = ""  # Reason why the backend has no log of its paths
    by_design: str = ""  # Reason why the backend always copies data through host memory
    refusals: tuple[type[Exception], ...] = ()  # Exceptions that the backend raises for unsupported operations

    @property
    def needs_gpus(self) -> bool:
        return self.gpus is GpuNeed.NEEDED

    def takes_gpus(self, *, seen: bool) -> bool:
        """Return True if the backend uses GPUs. `seen`: some rank of the job sees a GPU."""
        return self.needs_gpus or (seen and self.gpus is GpuNeed.USED)


def _open_nccl(setup: BackendSetup) -> MultiGroupBackend:
    if setup.device is None or setup.library is None:
        raise no_gpu("this rank has none")
    from gpubench.backends.nccl.backend import GatedNccl, NcclBackend

    kind = GatedNccl if setup.gated else NcclBackend
    backend = kind(setup.group, setup.device, setup.library, setup.allocator, setup.progress)
    setup.progress.answer_watchdog(backend.trouble, backend.abort)
    return backend


def _open_host(setup: BackendSetup) -> MultiGroupBackend:
    from gpubench.backends.mpi.backends import HostBackend

    return HostBackend(cast("MpiGroup", setup.group), setup.ranks_on_node, progress=setup.progress)


def _check_mpi_types(backend: str, dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    from gpubench.backends.mpi.group import check_types

    check_types(backend, dtypes, ops)


def _open_mpi(setup: BackendSetup) -> MultiGroupBackend:
    from gpubench.backends.mpi.backends import MpiOnCuda

    if setup.device is None:
        raise no_gpu("this rank has none", for_what="--backend mpi")
    return MpiOnCuda(cast("MpiGroup", setup.group), setup.device, setup.progress)


_TORCH_DEVICES = {"rccl": "cuda", "xccl": "xpu"}


def _load_torch(name: str, driver_cuda: int) -> "TorchDistributed":
    """Import torch for a backend. This must happen before NCCL is loaded, because a process loads only one libnccl.

    `driver_cuda` is the driver's CUDA version, or 0 if the rank uses no NVIDIA GPU.
    """
    from gpubench.backends.torch import distributed, symmetric

    found = distributed.load_torch(name.removeprefix(TORCH), for_cuda=driver_cuda > 0, driver_cuda=driver_cuda)
    if name == TORCH_SYMM:
        distributed.import_symmetric_memory(found)
        symmetric.check_operations(found)
    return found


def _open_torch(name: str, setup: BackendSetup) -> MultiGroupBackend:
    """Open a torch backend on this rank's GPU, or without one on the device that the torch backend uses.

    Raises:
        CouldNotMeasureError: torch or its device is not usable.
    """
    from gpubench.backends.torch import backend, distributed, symmetric

    device, group, progress = setup.device, setup.group, setup.progress
    found = _load_torch(name, 0 if device is None else device.driver_cuda)
    groups = backend.TorchGroups(found, name, group, one_node=setup.ranks_on_node == group.size)
    if device is not None and name == TORCH_SYMM:
        return symmetric.TorchSymmetric(groups, found, device, group, progress)
    if device is not None and found.backend == "gloo":
        return backend.TorchGlooOnCuda(groups, found, device, group, progress)
    if device is not None:
        opened = backend.TorchNccl(groups, found, device, group, progress)
        progress.answer_watchdog(opened.trouble, opened.abort)
        return opened
    if found.backend == "gloo":
        return backend.TorchOnCpu(groups, group, setup.ranks_on_node, progress)
    kind = _TORCH_DEVICES[name.removeprefix(TORCH)]
    devices = getattr(found.torch, kind)
    if not devices.is_available():
        raise distributed.torch_without(found.version, f"a GPU for {name} in this machine")
    index = setup.local_rank % devices.device_count()
    devices.set_device(index)
    return backend.TorchOnDevice(groups, found, found.torch.device(kind, index), group, progress)


def _check_symmetric_types(dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    from gpubench.backends.torch.symmetric import check_types

    check_types(dtypes, ops)


def _check_torch() -> None:
    from gpubench.backends.torch.distributed import check_installed

    check_installed()


_NO_NCCL = "MPI moves the data, not NCCL"
_TO_NCCL = ("--allocator nccl", "--algo", "--proto", "--set", "--register", "--cta-policy", "--max-ctas")
_NCCL_OPTIONS = ("--nccl-library", *_TO_NCCL)
_SHARING, _NO_GPU_TO_SHARE = "--ranks-per-gpu", "its ranks use CPU buffers, and --np sets their number"
_NO_GRAPHS = "a CUDA graph captures only operations in a stream of an NVIDIA GPU"
_TORCH_CHOOSES = "torch creates communicators and allocates memory in its own way"


def _torch(
    library: str,
    summary: str,
    gpus: GpuNeed,
    default_sizes: str,
    lacks: Mapping[str, str],
    **others: Any,
) -> BackendKind:
    name = f"{TORCH}{library}"
    return BackendKind(
        name=name,
        summary=summary,
        gpus=gpus,
        default_sizes=default_sizes,
        open=partial(_open_torch, name),
        check_installed=_check_torch,
        load=partial(_load_torch, name),
        lacks=lacks,
        refusals=(RuntimeError, ValueError, TypeError, NotImplementedError),
        **others,
    )


_TORCH_LACKS = dict.fromkeys(_TO_NCCL, _TORCH_CHOOSES)
_NOT_BY_NCCL = "PyTorch's kernels move the data, not NCCL"
_OTHER_GPUS = {"--graph": _NO_GRAPHS, **dict.fromkeys(_NCCL_OPTIONS, "these are not NVIDIA GPUs")}

BACKENDS = (
    BackendKind(
        name="nccl",
        summary="nccl drives GPUs (default on GPUs)",
        gpus=GpuNeed.NEEDED,
        default_sizes="8:4G",
        open=_open_nccl,
        logs_to_nccl=True,
    ),
    _torch("nccl", "torch:nccl is PyTorch over NCCL", GpuNeed.NEEDED, "8:4G", _TORCH_LACKS, logs_to_nccl=True),
    _torch(
        "symm",
        "torch:symm is all-reduce with PyTorch's symmetric memory",
        GpuNeed.NEEDED,
        "8:64M",
        dict.fromkeys(_NCCL_OPTIONS, _NOT_BY_NCCL),
        collectives=("allreduce",),
        check_types=_check_symmetric_types,
        no_log=f"{_NOT_BY_NCCL}, and log no paths",
    ),
    _torch("rccl", "torch:rccl on AMD GPUs (never run)", GpuNeed.NONE, "8:256M", _OTHER_GPUS),
    _torch("xccl", "torch:xccl on Intel GPUs (never run)", GpuNeed.NONE, "8:256M", _OTHER_GPUS),
    BackendKind(
        name="mpi",
        summary="mpi is MPI on GPU buffers",
        gpus=GpuNeed.NEEDED,
        default_sizes="8:256M",
        open=_open_mpi,
        check_types=partial(_check_mpi_types, "mpi"),
        lacks={"--graph": "the host makes MPI's calls", **dict.fromkeys(_NCCL_OPTIONS, _NO_NCCL)},
        no_log="MPI moves the data, not NCCL, and logs no paths",
    ),
    _torch(
        "gloo",
        "torch:gloo is PyTorch over Gloo, which uses host memory on GPUs",
        GpuNeed.USED,
        "8:16M",
        {"--graph": _NO_GRAPHS, **dict.fromkeys(_NCCL_OPTIONS, "Gloo moves the data, not NCCL")},
        no_log="Gloo moves the data, not NCCL, and logs no paths",
        by_design="Gloo copies CUDA tensors to host memory, sends them over TCP and copies them back",
    ),
    BackendKind(
        name="host",
        summary="host is MPI on CPU buffers",
        gpus=GpuNeed.NONE,
        default_sizes="8:16M",  # A sweep takes less than 10 s on a laptop
        open=_open_host,
        check_types=partial(_check_mpi_types, "host"),
        lacks={
            "--graph": "CPUs have no CUDA graphs",
            _SHARING: _NO_GPU_TO_SHARE,
            REQUIRE_PATH: "it requires a path between GPUs",
            **dict.fromkeys(_NCCL_OPTIONS, _NO_NCCL),
        },
    ),
)
"""All backends. If a user selects several, they run in this order and are compared with the first one."""


def backend_named(name: str) -> BackendKind:
    """Return the backend with this name. Raise UsageError if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise invalid_choice("--backend", name, [backend.name for backend in BACKENDS])


def default_backend(*, gpus: bool) -> BackendKind:
    """Return the default backend: nccl if some rank sees a GPU (`gpus`), else host."""
    return backend_named(NCCL if gpus else HOST)
