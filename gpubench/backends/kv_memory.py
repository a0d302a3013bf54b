"""GPU memory as inference engines allocate it, and host memory, for transfers between processes."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.machine.drivers import load_cuda
from gpubench.model.paths.ucx import Allocation
from gpubench.ports.transfers import WORD_BYTES

_SEGMENT_BYTES = 20 * 2**20  # PyTorch's expandable segments consist of pieces of this size (kLargeBuffer)
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
CU_MEM_ACCESS_FLAGS_PROT_READWRITE in cuda.h."""

_MULTIPLIER = 0x9E3779B97F4A7C15  # An odd number: words at different positions differ, and so do words of two seeds


class _Properties(ctypes.Structure):
    """CUmemAllocationProp in cuda.h."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32_handle", c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class TransferMemory:
    """A buffer on a GPU or, without an allocation, in pinned host memory."""

    def __init__(self, cupy: Any, device: int, allocation: Allocation | None, size_bytes: int) -> None:
        import numpy

        runtime = cupy.cuda.runtime
        self._numpy, self._runtime, self.size_bytes = numpy, runtime, size_bytes
        self._known: Any = None
        self._known_seed: int | None = None
        match allocation:
            case None:
                address = runtime.hostAlloc(size_bytes, 0)
            case Allocation.MALLOC:
                address = runtime.malloc(size_bytes)
            case Allocation.ASYNC:
                address = runtime.mallocAsync(size_bytes, 0)
            case Allocation.MANAGED:
                address = runtime.mallocManaged(size_bytes)
            case _:  # EXPANDABLE
                address = _allocate_expandable(device, size_bytes)
        self.address = int(address)
        self._runtime.deviceSynchronize()

    @property
    def exportable(self) -> bool:
        """True if CUDA IPC can export the memory to another process."""
        try:
            self._runtime.ipcGetMemHandle(self.address)
        except RuntimeError:
            return False
        return True

    def fill(self, seed: int) -> None:
        """Fill the buffer with words that depend on the seed and on their position."""
        words = self._words(seed, self.size_bytes)
        self._copy(self.address, words.ctypes.data, self.size_bytes)

    def clear(self, size_bytes: int) -> None:
        """Set the first bytes to 0."""
        zeros = self._numpy.zeros(size_bytes, "uint8")
        self._copy(self.address, zeros.ctypes.data, size_bytes)

    def count_wrong(self, seed: int, size_bytes: int) -> int:
        """Return how many words differ from those that `fill` writes for this seed."""
        arrived = self._numpy.empty(size_bytes // WORD_BYTES, "uint64")
        self._copy(arrived.ctypes.data, self.address, size_bytes)
        return int((arrived != self._words(seed, size_bytes)).sum())

    def _words(self, seed: int, size_bytes: int) -> Any:
        if self._known_seed != seed:  # Computing them takes longer than most transfers
            positions = self._numpy.arange(self.size_bytes // WORD_BYTES, dtype="uint64")
            self._known = (positions + self._numpy.uint64(seed << 32)) * self._numpy.uint64(_MULTIPLIER)
            self._known_seed = seed
        return self._known[: size_bytes // WORD_BYTES]

    def _copy(self, to: int, origin: int, size_bytes: int) -> None:
        any_direction = 4  # cudaMemcpyDefault
        self._runtime.memcpy(to, origin, size_bytes, any_direction)
        self._runtime.deviceSynchronize()


def _allocate_expandable(device: int, size_bytes: int) -> int:
    """Map pieces of 20 MiB into virtual memory, as PyTorch's expandable_segments:True does. Return the address."""
    cuda = load_cuda()

    def call(function: str, *arguments: object) -> None:
        code = getattr(cuda, function)(*arguments)
        if code:
            raise CouldNotMeasureError(f"{function} failed with CUDA error {code}")

    pieces = -(-size_bytes // _SEGMENT_BYTES)
    total = c_size_t(pieces * _SEGMENT_BYTES)
    properties = _Properties(_PINNED, _FILE_DESCRIPTOR, _ON_DEVICE, device, gpu_direct_rdma=1)
    address = c_uint64()
    call("cuMemAddressReserve", byref(address), total, c_size_t(0), c_uint64(0), c_uint64(0))
    for piece in range(pieces):
        handle = c_uint64()
        call("cuMemCreate", byref(handle), c_size_t(_SEGMENT_BYTES), byref(properties), c_uint64(0))
        at = c_uint64(address.value + piece * _SEGMENT_BYTES)
        call("cuMemMap", at, c_size_t(_SEGMENT_BYTES), c_size_t(0), handle, c_uint64(0))
        call("cuMemRelease", handle)  # The mapping keeps the memory
    access = (c_int * 3)(_ON_DEVICE, device, _READ_WRITE)  # CUmemAccessDesc in cuda.h
    call("cuMemSetAccess", address, total, byref(access), c_size_t(1))
    return address.value
