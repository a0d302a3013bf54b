"""Request for a run of copies: the copies to make, the GPUs they run on, and the recording of their raw samples."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Protocol, cast

from gpubench.conditions.circumstances import Facts
from gpubench.errors import UsageError
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.p2p import LATENCY_BYTES, Cell, Pair, Series
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.figures import Measurements
from gpubench.model.results.report import PairRow, PatternRow
from gpubench.model.terms import operation
from gpubench.model.terms.plain import Bytes
from gpubench.model.terms.ranks import RankIdentity, check_hosts
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Origin
from gpubench.profiles import ProfileMatch
from gpubench.readers.documents import check_version, read_json_line
from gpubench.records import dataclass

_MOST_REPEATS = 100  # Enough for a mean of microseconds, and as many as p2pBandwidthLatencyTest makes
_TO_HOST = (operation.ManagedWay.PINNED_KERNEL, operation.ManagedWay.PREFETCH, operation.ManagedWay.IN_PLACE)
"""A kernel's page faults fetch; to the host it only writes."""

_BETWEEN_GPUS = (operation.ManagedWay.PREFETCH, operation.ManagedWay.FAULTS, operation.ManagedWay.IN_PLACE)
"""What a kernel does with plain memory of another GPU is a series of its own."""


@dataclass(frozen=True, slots=True)
class Method:
    """The length of samples: `repeats` copies, or as many as last `sample_seconds`; the median of `samples` counts."""

    warmup: int = 4
    samples: int = 3
    repeats: int | None = None
    sample_seconds: float = 0.01

    def repeats_for(self, seconds: float) -> int:
        """The number of copies in a sample, where one takes so many seconds."""
        if self.repeats is not None:
            return self.repeats
        return max(1, min(_MOST_REPEATS, round(self.sample_seconds / seconds)))


NVBANDWIDTH = Method(warmup=4, samples=3, repeats=16)  # 0.8: 4 copies to warm up, 16 in one go, median of 3


@dataclass(frozen=True, slots=True)
class PairCopy:
    """A copy from one GPU to another; as text, its name in a recording, as for the other kinds of copies."""

    series: Series
    pair: Pair

    def __str__(self) -> str:
        return f"{self.series.name} {self.series.size_bytes} {self.pair[0]}-{self.pair[1]}"


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between host memory and a GPU."""

    memory: operation.HostMemory
    gpu: int
    to_gpu: bool

    @property
    def label(self) -> str:
        """The copy for a progress line, which ends with the name of the GPU."""
        return f"{self.memory} host memory {'to' if self.to_gpu else 'from'}"

    def __str__(self) -> str:
        return f"{self.label} {self.gpu}"


@dataclass(frozen=True, slots=True)
class PatternCopy:
    """Copies of several pairs at once: their bytes together count, over the time until the last is made."""

    pattern: operation.CopyPattern
    direction: operation.Direction

    def __str__(self) -> str:
        return f"{self.pattern} {self.direction}"


@dataclass(frozen=True, slots=True)
class ManagedCopy:
    """Bytes of managed memory, or what they compare with, from one end to another; an end of None is the host."""

    way: operation.ManagedWay
    source: int | None
    destination: int | None

    @property
    def by(self) -> int:
        """The GPU that fetches the bytes, or that brings them to the host."""
        return cast("int", self.source if self.destination is None else self.destination)

    def __str__(self) -> str:
        ends = ("host" if end is None else str(end) for end in (self.source, self.destination))
        return f"managed {self.way} {'-'.join(ends)}"


Copy = PairCopy | HostCopy | PatternCopy | ManagedCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pRequest:
    """The copies to make: `pairs` by position, `series` without peer access first; bytes of managed memory."""

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
        """Bytes of the largest copy."""
        sizes = (*(each.size_bytes for each in self.series), self.host_bytes, self.managed_bytes)
        return max(filter(None, sizes), default=0)

    @property
    def pattern_copies(self) -> list[PatternCopy]:
        """Every pattern, written and read."""
        return [
            PatternCopy(each, way)
            for each in self.patterns
            for way in (operation.Direction.WRITE, operation.Direction.READ)
        ]

    def host_copies(self, gpus: int) -> Iterator[HostCopy]:
        """Both kinds of host memory to and from every GPU, where that was asked for."""
        for memory in operation.HostMemory if self.host_bytes else ():
            for to_gpu in (True, False):
                for gpu in range(gpus):
                    yield HostCopy(memory, gpu, to_gpu)

    def managed_copies(self, gpus: int) -> Iterator[ManagedCopy]:
        """Every way to every GPU and back to the host, and between the pairs, where that was asked for."""
        if not self.managed_bytes:
            return
        for gpu in range(gpus) if self.host_bytes else ():
            yield from (ManagedCopy(way, None, gpu) for way in operation.ManagedWay)
            yield from (ManagedCopy(way, gpu, None) for way in _TO_HOST)
        for source, destination in self.pairs:
            yield from (ManagedCopy(way, source, destination) for way in _BETWEEN_GPUS)

    def steps(self, gpus: int) -> int:
        """The number of copies, each of which is a step of the progress."""
        single = len(list(self.host_copies(gpus))) + len(list(self.managed_copies(gpus)))
        return single + len(self.series) * len(self.pairs) + len(self.pattern_copies)


class Bench(Protocol):
    """Times copies and verifies what arrived: on GPUs of one process, between ranks, or from a recording."""

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enable peer access wherever CUDA says that it can be; the errors of pairs for which it then fails."""
        ...

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """Measure copies of one kind, pairs of one series; a cell for each, in their order, errors included."""
        ...

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Measure one of them again: the cell with all samples, or with the error."""
        ...

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """The GPUs while nothing of this run is copied, in their order; empty where nobody can look."""
        return ()


def default_series(size_bytes: int, *, sm: bool = True) -> tuple[Series, ...]:
    """The series of p2pBandwidthLatencyTest and nvbandwidth: peer access off, then on, and a 16-byte copy with each."""
    write, read, both = operation.Direction.WRITE, operation.Direction.READ, operation.Direction.BOTH
    off = [Series(operation.Engine.CE, write, peer=False, size_bytes=size) for size in (size_bytes, LATENCY_BYTES)]
    on = [Series(operation.Engine.CE, way, peer=True, size_bytes=size_bytes) for way in (write, read, both)]
    kernels = [Series(operation.Engine.SM, write, peer=True, size_bytes=size_bytes)] if sm else []
    return (*off, *on, *kernels, Series(operation.Engine.CE, write, peer=True, size_bytes=LATENCY_BYTES))


def sweep_series(sizes: Sequence[int]) -> tuple[Series, ...]:
    """A matrix for each size: written by copy engines, with peer access off, then on."""
    return tuple(
        Series(operation.Engine.CE, operation.Direction.WRITE, peer=peer, size_bytes=size)
        for peer in (False, True)
        for size in sizes
    )


def with_latency(series: Sequence[Series], pairs: Iterable[Pair], wiring: Wiring) -> tuple[Series, ...]:
    """The series, with 16 bytes copied too, peer access off and on, where bandwidths would not tell a pair's path."""
    write = partial(Series, operation.Engine.CE, operation.Direction.WRITE, size_bytes=LATENCY_BYTES)
    off, on = write(peer=False), write(peer=True)
    if not series or all(wiring.outruns_host(pair) for pair in pairs):
        return tuple(series)
    return tuple(dict.fromkeys((*series, off, on)))


