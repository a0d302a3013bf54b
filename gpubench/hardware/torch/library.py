"""The torch of this environment: imported late, and found out about without its help where that is possible."""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gpubench.hardware.process.mapped import mapped_files
from gpubench.hardware.torch import refusals

_NCCL_FILE = r"libnccl\.so"
_LINKED_IN = "libtorch_cuda.so"


@dataclass(frozen=True, slots=True)
class TorchDistributed:
    """torch with one of the backends of torch.distributed; `word` is the name that torch has for it."""

    torch: Any
    word: str

    @property
    def distributed(self) -> Any:
        """`torch.distributed`."""
        return self.torch.distributed

    @property
    def built_for(self) -> str:
        """'CUDA 13.0', 'ROCm 6.4', 'XPU', 'CPUs alone'."""
        version = self.torch.version
        if version.cuda:
            return f"CUDA {version.cuda}"
        if version.hip:
            return f"ROCm {version.hip}"
        return f"XPU {version.xpu}" if getattr(version, "xpu", None) else "CPUs alone"

    @property
    def version(self) -> str:
        """'2.11.0 (CUDA 13.0)'."""
        return f"{str(self.torch.__version__).partition('+')[0]} ({self.built_for})"

    def nccl(self) -> str:
        """'2.28.9 from /usr/lib/libnccl.so.2', of the NCCL that this torch calls; '' where it has none."""
        if not self.torch.version.cuda or not self.distributed.is_nccl_available():
            return ""
        version = ".".join(map(str, self.torch.cuda.nccl.version()))
        return f"{version} from {' and '.join(mapped_files(_NCCL_FILE)) or _LINKED_IN}"


def is_installed() -> bool:
    """True where torch is installed, whether or not it can be imported."""
    return find_spec("torch") is not None


def check_installed() -> None:
    """Raise CouldNotMeasureError where torch is not installed."""
    if not is_installed():
        raise refusals.missing_torch()


def import_torch() -> Any:
    """The module `torch`. Raises CouldNotMeasureError: it is not installed, or cannot be imported."""
    check_installed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import torch.distributed
    except (ImportError, OSError, RuntimeError) as error:
        raise refusals.unusable_torch(refusals.first_line(error)) from error
    return torch


def import_fully_shard() -> Any:
    """`fully_shard`, FSDP2. Raises ImportError: this torch has none (2.6 or later has)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import fully_shard
    return fully_shard


def load_torch(word: str, *, for_cuda: bool = False, driver_cuda: int = 0) -> TorchDistributed:
    """Torch with that backend of torch.distributed; with `for_cuda`, one that drives NVIDIA GPUs.

    `driver_cuda` is the newest CUDA that the driver runs, 13000 for 13.0. Raises CouldNotMeasureError: torch is not
    installed, cannot be imported, or lacks what is asked of it.
    """
    torch = import_torch()
    found = TorchDistributed(torch, "nccl" if word == "rccl" else word)
    if not torch.distributed.is_available():
        raise refusals.torch_without(found.version, "torch.distributed")
    if for_cuda:
        _check_cuda(found, driver_cuda)
    if word == "rccl" and not torch.version.hip:
        raise refusals.torch_without(found.version, "RCCL")
    available = getattr(torch.distributed, f"is_{found.word}_available", lambda: False)
    if not available():
        raise refusals.torch_without(found.version, f"the {found.word} backend of torch.distributed")
    return found


def _check_cuda(found: TorchDistributed, driver_cuda: int) -> None:
    built_for = found.torch.version.cuda
    if not built_for:
        raise refusals.torch_without(found.version, "CUDA")
    if driver_cuda and int(built_for.partition(".")[0]) > driver_cuda // 1000:
        raise refusals.torch_of_wrong_cuda(found.version, f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}")
    if not found.torch.cuda.is_available():
        raise refusals.torch_sees_no_gpu(found.version)
