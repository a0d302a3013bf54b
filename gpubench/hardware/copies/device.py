"""One of the GPUs that a process copies between: its streams, its kernels, and the errors of CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.cuda.memory import PatternKernels

_THREADS = 512
_VECTOR_BYTES = 16
"""Threads a block, and bytes that each of them moves at once: as in nvbandwidth's kernel, with a block an SM."""

ANY_DIRECTION = 4
"""cudaMemcpyDefault: the addresses tell which memory is whose."""

_STICKY = (
    *("IllegalAddress", "IllegalInstruction", "MisalignedAddress", "InvalidAddressSpace", "InvalidPc", "LaunchFailure"),
    *("LaunchFailed", "LaunchTimeout", "HardwareStackError", "Assert", "EccUncorrectable", "NvlinkUncorrectable"),
    "Contained",
)
"""Errors after which a process has to be started anew (cudaError_t in CUDA's driver_types.h; CUresult has the same)."""

_NEXT_STEPS = {
    "MemoryAllocation": "nvidia-smi shows what holds the memory; smaller --sizes need less",
    "PeerAccess": "nvidia-smi topo -p2p r shows between which GPUs the driver allows peer access",
    "DevicesUnavailable": "nvidia-smi shows whose process holds the GPU, nvidia-smi -q its compute mode",
}


@dataclass(slots=True)
class CopyQueue:
    """A stream and the event that ends what it does in one measurement."""

    stream: Any
    end: Any


class CopyKernel:
    """The kernel of copy.cu on the device that is current when it is made, launched on the stream that is current."""

    def __init__(self, cupy: Any, multiprocessors: int) -> None:
        import numpy

        self._numpy = numpy
        self._multiprocessors = multiprocessors
        module = cupy.RawModule(code=files("gpubench.hardware.copies").joinpath("copy.cu").read_text())
        self._kernel = module.get_function("copy_bytes")

    def launch(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy between two addresses that the device can reach."""
        blocks = max(1, min(self._multiprocessors, -(-size_bytes // (_THREADS * _VECTOR_BYTES))))
        arguments = tuple(self._numpy.uint64(value) for value in (destination, source, size_bytes))
        self._kernel((blocks,), (_THREADS,), arguments)


class CopyDevice:
    """A GPU with a stream for test data and one more, a queue, for each copy that runs on it at once."""

    def __init__(self, cupy: Any, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._queues: list[CopyQueue] = []
        self._runtime.setDevice(index)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            self.patterns = PatternKernels(cupy, self._stream)
            self._copy = CopyKernel(cupy, self._runtime.getDeviceProperties(index)["multiProcessorCount"])
            # CUDA loads a kernel at its first launch, and may wait for the device then: never behind a closed gate.
            self._copy.launch(0, 0, 0)
        self._stream.synchronize()

    def queue(self, number: int) -> CopyQueue:
        """The queue of that number, 0 for the first."""
        while len(self._queues) <= number:
            self._runtime.setDevice(self.index)
            stream = self._cupy.cuda.Stream(non_blocking=True)
            self._queues.append(CopyQueue(stream, self._cupy.cuda.Event(disable_timing=True)))
        return self._queues[number]

    def copy_by_kernel(self, queue: CopyQueue, destination: int, source: int, size_bytes: int) -> None:
        """Enqueue a copy by the SMs of this GPU."""
        self._runtime.setDevice(self.index)
        with queue.stream:
            self._copy.launch(destination, source, size_bytes)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Make the device and its stream current, and wait for what was enqueued: copies use other streams.

        Raises CouldNotMeasureError where CUDA fails.
        """
        with cuda_errors(f"filling or checking memory of {self.name}"):
            self._runtime.setDevice(self.index)
            with self._stream:
                yield
            self._stream.synchronize()


@contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """Turn errors of CUDA and CuPy into CouldNotMeasureError that names what was being done."""
    try:
        yield
    except RuntimeError as error:
        raise cuda_failed(doing, str(error)) from error


def cuda_failed(doing: str, error: str) -> CouldNotMeasureError:
    """CUDA's error in words, what it means for the rest of the run, and what to look at."""
    code = error.partition(":")[0].replace("_", "").casefold()
    sticky = any(code.endswith(name.casefold()) for name in _STICKY)
    steps = [step for name, step in _NEXT_STEPS.items() if name.casefold() in code]
    lasting = "after this error CUDA answers every further call of this process with it: no later copy is measured"
    return CouldNotMeasureError(
        f"{doing} failed: {error}",
        reason=lasting if sticky else "",
        next_step="dmesg | grep Xid shows what the GPU reported; run again" if sticky else "".join(steps[:1]),
    )
