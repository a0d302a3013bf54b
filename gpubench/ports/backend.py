"""What a measurement needs from a backend of collectives on one rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder
from gpubench.ports.group import Group

Launch = Callable[[], object]  # An operation with all its arguments bound: calling it issues the operation


class BatchedLaunch(Protocol):
    """A launch that records how long each batch of its operations takes."""

    def __call__(self) -> object: ...

    def batch_seconds(self) -> Sequence[float]:
        """Return the seconds of every batch except the first, which includes the start."""


class LaunchTimer(Protocol):
    """Joins many operations into one launch, and times launches."""

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Return one launch that issues all launches in order, or replays a captured graph of them."""

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """Return one launch that issues all launches in order, and reads a clock after every `operations` of them."""

    def once(self, launch: Launch) -> None:
        """Warm up: issue an operation and wait for it, without timing or progress."""

    def seconds(self, launch: Launch) -> float:
        """Return the wall seconds from issuing the launch until all its operations are done."""

    def together(self, launch: Launch) -> float:
        """Return the seconds from when every rank is ready to issue the launch. Every rank has to call it."""


@runtime_checkable
class IssueClock(Protocol):
    """A timer that also measures how long the host takes to issue operations."""

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Return the host seconds to issue one operation of the last timing. None if the device's queue was full."""


Array = Any  # A NumPy or CuPy array
ArrayNamespace = Any  # The module of an array: `numpy` or `cupy`


class Memory(Protocol):
    """One allocation of a backend, which can be filled with test data and checked."""

    @property
    def size_bytes(self) -> int: ...

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """Return a writable view of `count` elements, as an array of a NumPy dtype."""

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write the data that `rank` sends into a block."""

    def fill_byte(self, size_bytes: int, value: int) -> None: ...

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Count the wrong elements of blocks. Each block has the data of a rank, or the reduction if that is None."""


class BufferSource(Protocol):
    """Allocates the buffers of a sweep."""

    @property
    def buffers(self) -> int:
        """How many buffers of the largest size a sweep needs, including the backend's workspace."""

    def free_bytes(self) -> int: ...

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory that is freed when the backend is closed."""


@runtime_checkable
class SharedMemory(Protocol):
    """A backend that can use the buffers of other backends with the same `memory_source`."""

    @property
    def memory_source(self) -> object: ...


class Region(Struct, frozen=True):
    """The part of an allocation from `offset_bytes` on."""

    memory: Memory
    offset_bytes: int

    @property
    def address(self) -> int:
        begin: int = self.memory.address  # type: ignore[attr-defined]
        return begin + self.offset_bytes


class OverlapSteps(Protocol):
    """Runs steps of computation and communication, each of which begins when the step before it is done."""

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        """Allocate the memory of a partner, and compute its expected result once."""

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        """Run steps of one collective (of `collectives` in turn) and `operations` operations of the partner.

        Meanwhile call `look` with the number of steps that were completed since its last call. Return marks in seconds
        since the first mark.
        """

    def partner_wrong(self, partner: Partner) -> int:
        """Count the elements of the partner's result that differ from the result that it computes alone."""


class LibraryLog(Protocol):
    """The log of a communication library in this process."""

    @property
    def no_log(self) -> str:
        """The reason why the log cannot be read, or ''."""

    @property
    def no_tuning(self) -> str:
        """The reason why the log names no algorithm, or ''."""

    def is_readable(self) -> bool:
        """True if the log can be read. Call it after the library's first call. Otherwise `no_log` has the reason."""

    def lines(self) -> list[bytes]:
        """Return the complete lines since the last call."""

    def switch_off(self) -> None:
        """Stop reading. From then on the library logs as the user set it."""


class CollectiveCalls(Protocol):
    """NCCL's collectives. Each method binds the arguments and returns the launch. Counts are those of NCCL's calls."""

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch: ...

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch: ...

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch: ...

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch: ...

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch: ...

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """Send block r, of `counts[r]` elements, to rank r. All ranks have the same counts."""

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch: ...


class Backend(BufferSource, LaunchTimer, Protocol):
    """The collectives of one rank, their memory, and their clock."""

    @property
    def name(self) -> str:
        """The backend's name on the command line and in rows."""

    @property
    def calls(self) -> CollectiveCalls: ...

    def libraries(self) -> Mapping[str, str]:
        """Return versions and files of the libraries, by name, for the metadata."""

    def close(self) -> None:
        """Free memory and communicators."""


class MultiGroupBackend(Backend, Protocol):
    """A backend that opens more communicators, which use the same memory, stream and clock."""

    def open(self, group: Group) -> CollectiveCalls:
        """Return the collectives of a new communicator. Every rank of the group has to call it."""

    def drop(self, calls: CollectiveCalls) -> None:
        """Drop a communicator from `open`, even if it is broken."""

    def chain(self, launches: Sequence[Launch]) -> Launch:
        """Join operations into one. Each begins when the one before it is done."""


@runtime_checkable
class SeveralKernels(Protocol):
    """A backend with several kernels, which otherwise chooses one per size."""

    def select_kernel(self, kernel: str) -> CollectiveCalls:
        """Return the collectives of all ranks with one kernel at every size."""


@runtime_checkable
class AbortableBackend(Protocol):
    """A backend whose communicators another thread can abort during an operation."""

    def trouble(self) -> str:
        """Return the library's asynchronous error, or ''."""

    def abort(self) -> None: ...
