"""What a measurement of collectives needs from a backend, on one rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder
from gpubench.ports.group import Group

Launch = Callable[[], object]  # An operation with all its arguments bound. Calling it issues the operation


class BatchedLaunch(Protocol):
    """A launch of many operations that records the time of each batch of them."""

    def __call__(self) -> object: ...

    def batch_seconds(self) -> Sequence[float]:
        """Return the time of each batch in seconds, except the first batch, which includes the start-up."""


class LaunchTimer(Protocol):
    """Combine many operations into one launch, and time launches."""

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Return one launch that issues all `launches` in order.

        If `graph_replays` is not 0, the launch replays a captured graph of them this many times.
        """

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """Return one launch that issues all `launches` in order and reads a clock after every `operations` of them."""

    def once(self, launch: Launch) -> None:
        """Issue an operation once and wait for it, as a warm-up. Do not time it or report progress."""

    def seconds(self, launch: Launch) -> float:
        """Return the wall time in seconds from issuing the launch until all its operations have completed."""

    def together(self, launch: Launch) -> float:
        """Return the time in seconds from the moment all ranks are ready until the launch has completed. A
        collective call.
        """


@runtime_checkable
class IssueClock(Protocol):
    """A timer that can also measure how long the host takes to issue operations."""

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Return the host time in seconds to issue one of the operations timed last. None if the device's queue was
        full.
        """


Array = Any  # A NumPy or CuPy array
ArrayNamespace = Any  # The module that an array belongs to: `numpy` or `cupy`


class Memory(Protocol):
    """A memory allocation by a backend, which can be filled with test data and verified."""

    @property
    def size_bytes(self) -> int: ...

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """Return a writable view of `count` elements, as an array with this NumPy dtype."""

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write the test data that `rank` sends into a block."""

    def fill_byte(self, size_bytes: int, value: int) -> None: ...

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Count the wrong elements in blocks. Each block comes with the rank whose data it should contain.

        None as the rank means the reduction over all ranks.
        """


class BufferSource(Protocol):
    """Allocate the buffers for a sweep."""

    @property
    def buffers(self) -> int:
        """The number of buffers of the largest size that a sweep needs, including the backend's workspace."""

    def free_bytes(self) -> int: ...

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate memory, which is freed when the backend is closed."""


@runtime_checkable
class SharedMemory(Protocol):
    """A backend that can use buffers from other backends with the same `memory_source`."""

    @property
    def memory_source(self) -> object: ...


class Region(Struct, frozen=True):
    """The part of a memory allocation that starts at `offset_bytes`."""

    memory: Memory
    offset_bytes: int

    @property
    def address(self) -> int:
        begin: int = self.memory.address  # type: ignore[attr-defined]
        return begin + self.offset_bytes


class OverlapSteps(Protocol):
    """Run steps of computation and communication. Each step starts when the previous one has completed."""

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        """Allocate memory for a partner, which is the computation in a step, and compute its expected result."""

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        """Run steps, each with one collective and `operations` operations of the partner. Steps use `collectives`
        in turn.

        Meanwhile, call `look` with the number of steps that have completed since its last call. Return each step's time
        marks, in seconds since the first mark.
        """

    def partner_wrong(self, partner: Partner) -> int:
        """Count the elements of the partner's result that differ from its result without a collective."""


class LibraryLog(Protocol):
    """The log that a communication library writes in this process."""

    @property
    def no_log(self) -> str:
        """The reason why the log is unreadable, or '' if it is readable."""

    @property
    def no_tuning(self) -> str:
        """The reason why the log names no algorithm, or '' if it does."""

    def is_readable(self) -> bool:
        """True if the log is readable. Otherwise `no_log` has the reason. Call this after the library's first call."""

    def lines(self) -> list[bytes]:
        """Return the complete lines that were written since the last call."""

    def switch_off(self) -> None:
        """Stop reading the log, and restore the user's own logging settings."""


class CollectiveCalls(Protocol):
    """NCCL's collectives. Each method binds its arguments and returns a launch. Counts have the same meaning as in
    NCCL.
    """

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch: ...

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch: ...

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch: ...

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch: ...

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch: ...

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """Send a block with `counts[r]` elements to each rank r. All ranks have the same counts."""

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch: ...

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch: ...


class Backend(BufferSource, LaunchTimer, Protocol):
    """One rank's collectives, with the memory and the clock for measuring them."""

    @property
    def name(self) -> str:
        """The name of the backend on the command line and in rows."""

    @property
    def calls(self) -> CollectiveCalls: ...

    def libraries(self) -> Mapping[str, str]:
        """Return the version and file of each library, by name, for the run's metadata."""

    def close(self) -> None:
        """Free all memory and communicators."""


class MultiGroupBackend(Backend, Protocol):
    """A backend that can create further communicators. They share its memory, stream and clock."""

    def open(self, group: Group) -> CollectiveCalls:
        """Create a communicator and return its collectives. Every rank in the group must call this."""

    def drop(self, calls: CollectiveCalls) -> None:
        """Release a communicator that `open` created, even if it is broken."""

    def chain(self, launches: Sequence[Launch]) -> Launch:
        """Return one launch that runs these operations in order. Each starts when the previous one has completed."""


@runtime_checkable
class SeveralKernels(Protocol):
    """A backend with several kernels. By default, it chooses a kernel for each size."""

    def select_kernel(self, kernel: str) -> CollectiveCalls:
        """Return collectives over all ranks that use one kernel for every size."""


@runtime_checkable
class AbortableBackend(Protocol):
    """A backend whose communicators can be aborted from another thread during an operation."""

    def trouble(self) -> str:
        """Return the library's asynchronous error, or '' if there is none."""

    def abort(self) -> None: ...
