"""GPU memory and the kernels that fill and check it."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from gpubench.model.terms.data_pattern import WORD, Block, DataPattern
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.arrays import Array

_THREADS = 256
_MOST_BLOCKS = 4096
_MOVE = -1
_REDUCTION = -1

_TYPES = {dtype: number for number, dtype in enumerate(DataType)}
_OPERATIONS = {op: number for number, op in enumerate(ReduceOp)}


class PatternKernels:
    """The kernels of pattern.cu on one device and stream, compiled once by NVRTC and kept by CuPy's disk cache."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        import numpy

        self.cupy = cupy
        self.stream = stream
        self._numpy = numpy
        module = cupy.RawModule(code=files("gpubench.hardware.cuda").joinpath("pattern.cu").read_text())
        self._fill = module.get_function("fill_sent")
        self._count = module.get_function("count_wrong")

    def fill(self, address: int, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block of the memory at `address`."""
        self._launch(self._fill, address, data, block, rank)

    def count(self, address: int, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Wrong elements in blocks of the memory at `address`."""
        total = self.cupy.zeros(1, "uint64")
        for block, source in blocks:
            self._launch(self._count, address, data, block, _REDUCTION if source is None else source, total)
        return int(total.get()[0])

    def _launch(self, kernel: Any, address: int, data: DataPattern, block: Block, rank: int, *more: Any) -> None:
        number, width = self._numpy, data.dtype.size_bytes
        pattern = (
            _TYPES[data.dtype],
            _MOVE if data.op is None else _OPERATIONS[data.op],
            data.ranks,
            data.contributors,
            data.lowest,
            data.neutral,
            data.tolerance_ulp,
            width,
        )
        arguments = (
            *(number.int32(value) for value in pattern),
            number.uint64(address + block.offset * width),
            number.int64(block.stride),
            number.int64(block.count),
            number.uint32(block.start & WORD),
            number.uint32(block.row),
            number.int32(block.buffers),
            number.int32(rank),
            *more,
        )
        grid = (min(_MOST_BLOCKS, -(-block.count // _THREADS)), min(_MOST_BLOCKS, block.buffers))
        kernel(grid, (_THREADS,), arguments)


class CudaMemory:
    """An allocation of no pool, mapped to no peer, filled and checked on the device's stream."""

    def __init__(self, kernels: PatternKernels, address: int, size_bytes: int, free: Callable[[int], object]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._kernels = kernels
        self._free = free

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements from `offset_bytes` on, as a writable view."""
        cupy = self._kernels.cupy
        memory = cupy.cuda.UnownedMemory(self.address, self.size_bytes, self)
        return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, offset_bytes))

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""
        self._kernels.fill(self.address, data, block, rank)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first bytes to a value."""
        self._kernels.cupy.cuda.runtime.memsetAsync(self.address, value, size_bytes, self._kernels.stream.ptr)

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold."""
        return self._kernels.count(self.address, data, blocks)

    def free(self) -> None:
        """Give it back."""
        self._free(self.address)
