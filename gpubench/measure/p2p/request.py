"""The requested copies, the GPUs that make them, and the recording of raw samples."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from typing import Protocol, cast

from msgspec import field
from msgspec.structs import replace

from gpubench.conditions.circumstances import Facts
from gpubench.errors import UsageError
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.p2p import LATENCY_BYTES, Cell, Pair, Series
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.figures import Measurements
from gpubench.model.results.report import PairRow, PatternRow
from gpubench.model.terms import operation
from gpubench.model.terms.plain import Bytes
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.ranks import RankIdentity, check_hosts
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Origin
from gpubench.profiles import ProfileMatch
from gpubench.readers.documents import check_version, read_json_line

_MOST_REPEATS = 100  # The number that p2pBandwidthLatencyTest uses, enough for a mean of microseconds
_TO_HOST = (operation.ManagedWay.PINNED_KERNEL, operation.ManagedWay.PREFETCH, operation.ManagedWay.IN_PLACE)
"""FAULTS is missing, because a kernel that copies to the host only writes there."""

_BETWEEN_GPUS = (operation.ManagedWay.PREFETCH, operation.ManagedWay.FAULTS, operation.ManagedWay.IN_PLACE)
"""Kernels on another GPU's plain memory are missing, because the SM series measures them."""


class Method(Struct, frozen=True):
    """How copies are sampled. A sample has `repeats` copies, or as many as fit into `sample_seconds`.

    The result is the median of `samples`.
    """

    warmup: int = 4
    samples: int = 3
    repeats: int | None = None
    sample_seconds: float = 0.01

    def count_repeats(self, copy_seconds: float) -> int:
        """Return the number of copies per sample. `copy_seconds` is the duration of one copy."""
        if self.repeats is not None:
            return self.repeats
        return max(1, min(_MOST_REPEATS, round(self.sample_seconds / copy_seconds)))


NVBANDWIDTH = Method(warmup=4, samples=3, repeats=16)  # The sampling of nvbandwidth 0.8


class PairCopy(Struct, frozen=True):
    """A copy from one GPU to another. As text, every copy is the name that a recording uses."""

    series: Series
    pair: Pair

    def __str__(self) -> str:
        return f"{self.series.name} {self.series.size_bytes} {self.pair[0]}-{self.pair[1]}"


class HostCopy(Struct, frozen=True):
    """A copy between host memory and a GPU."""

    memory: operation.HostMemory
    gpu: int
    to_gpu: bool

    @property
    def label(self) -> str:
        """The start of a progress line. The name of the GPU follows."""
        return f"{self.memory} host memory {'to' if self.to_gpu else 'from'}"

    def __str__(self) -> str:
        return f"{self.label} {self.gpu}"


class PatternCopy(Struct, frozen=True):
    """Copies between several pairs at once. The bandwidth is all bytes over the time until the last copy ends."""

    pattern: operation.CopyPattern
    direction: operation.Direction

    def __str__(self) -> str:
        return f"{self.pattern} {self.direction}"


class ManagedCopy(Struct, frozen=True):
    """A copy in managed memory, or in pinned memory for comparison. None as source or destination is the host."""

    way: operation.ManagedWay
    source: int | None
    destination: int | None

    @property
    def by(self) -> int:
        """The GPU that runs the copy."""
        return cast("int", self.source if self.destination is None else self.destination)

    def __str__(self) -> str:
        ends = ("host" if end is None else str(end) for end in (self.source, self.destination))
        return f"managed {self.way} {'-'.join(ends)}"


Copy = PairCopy | HostCopy | PatternCopy | ManagedCopy


