"""The mpi backend: GPU memory handed to MPI, which has to know what to do with it."""

from collections.abc import Mapping, Sequence
from typing import cast

from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.mpi.calls import MpiCalls
from gpubench.hardware.timing.blocking import BlockingClock
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch
from gpubench.ports.memory import Memory


class MpiOnCuda(BlockingClock):
    """MPI's collectives on memory of a GPU. Its calls return when the data are there, so the host's clock times them.

    Handed to an MPI that is not CUDA-aware, GPU memory ends the process: `support.py` finds out before.
    """

    name = "mpi"
    buffers = 2

    def __init__(self, group: mpi.MpiGroup, device: CudaDevice, progress: Progress = UNWATCHED) -> None:
        super().__init__(group, progress, "MPI's calls are of the host")
        self._device = device
        self.calls = self._calls(group)

    @property
    def memory_source(self) -> object:
        """What memory is taken from: backends with the same one can share buffers."""
        return self._device

    def open(self, group: Group) -> MpiCalls:
        """The collectives among the ranks of `group`, which is one of MPI's."""
        return self._calls(cast("mpi.MpiGroup", group))

    def drop(self, calls: CollectiveCalls) -> None:
        """MPI's communicators last as long as the job."""

    def libraries(self) -> Mapping[str, str]:
        """Driver, CUDA, CuPy; MPI is named for every backend."""
        return self._device.libraries()

    def free_bytes(self) -> int:
        """Device memory that buffers may take."""
        return self._device.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        """A plain `cudaMalloc` allocation."""
        return self._device.allocate(size_bytes)

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order, once the stream is idle: MPI knows nothing of what fills buffers on it."""
        self._device.stream.synchronize()
        return super().bind(launches, graph_replays)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order, with a look at the clock after each so many of them."""
        self._device.stream.synchronize()
        return super().in_batches(launches, operations)

    def together(self, launch: Launch) -> float:
        """The wall time behind a barrier, once the stream is idle."""
        self._device.stream.synchronize()
        return super().together(launch)

    def close(self) -> None:
        """Free the buffers."""
        self._device.close()

    def _calls(self, group: mpi.MpiGroup) -> MpiCalls:
        return MpiCalls(group.communicator, settle=self._device.stream.synchronize)