def label(series: Series) -> str:
    """A series for a progress line."""
    return f"{series.name} {format_size(series.size_bytes)}"


def random_data(
    size_bytes: int, row: int, senders: int, offset_bytes: int = 0
) -> tuple[operation.DataPattern, operation.Block]:
    """Random bits over that many bytes from an offset on, other ones for each row; as words where they divide both."""
    words = (
        size_bytes % operation.DataType.INT64.size_bytes == 0
        and offset_bytes % operation.DataType.INT64.size_bytes == 0
    )
    dtype = operation.DataType.INT64 if words else operation.DataType.UINT8
    offset, count = offset_bytes // dtype.size_bytes, size_bytes // dtype.size_bytes
    return operation.DataPattern(dtype, None, senders), operation.Block(row, 1, offset + count, offset, count)


PROCESS, IPC, NETWORK = "process", "ipc", "network"
"""Scopes of a pair: one process drives both GPUs, two processes of a node do, or two of different nodes."""


@dataclass(frozen=True)
class CopyMachine:
    """The GPUs that copy, by position, of one process or a rank each; `unreachable` pairs, and `idle_gpus`."""

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
        """The nodes without what this run has on their GPUs, as conditions are looked for in them, and in some rows."""
        own: dict[int, set[int]] = {}
        for each in self.processes:
            own.setdefault(each.node, set()).add(each.pid)
        return Facts(
            [_without(own.get(number, set()), node) for number, node in self.wiring.nodes.items()],
            profiles=[None if self.matched is None else self.matched.profile] * len(self.nodes),
            measurements=Measurements(pairs=tuple(rows), patterns=tuple(patterns)),
            asked=self.profile_asked_for,
            expected_gpus=self.expected_gpus,
        )

    @property
    def nodes(self) -> tuple[Topology, ...]:
        """The nodes of the GPUs, in their order."""
        return tuple(self.wiring.nodes.values())

    def limit(self, series: Series, pair: Pair) -> Limit:
        """The ceiling of a pair, for both directions together where both are copied."""
        limit = self.wiring.limit(pair)
        if series.direction is operation.Direction.BOTH and limit.gb_s is not None:
            return Limit(2 * limit.gb_s, f"{limit.note}, both ways")
        return limit

    def label(self, gpu: int) -> str:
        """The name of a GPU in rows and matrices: the driver's, or the rank as a number."""
        return str(gpu) if self.is_ranks else self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """A GPU in words, for a header."""
        found = f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"
        return f"on {self.host(gpu)}: {found}" if self.is_ranks else found

    def host(self, gpu: int) -> str:
        """The host that a GPU is in."""
        return self.wiring.host(gpu)

    def scope(self, pair: Pair) -> str:
        """The way between the processes that drive a pair: PROCESS, IPC or NETWORK."""
        if not self.is_ranks:
            return PROCESS
        return IPC if self.wiring.together(pair) else NETWORK

    def can_reach(self, pair: Pair) -> bool:
        """True if peer access is possible: as CUDA says, NVML where CUDA was not asked; between nodes it needs none."""
        if not self.is_ranks:
            return pair not in self.unreachable
        if not self.wiring.together(pair):
            return True
        access = self.wiring.peer_access(pair)
        return access.possible is not False if access.cuda is None else access.cuda

    def users(self, *gpus: int) -> str:
        """Other users of these GPUs; empty where there are none."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self._busy[gpu]}" for gpu in gpus if gpu in self._busy)

    @cached_property
    def _busy(self) -> dict[int, str]:
        """The processes that used each GPU before this run touched it; a mere context leaves a GPU idle."""
        own = {(each.node, each.pid) for each in self.processes}
        busy = {}
        for position, place in enumerate(self.wiring.gpus):
            gpu = self.wiring.gpu(position)
            held = gpu.processes or () if gpu is not None and gpu.idle is not True else ()
            others = [each for each in held if (place.node, each.pid) not in own]
            if others:
                busy[position] = ", ".join(each.label for each in others)
        return busy


def _without(pids: AbstractSet[int], node: Topology) -> Topology:
    gpus = tuple(
        replace(gpu, processes=tuple(each for each in gpu.processes or () if each.pid not in pids))
        for gpu in node.snapshot.gpus
    )
    return Topology(replace(node.snapshot, gpus=gpus)) if pids else node


def wiring_of_process(node: Topology, gpus: Sequence[operation.CopyGpu]) -> Wiring:
    """The wiring of those GPUs of a node that one process drives."""
    return Wiring([GpuPlace(node.snapshot.host, 0, gpu.bus_id) for gpu in gpus], {0: node})


def machine_of_ranks(
    nodes: Sequence[Topology],
    ranks: Sequence[RankIdentity],
    processes: Sequence[RankFacts],
    matched: ProfileMatch | None,
    origin: Origin,
) -> CopyMachine:
    """The GPUs of all ranks, on nodes in their order."""
    gpus = [
        operation.CopyGpu(
            device=f"rank {rank.rank}",
            index=rank.gpu_index or 0,
            bus_id=bus_id(rank.gpu_bus_id or ""),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedP2p:
    """The first line: what was asked for, and of whom: `gpus` of one process, or `ranks`."""

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


@dataclass(frozen=True, slots=True)
class RecordedCopy:
    """Every other line: a measured cell, the latest counts; `idle` are the GPUs before and after all copies."""

    of: str
    cell: Cell
    idle: tuple[IdleGpu, ...] = ()


class RecordingBench(Bench):
    """Writes down what another bench measures."""

    def __init__(self, bench: Bench, write: Write) -> None:
        self._bench = bench
        self._write = write

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enabled by the other; a sample for each pair that was refused."""
        refused = self._bench.enable_peer_access()
        for pair, error in refused.items():
            self._write(RecordedCopy(_access(pair), Cell(error=error)))
        return refused

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """A sample of each copy, as soon as it is measured."""
        for copy, cell in zip(copies, self._bench.measure(copies), strict=True):
            self._write(RecordedCopy(str(copy), cell))
            yield cell

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Another sample of a copy, which holds those before."""
        cell = self._bench.measure_again(copy, before)
        self._write(RecordedCopy(str(copy), cell))
        return cell

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """A sample of all GPUs, where the other can look."""
        idle = self._bench.look_while_idle()
        if idle:
            self._write(RecordedCopy(_IDLE, Cell(), idle))
        return idle


class ReplayedBench(Bench):
    """A recording in the place of GPUs, of one process or of ranks: each sample as often as it was measured."""

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
        """The errors of then."""
        refused = {pair: self._next(_access(pair)) for pair in self._pairs}
        return {pair: cell.error for pair, cell in refused.items() if cell is not None and cell.error}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """The first sample of each copy; an error where the run ended before."""
        return (self._next(str(copy)) or Cell(error=_CUT_SHORT) for copy in copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """The next sample of a copy; the same again where it was not measured again, for thresholds change."""
        cell = self._next(str(copy))
        if cell is None:
            return before
        # Of copies with host memory, recordings from before 2026 hold the new samples alone.
        has_all = cell.seconds[: len(before.seconds)] == before.seconds
        return cell if has_all else before.extended(cell)

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """The GPUs of then; nothing where the run was cut short, or nobody looked."""
        return self._idle.popleft() if self._idle else ()

    def _next(self, name: str) -> Cell | None:
        cells = self._cells[name]
        return cells.popleft() if cells else None


def read_samples(lines: Sequence[tuple[str, str]], name: str) -> tuple[RecordedP2p, list[RecordedCopy]]:
    """A recording from its lines, each with its place. Raises UsageError."""
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