class P2pRequest(Struct, frozen=True, kw_only=True):
    """The copies to measure. `pairs` are positions of GPUs. Series without peer access come first in `series`."""

    pairs: tuple[Pair, ...]
    series: tuple[Series, ...]
    host_bytes: int | None = None
    patterns: tuple[operation.CopyPattern, ...] = ()
    pattern_bytes: Bytes
    method: Method
    check: bool
    managed_bytes: int | None = None
    managed: tuple[operation.ManagedSupport, ...] = ()

    @property
    def largest(self) -> int:
        """The size of the largest copy in bytes."""
        sizes = (*(one_series.size_bytes for one_series in self.series), self.host_bytes, self.managed_bytes)
        return max(filter(None, sizes), default=0)

    @property
    def pattern_copies(self) -> list[PatternCopy]:
        """Every pattern, once with writes and once with reads."""
        return [
            PatternCopy(pattern, way)
            for pattern in self.patterns
            for way in (operation.Direction.WRITE, operation.Direction.READ)
        ]

    def host_copies(self, gpus: int) -> Iterator[HostCopy]:
        """Yield the copies from and to pinned and pageable host memory for every GPU."""
        for memory in operation.HostMemory if self.host_bytes else ():
            for to_gpu in (True, False):
                for gpu in range(gpus):
                    yield HostCopy(memory, gpu, to_gpu)

    def managed_copies(self, gpus: int) -> Iterator[ManagedCopy]:
        """Yield managed copies to every GPU, back to the host, and between the pairs."""
        if not self.managed_bytes:
            return
        for gpu in range(gpus) if self.host_bytes else ():
            yield from (ManagedCopy(way, None, gpu) for way in operation.ManagedWay)
            yield from (ManagedCopy(way, gpu, None) for way in _TO_HOST)
        for source, destination in self.pairs:
            yield from (ManagedCopy(way, source, destination) for way in _BETWEEN_GPUS)

    def steps(self, gpus: int) -> int:
        """Return the total number of copies, for the progress line."""
        single = len(list(self.host_copies(gpus))) + len(list(self.managed_copies(gpus)))
        return single + len(self.series) * len(self.pairs) + len(self.pattern_copies)


class Bench(Protocol):
    """Times copies and verifies their data. It may use GPUs of one process, ranks, or a recording."""

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable peer access for every pair that CUDA allows. Return the pairs that failed, with the error."""
        ...

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """Measure copies of one type, and yield a cell for each, in order.

        A copy that failed has an error in its cell.
        """
        ...

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Measure a copy again. Return the cell with old and new samples, or with the error."""
        ...

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """Return the traffic and users of the GPUs while this run makes no copies, or () if they cannot be read."""
        return ()


def default_series(size_bytes: int, *, sm: bool = True) -> tuple[Series, ...]:
    """Return the series of p2pBandwidthLatencyTest and nvbandwidth, without and with peer access."""
    write, read, both = operation.Direction.WRITE, operation.Direction.READ, operation.Direction.BOTH
    off = [Series(operation.Engine.CE, write, peer=False, size_bytes=size) for size in (size_bytes, LATENCY_BYTES)]
    on = [Series(operation.Engine.CE, way, peer=True, size_bytes=size_bytes) for way in (write, read, both)]
    kernels = [Series(operation.Engine.SM, write, peer=True, size_bytes=size_bytes)] if sm else []
    return (*off, *on, *kernels, Series(operation.Engine.CE, write, peer=True, size_bytes=LATENCY_BYTES))


def sweep_series(sizes: Sequence[int]) -> tuple[Series, ...]:
    """Return two series per size, without and with peer access, written by copy engines."""
    return tuple(
        Series(operation.Engine.CE, operation.Direction.WRITE, peer=peer, size_bytes=size)
        for peer in (False, True)
        for size in sizes
    )


def add_latency_series(series: Sequence[Series], pairs: Iterable[Pair], wiring: Wiring) -> tuple[Series, ...]:
    """Add 16-byte copies if the bandwidth of some pair cannot show whether its path is direct."""
    write = partial(Series, operation.Engine.CE, operation.Direction.WRITE, size_bytes=LATENCY_BYTES)
    off, on = write(peer=False), write(peer=True)
    if not series or all(wiring.outruns_host(pair) for pair in pairs):
        return tuple(series)
    return tuple(dict.fromkeys((*series, off, on)))


