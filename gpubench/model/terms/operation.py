"""One operation: a collective with its types, buffers, test data and bandwidth, or a copy with its ends and engine.

Test data differs per rank, element, buffer and row, so that a block from the wrong rank, a shifted block, an old buffer
and a missing contribution are all detected. Moved data is random bits. Reduced data is small integers, so that the
result is exact in every type and any order of addition: at each element at most `contributors` ranks have a value other
than the neutral one of the reduction, a different set at each.
"""

from collections.abc import Hashable, Sequence
from enum import StrEnum
from functools import lru_cache

from gpubench.errors import UsageError
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB


class NumberKind(StrEnum):
    """The interpretation of an element's bits."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"


class DataType(StrEnum):
    """Element types, by NCCL's names."""

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
        """Bytes per element."""
        return int("".join(filter(str.isdigit, self.value))) // 8

    @property
    def kind(self) -> NumberKind:
        """Signed or unsigned integer, or floating point."""
        if self in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64):
            return NumberKind.FLOAT
        return NumberKind.UNSIGNED if self is DataType.UINT8 else NumberKind.SIGNED


class ReduceOp(StrEnum):
    """Reductions, by NCCL's names."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AVG = "avg"


class Placement(StrEnum):
    """Whether the result has its own buffer, or the input's, as NCCL lays it out."""

    OUT_OF_PLACE = "out_of_place"
    IN_PLACE = "in_place"


class Layout(Struct, frozen=True):
    """Element counts of one operation on one rank.

    `count` is the number passed to the library. `send` and `receive` are the elements of each buffer. In place, rank r
    sends from `r × in_place_send` and receives at `r × in_place_receive` of the one buffer.
    """

    count: int
    send: int
    receive: int
    in_place_send: int = 0
    in_place_receive: int = 0

    @property
    def largest(self) -> int:
        """Elements of the larger buffer, which nccl-tests prints as size, and the distance between rotated buffers."""
        return max(self.send, self.receive)


class Segment(Struct, frozen=True):
    """The elements that a part of a receive buffer must have after the operation.

    Elements `[offset, offset + count)` equal elements `[start, start + count)` of what rank `source` sent, or of the
    reduction over all ranks if `source` is None.
    """

    offset: int
    count: int
    start: int
    source: int | None = None


HIERARCHICAL_OPTION = "--hierarchical"


