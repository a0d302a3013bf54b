"""Rows of measured copies: the matrix of each series, the expected bandwidth, and copies of several pairs at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Together
from gpubench.measure.p2p.request import PROCESS, CopyMachine, HostCopy, ManagedCopy, P2pRequest, PatternCopy
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, LIMIT_WARN_SHARE, Carried, Cell, Pair, Reference, Series, judge
from gpubench.model.paths.topology import rounded
from gpubench.model.paths.transport import is_staged, names
from gpubench.model.results.report import SIBLINGS, PairRow, PatternRow
from gpubench.model.results.speed import refused_above_limit
from gpubench.model.terms.operation import Direction, Engine, HostMemory, pairs_of
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, percent
from gpubench.model.terms.verdict import Verdict
from gpubench.records import dataclass

Judged = tuple[Verdict | None, str]  # A verdict, None where nothing is expected, and its reason


@dataclass(frozen=True, slots=True)
class CopyMatrix:
    """The cells of a series, the verdicts on them, and the bandwidth in GB/s of those that were measured."""

    series: Series
    cells: Mapping[Pair, Cell]
    gb_s: Mapping[Pair, float]
    verdicts: Mapping[Pair, Judged]

    @property
    def slow(self) -> set[Pair]:
        """Pairs whose bandwidth is judged and not enough."""
        return {pair for pair in self.gb_s if self.verdicts[pair][0] in (Verdict.FAIL, Verdict.WARN)}


def bandwidth_gb_s(series: Series, cell: Cell) -> float:
    """The bandwidth of a cell, of both directions together where both are copied."""
    copies = 2 if series.direction is Direction.BOTH else 1
    return copies * series.size_bytes / cell.typical_seconds / BYTES_PER_GB


def verdict_without_bandwidth(cell: Cell, users: str, *, is_judged: bool) -> Judged | None:
    """The verdict on a cell whatever its bandwidth: failed, wrong, not judged; None where that counts."""
    if cell.error:
        return Verdict.ERROR, cell.error
    if cell.wrong:
        return Verdict.FAIL, f"{cell.wrong} wrong elements"
    if not is_judged:
        return None, ""
    return (Verdict.SKIP, f"not judged: {users}") if users else None


PastBandwidth = Callable[[PairRow], tuple[float, str] | None]  # GB/s of earlier results, and their source
_LATE_SHARE, _LATE_MICROSECONDS = 0.3, 8.0
"""A small copy is late beyond so much of its time and these µs: direct ones of 16 bytes take 2 µs, those through host
memory 12 to 19."""


def no_past(_row: PairRow) -> None:
    """For runs that keep no results."""


@dataclass(frozen=True, slots=True)
class ExpectedCopy:
    """The bandwidth of a copy on healthy machines, in GB/s, both directions together where both are copied."""

    gb_s: float
    source: str

    def compared(self, row: PairRow, copies: int) -> PairRow:
        """The row with what is expected of it; `copies` of its size are made at once."""
        size_bytes = row.size_bytes or 0
        return replace(
            row,
            expected_gb_s=self.gb_s,
            expected_us=copies * size_bytes / (self.gb_s * BYTES_PER_GB) * MICROSECONDS_PER_SECOND,
            expected_percent=percent(row.bandwidth_gb_s, self.gb_s),
            expected_source=self.source,
        )


def expected_copy(machine: CopyMachine, series: Series, pair: Pair, reference: Reference | None) -> ExpectedCopy | None:
    """The first source that knows; without a reference the copy is judged by the profile's latency and bandwidth."""
    if reference is None:
        return _small(machine, series, machine.wiring.path(pair))
    if reference.expected_gb_s is not None:
        return ExpectedCopy(reference.expected_gb_s, reference.source)
    if reference.siblings_gb_s is not None:
        return ExpectedCopy(reference.siblings_gb_s, SIBLINGS)
    if reference.limit_gb_s is None:
        return None
    share = f"{LIMIT_WARN_SHARE:.0%} of the limit"
    return ExpectedCopy(LIMIT_WARN_SHARE * reference.limit_gb_s, share)


def _small(machine: CopyMachine, series: Series, path: str) -> ExpectedCopy | None:
    if machine.matched is None or machine.matched.profile.match.generic is not None or series.quantity is None:
        return None
    profile = machine.matched.profile
    gb_s = profile.typical(series.quantity, path)
    latency_us = profile.typical("p2p.latency_us" if series.peer else "p2p.staged_latency_us", path)
    if gb_s is None or latency_us is None:
        return None
    moved = series.size_bytes * (2 if series.direction is Direction.BOTH else 1)
    seconds = latency_us / MICROSECONDS_PER_SECOND + moved / (gb_s * BYTES_PER_GB)
    return ExpectedCopy(moved / seconds / BYTES_PER_GB, f"profile {profile.name}, latency and bandwidth")


