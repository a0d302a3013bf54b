"""The rows of measured copies that checks judge, by the GPUs of a node, and of copies in its host memory."""

from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.results.curves import HOST
from gpubench.model.results.figures import is_pinned
from gpubench.model.results.measurements import Measurements
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import Direction, Engine
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

BY_CPU = "cpu"
"""The engine of copies within host memory."""


def peer_rows(measured: Measurements, node: Topology) -> dict[Pair, PairRow]:
    """Large copies between two GPUs of a node by their positions, written the way that healthy ones of the kind have.

    GPUs that somebody else uses are left out.
    """
    positions = {gpu.bus_id: position for position, gpu in enumerate(node.gpus) if gpu.bus_id and not is_busy(gpu)}
    staged = measured.staged
    host = node.snapshot.host
    return {
        (positions[row.source_bus_id], positions[row.destination_bus_id]): row
        for row in measured.pairs_from(host)
        if row.destination_node == host
        and row.source_bus_id in positions
        and row.destination_bus_id in positions
        and (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        and row.bandwidth_gb_s is not None
        and (row.size_bytes or 0) >= JUDGED_FROM_BYTES
        and (is_by_design(row) or row.peer == "on")
        and (is_by_design(row) or (host, row.source_bus_id, row.destination_bus_id) not in staged)
    }


def is_by_design(row: PairRow) -> bool:
    """True of a copy without peer access that is judged: healthy machines have no other way between these GPUs."""
    return row.peer == "off" and row.verdict is not None


def host_rows(measured: Measurements, node: Topology, *, to_gpu: bool) -> list[tuple[GpuFacts, PairRow]]:
    """Large copies between pinned host memory and GPUs of a node that nobody else uses."""
    gpus = {gpu.bus_id: gpu for gpu in node.gpus if gpu.bus_id and not is_busy(gpu)}
    found = []
    for row in measured.pairs_from(node.snapshot.host):
        own, other = (
            (row.destination_bus_id, row.source_bus_id) if to_gpu else (row.source_bus_id, row.destination_bus_id)
        )
        if other is not None or own not in gpus or not is_pinned(row):
            continue
        found.append((gpus[own], row))
    return found


def of_host_memory(host: str, size_bytes: int, seconds: float) -> PairRow:
    """A copy of so many bytes from host memory to host memory of a node, which took so long."""
    return PairRow(
        source=HOST,
        destination=HOST,
        source_bus_id=None,
        destination_bus_id=None,
        source_node=host,
        destination_node=host,
        scope="process",
        origin=Origin.MEASURED,
        engine=BY_CPU,
        size_bytes=size_bytes,
        bandwidth_gb_s=size_bytes / seconds / BYTES_PER_GB,
        latency_us=seconds * MICROSECONDS_PER_SECOND,
        limit_gb_s=None,
        path_class=None,
    )


def memory_row(measured: Measurements, host: str) -> PairRow | None:
    """The copy in the host memory of a node; None where nobody made one."""
    return next((row for row in measured.pairs_from(host) if row.engine == BY_CPU), None)


def is_busy(gpu: GpuFacts) -> bool:
    """True where somebody else uses a GPU: what is measured on it is no fault of it."""
    return bool(gpu.processes) and gpu.idle is not True
