"""A process that uses a GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

MPS = "MPS"
MPS_SETTINGS = "CUDA_MPS_"
"""What the names of MPS's variables begin with."""

_MPS_SERVER = "nvidia-cuda-mps-server"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has a context on a GPU. Inside a container its pid may be another's.

    `container` is the short id of the container that it runs in, with its runtime's name; `mps` is whether NVML lists
    it among those that an MPS server runs.
    """

    pid: int
    name: str | None = None
    memory_bytes: int | None = None
    container: str | None = None
    mps: bool = False

    @property
    def label(self) -> str:
        """Its name in texts: 'process 8342 (python)', with its container where it has one."""
        named = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return " ".join(
            filter(None, (named, "under MPS" if self.mps else "", f"in {self.container}" if self.container else ""))
        )

    @property
    def is_mps_server(self) -> bool:
        """True of an MPS server, which does no work of its own: its clients are listed beside it."""
        return (self.name or "").rpartition("/")[2] == _MPS_SERVER

    @property
    def shows_mps(self) -> bool:
        """True of a process that an MPS server runs, and of the server."""
        return self.mps or self.is_mps_server


class _UsedGpu(Protocol):
    @property
    def device(self) -> str: ...

    @property
    def processes(self) -> tuple[GpuProcess, ...] | None: ...


def mps_in_use(gpus: Iterable[_UsedGpu], environment: Mapping[str, str]) -> str:
    """Where CUDA's MPS is in use: 'in use on GPU0', by NVML's processes, and what the environment asks for; else ''."""
    seen = [gpu.device for gpu in gpus if any(each.shows_mps for each in gpu.processes or ())]
    asked = [f"{name}={value}" for name, value in environment.items() if name == _PIPES]
    found = [f"in use on {', '.join(dict.fromkeys(seen))}"] if seen else []
    return "; ".join([*found, *(f"asked for by {each}" for each in asked)])
