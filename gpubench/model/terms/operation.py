"""The description of one operation, which is a collective or a copy, with its buffers, test data and bandwidth.

Test data differs per rank, element, buffer and row. It reveals blocks from a wrong rank, shifted blocks, old buffers
and missing contributions.

Collectives that only move data use random bits. Reductions use small integers, and only a few ranks contribute a value
to each element. All other ranks contribute the neutral value, so results are exact in every type and order of addition.
"""

from collections.abc import Hashable, Sequence
from enum import StrEnum
from functools import lru_cache

from gpubench.errors import UsageError
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB


class NumberKind(StrEnum):
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"


class DataType(StrEnum):
    """Data types of elements, with the names that NCCL uses."""

    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def size_bytes(self) -> int:
        """The size of an element in bytes."""
        return int("".join(filter(str.isdigit, self.value))) // 8

    @property
    def kind(self) -> NumberKind:
        """Whether the type is a signed integer, an unsigned integer or a floating-point number."""
        if self in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64):
            return NumberKind.FLOAT
        return NumberKind.UNSIGNED if self is DataType.UINT8 else NumberKind.SIGNED


class ReduceOp(StrEnum):
    """Reduction operations, with the names that NCCL uses."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AVG = "avg"


class Placement(StrEnum):
    """Whether the result has its own buffer or overwrites the input, with NCCL's in-place layout."""

    OUT_OF_PLACE = "out_of_place"
    IN_PLACE = "in_place"


class Layout(Struct, frozen=True):
    """The number of elements that one operation sends and receives on one rank.

    `count` is the argument of the library function. `send` and `receive` are the sizes of the two buffers in elements.
    An in-place operation has one buffer: rank r sends from element `r × in_place_send` and receives at `r ×
    in_place_receive`.
    """

    count: int
    send: int
    receive: int
    in_place_send: int = 0
    in_place_receive: int = 0

    @property
    def largest(self) -> int:
        """The number of elements of the larger buffer.

        It is the size as nccl-tests defines it, and the distance between the buffers that operations rotate through.
        """
        return max(self.send, self.receive)


class Segment(Struct, frozen=True):
    """The expected contents of a range of a receive buffer.

    Elements `[offset, offset + count)` must equal elements `[start, start + count)` of the data that rank `source`
    sent. If `source` is None, they must equal the reduction over all ranks.
    """

    offset: int
    count: int
    start: int
    source: int | None = None


HIERARCHICAL_OPTION = "--hierarchical"


class TwoLevels(Struct, frozen=True):
    """The node of every rank, and the rank's index on that node. All nodes have the same number of ranks."""

    nodes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def node_count(self) -> int:
        return max(self.nodes) + 1

    @property
    def ranks_per_node(self) -> int:
        return max(self.places) + 1

    @classmethod
    def of(cls, node_by_rank: Sequence[Hashable]) -> "TwoLevels":
        """Number the nodes, and the ranks on each node.

        Raises UsageError unless there are two or more nodes, all with the same number of ranks, which is at least two.
        """
        numbers = {node: number for number, node in enumerate(dict.fromkeys(node_by_rank))}
        nodes = tuple(numbers[node] for node in node_by_rank)
        members = [0] * len(numbers)
        places = []
        for node in nodes:
            places.append(members[node])
            members[node] += 1
        seen, next_step, least = "", "", min(members)
        if len(numbers) < 2:
            seen, next_step = f"all {len(nodes)} ranks are on one node", "a launcher that starts ranks on several hosts"
        elif least < max(members):
            seen = f"nodes have from {least} to {max(members)} ranks"
            next_step = f"the same number of ranks on every node, e.g. mpirun --map-by ppr:{least}:node"
        elif least < 2:
            seen = "every node has a single rank"
            next_step = "omit it, because flat and hierarchical are the same there"
        if seen:
            raise UsageError(
                f"{HIERARCHICAL_OPTION}, but {seen}",
                expected="at least two nodes with the same number of ranks, at least two each",
                reason="it reduces inside nodes first, then between ranks with the same position in their nodes",
                next_step=next_step,
            )
        return cls(nodes, tuple(places))

    def check_averages(self, ops: Sequence[ReduceOp], dtypes: Sequence[DataType]) -> None:
        """Raise UsageError if averaging the averages of nodes would be inexact."""
        integers = [dtype for dtype in dtypes if dtype.kind is not NumberKind.FLOAT]
        inexact = any(count & (count - 1) for count in (self.node_count, self.ranks_per_node))
        if ReduceOp.AVG in ops and (integers or inexact):
            what = f"of {integers[0]}" if integers else f"over {self.node_count} nodes of {self.ranks_per_node} ranks"
            raise UsageError(
                f"{HIERARCHICAL_OPTION} with --op avg {what}",
                expected="floating-point types and powers of two, because otherwise an average of averages is "
                "not exact",
                next_step="--op sum",
            )