class TwoLevels(Struct, frozen=True):
    """The node of every rank, and its place there. Every node has the same number of ranks."""

    nodes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def node_count(self) -> int:
        """The number of nodes, at least two."""
        return max(self.nodes) + 1

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks per node, at least two."""
        return max(self.places) + 1

    @classmethod
    def of(cls, node_by_rank: Sequence[Hashable]) -> "TwoLevels":
        """Build from each rank's node. Raises UsageError for a single node, a single rank per node, or unequal
        numbers.
        """
        numbers = {node: number for number, node in enumerate(dict.fromkeys(node_by_rank))}
        nodes = tuple(numbers[node] for node in node_by_rank)
        members = [0] * len(numbers)
        places = []
        for node in nodes:
            places.append(members[node])
            members[node] += 1
        counts = sorted(set(members))
        if len(numbers) < 2:
            raise _cannot(f"all {len(nodes)} ranks are on one node", "a launcher that starts ranks on several hosts")
        if len(counts) > 1:
            seen = f"nodes have from {counts[0]} to {counts[-1]} ranks"
            raise _cannot(seen, f"as many ranks on every node, e.g. mpirun --map-by ppr:{counts[0]}:node")
        if counts[0] < 2:
            raise _cannot("every node has a single rank", "leave it out: flat and hierarchical are the same there")
        return cls(nodes, tuple(places))

    def check_averages(self, ops: Sequence[ReduceOp], dtypes: Sequence[DataType]) -> None:
        """Raise UsageError if averages of averages would differ from the average of all."""
        integers = [dtype for dtype in dtypes if dtype.kind is not NumberKind.FLOAT]
        inexact = any(count & (count - 1) for count in (self.node_count, self.ranks_per_node))
        if ReduceOp.AVG in ops and (integers or inexact):
            what = f"of {integers[0]}" if integers else f"over {self.node_count} nodes of {self.ranks_per_node} ranks"
            raise UsageError(
                f"{HIERARCHICAL_OPTION} with --op avg {what}",
                expected="floats, and powers of two: only there is an average of averages exact",
                next_step="--op sum",
            )


def _cannot(seen: str, next_step: str) -> UsageError:
    return UsageError(
        f"{HIERARCHICAL_OPTION}, but {seen}",
        expected="two nodes or more, with the same number of ranks, two or more",
        reason="it reduces inside nodes first, then between ranks with the same place in their nodes",
        next_step=next_step,
    )


def nccl_version(code: int) -> str:
    """Decode NCCL_VERSION_CODE: 22809 → '2.28.9', and before NCCL 2.9 2708 → '2.7.8'."""
    thousand = 10_000 if code >= 10_000 else 1_000
    return f"{code // thousand}.{code % thousand // 100}.{code % 100}"


class Allocator(StrEnum):
    """The library that allocates buffers: CUDA, as in frameworks, or NCCL, as in nccl-tests."""

    CUDA = "cuda"
    NCCL = "nccl"


POISON = 0xA5  # Fills a receive buffer before an operation, so that no older result counts
WORD = 0xFFFFFFFF  # Seeds, hashes and element indices are 32-bit: elements 2**32 apart look alike
ROW_SEED, BUFFER_SEED = 0x85EBCA6B, 0xC2B2AE35

MOST_CONTRIBUTORS = 8
FLOAT_AVERAGE_CONTRIBUTORS = 2
AVERAGE_TOLERANCE_ULP = 2


class DataPattern(Struct, frozen=True):
    """The test data of a row. `op` is None if data is only moved."""

    dtype: DataType
    op: ReduceOp | None
    ranks: int

    @property
    def contributors(self) -> int:
        """The number of ranks with their own value at an element."""
        rounds = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT
        return min(self.ranks, FLOAT_AVERAGE_CONTRIBUTORS if rounds else MOST_CONTRIBUTORS)

    @property
    def lowest(self) -> int:
        """The lowest value for max and min. The highest is 200 more."""
        return 0 if self.dtype.kind is NumberKind.UNSIGNED else -100

    @property
    def neutral(self) -> int:
        """The value of a rank that does not contribute."""
        neutral = {ReduceOp.PROD: 1, ReduceOp.MAX: self.lowest, ReduceOp.MIN: self.lowest + 200}
        return neutral.get(self.op or ReduceOp.SUM, 0)

    @property
    def tolerance_ulp(self) -> int:
        """The error in ulp that averages may have: 0 for a power of two of ranks, else 2 as in nccl-tests."""
        inexact = self.op is ReduceOp.AVG and self.dtype.kind is NumberKind.FLOAT and self.ranks & (self.ranks - 1)
        return AVERAGE_TOLERANCE_ULP if inexact else 0


class Block(Struct, frozen=True):
    """A run of elements at the same offset in several equally spaced buffers of one memory.

    Buffer k starts at element `k × stride`. The run `[offset, offset + count)` of it contains elements `[start, start +
    count)` of a rank's data for row `row`.
    """

    row: int
    buffers: int
    stride: int
    offset: int
    count: int
    start: int = 0

    def seeds(self) -> tuple[int, ...]:
        """A 32-bit seed per buffer, different for all buffers and rows."""
        return tuple(buffer_seed(self.row, buffer) for buffer in range(self.buffers))


def buffer_seed(row: int, buffer: int) -> int:
    """Return the 32-bit seed of one buffer of a row."""
    return ((row * ROW_SEED) ^ (buffer * BUFFER_SEED) ^ (row >> 16)) & WORD


def algbw_gb_s(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth, size over time, in GB/s of 1e9 bytes."""
    return size_bytes / seconds / BYTES_PER_GB


