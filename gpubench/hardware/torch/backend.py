"""torch.distributed as a backend: on GPUs by streams and events, on CPUs and with Gloo by calls that block."""

from collections.abc import Mapping
from typing import Any

from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.mpi.host import NumpyMemory
from gpubench.hardware.process import free_memory as host_memory
from gpubench.hardware.timing.blocking import BlockingClock
from gpubench.hardware.timing.gated import GatedClock
from gpubench.hardware.torch import world
from gpubench.hardware.torch.calls import TorchCalls
from gpubench.hardware.torch.library import TorchDistributed
from gpubench.hardware.torch.tensors import DeviceMemory, Tensors
from gpubench.model.terms.progress import Progress
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Memory

NEVER_RUN = "labelled as never run: none of gpubench's authors has such GPUs"


class TorchGroups:
    """The process groups of one backend of torch.distributed, and their collectives."""

    def __init__(self, found: TorchDistributed, name: str, group: Group, *, one_node: bool) -> None:
        self.name = name
        self._found, self._group, self._one_node = found, group, one_node
        self._tensors = Tensors(found.torch)
        self._settle: Launch | None = None
        self._device: Any = None
        self._process_group: Any = None
        self._all: TorchCalls | None = None

    def settle_with(self, settle: Launch) -> None:
        """Have every operation end with this, which waits for what it put on a stream."""
        self._settle = settle

    def bind_to(self, device: Any) -> None:
        """Have communicators made for a torch device as they are opened."""
        self._device = device

    @property
    def calls(self) -> TorchCalls:
        """The collectives of all ranks, which are connected at first use: every rank comes here at the same time."""
        if self._all is None:
            group = world.open_group(self._found, self._group, one_node=self._one_node, device=self._device)
            self._process_group, self._all = group, self._calls(group)
        return self._all

    def open(self, group: Group) -> TorchCalls:
        """The collectives of a new process group of these ranks."""
        return self._calls(world.open_part(self._found, group.gather(self._group.rank)))

    def drop(self, calls: CollectiveCalls) -> None:
        """Process groups last as long as the job."""

    def versions(self) -> dict[str, str]:
        """Torch and its NCCL, for the metadata."""
        nccl = self._found.nccl()
        return {"torch": self._found.version} | ({"torch's NCCL": nccl} if nccl else {})

    def abort(self) -> None:
        """Abort the communicators, where torch can. For a thread."""
        abort = getattr(self._process_group, "abort", None)
        if abort is not None:
            abort()

    def end(self) -> None:
        """Destroy the process group of all ranks."""
        world.close(self._found, self._process_group)
        self._process_group = None

    def _calls(self, process_group: Any) -> TorchCalls:
        return TorchCalls(self._found, self.name, process_group, self._tensors, self._settle)


class _Opening:
    """What every backend of torch's hands on to its process groups."""

    _groups: TorchGroups

    @property
    def name(self) -> str:
        """Its word on the command line and in rows."""
        return self._groups.name

    @property
    def calls(self) -> TorchCalls:
        """The collectives of all ranks, connected at first use."""
        return self._groups.calls

    def open(self, group: Group) -> TorchCalls:
        """The collectives of a new process group of these ranks."""
        return self._groups.open(group)

    def drop(self, calls: CollectiveCalls) -> None:
        """Process groups last as long as the job."""


class TorchOnCpu(_Opening, BlockingClock):
    """torch.distributed on tensors of the CPU, which share memory with NumPy's arrays."""

    buffers = 3  # Gloo reduces through working space of up to the size of the message

    def __init__(self, groups: TorchGroups, group: Group, ranks_on_node: int, progress: Progress) -> None:
        super().__init__(group, progress, "CPUs have no CUDA graphs")
        self._groups, self._ranks_on_node, self._progress = groups, ranks_on_node, progress

    def libraries(self) -> Mapping[str, str]:
        """Torch."""
        return self._groups.versions()

    def free_bytes(self) -> int:
        """This rank's share of what the host has left."""
        return int(host_memory.free_bytes() * host_memory.SHARE) // self._ranks_on_node

    def allocate(self, size_bytes: int) -> Memory:
        """A NumPy buffer."""
        return NumpyMemory(size_bytes, self._progress)

    def close(self) -> None:
        """End the process groups."""
        self._groups.end()