def late_verdict(series: Series, row: PairRow) -> tuple[Verdict, str] | None:
    """The verdict on a small copy with peer access, by its time; None where nothing is expected of it."""
    if not series.peer or series.is_judged or row.expected_us is None or row.latency_us is None:
        return None
    if row.latency_us > (1 + _LATE_SHARE) * row.expected_us + _LATE_MICROSECONDS:
        return Verdict.FAIL, f"{row.latency_us:.3g} µs, {row.expected_us:.3g} are expected"
    return Verdict.PASS, ""


PatternCells = Mapping[PatternCopy, Cell]


def pattern_rows(
    machine: CopyMachine, request: P2pRequest, measured: PatternCells, matrices: Sequence[CopyMatrix]
) -> Iterator[PatternRow]:
    """A row for every pattern in each direction."""
    for copy, cell in measured.items():
        pairs = pairs_of(copy.pattern, len(machine.gpus))
        total = _total_gb_s(request, cell, len(pairs))
        parts = None if total is None else _parts_gb_s(request, copy.direction, pairs, matrices)
        yield PatternRow(
            pattern=copy.pattern,
            direction=copy.direction,
            gpus=len(machine.gpus),
            pairs=len(pairs),
            size_bytes=request.pattern_bytes,
            total_gb_s=total,
            parts_gb_s=parts,
            share_percent=percent(total, parts),
            wrong=cell.wrong,
            origin=machine.origin,
            note=cell.error,
        )


def measured_both_ways(request: P2pRequest, measured: PatternCells, gpus: int) -> list[Together]:
    """The patterns that were both written and read."""
    found = []
    for pattern in request.patterns:
        pairs = pairs_of(pattern, gpus)
        cells = [measured[PatternCopy(pattern, way)] for way in (Direction.WRITE, Direction.READ)]
        write, read = (_total_gb_s(request, cell, len(pairs)) for cell in cells)
        if write is not None and read is not None:
            found.append(Together(pattern.replace("_", " "), pairs, write, read))
    return found


def _total_gb_s(request: P2pRequest, cell: Cell, pairs: int) -> float | None:
    return pairs * request.pattern_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None


def _parts_gb_s(
    request: P2pRequest, direction: Direction, pairs: Sequence[Pair], matrices: Sequence[CopyMatrix]
) -> float | None:
    """The bandwidths of the pairs one at a time, added up; None where one was not measured."""
    wanted = Series(Engine.CE, direction, peer=True, size_bytes=request.pattern_bytes)
    undisturbed = next((each.gb_s for each in matrices if each.series == wanted), {})
    return sum(undisturbed[pair] for pair in pairs) if all(pair in undisturbed for pair in pairs) else None


HOST = "host"


def pair_row(machine: CopyMachine, series: Series, pair: Pair, cell: Cell, judged: Judged) -> PairRow:
    """A cell of a matrix as a row."""
    source, destination = (machine.gpus[gpu] for gpu in pair)
    ceiling = machine.limit(series, pair)
    limit, why_no_limit = ceiling.gb_s, "" if ceiling.gb_s is not None else f"no limit: {ceiling.note}"
    bandwidth = bandwidth_gb_s(series, cell) if cell.seconds else None
    verdict, note = judged
    row = PairRow(
        source=machine.label(pair[0]),
        destination=machine.label(pair[1]),
        source_bus_id=source.bus_id,
        destination_bus_id=destination.bus_id,
        source_node=machine.host(pair[0]),
        destination_node=machine.host(pair[1]),
        scope=machine.scope(pair),
        origin=machine.origin,
        direction=series.direction,
        engine="nccl" if series.network else series.engine,
        peer=None if series.network else "on" if series.peer else "off",
        size_bytes=series.size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=rounded(limit),
        limit_percent=percent(bandwidth, limit),
        nvlink_bytes=cell.carried.nvlink_bytes,
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=machine.wiring.path(pair),
        transport=names(cell.transports),
        host_staged=_is_staged(series, cell),
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (note, why_no_limit))) or None,
    )
    return refused_above_limit(row)