def nccl_version(code: int) -> str:
    """Decode NCCL_VERSION_CODE: 22809 → '2.28.9'. Versions before 2.9 have a shorter code: 2708 → '2.7.8'."""
    thousand = 10_000 if code >= 10_000 else 1_000
    return f"{code // thousand}.{code % thousand // 100}.{code % 100}"


class Allocator(StrEnum):
    """The library that allocates buffers: CUDA, as in training frameworks, or NCCL, as in nccl-tests."""

    CUDA = "cuda"
    NCCL = "nccl"


POISON = 0xA5  # Fill byte for receive buffers before an operation, so that an old result is not accepted
WORD = 0xFFFFFFFF  # Seeds, hashes and element indices have 32 bits, so elements that are 2**32 apart are equal.


class DataPattern(Struct, frozen=True):
    """The test data for one row. `op` is None for collectives that only move data."""

    dtype: DataType
    op: ReduceOp | None
    ranks: int

    @property
    def contributors(self) -> int:
        """The number of ranks that contribute a value other than the neutral one to an element."""
        rounds = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT
        return min(self.ranks, 2 if rounds else 8)

    @property
    def lowest(self) -> int:
        """The lowest test value for max and min. The highest is larger by 200."""
        return 0 if self.dtype.kind is NumberKind.UNSIGNED else -100

    @property
    def neutral(self) -> int:
        """The neutral value of the reduction, sent by ranks that do not contribute to an element."""
        neutral = {ReduceOp.PROD: 1, ReduceOp.MAX: self.lowest, ReduceOp.MIN: self.lowest + 200}
        return neutral.get(self.op or ReduceOp.SUM, 0)

    @property
    def tolerance_ulp(self) -> int:
        """The allowed error of averages in ulp. 0 if the number of ranks is a power of two, else 2 as in nccl-tests."""
        inexact = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT and self.ranks & (self.ranks - 1)
        return 2 if inexact else 0


class Block(Struct, frozen=True):
    """The same range of elements in several equally spaced buffers within one allocation.

    Buffer k starts at element `k × stride`. Its elements `[offset, offset + count)` contain elements `[start, start +
    count)` of a rank's test data for row `row`.
    """

    row: int
    buffers: int
    stride: int
    offset: int
    count: int
    start: int = 0

    def seeds(self) -> tuple[int, ...]:
        """Return the seed for the test data of each buffer."""
        return tuple(buffer_seed(self.row, buffer) for buffer in range(self.buffers))


def buffer_seed(row: int, buffer: int) -> int:
    """Return the 32-bit seed for the test data of one buffer. It differs between buffers and between rows."""
    return ((row * 0x85EBCA6B) ^ (buffer * 0xC2B2AE35) ^ (row >> 16)) & WORD


