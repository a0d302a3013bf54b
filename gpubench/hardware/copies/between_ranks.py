"""Copies between the GPUs of two processes: through CUDA IPC on one node, by NCCL between nodes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.copies.device import ANY_DIRECTION, CopyDevice, CopyQueue, cuda_errors
from gpubench.hardware.copies.memory import GpuMemory
from gpubench.hardware.cuda.device import CudaDevice, opening
from gpubench.hardware.cuda.gate import HeldStream, StreamGate
from gpubench.hardware.nccl.backend import AbortedError, NcclLibrary, trouble
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.model.terms.copies import Direction
from gpubench.model.terms.units import format_size
from gpubench.ports.group import Group
from gpubench.ports.memory import Memory

_BLOCK_BYTES = 2 * 2**20
"""cudaMalloc takes smaller allocations from larger blocks, and a handle then names the whole block: only multiples of
2 MiB are shared alone (CUDA C++ Programming Guide, "Interprocess Communication")."""

_REFUSALS = {
    "PeerAccess": "these two GPUs have no peer access, which CUDA IPC between GPUs needs",
    "": "ranks in different containers or PID namespaces cannot share CUDA memory, and neither can those under WSL",
}
"""Likely reasons for which CUDA shares no memory, by a part of the error's name."""


class Network:
    """NCCL between all ranks of a job: each may send to each."""

    def __init__(self, group: Group, library: NcclLibrary) -> None:
        self._library = library
        self.described = f"{library.version} from {library.path}"
        self.aborted = False
        unique_id = group.broadcast(library.nccl.get_unique_id() if group.rank == 0 else None)
        with cuda_errors("connecting the ranks by NCCL"):
            self._communicator = library.nccl.NcclCommunicator(group.size, unique_id, group.rank)

    def transfer(self, address: int, size_bytes: int, peer: int, stream: int, *, sends: bool) -> None:
        """Enqueue `ncclSend` or `ncclRecv` of bytes."""
        call = self._communicator.send if sends else self._communicator.recv
        call(address, size_bytes, self._library.nccl.NCCL_UINT8, peer, stream)

    def trouble(self) -> str:
        """NCCL's asynchronous error, empty where it has none."""
        return trouble(self._library.nccl, self._communicator)

    def abort(self) -> None:
        """Abort the communicator, wherever it waits; it cannot be used afterwards."""
        self.aborted = True
        self._communicator.abort()

    def close(self) -> None:
        """Destroy the communicator."""
        with contextlib.suppress(RuntimeError):
            self._communicator.destroy()


class CudaRankCopies:
    """Copies between the GPU of this rank and those of others. Without a `network` all ranks are on one node."""

    def __init__(self, opened: CudaDevice, network: Network | None = None) -> None:
        self._opened = opened
        self._cupy = opened.cupy
        self._runtime: Any = opened.cupy.cuda.runtime
        self._network = network
        self._memories: list[GpuMemory] = []
        self._addresses: dict[bytes, int] = {}
        with opening(self._runtime):
            self._device = CopyDevice(opened.cupy, opened.identity.index, f"GPU {opened.identity.bus_id}")
            self._gate = StreamGate(self._runtime)

    def libraries(self) -> Mapping[str, str]:
        """Versions of what copies, for the metadata."""
        return self._opened.libraries() | ({"NCCL": self._network.described} if self._network else {})

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation on this rank's GPU, kept until `close`."""
        with cuda_errors(f"allocating {format_size(size_bytes)} on {self._device.name}"):
            self._runtime.setDevice(self._device.index)
            address = self._runtime.malloc(-(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        self._memories.append(GpuMemory(self._device, 0, address, size_bytes, self._runtime.free))
        return self._memories[-1]

    def export(self, memory: Memory) -> bytes:
        """The CUDA IPC handle of a memory that `allocate` returned."""
        with _sharing("sharing memory through CUDA IPC"):
            handle: bytes = self._runtime.ipcGetMemHandle(cast("GpuMemory", memory).address)
        return handle

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Seconds of so many copies by this rank's copy engine, issued before the first of them starts."""
        self._runtime.setDevice(self._device.index)
        theirs, mine = self._address(other), cast("GpuMemory", own).address
        to, origin = (theirs, mine) if direction is Direction.WRITE else (mine, theirs)
        queue = self._device.queue(0)
        copy = partial(self._runtime.memcpyAsync, to, origin, size_bytes, ANY_DIRECTION, queue.stream.ptr)
        with cuda_errors(f"copying {size_bytes} bytes through CUDA IPC ({direction} by {self._device.name})"):
            return self._seconds(queue, copy, repeats, gated=True)

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Seconds in which NCCL sent `own` to a rank so often, or received it.

        Nothing waits behind the gate: NCCL's own threads, and the other rank, may need what would wait there.
        """
        if self._network is None:
            raise CouldNotMeasureError("NCCL was not started: all ranks are on one node")
        self._runtime.setDevice(self._device.index)
        queue, address = self._device.queue(0), cast("GpuMemory", own).address
        send = partial(self._network.transfer, address, size_bytes, peer, queue.stream.ptr, sends=sends)
        with cuda_errors(f"{'sending to' if sends else 'receiving from'} rank {peer} by NCCL ({size_bytes} bytes)"):
            seconds = self._seconds(queue, send, repeats, gated=False)
        if self._network.aborted:
            raise AbortedError
        return seconds

    def release(self) -> None:
        """Close other ranks' memory. Errors are ignored: after some of them every call fails."""
        for address in self._addresses.values():
            with contextlib.suppress(RuntimeError):
                self._runtime.ipcCloseMemHandle(address)
        self._addresses.clear()

    def close(self) -> None:
        """Give all memory back, and NCCL."""
        if self._network is not None:
            self._network.close()
        while self._memories:
            with contextlib.suppress(RuntimeError):
                self._memories.pop().free()
        with contextlib.suppress(RuntimeError):
            self._gate.free()

    def _address(self, handle: bytes) -> int:
        """The address of another rank's memory in this process; opened once."""
        if handle not in self._addresses:
            with _sharing("opening another rank's memory through CUDA IPC"):
                self._addresses[handle] = self._runtime.ipcOpenMemHandle(handle)
        return self._addresses[handle]

    def _seconds(self, queue: CopyQueue, issue: Callable[[], object], repeats: int, *, gated: bool) -> float:
        """Seconds on the GPU from the start of the first operation to the end of the last.

        The host sleeps meanwhile: mpirun binds a rank to one core, which NCCL's threads need to move the data.
        """
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event(block=True)
        with no_garbage_collection():
            with self._gate.hold(queue.stream.ptr) if gated else contextlib.nullcontext(HeldStream()) as hold:
                queue.stream.record(start)
                for _ in range(repeats):
                    hold.count(1)
                    issue()
                queue.stream.record(stop)
            stop.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(start, stop)
        return milliseconds / 1e3


@contextlib.contextmanager
def _sharing(doing: str) -> Iterator[None]:
    """Turn CUDA's refusal to share memory into CouldNotMeasureError with the likely reason."""
    try:
        yield
    except RuntimeError as error:
        meaning = next(text for name, text in _REFUSALS.items() if name in str(error))
        raise CouldNotMeasureError(f"{doing} failed: {error}", reason=meaning) from error
