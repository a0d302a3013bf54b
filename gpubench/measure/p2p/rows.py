"""Rows of measured copies."""

from dataclasses import replace

from gpubench.measure.p2p.expected import ExpectedCopy
from gpubench.measure.p2p.machine import PROCESS, CopyMachine
from gpubench.measure.p2p.matrix import Judged, bandwidth_gb_s, verdict_without_bandwidth
from gpubench.measure.p2p.request import HostCopy, ManagedCopy
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, Carried, Cell, Pair, Reference, Series, judge
from gpubench.model.paths.selection import names
from gpubench.model.paths.topology import rounded
from gpubench.model.paths.transport import is_staged
from gpubench.model.results.above_limit import refused_above_limit
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import Direction, Engine, HostMemory
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, percent
from gpubench.model.terms.verdict import Verdict

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
    """GB/s that the profile has of large copies of pinned memory."""
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
