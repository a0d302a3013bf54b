"""Times of matrix products and of copies within one GPU, by CuPy."""

from collections.abc import Callable
from time import perf_counter

from gpubench.hardware.cuda.device import CudaDevice

_SETTLE_SECONDS = 0.5
"""Clocks and power of a GPU that was idle fall to what it can hold within this."""

_SAMPLES = 7
_SAMPLE_SECONDS = 0.02
_COPY_BYTES = 2**28
_MILLISECONDS = 1e3


class ProductTimer:
    """Times operations of one GPU, each as samples of seconds."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._cupy = device, device.cupy
        self._settled = False

    def product(self, rows: int, inner: int, columns: int) -> list[float]:
        """Of a product of float16 matrices, (rows × inner) by (inner × columns), accumulated in float32."""
        cupy = self._cupy
        first, second = self._matrix(rows, inner), self._matrix(inner, columns)
        out = cupy.empty((rows, columns), dtype=cupy.float16)
        return self._samples(lambda: cupy.matmul(first, second, out=out))

    def copy(self) -> list[float]:
        """Of a copy; `copy_bytes` are read, and as many written."""
        cupy = self._cupy
        source = cupy.zeros(_COPY_BYTES // 4, dtype=cupy.float32)
        target = cupy.empty_like(source)
        return self._samples(lambda: cupy.copyto(target, source))

    @property
    def copy_bytes(self) -> int:
        """Bytes that `copy` reads."""
        return _COPY_BYTES

    def _matrix(self, rows: int, columns: int) -> object:
        """Numbers of both signs: zeros take less power, and so run at higher clocks."""
        cupy = self._cupy
        values = cupy.arange(rows * columns, dtype=cupy.int32) % 13 - 6
        return (values.astype(cupy.float16) / 8).reshape(rows, columns)

    def _samples(self, launch: Callable[[], object]) -> list[float]:
        launch()
        self._device.stream.synchronize()
        count = max(1, round(_SAMPLE_SECONDS / max(1e-6, self._once(launch, 3))))
        if not self._settled:
            until = perf_counter() + _SETTLE_SECONDS
            while perf_counter() < until:
                self._once(launch, count)
            self._settled = True
        return [self._once(launch, count) for _ in range(_SAMPLES)]

    def _once(self, launch: Callable[[], object], count: int) -> float:
        """Seconds of one launch, by events around so many."""
        stream, event = self._device.stream, self._cupy.cuda.Event
        first, last = event(), event()
        first.record(stream)
        for _ in range(count):
            launch()
        last.record(stream)
        last.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(first, last)
        return milliseconds / _MILLISECONDS / count
