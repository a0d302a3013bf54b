"""Build rows from measured copies: pairs, host memory, managed memory, and patterns of several pairs."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Together
from gpubench.measure.p2p.request import PROCESS, CopyMachine, HostCopy, ManagedCopy, P2pRequest, PatternCopy
from gpubench.model.paths.p2p import Cell, Pair, Series, is_large_copy
from gpubench.model.paths.topology import ACROSS_SOCKETS, round_gb_s
from gpubench.model.paths.transport import is_staged, join_names
from gpubench.model.profiles.copies import WRONG, judge_pattern
from gpubench.model.results.report import PairRow, PatternRow
from gpubench.model.results.speed import copies_times_limit, refuse_above_limit
from gpubench.model.terms.operation import Direction, Engine, HostMemory, pattern_pairs
from gpubench.model.terms.statistics import Spread
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, percent, plural
from gpubench.model.terms.verdict import Verdict

Judged = tuple[Verdict | None, str]
"""A verdict and its reason. The verdict is None if nothing is expected."""


class CopyMatrix(Struct, frozen=True):
    """The cells and verdicts of a series by pair. `gb_s` has only the pairs that were measured."""

    series: Series
    cells: Mapping[Pair, Cell]
    gb_s: Mapping[Pair, float]
    verdicts: Mapping[Pair, Judged]


def bandwidth_gb_s(series: Series, cell: Cell) -> float:
    """Return the bandwidth of a cell in GB/s. If the series copies in both directions, it is their sum."""
    copies = 2 if series.direction is Direction.BOTH else 1
    return copies * series.size_bytes / cell.typical_seconds / BYTES_PER_GB


def verdict_without_bandwidth(cell: Cell, users: str, *, is_judged: bool) -> Judged | None:
    """Return the verdict on a cell that failed, has wrong data or is not judged. Otherwise return None.

    None means that the bandwidth determines the verdict.
    """
    if cell.error:
        return Verdict.ERROR, cell.error
    if cell.wrong:
        return Verdict.FAIL, plural(cell.wrong, WRONG)
    if not is_judged:
        return None, ""
    return (Verdict.SKIP, f"not judged: {users}") if users else None


PastBandwidth = Callable[[PairRow], tuple[float, str] | None]
"""Returns the bandwidth from earlier results in GB/s, and where it comes from, or None."""

# If a pair can use this share of its GPU's NVLinks, switches connect it, and it shares the links with other pairs
_ALL_LINKS = 0.9


def pattern_row(
    machine: CopyMachine, request: P2pRequest, copy: PatternCopy, cell: Cell, matrices: Sequence[CopyMatrix]
) -> PatternRow:
    """Return the row for a pattern in one direction. It is judged by the bandwidth of each pair alone."""
    pairs = pattern_pairs(copy.pattern, len(machine.gpus))
    total = _total_gb_s(request, cell, len(pairs))
    wanted = Series(Engine.CE, copy.direction, peer=True, size_bytes=request.pattern_bytes)
    alone = next((matrix.gb_s for matrix in matrices if matrix.series == wanted), {})
    is_known = total is not None and all(pair in alone for pair in pairs)
    row = PatternRow(
        pattern=copy.pattern,
        direction=copy.direction,
        gpus=len(machine.gpus),
        pairs=len(pairs),
        size_bytes=request.pattern_bytes,
        total_gb_s=total,
        parts_gb_s=(parts := sum(alone[pair] for pair in pairs) if is_known else None),
        share_percent=percent(total, parts),
        wrong=cell.wrong,
        origin=machine.origin,
        note=cell.error,
        node=machine.host(0),
        ci95_percent=_ci95_percent(cell),
    )
    if not is_known or not pairs or machine.users(*range(len(machine.gpus))):
        return row
    # Expect each link to make its copies one after another, each as fast as the pair alone.
    busy: dict[tuple[object, ...], float] = defaultdict(float)
    for pair in pairs:
        for link in set(_links(machine, pair)):
            busy[link] += 1 / alone[pair]
    return judge_pattern(replace(row, expected_gb_s=len(pairs) / max(busy.values())))


def _links(machine: CopyMachine, pair: Pair) -> Iterator[tuple[object, ...]]:
    """Yield the links that a pair uses.

    Over PCIe, GPUs share the uplink of their switch and the link between sockets.
    """
    wiring, path = machine.wiring, machine.wiring.path(pair)
    if wiring.has_nvlinks(pair):
        total, pair_gb_s = wiring.nvlink_total(pair[0]).gb_s, wiring.limit(pair).gb_s
        is_switched = total is None or pair_gb_s is None or pair_gb_s > _ALL_LINKS * total
        yield from [("NVLink", pair[0], "out"), ("NVLink", pair[1], "in")] if is_switched else [("NVLink", *pair)]
        return
    for gpu, way in zip(pair, ("out", "in"), strict=True):
        yield "PCIe", gpu, way
        near = {"PIX": (), ACROSS_SOCKETS: ("PIX", "PXB", "PHB", "NODE")}.get(path, ("PIX",))
        others = range(len(machine.gpus))
        yield "shared", frozenset((gpu, *(other for other in others if wiring.path((gpu, other)) in near))), way


def bidirectional_patterns(request: P2pRequest, measured: Mapping[PatternCopy, Cell], gpus: int) -> list[Together]:
    """Return the patterns that were measured with writes and with reads."""
    found = []
    for pattern in request.patterns:
        pairs = pattern_pairs(pattern, gpus)
        cells = [measured[PatternCopy(pattern, way)] for way in (Direction.WRITE, Direction.READ)]
        write, read = (_total_gb_s(request, cell, len(pairs)) for cell in cells)
        if write is not None and read is not None:
            found.append(Together(pattern.replace("_", " "), pairs, write, read))
    return found


def _total_gb_s(request: P2pRequest, cell: Cell, pairs: int) -> float | None:
    return pairs * request.pattern_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None


HOST = "host"


def pair_row(machine: CopyMachine, series: Series, pair: Pair, cell: Cell, judged: Judged) -> PairRow:
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
        limit_gb_s=round_gb_s(limit),
        limit_percent=percent(bandwidth, limit),
        nvlink_bytes=cell.carried.nvlink_bytes,
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=machine.wiring.path(pair),
        transport=join_names(cell.transports),
        host_staged=_is_staged(series, cell),
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (note, why_no_limit))) or None,
        ci95_percent=_ci95_percent(cell),
    )
    # A single NVLink is slower than PCIe, so a copy above its limit may be valid if it went through host memory.
    through_host = copies_times_limit(bandwidth, machine.wiring.staged_gb_s(pair) or limit)
    return row if through_host is None else refuse_above_limit(row)


def host_row(machine: CopyMachine, copy: HostCopy, cell: Cell, size_bytes: int) -> PairRow:
    """Return the row for a copy between host memory and a GPU, without a verdict on its bandwidth."""
    gpu, host, to_gpu = machine.gpus[copy.gpu], machine.host(copy.gpu), copy.to_gpu
    limit = machine.wiring.host_limit(copy.gpu).gb_s
    bandwidth = size_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None
    is_large = is_large_copy(size_bytes)
    verdict, note = verdict_without_bandwidth(cell, machine.users(copy.gpu), is_judged=is_large) or (None, "")
    row = PairRow(
        source=HOST if to_gpu else gpu.device,
        destination=gpu.device if to_gpu else HOST,
        source_bus_id=None if to_gpu else gpu.bus_id,
        destination_bus_id=gpu.bus_id if to_gpu else None,
        source_node=host,
        destination_node=host,
        scope=PROCESS,
        origin=machine.origin,
        direction=Direction.READ if to_gpu else Direction.WRITE,
        engine=Engine.CE,
        size_bytes=size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=round_gb_s(limit),
        limit_percent=percent(bandwidth, limit),
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=None,
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (copy.memory.full_name, note))),
        ci95_percent=_ci95_percent(cell),
    )
    return refuse_above_limit(row)


def _ci95_percent(cell: Cell) -> float | None:
    interval = Spread.of(cell.seconds).interval if cell.seconds else None
    return None if interval is None else 100 * interval


def _microseconds(cell: Cell) -> float | None:
    return cell.typical_seconds * MICROSECONDS_PER_SECOND if cell.seconds else None


def _is_staged(series: Series, cell: Cell) -> bool | None:
    """True if the copy went through host memory, which is always so without peer access.

    NCCL's log shows it between nodes, and link counters inside a node. None if unknown.
    """
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
    """Return the row for a managed copy. `lacks` is the reason why it was not measured, or empty."""
    ends = copy.source, copy.destination
    names = [HOST if end is None else machine.label(end) for end in ends]
    bus_ids = [None if end is None else machine.gpus[end].bus_id for end in ends]
    pair = None if copy.source is None or copy.destination is None else (copy.source, copy.destination)
    limit = machine.wiring.host_limit(copy.by).gb_s if pair is None else machine.wiring.limit(pair).gb_s
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
        limit_gb_s=round_gb_s(limit),
        limit_percent=percent(bandwidth, limit),
        nvlink_bytes=cell.carried.nvlink_bytes,
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=None if pair is None else machine.wiring.path(pair),
        host_staged=None if pair is None or not cell.seconds else cell.is_staged,
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, ("managed memory" if copy.way.is_managed else HostMemory.PINNED.full_name, note))),
    )