def label(series: Series) -> str:
    """Return the text for a series in a progress line."""
    return f"{series.name} {format_size(series.size_bytes)}"


def random_data(
    size_bytes: int, row: int, senders: int, offset_bytes: int = 0
) -> tuple[operation.DataPattern, operation.Block]:
    """Return the pattern and block of random test data at an offset. The data differ for every `row`."""
    word_bytes = operation.DataType.INT64.size_bytes
    is_aligned = size_bytes % word_bytes == 0 and offset_bytes % word_bytes == 0
    dtype = operation.DataType.INT64 if is_aligned else operation.DataType.UINT8
    offset, count = offset_bytes // dtype.size_bytes, size_bytes // dtype.size_bytes
    return operation.DataPattern(dtype, None, senders), operation.Block(row, 1, offset + count, offset, count)


def find_pairs(asked: Sequence[Pair], gpus: Sequence[operation.CopyGpu]) -> tuple[Pair, ...]:
    """Return the positions of the GPUs in --pairs. Raises UsageError for a missing GPU."""
    positions = {gpu.device: position for position, gpu in enumerate(gpus)}
    for pair in asked:
        for index in pair:
            if f"GPU{index}" not in positions:
                raise UsageError(
                    f"--pairs {pair[0]}-{pair[1]}: there is no GPU{index}",
                    expected=f"GPUs from {', '.join(positions)}",
                    reason="--gpus or CUDA_VISIBLE_DEVICES hides it, or this machine has fewer",
                    next_step="gpubench topo shows the GPUs and their numbers",
                )
    return tuple((positions[f"GPU{one}"], positions[f"GPU{other}"]) for one, other in asked)


PROCESS, IPC, NETWORK = "process", "ipc", "network"
"""Scopes of a pair of GPUs: both in one process, in two processes on a node, or on two nodes."""


