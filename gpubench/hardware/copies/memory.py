"""Memory that copies read and write: of a GPU, filled and checked there, or of the host."""

import ctypes
from collections.abc import Callable, Sequence

from gpubench.hardware.copies.device import CopyDevice
from gpubench.hardware.cuda.memory import CudaMemory
from gpubench.hardware.mpi.host import NumpyMemory
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.ports.arrays import Array


class GpuMemory(CudaMemory):
    """An allocation of no pool on the GPU at a position; its owner fills and checks it, and is done on return."""

    pageable = False

    def __init__(self, device: CopyDevice, gpu: int, address: int, size_bytes: int, free: Callable[[int], object]):
        super().__init__(device.patterns, address, size_bytes, free)
        self.gpu: int | None = gpu
        self._device = device

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements from `offset_bytes` on, as a writable view."""
        with self._device.settled():
            return super().array(offset_bytes, count, dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""
        with self._device.settled():
            super().fill_sent(data, block, rank)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first bytes to a value."""
        with self._device.settled():
            super().fill_byte(size_bytes, value)

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold."""
        with self._device.settled():
            return super().count_wrong(data, blocks)


class PageableMemory(NumpyMemory):
    """Ordinary memory of this process, every page of it touched: the kernel takes pages as they are first used."""

    gpu: int | None = None
    pageable = True

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.address: int = self._bytes.ctypes.data
        self.fill_byte(size_bytes, 0)

    def free(self) -> None:
        """NumPy's memory goes with its last reference."""


class PinnedMemory(NumpyMemory):
    """Host memory from `cudaHostAlloc`, which copy engines and SMs reach by its address."""

    gpu: int | None = None
    pageable = False

    def __init__(self, address: int, size_bytes: int, free: Callable[[int], object]) -> None:
        super().__init__(0)
        self.size_bytes = size_bytes
        self.address = address
        self._free = free
        self._bytes = self._numpy.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def free(self) -> None:
        """Give it back."""
        self._free(self.address)


class ManagedPages(PinnedMemory):
    """Managed memory, which host and GPUs reach by one address; filled and checked by the host."""


CopyMemory = GpuMemory | PageableMemory | PinnedMemory
