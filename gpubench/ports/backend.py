"""A backend of collectives on one rank: memory, launches, the calls, steps beside computation, and the log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder
from gpubench.ports.group import Group

Launch = Callable[[], object]  # An operation with all its arguments bound: calling it issues the operation


class BatchedLaunch(Protocol):
    """A launch that knows, once it was timed, how long each batch of its operations took."""

    def __call__(self) -> object:
        """Issue all batches."""

    def batch_seconds(self) -> Sequence[float]:
        """Seconds of every batch but the first, which has the beginning in it."""


class LaunchTimer(Protocol):
    """Launches of many operations, and the time that they take."""

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """One launch that issues all of `launches` in order, or replays a captured graph of them so many times."""

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """One launch that issues all of `launches` in order, with a look at a clock after each so many of them."""

    def once(self, launch: Launch) -> None:
        """Issue an operation and wait for it, untimed and unreported: what comes next finds everything at work."""

    def seconds(self, launch: Launch) -> float:
        """Wall time from issuing `launch` to the completion of all it started, in seconds."""

    def together(self, launch: Launch) -> float:
        """The same from the moment at which every rank was ready to issue it; every rank calls it."""


@runtime_checkable
class IssueClock(Protocol):
    """A timer that knows how long the host took to issue what it timed last."""

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue one operation; None where the device's queue may have been full."""


Array = Any  # A NumPy or CuPy array
ArrayNamespace = Any  # The module of an array: `numpy` or `cupy`


class Memory(Protocol):
    """One plain allocation of a backend, and the test data in it."""

    @property
    def size_bytes(self) -> int:
        """Bytes that were asked for."""

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements of a NumPy `dtype` from `offset_bytes` on, as a writable view."""

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first `size_bytes` bytes to a value."""

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold: what that rank sent, or, with None, the reduction."""


class BufferSource(Protocol):
    """The memory that a rank can take for the buffers of a sweep."""

    @property
    def buffers(self) -> int:
        """Buffers of the largest size that a sweep holds at once, the backend's own working space included."""

    def free_bytes(self) -> int:
        """Memory this rank can still take for buffers."""

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation of that size, kept until the backend is closed."""


@runtime_checkable
class SharedMemory(Protocol):
    """A source of memory that several backends may have in common: then they can work in the same buffers."""

    @property
    def memory_source(self) -> object:
        """What the memory is taken from."""


class Region(Struct, frozen=True):
    """A place in a memory that an operation reads or writes."""

    memory: Memory
    offset_bytes: int

    @property
    def address(self) -> int:
        """The address at which it begins, in memory that has one."""
        begin: int = self.memory.address  # type: ignore[attr-defined]
        return begin + self.offset_bytes


class OverlapSteps(Protocol):
    """Runs steps, each of which begins when the one before it is done."""

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        """Take the memory of a partner, and compute once what its results are held against."""

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        """Run so many steps of one collective, each of `collectives` in turn, and so many operations of the partner.

        `look` is called while they run, with the number of steps that were completed since. Marks are in seconds since
        the first of them.
        """

    def partner_wrong(self, partner: Partner) -> int:
        """Elements of the partner's results that are not what it computes alone."""


class LibraryLog(Protocol):
    """The lines that the library that runs collectives logs in this process while it is asked to."""

    @property
    def no_log(self) -> str:
        """The reason why no line can be read; empty while one may come."""

    @property
    def no_tuning(self) -> str:
        """The reason for which its lines name no algorithm; empty where they do."""

    def is_readable(self) -> bool:
        """True where lines can be read, once the library has been called; `no_log` has the reason where not."""

    def lines(self) -> list[bytes]:
        """The whole lines since the last call."""

    def switch_off(self) -> None:
        """End the reading: the library logs as the user set it."""


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

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """Of every rank's buffer block r for rank r, of `counts[r]` elements, the same on every rank."""

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclGather`, or grouped sends and receives."""

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`ncclScatter`, or grouped sends and receives."""

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`ncclSend` and `ncclRecv` in one group."""


class Backend(BufferSource, LaunchTimer, Protocol):
    """Collectives on one rank, the memory that they work on, and a clock around them."""

    @property
    def name(self) -> str:
        """Its word on the command line and in rows."""

    @property
    def calls(self) -> CollectiveCalls:
        """The library's collectives."""

    def libraries(self) -> Mapping[str, str]:
        """Versions and files of the libraries that do the work, by name, for the metadata."""

    def close(self) -> None:
        """Give back memory and communicators."""


class MultiGroupBackend(Backend, Protocol):
    """A backend that opens further communicators beside its own; memory, stream and clock stay."""

    def open(self, group: Group) -> CollectiveCalls:
        """The collectives of a new communicator of these ranks, all of which call this."""

    def drop(self, calls: CollectiveCalls) -> None:
        """Give up a communicator that `open` made, whatever state it is in."""

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several, each of which begins when the one before it is done."""


@runtime_checkable
class SeveralKernels(Protocol):
    """A backend that has kernels of its own, of which it takes one by size."""

    def select_kernel(self, kernel: str) -> CollectiveCalls:
        """The collectives of all ranks, by that kernel at every size."""


@runtime_checkable
class AbortableBackend(Protocol):
    """A backend whose communicators a thread can abort while operations wait in them."""

    def trouble(self) -> str:
        """The library's asynchronous error, empty where it has none."""

    def abort(self) -> None:
        """Abort the communicators, wherever they wait."""