def host_row(machine: CopyMachine, copy: HostCopy, cell: Cell, size_bytes: int) -> PairRow:
    """A copy between host memory and a GPU as a row."""
    own, host, to_gpu = machine.gpus[copy.gpu], machine.host(copy.gpu), copy.to_gpu
    limit = machine.wiring.to_host(copy.gpu).gb_s
    bandwidth = size_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None
    verdict, note = _host_verdict(machine, copy, cell, bandwidth, size_bytes)
    expected = _host_expected(machine, copy, size_bytes)
    row = PairRow(
        source=HOST if to_gpu else own.device,
        destination=own.device if to_gpu else HOST,
        source_bus_id=None if to_gpu else own.bus_id,
        destination_bus_id=own.bus_id if to_gpu else None,
        source_node=host,
        destination_node=host,
        scope=PROCESS,
        origin=machine.origin,
        direction=Direction.READ if to_gpu else Direction.WRITE,
        engine=Engine.CE,
        size_bytes=size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=rounded(limit),
        limit_percent=percent(bandwidth, limit),
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=None,
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (copy.memory.full_name, note))),
    )
    row = refused_above_limit(row)
    return row if expected is None else ExpectedCopy(expected, machine.whose_expectation).compared(row, 1)


def _host_expected(machine: CopyMachine, copy: HostCopy, size_bytes: int) -> float | None:
    if copy.memory is not HostMemory.PINNED or size_bytes < JUDGED_FROM_BYTES:
        return None
    quantity = "host_to_device_gb_s" if copy.to_gpu else "device_to_host_gb_s"
    return machine.expected(quantity, machine.wiring.to_host(copy.gpu).gb_s)


def _host_verdict(machine: CopyMachine, copy: HostCopy, cell: Cell, bandwidth: float | None, size_bytes: int) -> Judged:
    is_judged = copy.memory is HostMemory.PINNED and size_bytes >= JUDGED_FROM_BYTES
    known = verdict_without_bandwidth(cell, machine.users(copy.gpu), is_judged=is_judged)
    if known is not None or bandwidth is None:
        return known or (Verdict.ERROR, "not measured")
    limit = machine.wiring.to_host(copy.gpu).gb_s
    expected = _host_expected(machine, copy, size_bytes)
    # Bytes for host memory do not go over NVLink, and that is no staging.
    uncounted = replace(cell, carried=Carried())
    return judge(bandwidth, uncounted, Reference(limit, None, expected, machine.whose_expectation))


def _microseconds(cell: Cell) -> float | None:
    return cell.typical_seconds * MICROSECONDS_PER_SECOND if cell.seconds else None


def _is_staged(series: Series, cell: Cell) -> bool | None:
    """Between nodes as NCCL says; without peer access always; with it as the counters say, where they say something."""
    if series.network:
        return is_staged(cell.transports)
    if not series.peer:
        return True if cell.seconds else None
    return cell.is_staged


def _verified(cell: Cell) -> str | None:
    if not cell.seconds:
        return None
    return "no" if cell.wrong is None else "last"


def managed_row(machine: CopyMachine, copy: ManagedCopy, cell: Cell, size_bytes: int, lacks: str) -> PairRow:
    """A pass over managed memory, or a kernel's over pinned memory, as a row; `lacks` is why nothing was measured."""
    ends = copy.source, copy.destination
    names = [HOST if end is None else machine.label(end) for end in ends]
    bus_ids = [None if end is None else machine.gpus[end].bus_id for end in ends]
    pair = None if copy.source is None or copy.destination is None else (copy.source, copy.destination)
    limit = machine.wiring.to_host(copy.by).gb_s if pair is None else machine.wiring.limit(pair).gb_s
    bandwidth = size_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None
    known = (Verdict.SKIP, f"not measured: {lacks}") if lacks else verdict_without_bandwidth(cell, "", is_judged=False)
    verdict, note = known or (None, "")
    host = machine.host(copy.by)
    return PairRow(
        source=names[0],
        destination=names[1],
        source_bus_id=bus_ids[0],
        destination_bus_id=bus_ids[1],
        source_node=host,
        destination_node=host,
        scope=PROCESS,
        origin=machine.origin,
        direction=Direction.WRITE if copy.destination is None else Direction.READ,
        engine=copy.way,
        size_bytes=size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=rounded(limit),
        limit_percent=percent(bandwidth, limit),
        nvlink_bytes=cell.carried.nvlink_bytes,
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=None if pair is None else machine.wiring.path(pair),
        host_staged=None if pair is None or not cell.seconds else cell.is_staged,
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, ("managed memory" if copy.way.is_managed else HostMemory.PINNED.full_name, note))),
    )
