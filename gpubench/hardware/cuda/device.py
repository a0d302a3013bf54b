"""One GPU through CuPy: selection, identity, plain allocations, a stream, graphs."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from gpubench import errors
from gpubench.hardware.cuda.memory import CudaMemory, PatternKernels
from gpubench.hardware.node.cuda_driver import (
    MPS_ENABLED,
    CudaUnavailableError,
    device_uuid,
    load_cuda,
    read_attribute,
    version_text,
)
from gpubench.hardware.node.nvml.library import Driver
from gpubench.hardware.process.mps import mps_serves
from gpubench.ports.launch import Launch

_HEADROOM_BYTES = 2 * 2**30
"""Left free for NCCL's own buffers, which it takes at the first collective, and for other processes."""

_REFUSED_BY_MPS = ("cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE", "cudaErrorMps", "CUDA_ERROR_MPS")
"""In the errors of a process that an MPS server does not take; the first two are also those of a GPU in exclusive
compute mode that another process uses."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU by its names: CUDA's index is this process's own count, bus id and UUID are the hardware's.

    `mps` is whether this process uses it through an MPS server.
    """

    name: str
    index: int
    bus_id: str
    uuid: str
    mps: bool = False


class CudaDevice:
    """The GPU of this rank, made current together with a non-blocking stream."""

    def __init__(self, cupy: Any, index: int, driver: Driver) -> None:
        self.cupy = cupy
        self._driver = driver
        self._runtime = cupy.cuda.runtime
        self._runtime.setDevice(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._kernels = PatternKernels(cupy, self.stream)
        self._memories: list[CudaMemory] = []
        self.sharing = 1
        """The ranks that share its memory, this one included."""
        self.identity = identify(self._runtime, index)

    @property
    def driver_cuda(self) -> int:
        """The newest CUDA that the driver runs, 13000 for 13.0."""
        return self._driver.cuda

    def libraries(self) -> dict[str, str]:
        """Driver, CUDA and CuPy versions."""
        return library_versions(self.cupy, self._driver)

    def free_bytes(self) -> int:
        """Memory that buffers may take: what is free, less the headroom, or half of it on a small or busy GPU.

        Of what is free a rank may take its equal share.
        """
        free: int = self._runtime.memGetInfo()[0] // self.sharing
        return max(free - _HEADROOM_BYTES, free // 2)

    def allocate(self, size_bytes: int) -> CudaMemory:
        """A plain allocation, freed by `close`."""
        return self.adopt(self._runtime.malloc(size_bytes), size_bytes, self._runtime.free)

    def adopt(self, address: int, size_bytes: int, free: Callable[[int], object]) -> CudaMemory:
        """Memory allocated elsewhere, freed with `free(address)` by `close`."""
        memory = CudaMemory(self._kernels, address, size_bytes, free)
        self._memories.append(memory)
        return memory

    def capture(self, launch: Launch, replays: int) -> Launch:
        """A launch that replays, `replays` times, a CUDA graph of what `launch` puts on the stream.

        Capture is thread-local, as in nccl-tests: NCCL may allocate while it connects.
        """
        self.stream.begin_capture(self._runtime.streamCaptureModeThreadLocal)
        try:
            launch()
        except BaseException:
            with contextlib.suppress(Exception):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        self.stream.synchronize()
        replay = partial(graph.launch, self.stream)
        if replays == 1:
            return replay

        def replay_all() -> None:
            for _ in range(replays):
                replay()

        return replay_all

    def close(self) -> None:
        """Give the memory back."""
        while self._memories:
            self._memories.pop().free()


def check_installed(driver: Driver) -> None:
    """Raise CouldNotMeasureError where CuPy is not installed, naming the extra that fits the driver."""
    if find_spec("cupy") is None:
        raise errors.missing_cupy(driver.cuda // 1000 or None)


def load_cupy(driver: Driver) -> Any:
    """CuPy, once it is known to fit the driver; CouldNotMeasureError for no driver, no CuPy, or one of another CUDA."""
    check_installed(driver)
    try:
        import cupy
    except ImportError as error:
        raise errors.unusable_cupy(str(error).splitlines()[0]) from error
    runtime = cupy.cuda.runtime
    runs, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if runs == 0:
        raise errors.no_gpu(driver.absent or "CUDA finds no driver")
    if built_for // 1000 > runs // 1000:
        raise errors.cupy_of_wrong_cuda(version_text(built_for), version_text(runs))
    return cupy


@contextlib.contextmanager
def opening(runtime: Any) -> Iterator[None]:
    """Turn errors while GPUs are opened into CouldNotMeasureError: of the GPU itself, or of CuPy without NVRTC."""
    try:
        yield
    except (runtime.CUDARuntimeError, CudaUnavailableError) as error:
        if any(word in str(error) for word in _REFUSED_BY_MPS) and mps_serves(os.environ):
            raise errors.mps_refuses_clients(str(error)) from error
        raise errors.no_gpu(str(error)) from error
    except (RuntimeError, ImportError, OSError) as error:
        raise errors.no_kernels(str(error).strip().splitlines()[0]) from error


def open_device(local_rank: int, ranks_on_host: int, host: str, driver: Driver, *, shared: bool = False) -> CudaDevice:
    """The GPU for a rank: the only one it sees, or the one that its place on the host selects; `shared`, in turn.

    Raises CouldNotMeasureError for no driver, no GPU, no CuPy, one of another CUDA, or one without NVRTC, and for an
    MPS server that takes no clients; UsageError for more ranks on the host than GPUs, where they may not share them.
    """
    cupy = load_cupy(driver)
    runtime = cupy.cuda.runtime
    with opening(runtime):
        visible = runtime.getDeviceCount()
        if visible > 1 and local_rank >= visible and not shared:
            raise errors.no_gpu_of_its_own(ranks_on_host, visible, host)
        return CudaDevice(cupy, local_rank % visible if visible > 1 else 0, driver)


def identify(runtime: Any, index: int) -> GpuIdentity:
    """The names of the GPU that CUDA counts as `index`; needs no context on it.

    Its UUID is the driver's answer: CuPy ends it at its first zero byte, and one UUID in 16 has one.
    Raises CudaUnavailableError where the driver does not tell it.
    """
    library = load_cuda()
    uuid, mps = device_uuid(library, index), read_attribute(library, MPS_ENABLED, index)
    return GpuIdentity(
        name=runtime.getDeviceProperties(index)["name"].decode(),
        index=index,
        bus_id=runtime.deviceGetPCIBusId(index).lower(),
        uuid=uuid,
        # A driver that does not know the attribute leaves the question to the server's own socket.
        mps=mps_serves(os.environ) if mps is None else bool(mps),
    )


def library_versions(cupy: Any, driver: Driver) -> dict[str, str]:
    """Versions of the driver, CUDA and CuPy, for the metadata."""
    runtime = version_text(cupy.cuda.runtime.runtimeGetVersion())
    runs = version_text(cupy.cuda.runtime.driverGetVersion())
    return {"driver": f"{driver.version} (runs CUDA {runs})", "CuPy": f"{cupy.__version__} (CUDA {runtime})"}
