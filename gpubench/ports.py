"""The hardware seam: what a measurement needs from a machine, and nothing else.

Adapters in `hardware/` implement these; tests implement them with NumPy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gpubench.model.copies import CopyGpu, Direction, Engine, Place
from gpubench.model.data_pattern import Block, DataPattern
from gpubench.model.lateness import Offset
from gpubench.model.operation import DataType, ReduceOp
from gpubench.model.report import Metadata, Report

T = TypeVar("T")
RowT = TypeVar("RowT", contravariant=True)

Array = Any
"""A NumPy or CuPy array."""

ArrayNamespace = Any
"""The module of an array: `numpy` or `cupy`."""

Launch = Callable[[], object]
"""An operation with all its arguments bound: calling it issues the operation."""


class Group(Protocol):
    """The processes of a job, as MPI knows them; `hardware.alone` has one of a single process."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        ...

    def collect(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the first rank; None on the others."""
        ...

    def broadcast(self, value: T | None, root: int = 0) -> T:
        """Root's value, on every rank."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Each of the values as it is on the rank where it is largest; every rank has as many, and gets them."""
        ...

    def clock_offset(self) -> Offset:
        """How this rank's `perf_counter` differs from the first rank's; every rank has to call it."""
        ...

    def split(self, color: int, key: int) -> "Group":
        """The group of the ranks with the same color, ordered by key."""
        ...


class Memory(Protocol):
    """One plain allocation of a backend, and the test data in it."""

    @property
    def size_bytes(self) -> int:
        """Bytes that were asked for."""
        ...

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements of a NumPy `dtype` from `offset_bytes` on, as a writable view."""
        ...

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""
        ...

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first `size_bytes` bytes to a value."""
        ...

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold: what that rank sent, or, with None, the reduction."""
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """A place in a memory: where an operation reads or writes."""

    memory: Memory
    offset_bytes: int


class CollectiveCalls(Protocol):
    """NCCL's collectives. Each method binds the arguments and returns the launch; counts are NCCL's."""

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclAllReduce`."""

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAllGather`."""

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`ncclReduceScatter`."""

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclBroadcast`."""

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`ncclReduce`."""

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`ncclAlltoAll`, or grouped sends and receives."""

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather`, or grouped sends and receives."""

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclScatter`, or grouped sends and receives."""

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`ncclSend` and `ncclRecv` in one group."""


class BatchedLaunch(Protocol):
    """A launch that knows, once it was timed, how long each batch of its operations took."""

    def __call__(self) -> object:
        """Issue all batches."""
        ...

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every batch but the first, which has the beginning in it."""
        ...


class Backend(Protocol):
    """What runs collectives on one rank: memory, calls, and a clock around them."""

    @property
    def name(self) -> str:
        """Its word on the command line and in rows."""
        ...

    @property
    def calls(self) -> CollectiveCalls:
        """The library's collectives."""
        ...

    @property
    def buffers(self) -> int:
        """Buffers of the largest size that a sweep holds at once, the backend's own working space included."""
        ...

    def libraries(self) -> Mapping[str, str]:
        """Versions and files of what does the work, by name, for the metadata."""
        ...

    def free_bytes(self) -> int:
        """Memory this rank can still take for buffers."""
        ...

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation of that size, kept until `close`."""
        ...

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """One launch that issues all of `launches` in order, or replays a captured graph of them so many times."""
        ...

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """One launch that issues all of `launches` in order, with a look at a clock after each so many of them."""
        ...

    def seconds(self, launch: Launch) -> float:
        """Wall time from issuing `launch` to the completion of all it started, in seconds."""
        ...

    def close(self) -> None:
        """Give back memory and communicators."""
        ...


@dataclass(frozen=True, slots=True)
class CopyStream:
    """Copies from one region to another, one after another, on a stream of the GPU at position `by`."""

    by: int
    engine: Engine
    source: Region
    destination: Region
    size_bytes: int


class Copies(Protocol):
    """What copies between the GPUs of one process, and a clock around it. GPUs are named by their position."""

    @property
    def gpus(self) -> Sequence[CopyGpu]:
        """The GPUs that this process sees."""
        ...

    def can_reach(self, source: int, destination: int) -> bool:
        """Whether CUDA says that one GPU may address another's memory."""
        ...

    def enable(self, source: int, destination: int) -> None:
        """Let one GPU address another's memory from now on; without it, copies go through host memory.

        Raises:
            CouldNotMeasureError: CUDA refuses.
        """
        ...

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """A plain allocation on a GPU or of host memory, kept until `close`.

        Raises:
            CouldNotMeasureError: there is not so much left.
        """
        ...

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """Wall time from a common start until every stream has made its copy `repeats` times.

        What the host needs to issue them is not in it. Raises CouldNotMeasureError where a copy fails.
        """
        ...

    def close(self) -> None:
        """Give all memory back, and peer access."""
        ...


class RankCopies(Protocol):
    """What copies between the GPU of this rank and those of others, and a clock around it."""

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation on this rank's GPU, kept until `close`.

        Raises:
            CouldNotMeasureError: there is not so much left.
        """
        ...

    def export(self, memory: Memory) -> bytes:
        """What another rank of this node needs to copy from and to a memory that `allocate` returned.

        Raises:
            CouldNotMeasureError: CUDA refuses.
        """
        ...

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        """Seconds of so many copies by this rank's GPU: it writes `own` to the other rank's memory, or reads that.

        Raises:
            CouldNotMeasureError: the memory cannot be opened here, or a copy fails.
        """
        ...

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        """Seconds in which `own` was sent to a rank of any node so often, or received; the peer does the opposite.

        Raises:
            CouldNotMeasureError: it fails on this side.
        """
        ...

    def release(self) -> None:
        """Let go of other ranks' memory; every rank has to before any of them calls `close`."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes that the NVLinks of a GPU, all together, and its PCIe link have carried; None where nothing counts them.

    Counters of PCIe start again from 0 at 2^32.
    """

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """What the links of GPUs have carried."""

    def read(self, gpu: int) -> Counted:
        """What the GPU at that position has counted until now."""
        ...


class LibraryLog(Protocol):
    """What the library that runs collectives says in this process while it is asked to."""

    @property
    def silence(self) -> str:
        """Why nothing is heard; empty while something may be."""
        ...

    @property
    def no_tuning(self) -> str:
        """Why it does not say which algorithm it takes; empty where it does."""
        ...

    def appeared(self) -> bool:
        """Whether anything can be heard, once the library has been called; where not, `silence` says why."""
        ...

    def lines(self) -> list[bytes]:
        """The whole lines since the last call."""
        ...

    def switch_off(self) -> None:
        """Have it be as it would be without us."""
        ...


class Listener(Protocol[RowT]):
    """Who hears of a measurement while it runs: what prints and stores, here or in another process."""

    def begin(self, metadata: Metadata) -> None:
        """The run is set up; rows follow."""
        ...

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""
        ...

    def row(self, row: RowT) -> None:
        """One more row is measured."""
        ...

    def end(self, report: Report) -> None:
        """All rows were measured."""
        ...