def algbw_gb_s(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s: size divided by time, with 1 GB = 1e9 bytes."""
    return size_bytes / seconds / BYTES_PER_GB


def ring_allreduce_factor(ranks: int) -> float:
    """Return 2(n−1)/n, the bus bandwidth factor of a ring allreduce.

    Each byte crosses n−1 links for the reduction and n−1 for the distribution, while n links work in parallel.
    """
    return 2 * (ranks - 1) / ranks


def all_but_own_factor(ranks: int) -> float:
    """Return (n−1)/n, the bus bandwidth factor if a rank's own block crosses no link."""
    return (ranks - 1) / ranks


def whole_factor(_ranks: int) -> float:
    """Return 1, the bus bandwidth factor if every byte crosses the busiest link once."""
    return 1.0


class Engine(StrEnum):
    """The hardware that copies data: a copy engine, or a kernel on the SMs."""

    CE = "ce"
    SM = "sm"


class Direction(StrEnum):
    """Which GPU of a pair starts the copy: the source writes, the destination reads, or both GPUs write at the same
    time.
    """

    WRITE = "write"
    READ = "read"
    BOTH = "both"


class HostMemory(StrEnum):
    """The kind of host memory: pinned, or pageable, which the driver copies through its own pinned buffer."""

    PINNED = "pinned"
    PAGEABLE = "pageable"

    @property
    def full_name(self) -> str:
        """The name in lists of copies. The `note` of a row also starts with it."""
        return f"{self} host memory"

    @classmethod
    @lru_cache(maxsize=256)
    def parse_note(cls, note: str | None) -> "HostMemory | None":
        """Parse the kind of host memory from a row's note. None if the note has none."""
        return next((memory for memory in cls if (note or "").startswith(memory.full_name)), None)


Place = int | HostMemory  # The index of a GPU in the list of measured GPUs, or host memory


class CopyGpu(Struct, frozen=True):
    """A GPU that takes part in copies.

    `device` is its name in matrices, with the driver's index. `index` is its index in CUDA.
    """

    device: str
    index: int
    bus_id: str
    uuid: str
    name: str


class CopyPattern(StrEnum):
    """Patterns in which several pairs of GPUs copy at the same time."""

    RING = "ring"
    ALL_TO_ONE = "all_to_one"
    ONE_TO_ALL = "one_to_all"
    BISECTION = "bisection"
    ALL_TO_ALL = "all_to_all"


def pattern_pairs(pattern: CopyPattern, gpus: int, root: int = 0) -> tuple[tuple[int, int], ...]:
    """Return the pairs (source, destination) that copy at the same time."""
    everybody = range(gpus)
    if pattern is CopyPattern.RING:
        return tuple((gpu, (gpu + 1) % gpus) for gpu in everybody) if gpus > 1 else ()
    if pattern is CopyPattern.ALL_TO_ONE:
        return tuple((gpu, root) for gpu in everybody if gpu != root)
    if pattern is CopyPattern.ONE_TO_ALL:
        return tuple((root, gpu) for gpu in everybody if gpu != root)
    if pattern is CopyPattern.BISECTION:
        half = gpus // 2
        across = [(gpu, gpu + half) for gpu in range(half)]
        return tuple(across + [(second, first) for first, second in across])
    return tuple((source, destination) for source in everybody for destination in everybody if source != destination)


MANAGED_MEMORY_SHARE = 0.25
"""Maximum share of free GPU memory and free host memory that managed memory may use.

If it used more, the driver would evict other memory page by page, which can hang a GPU.
"""


class ManagedWay(StrEnum):
    """How data in managed memory moves. Rows show it as `engine`."""

    PINNED_KERNEL = "sm"
    """A kernel accesses pinned host memory, as a reference for IN_PLACE."""

    PREFETCH = "prefetch"
    """The driver migrates pages on request (cuMemPrefetchAsync)."""

    RESIDENT = "resident"
    """A kernel reads pages after a prefetch to its GPU. If the prefetch had no effect, it is as slow as FAULTS."""

    FAULTS = "faults"
    """Pages migrate one page fault at a time while a kernel reads them."""

    IN_PLACE = "in place"
    """A kernel accesses pages that do not migrate (preferred location and accessed-by advice)."""

    @property
    def is_migration(self) -> bool:
        """True if pages must migrate back before the next pass."""
        return self in (ManagedWay.PREFETCH, ManagedWay.RESIDENT, ManagedWay.FAULTS)

    @property
    def is_managed(self) -> bool:
        return self is not ManagedWay.PINNED_KERNEL


class ManagedSupport(Struct, frozen=True, kw_only=True):
    """CUDA attributes that describe a GPU's support for managed memory. None if the driver does not know the
    attribute.

    - `concurrent`: concurrentManagedAccess, required for prefetches, advice and page faults
    - `pageable`: pageableMemoryAccess, kernels can read memory from malloc
    """

    device: str
    managed: bool | None = None
    concurrent: bool | None = None
    pageable: bool | None = None
    host_page_tables: bool | None = None

    @property
    def missing_feature(self) -> str:
        """The reason why the GPU cannot use managed memory. '' if it can."""
        if self.managed is False:
            return f"{self.device} has no managed memory (managedMemory 0)"
        if self.concurrent is False:
            return f"{self.device} supports neither prefetch nor advice (concurrentManagedAccess 0)"
        return ""


TORCH = "torch:"  # Prefix of backends that run in torch.distributed

TORCH_NCCL, TORCH_SYMM, TORCH_GLOO = "torch:nccl", "torch:symm", "torch:gloo"

NCCL, MPI, HOST = "nccl", "mpi", "host"

NCCL_ALONE = "NCCL without torch"  # The NCCL library that the nccl backend would load if torch were not loaded

BACKEND_NAMES = (NCCL, TORCH_NCCL, TORCH_SYMM, "torch:rccl", "torch:xccl", MPI, TORCH_GLOO, HOST)
"""Names of all backends. In a table with several backends, the earliest one in this list is the reference."""

ROW_BACKENDS = (*BACKEND_NAMES, "rccl", "simulated")  # Rows also come from other programs and from the simulator.


class TransferBackend(StrEnum):
    """The libraries that `gpubench kv` measures."""

    UCX = "ucx"
    NIXL = "nixl"


_ONE_BUFFER = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""torch.distributed collectives that write their result to the input buffer."""

ONE_SHOT, TWO_SHOT = "one-shot", "two-shot"

KERNELS = {TORCH_SYMM: (ONE_SHOT, TWO_SHOT)}
"""Backends with several kernels, which are measured separately."""

_ONE_SHOT_BYTES = 128 * 2**10
"""Maximum size for which PyTorch's compiler uses the one-shot kernel.

Source: `one_shot_all_reduce_threshold_bytes` in torch/_inductor/config.py, versions 2.5 to 2.11.
"""


def choose_kernel(backend: str, size_bytes: int, setting: str | None = None) -> str | None:
    """Return the kernel named by `setting`, or the backend's default kernel for this size.

    None for backends without a choice of kernels.
    """
    known = KERNELS.get(backend, ())
    if setting in known:
        return setting
    return (ONE_SHOT if size_bytes <= _ONE_SHOT_BYTES else TWO_SHOT) if known else None


# Backends whose operations can be queued in a CUDA stream behind a gate
_STREAM_BACKENDS = (NCCL, TORCH_NCCL, TORCH_SYMM)
GATE = "gate"  # Name of the clock in the metadata if any backend is timed from a gate


def gated_backends(backends: Sequence[str], *, one_by_one: bool = False, graph: bool = False) -> tuple[str, ...]:
    """Return the backends whose operations the GPU times from the opening of a gate.

    A gate blocks the stream until all operations are queued. The host clock times other backends. There is no gate if
    operations are timed together with their launch (`one_by_one`) or replayed from a CUDA `graph`.
    """
    if one_by_one or graph or {TORCH_NCCL, TORCH_SYMM}.isdisjoint(backends):
        return ()
    return tuple(backend for backend in _STREAM_BACKENDS if backend in backends)


def describe_composition(
    backend: str,
    collective: str,
    dtype: DataType,
    op: ReduceOp | None,
    placement: Placement,
    kernel: str | None = None,
) -> str:
    """Return a row's note if the backend builds the operation from several others. '' if it does not."""
    parts = []
    if backend.startswith(TORCH) and collective in _ONE_BUFFER and kernel != ONE_SHOT:
        name = "two_shot_all_reduce_" if kernel == TWO_SHOT else _ONE_BUFFER[collective]
        if placement is Placement.OUT_OF_PLACE:
            parts.append(f"torch's {name} has one buffer, so the input is copied into it first")
    if backend == TORCH_GLOO and collective == "sendrecv":
        parts.append("Gloo cannot send CUDA tensors, so data from GPUs are copied to host tensors")
    if op is ReduceOp.AVG and divides_sum(backend, dtype):
        parts.append(f"{backend} has no average of {dtype}, so a sum is divided afterwards")
    return "; ".join(parts)


def divides_sum(backend: str, dtype: DataType) -> bool:
    """True if the backend computes an average as a sum and a division. MPI has no average, and Gloo has none for
    integers.
    """
    return backend == MPI or (backend == TORCH_GLOO and dtype.kind is not NumberKind.FLOAT)
