"""The host backend: the same collectives with NumPy buffers over MPI, real data and real times, no GPU."""

from collections.abc import Iterator, Sequence
from typing import cast

from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.mpi.calls import MOST_ELEMENTS, MpiCalls
from gpubench.hardware.process import free_memory as host_memory
from gpubench.hardware.timing.blocking import BlockingClock
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.arrays import Array
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.memory import Memory

_CHUNK_ELEMENTS = 2**18
"""Elements of a temporary array: a megabyte, which stays in a core's cache."""


class NumpyMemory:
    """One NumPy buffer. Gigabytes take long to fill and to check: each piece is progress."""

    def __init__(self, size_bytes: int, progress: Progress = UNWATCHED) -> None:
        import numpy

        self._numpy = numpy
        self._progress = progress
        self.size_bytes = size_bytes
        self._bytes = numpy.empty(size_bytes, "uint8")

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements from `offset_bytes` on, as a writable view."""
        width = self._numpy.dtype(dtype).itemsize
        return self._bytes[offset_bytes : offset_bytes + count * width].view(dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block, piece by piece."""
        pattern = ArrayPattern(self._numpy, data)
        for elements, stretch in self._pieces(data, block):
            elements[:] = pattern.sent(rank, stretch)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first bytes to a value."""
        self._bytes[:size_bytes] = value

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold."""
        pattern = ArrayPattern(self._numpy, data)
        return sum(
            pattern.wrong(elements, pattern.reduced(stretch) if source is None else pattern.sent(source, stretch))
            for block, source in blocks
            for elements, stretch in self._pieces(data, block)
        )

    def _pieces(self, data: DataPattern, block: Block) -> Iterator[tuple[Array, Stretch]]:
        """A block in pieces small enough for temporaries: several short buffers at once, or a part of a long one."""
        storage, seeds = STORAGE[data.dtype.size_bytes], block.seeds()
        table = self.array(0, block.buffers * block.stride, storage).reshape(block.buffers, block.stride)
        buffers_at_once = max(1, _CHUNK_ELEMENTS // block.count)
        for buffer in range(0, block.buffers, buffers_at_once):
            rows = slice(buffer, min(buffer + buffers_at_once, block.buffers))
            for first in range(0, block.count, _CHUNK_ELEMENTS):
                count = min(_CHUNK_ELEMENTS, block.count - first)
                begin = block.offset + first
                yield table[rows, begin : begin + count], Stretch(block.start + first, count, seeds[rows])
                self._progress.completed()


class HostBackend(BlockingClock):
    """Collectives over an MPI communicator."""

    name = "host"
    buffers = 3  # Open MPI and MPICH reduce through working space of up to the size of the message

    def __init__(
        self,
        group: mpi.MpiGroup,
        ranks_on_node: int,
        most_elements: int = MOST_ELEMENTS,
        progress: Progress = UNWATCHED,
    ) -> None:
        super().__init__(group, progress, "the host backend has no CUDA graphs")
        self.calls = MpiCalls(group.communicator, most_elements)
        self._most_elements = most_elements
        self._ranks_on_node = ranks_on_node
        self._progress = progress

    def open(self, group: Group) -> MpiCalls:
        """The collectives among the ranks of `group`, which is one of MPI's."""
        return MpiCalls(cast("mpi.MpiGroup", group).communicator, self._most_elements)

    def drop(self, calls: CollectiveCalls) -> None:
        """MPI's communicators last as long as the job."""

    def libraries(self) -> dict[str, str]:
        """NumPy; MPI is named for every backend."""
        import numpy

        return {"numpy": numpy.__version__}

    def free_bytes(self) -> int:
        """This rank's share of what the host, or its control group, has left."""
        return int(host_memory.free_bytes() * host_memory.SHARE) // self._ranks_on_node

    def allocate(self, size_bytes: int) -> Memory:
        """A NumPy buffer; pages are taken as they are touched."""
        return NumpyMemory(size_bytes, self._progress)

    def close(self) -> None:
        """NumPy's buffers go with their references."""