class CopyMachine(Struct, frozen=True, dict=True):
    """The GPUs that take part, by position. They belong to one process, or to one rank each (`is_ranks`)."""

    wiring: Wiring
    gpus: Sequence[operation.CopyGpu]
    processes: Sequence[RankFacts]
    matched: ProfileMatch | None
    origin: Origin
    unreachable: frozenset[Pair] = frozenset()
    is_ranks: bool = False
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    profile_asked_for: bool = False
    expected_gpus: int | None = None

    def facts(self, rows: Sequence[PairRow], patterns: Sequence[PatternRow] = ()) -> Facts:
        """Return the facts for evaluating conditions, without the processes of this run."""
        pids: dict[int, set[int]] = {}
        for process in self.processes:
            pids.setdefault(process.node, set()).add(process.pid)
        return Facts(
            [_without(pids.get(number, set()), node) for number, node in self.wiring.nodes.items()],
            profiles=[None if self.matched is None else self.matched.profile] * len(self.nodes),
            measurements=Measurements(pairs=tuple(rows), patterns=tuple(patterns)),
            asked=self.profile_asked_for,
            expected_gpus=self.expected_gpus,
        )

    @property
    def nodes(self) -> tuple[Topology, ...]:
        return tuple(self.wiring.nodes.values())

    def limit(self, series: Series, pair: Pair) -> Limit:
        """Return the bandwidth limit of a pair.

        If the series copies in both directions, it is the limit for their sum.
        """
        limit = self.wiring.limit(pair)
        if series.direction is operation.Direction.BOTH and limit.gb_s is not None:
            return Limit(2 * limit.gb_s, f"{limit.note}, both ways")
        return limit

    def label(self, gpu: int) -> str:
        """Return the name of a GPU in rows and matrices. If there are ranks, it is the rank."""
        return str(gpu) if self.is_ranks else self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """Return the description of a GPU in a table header."""
        text = f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"
        return f"on {self.host(gpu)}: {text}" if self.is_ranks else text

    def host(self, gpu: int) -> str:
        return self.wiring.host(gpu)

    def scope(self, pair: Pair) -> str:
        """Return PROCESS, IPC or NETWORK, depending on how the two processes can exchange data."""
        if not self.is_ranks:
            return PROCESS
        return IPC if self.wiring.share_node(pair) else NETWORK

    def can_reach(self, pair: Pair) -> bool:
        """True if peer access is possible according to CUDA, or to NVML if CUDA was not asked.

        Pairs on two nodes are always true, because they do not need peer access.
        """
        if not self.is_ranks:
            return pair not in self.unreachable
        if not self.wiring.share_node(pair):
            return True
        access = self.wiring.peer_access(pair)
        return access.possible is not False if access.cuda is None else access.cuda

    def users(self, *gpus: int) -> str:
        """Return a text with the processes of other users on these GPUs."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self._busy[gpu]}" for gpu in gpus if gpu in self._busy)

    @cached_property
    def _busy(self) -> dict[int, str]:
        """The other processes on each busy GPU, by position.

        A process that only has a context does not make a GPU busy.
        """
        ours = {(process.node, process.pid) for process in self.processes}
        busy = {}
        for position, place in enumerate(self.wiring.gpus):
            gpu = self.wiring.gpu(position)
            held = gpu.processes or () if gpu is not None and gpu.idle is not True else ()
            others = [process for process in held if (place.node, process.pid) not in ours]
            if others:
                busy[position] = ", ".join(other.label for other in others)
        return busy


def _without(pids: AbstractSet[int], node: Topology) -> Topology:
    gpus = tuple(
        replace(gpu, processes=tuple(process for process in gpu.processes or () if process.pid not in pids))
        for gpu in node.snapshot.gpus
    )
    return Topology(replace(node.snapshot, gpus=gpus)) if pids else node


def wiring_of_process(node: Topology, gpus: Sequence[operation.CopyGpu]) -> Wiring:
    """Return the wiring of the GPUs in one process."""
    return Wiring([GpuPlace(node.snapshot.host, 0, gpu.bus_id) for gpu in gpus], {0: node})


def machine_of_ranks(
    nodes: Sequence[Topology],
    ranks: Sequence[RankIdentity],
    processes: Sequence[RankFacts],
    matched: ProfileMatch | None,
    origin: Origin,
) -> CopyMachine:
    """Return the machine with one GPU per rank. `nodes` are in the order of the ranks' node numbers."""
    gpus = [
        operation.CopyGpu(
            device=f"rank {rank.rank}",
            index=rank.gpu_index or 0,
            bus_id=normalize_bus_id(rank.gpu_bus_id or ""),
            uuid=rank.gpu_uuid or "",
            name=rank.gpu or "",
        )
        for rank in ranks
    ]
    return CopyMachine(Wiring(ranks, dict(enumerate(nodes))), gpus, processes, matched, origin, is_ranks=True)


FILE = "p2p.jsonl"
VERSION = 1
_IDLE = "idle GPUs"
_CUT_SHORT = "not recorded: the run was cut short"

Write = Callable[[object], None]


class RecordedP2p(Struct, frozen=True, kw_only=True):
    """The first line of a recording: the request, and either the `gpus` of one process or the `ranks`."""

    schema_version: int
    origin: Origin
    request: P2pRequest
    hosts: tuple[str, ...]
    gpus: tuple[operation.CopyGpu, ...] = ()
    ranks: tuple[RankIdentity, ...] = ()
    unreachable: tuple[Pair, ...] = ()
    like: str | None = None
    strict: bool = False
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class RecordedCopy(Struct, frozen=True):
    """Any later line of a recording: a measured cell, or the idle GPUs before or after the copies.

    If a copy was measured again, its last line has all samples.
    """

    of: str
    cell: Cell
    idle: tuple[IdleGpu, ...] = ()