class TorchOnDevice(_Opening, BlockingClock):
    """torch.distributed on a device that torch alone drives: an AMD or Intel GPU. Every operation is waited for."""

    buffers = 2

    def __init__(self, groups: TorchGroups, found: TorchDistributed, device: Any, group: Group, progress: Progress):
        super().__init__(group, progress, "on this device torch's operations are timed one by one")
        self._groups, self._torch, self._device, self._progress = groups, found.torch, device, progress
        self._of_kind = getattr(found.torch, device.type)
        groups.settle_with(getattr(self._of_kind, "synchronize", lambda: None))

    def libraries(self) -> Mapping[str, str]:
        """torch, and that nobody has tried this."""
        return self._groups.versions() | {"this backend": NEVER_RUN}

    def free_bytes(self) -> int:
        """Memory of the device that is free, less an eighth."""
        free, _ = self._of_kind.mem_get_info(self._device)
        return int(free) * 7 // 8

    def allocate(self, size_bytes: int) -> Memory:
        """A tensor of torch's."""
        return DeviceMemory(self._torch, self._device, size_bytes, self._progress)

    def close(self) -> None:
        """End the process groups."""
        self._groups.end()


class _OnCuda(_Opening):
    """The GPU that CuPy opened, whose stream torch uses too."""

    buffers = 2
    _device: CudaDevice

    def _share_stream(self, found: TorchDistributed) -> Any:
        """Have torch work on the GPU and the stream of `device`; the torch device."""
        cuda, index = found.torch.cuda, self._device.identity.index
        cuda.set_device(index)
        cuda.set_stream(cuda.ExternalStream(self._device.stream.ptr, device=index))
        return found.torch.device("cuda", index)

    @property
    def memory_source(self) -> object:
        """What memory is taken from: backends with the same one can share buffers."""
        return self._device

    def libraries(self) -> Mapping[str, str]:
        """Torch and its NCCL, driver, CUDA, CuPy."""
        return self._groups.versions() | self._device.libraries()

    def free_bytes(self) -> int:
        """Device memory that buffers may take."""
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        """A plain `cudaMalloc` allocation."""
        return self._device.allocate(size_bytes)


class TorchNccl(_OnCuda, GatedClock):
    """torch.distributed over NCCL on NVIDIA GPUs."""

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(device.cupy, device.stream, group, progress)
        self._groups, self._device = groups, device
        groups.bind_to(self._share_stream(found))

    def libraries(self) -> Mapping[str, str]:
        """Torch and its NCCL, driver, CUDA, CuPy, and whether there is a gate."""
        return {**super().libraries(), **self.gate_words()}

    def trouble(self) -> str:
        """Nothing: torch does not tell NCCL's asynchronous errors."""
        return ""

    def abort(self) -> None:
        """Abort the communicators, wherever they wait. For a thread."""
        self.end_waiting()
        self._groups.abort()

    def close(self) -> None:
        """End the process groups, then free the buffers."""
        self._device.stream.synchronize()
        self._groups.end()
        self.free_gate()
        self._device.close()


class TorchGlooOnCuda(_OnCuda, BlockingClock):
    """torch.distributed over Gloo on CUDA tensors, which Gloo copies to host memory and back."""

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(group, progress, "Gloo's operations are of the host")
        self._groups, self._device = groups, device
        self._share_stream(found)
        groups.settle_with(device.stream.synchronize)

    def close(self) -> None:
        """End the process groups, then free the buffers."""
        self._device.stream.synchronize()
        self._groups.end()
        self._device.close()
