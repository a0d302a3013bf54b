"""The computation beside a collective: GEMMs by cuBLAS, copies within GPU memory, chains of small kernels."""

from importlib.resources import files
from typing import Any, Protocol

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.copies.device import ANY_DIRECTION
from gpubench.hardware.cuda.device import CudaDevice
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.overlap.asked import Partner
from gpubench.model.terms.overlap.partners import CHAIN_BYTES, CHAIN_KERNELS, COPY_BYTES, gemm_type

_WORD_BYTES = 4
_THREADS = 256

_CUDA_TYPES = {DataType.FLOAT16: 2, DataType.BFLOAT16: 14}
"""cudaDataType in library_types.h."""

_COMPUTE_IN_FLOAT32, _DEFAULT_ALGORITHM, _NOT_TRANSPOSED = 68, -1, 0
"""CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT and CUBLAS_OP_N in cublas_api.h."""

_FACTOR, _TERM, _WORDS = 1664525, 1013904223, 2**32
"""Of the generator in overlap.cu (Numerical Recipes)."""


class PartnerWork(Protocol):
    """One kind of computation, on the stream that is current."""

    def issue(self) -> None:
        """Enqueue one operation."""

    def wrong(self) -> int:
        """Elements of the result that are not what it computes alone; the stream is idle."""


def open_partner(partner: Partner, device: CudaDevice, stream: Any, gemm_side: int, dtype: DataType) -> PartnerWork:
    """A partner on a GPU, with memory of its own, whose result alone is known."""
    if partner is Partner.GEMM:
        return GemmWork(device, gemm_side, gemm_type(dtype))
    if partner is Partner.COPY:
        return CopyWork(device, stream)
    return ChainWork(device, stream)


class GemmWork:
    """C = A × B of n × n matrices of small integers in 16 bits, accumulated in float32, on Tensor Cores."""

    def __init__(self, device: CudaDevice, side: int, dtype: DataType) -> None:
        import numpy
        from cupy_backends.cuda.libs import cublas

        self._cupy = device.cupy
        self._side, self._type = side, _CUDA_TYPES[dtype]
        self._gemm: Any = cublas.gemmEx
        self._one, self._zero = numpy.ones(1, "float32"), numpy.zeros(1, "float32")
        count, data = side * side, DataPattern(dtype, ReduceOp.SUM, 2)
        self._memories = [device.allocate(count * dtype.size_bytes) for _ in range(3)]
        for number, memory in enumerate(self._memories[:2]):
            memory.fill_sent(data, Block(number, 1, count, 0, count), 0)
        self._result = self._memories[2].array(0, count, "uint16")
        self._result[:] = 0
        try:
            self.issue()
        except cublas.CUBLASError as error:
            raise CouldNotMeasureError(
                f"cuBLAS multiplies no {dtype} matrices of {side} × {side} on this GPU: {error}",
                expected="a type that its Tensor Cores have: bfloat16 since compute capability 8.0, float16 since 7.0",
                next_step="--dtype float16, or --partner copy",
            ) from error
        self._alone = self._result.copy()

    def issue(self) -> None:
        """One GEMM."""
        first, second, result = (memory.address for memory in self._memories)
        side, kind = self._side, self._type
        self._gemm(
            *(self._cupy.cuda.device.get_cublas_handle(), _NOT_TRANSPOSED, _NOT_TRANSPOSED, side, side, side),
            *(self._one.ctypes.data, first, kind, side, second, kind, side),
            *(self._zero.ctypes.data, result, kind, side, _COMPUTE_IN_FLOAT32, _DEFAULT_ALGORITHM),
        )

    def wrong(self) -> int:
        """None is right: products of integers up to 15 add up exactly in float32, in any order and for any n here."""
        return int(self._cupy.count_nonzero(self._result != self._alone))


class CopyWork:
    """CUDA's own copy from one place of the GPU's memory to another: bound by that memory.

    On an H200 it is a kernel on all SMs: a collective waited for it as long as for one that filled them.
    """

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        cupy = device.cupy
        self._cupy, self._stream = cupy, stream
        self._source, self._destination = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
        count = COPY_BYTES // _WORD_BYTES
        self._words = [each.array(0, count, "uint32") for each in (self._source, self._destination)]
        self._words[0][:] = cupy.arange(count, dtype="uint32")
        self._words[1][:] = 0
        self.issue()

    def issue(self) -> None:
        """One copy."""
        copy = self._cupy.cuda.runtime.memcpyAsync
        copy(self._destination.address, self._source.address, COPY_BYTES, ANY_DIRECTION, self._stream.ptr)

    def wrong(self) -> int:
        """What differs between the two places."""
        return int(self._cupy.count_nonzero(self._words[0] != self._words[1]))


class ChainWork:
    """Small kernels in a captured graph, each of which needs the result of the one before."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        import numpy

        self._cupy, self._stream = device.cupy, stream
        count = CHAIN_BYTES // _WORD_BYTES
        module = load_kernels(device.cupy)
        kernel = module.get_function("next_value")
        self._memory = device.allocate(CHAIN_BYTES)
        self._values = self._memory.array(0, count, "uint32")
        self._first = device.cupy.arange(count, dtype="uint32")
        self._values[:] = self._first
        arguments = numpy.uint64(self._memory.address), numpy.uint32(count)
        self._operations = 0

        def chain() -> None:
            for _ in range(CHAIN_KERNELS):
                kernel((-(-count // _THREADS),), (_THREADS,), arguments)

        # CUDA loads a kernel at its first launch, which a capture forbids.
        kernel((1,), (_THREADS,), (numpy.uint64(self._memory.address), numpy.uint32(0)))
        stream.synchronize()
        stream.begin_capture(device.cupy.cuda.runtime.streamCaptureModeThreadLocal)
        chain()
        self._graph = stream.end_capture()
        self._graph.upload(stream)

    def issue(self) -> None:
        """One chain."""
        self._graph.launch(self._stream)
        self._operations += 1

    def wrong(self) -> int:
        """Elements that are not what so many kernels make of them."""
        factor, term = steps_of_generator(self._operations * CHAIN_KERNELS)
        number = self._cupy.uint32
        return int(self._cupy.count_nonzero(self._values != self._first * number(factor) + number(term)))


def load_kernels(cupy: Any) -> Any:
    """The module of overlap.cu."""
    return cupy.RawModule(code=files("gpubench.hardware.overlap").joinpath("overlap.cu").read_text())


def steps_of_generator(steps: int) -> tuple[int, int]:
    """Factor and term that do what so many steps of the generator do, modulo 2**32."""
    factor, term, base_factor, base_term = 1, 0, _FACTOR, _TERM
    while steps:
        if steps & 1:
            factor, term = factor * base_factor % _WORDS, (term * base_factor + base_term) % _WORDS
        base_factor, base_term = base_factor * base_factor % _WORDS, (base_factor + 1) * base_term % _WORDS
        steps >>= 1
    return factor, term