def ring_allreduce_factor(ranks: int) -> float:
    """Return 2(n−1)/n: every byte is reduced over n−1 links and distributed over n−1 links, n at a time."""
    return 2 * (ranks - 1) / ranks


def all_but_own_factor(ranks: int) -> float:
    """Return (n−1)/n: a rank's own block crosses no link."""
    return (ranks - 1) / ranks


def whole_factor(_ranks: int) -> float:
    """Return 1: every byte crosses the busiest link once."""
    return 1.0


class Engine(StrEnum):
    """The engine that moves the bytes: a copy engine, or a kernel on the SMs."""

    CE = "ce"
    SM = "sm"


class Direction(StrEnum):
    """The direction of a copy: the source writes, the destination reads, or both GPUs write to each other at once."""

    WRITE = "write"
    READ = "read"
    BOTH = "both"


class HostMemory(StrEnum):
    """Pinned memory, which the driver copies from directly, or pageable memory, which it copies through its own
    buffer.
    """

    PINNED = "pinned"
    PAGEABLE = "pageable"

    @property
    def full_name(self) -> str:
        """Its name in lists of copies, with which the `note` of a row starts."""
        return f"{self} host memory"

    @classmethod
    @lru_cache(maxsize=256)
    def parse_note(cls, note: str | None) -> "HostMemory | None":
        """Parse the kind of host memory in a row's note, or return None."""
        return next((memory for memory in cls if (note or "").startswith(memory.full_name)), None)


Place = int | HostMemory  # A GPU by its position among those that are measured, or host memory


class CopyGpu(Struct, frozen=True):
    """A GPU that copies. `device` is its name in matrices (the driver's index), `index` is CUDA's."""

    device: str
    index: int
    bus_id: str
    uuid: str
    name: str


class CopyPattern(StrEnum):
    """Copies of several pairs at once."""

    RING = "ring"
    ALL_TO_ONE = "all_to_one"
    ONE_TO_ALL = "one_to_all"
    BISECTION = "bisection"
    ALL_TO_ALL = "all_to_all"


def pattern_pairs(pattern: CopyPattern, gpus: int, root: int = 0) -> tuple[tuple[int, int], ...]:
    """Return the ordered pairs that copy at once: to the next neighbor, to or from `root`, half to half, or all."""
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
"""Maximum share of free GPU and host memory for managed memory. Memory that does not fit is evicted page by page,
which can hang a GPU.
"""


class ManagedWay(StrEnum):
    """How bytes move from one end to the other. It is the `engine` in rows."""

    PINNED_KERNEL = "sm"
    """A kernel accesses pinned host memory, for comparison with access in place."""

    PREFETCH = "prefetch"
    """The driver migrates the pages on request (cuMemPrefetchAsync)."""

    RESIDENT = "resident"
    """A kernel reads pages prefetched to its GPU. If the prefetch did nothing, it is as slow as page faults."""

    FAULTS = "faults"
    """The pages migrate during a kernel's reads, fault by fault."""

    IN_PLACE = "in place"
    """A kernel accesses pages that stay where they are (preferred location, accessed by)."""

    @property
    def is_migration(self) -> bool:
        """True if every pass needs the pages back first: they move during it, or for RESIDENT just before it."""
        return self in (ManagedWay.PREFETCH, ManagedWay.RESIDENT, ManagedWay.FAULTS)

    @property
    def is_managed(self) -> bool:
        """True if managed memory is used."""
        return self is not ManagedWay.PINNED_KERNEL


class ManagedSupport(Struct, frozen=True, kw_only=True):
    """CUDA's attributes of a GPU's managed memory. None if the driver does not know the attribute.

    `concurrent` is concurrentManagedAccess, without which there is no prefetch, advice or page fault. `pageable` is
    pageableMemoryAccess: kernels read memory from malloc (by HMM, or by hardware, see `host_page_tables`).
    """

    device: str
    managed: bool | None = None
    concurrent: bool | None = None
    pageable: bool | None = None
    host_page_tables: bool | None = None

    @property
    def missing_feature(self) -> str:
        """The reason why its managed memory cannot be used, or ''."""
        if self.managed is False:
            return f"{self.device} has no managed memory (managedMemory 0)"
        if self.concurrent is False:
            return f"{self.device} takes neither prefetch nor advice (concurrentManagedAccess 0)"
        return ""