class RecordingBench(Bench):
    """Measures with another bench, and records the cells."""

    def __init__(self, bench: Bench, write: Write) -> None:
        self._bench = bench
        self._write = write

    def enable_peer_access(self) -> dict[Pair, str]:
        refused = self._bench.enable_peer_access()
        for pair, error in refused.items():
            self._write(RecordedCopy(_access(pair), Cell(error=error)))
        return refused

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        for copy, cell in zip(copies, self._bench.measure(copies), strict=True):
            self._write(RecordedCopy(str(copy), cell))
            yield cell

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        cell = self._bench.measure_again(copy, before)
        self._write(RecordedCopy(str(copy), cell))
        return cell

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        idle = self._bench.look_while_idle()
        if idle:
            self._write(RecordedCopy(_IDLE, Cell(), idle))
        return idle


class ReplayedBench(Bench):
    """Returns recorded cells, in the order in which they were measured."""

    def __init__(self, recorded: RecordedP2p, samples: Iterable[RecordedCopy]) -> None:
        self._pairs = recorded.request.pairs
        self._cells: dict[str, deque[Cell]] = defaultdict(deque)
        self._idle: deque[tuple[IdleGpu, ...]] = deque()
        for sample in samples:
            if sample.of == _IDLE:
                self._idle.append(sample.idle)
            else:
                self._cells[sample.of].append(sample.cell)

    def enable_peer_access(self) -> dict[Pair, str]:
        refused = {pair: self._next(_access(pair)) for pair in self._pairs}
        return {pair: cell.error for pair, cell in refused.items() if cell is not None and cell.error}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """Yield the next cell for each copy, or an error if the recording ended before it."""
        return (self._next(str(copy)) or Cell(error=_CUT_SHORT) for copy in copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Return the next cell for a copy.

        Return `before` if the run did not repeat the copy, because thresholds may have changed since.
        """
        cell = self._next(str(copy))
        if cell is None:
            return before
        # In recordings from before 2026, a repeated copy with host memory has only its new samples.
        has_all = cell.seconds[: len(before.seconds)] == before.seconds
        return cell if has_all else before.extended(cell)

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        return self._idle.popleft() if self._idle else ()

    def _next(self, name: str) -> Cell | None:
        cells = self._cells[name]
        return cells.popleft() if cells else None


def read_samples(lines: Sequence[tuple[str, str]], name: str) -> tuple[RecordedP2p, list[RecordedCopy]]:
    """Parse a recording. `lines` are pairs of a line's text and its location, for error messages. Raises UsageError."""
    if not lines:
        raise UsageError(f"{name}, {FILE}: empty", expected="a recorded run of p2p", reason="it was interrupted")
    recorded = read_json_line(RecordedP2p, *lines[0])
    _check(recorded, lines[0][1])
    samples = []
    for line, where in lines[1:]:
        sample = read_json_line(RecordedCopy, line, where)
        if len(sample.idle) not in (0, len(recorded.gpus or recorded.ranks)):
            raise UsageError(f"{where}: {len(sample.idle)} idle GPUs", expected="those of the first line")
        samples.append(sample)
    return recorded, samples


def _check(recorded: RecordedP2p, where: str) -> None:
    check_version(recorded.schema_version, VERSION, where)
    check_hosts(recorded.ranks, recorded.hosts, where)
    count = len(recorded.gpus or recorded.ranks)
    pairs: tuple[tuple[int, ...], ...] = (*recorded.request.pairs, *recorded.unreachable)
    for ends in pairs:
        if len(ends) != 2 or ends[0] == ends[1] or not all(0 <= end < count for end in ends):
            raise UsageError(
                f"{where}: the pair {list(ends)}", expected=f"two different of {count} GPUs, counted from 0"
            )


def _access(pair: Pair) -> str:
    return f"enable {pair[0]}-{pair[1]}"
