"""Memory of this rank as torch's tensors, without a copy: NumPy's, CUDA's, or of a device that only torch drives."""

from collections.abc import Sequence
from typing import Any

from gpubench.hardware.cuda.memory import CudaMemory
from gpubench.hardware.mpi.host import NumpyMemory
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.arrays import Array
from gpubench.ports.memory import Memory, Region


class DeviceMemory:
    """A tensor on a device of torch's own, filled and checked by way of a buffer of the host."""

    def __init__(self, torch: Any, device: Any, size_bytes: int, progress: Progress = UNWATCHED) -> None:
        self.size_bytes = size_bytes
        self._host = NumpyMemory(size_bytes, progress)
        self._on_host = torch.from_numpy(self._host.array(0, size_bytes, "uint8"))
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """A copy of `count` elements on the host."""
        self._on_host.copy_(self.tensor)
        return self._host.array(offset_bytes, count, dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""
        self._on_host.copy_(self.tensor)
        self._host.fill_sent(data, block, rank)
        self.tensor.copy_(self._on_host)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first bytes to a value."""
        self.tensor[:size_bytes] = value

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold."""
        self._on_host.copy_(self.tensor)
        return self._host.count_wrong(data, blocks)


class Tensors:
    """Views of memory as tensors of a type."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._whole: dict[int, tuple[Memory, Any]] = {}
        self.types = {dtype: getattr(torch, dtype.value) for dtype in DataType}

    def of(self, region: Region, count: int, dtype: DataType) -> Any:
        """`count` elements of a region."""
        start = region.offset_bytes
        return self._bytes(region.memory)[start : start + count * dtype.size_bytes].view(self.types[dtype])

    def _bytes(self, memory: Memory) -> Any:
        if id(memory) not in self._whole:
            self._whole[id(memory)] = memory, self._made_of(memory)
        return self._whole[id(memory)][1]

    def _made_of(self, memory: Memory) -> Any:
        if isinstance(memory, DeviceMemory):
            return memory.tensor
        whole = memory.array(0, memory.size_bytes, "uint8")
        return self._torch.as_tensor(whole, device="cuda" if isinstance(memory, CudaMemory) else "cpu")