TORCH = "torch:"  # Before the name of torch.distributed's own backend

TORCH_NCCL, TORCH_SYMM, TORCH_GLOO = "torch:nccl", "torch:symm", "torch:gloo"

NCCL, MPI, HOST = "nccl", "mpi", "host"

NCCL_ALONE = "NCCL without torch"  # What the nccl backend would load if torch were not first

BACKEND_NAMES = (NCCL, TORCH_NCCL, TORCH_SYMM, "torch:rccl", "torch:xccl", MPI, TORCH_GLOO, HOST)
"""All backends. In a table of several, the first in this order is the reference."""

ROW_BACKENDS = (*BACKEND_NAMES, "rccl", "simulated")  # Of other programs' results or a model too

_ONE_BUFFER = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""Collectives of torch.distributed that leave their result in the input buffer."""

ONE_SHOT, TWO_SHOT = "one-shot", "two-shot"

KERNELS = {TORCH_SYMM: (ONE_SHOT, TWO_SHOT)}
"""Backends with several own kernels, which are measured separately."""

_ONE_SHOT_BYTES = 128 * 2**10
"""Size up to which PyTorch's compiler uses the one-shot kernel: `one_shot_all_reduce_threshold_bytes` in
torch/_inductor/config.py of 2.5 to 2.11.
"""


def choose_kernel(backend: str, size_bytes: int, setting: str | None = None) -> str | None:
    """Return a backend's kernel: the one that is set, or else by size. None for other backends."""
    known = KERNELS.get(backend, ())
    if setting in known:
        return setting
    return (ONE_SHOT if size_bytes <= _ONE_SHOT_BYTES else TWO_SHOT) if known else None


_ENQUEUED = (NCCL, TORCH_NCCL, TORCH_SYMM)  # They wait in a stream, so that a gate can hold them
GATE = "gate"  # In the metadata, the clock of a table in which operations that can wait behind a gate do so


def gated_backends(backends: Sequence[str], *, one_by_one: bool = False, graph: bool = False) -> tuple[str, ...]:
    """Return the backends that the GPU times from the opening of a gate. The host's clock times the others.

    Operations `one_by_one` are timed with their launch, and replays of a `graph` need no host to issue operations.
    """
    if one_by_one or graph or {TORCH_NCCL, TORCH_SYMM}.isdisjoint(backends):
        return ()
    return tuple(each for each in _ENQUEUED if each in backends)


def describe_composition(
    backend: str,
    collective: str,
    dtype: DataType,
    op: ReduceOp | None,
    placement: Placement,
    kernel: str | None = None,
) -> str:
    """Return a row's note if the backend composes the operation from several ones, or ''."""
    parts = []
    if backend.startswith(TORCH) and collective in _ONE_BUFFER and kernel != ONE_SHOT:
        name = "two_shot_all_reduce_" if kernel == TWO_SHOT else _ONE_BUFFER[collective]
        if placement is Placement.OUT_OF_PLACE:
            parts.append(f"torch's {name} has one buffer: copied into it first")
    if backend == TORCH_GLOO and collective == "sendrecv":
        parts.append("Gloo sends no CUDA tensors: from GPUs by way of tensors of the host")
    if op is ReduceOp.AVG and divides_sum(backend, dtype):
        parts.append(f"{backend} has no average of {dtype}: a sum, divided afterwards")
    return "; ".join(parts)


def divides_sum(backend: str, dtype: DataType) -> bool:
    """True if an average is a sum divided afterwards: MPI has no average, and Gloo none for integers."""
    return backend == MPI or (backend == TORCH_GLOO and dtype.kind is not NumberKind.FLOAT)
