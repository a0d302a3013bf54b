"""Compare a measurement on more and more GPUs: its efficiency, and where and why scaling breaks."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import product

from msgspec.structs import replace

from gpubench.model.paths.wiring import MNNVL, NETWORK, Wiring
from gpubench.model.results.kv import KvRow
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import CollectiveRow, make_record
from gpubench.model.results.scaling import ScalingRow, largest_rows
from gpubench.model.results.speed import LARGE_BYTES
from gpubench.model.terms.overlap import describe_cap
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import compress_names, format_ranges, format_size, group_by, plural

ALONE = "--np 1 is left out: one rank has no other to exchange data with"
LOCAL_COPY = "a local copy: one rank has no bus bandwidth (nccl-tests shows 0)"
EXPECTED = "as expected of this machine"
NO_REASON = "no reason found in the topology"
SMALL = f"latency counts below {format_size(LARGE_BYTES)}"
_LEAST_LOSS = 0.1  # A smaller loss is no break, as in the verdicts on speed
_CROSSINGS = {
    NETWORK: "the added GPUs are on another node, behind NICs",
    "SYS": "pairs with the added GPUs cross a NUMA boundary (SYS)",
    "NODE": "pairs with the added GPUs pass several PCIe host bridges (NODE)",
    "PHB": "pairs with the added GPUs pass a PCIe host bridge (PHB)",
    "PXB": "pairs with the added GPUs pass several PCIe switches (PXB)",
    MNNVL: "the added GPUs are on another node of the NVLink domain",
}
"""What the added GPUs cross, by the new path class, the slowest first."""

Reason = Callable[[int, int], str]
"""Returns why the ranks from a lower count to a higher one may be slower, or an empty text."""


def describe_gpus(ranks: Sequence[RankIdentity]) -> str:
    """Return the GPUs of some ranks, such as 'GPU0-3' or 'node0-1: GPU0-7'. Without GPUs, 'CPU ranks'."""
    by_host = group_by([rank for rank in ranks if rank.gpu_index is not None], lambda rank: rank.host)
    lists = {host: f"GPU{format_ranges({rank.gpu_index or 0 for rank in own})}" for host, own in by_host.items()}
    if len(lists) <= 1:
        return next(iter(lists.values()), "CPU ranks")
    return "; ".join(f"{compress_names(hosts)}: {gpus}" for gpus, hosts in group_by(lists, lists.__getitem__).items())


def scaling_row(row: CollectiveRow | OverlapRow, gpus: str) -> ScalingRow:
    """Return the part of a row that scaling compares."""
    if isinstance(row, OverlapRow):
        step = f"step of {row.collective} and {row.partner}, {describe_cap(row.ctas)}"
        return make_record(
            ScalingRow, row, measured=step, gpus=gpus, time_us=row.step_us, ci95_percent=row.step_ci95_percent
        )
    measured = " ".join(filter(None, (row.collective, row.dtype, row.op, row.placement.replace("_", " "))))
    reason = LOCAL_COPY if row.busbw_gb_s is None else None
    return make_record(ScalingRow, row, measured=measured, gpus=gpus, bandwidth_gb_s=row.busbw_gb_s, reason=reason)


def kv_scaling(rows: Iterable[KvRow], gpus: Sequence[str]) -> list[ScalingRow]:
    """Return the slowest pair among some GPUs, for each kind of transfer."""
    inside = [row for row in rows if row.source in gpus and row.destination in gpus]
    return [
        make_record(
            ScalingRow,
            min(alike, key=lambda row: row.bandwidth_gb_s or 0.0),
            measured=f"slowest pair, {memory}, {plural(blocks, 'block')}",
            ranks=len(gpus),
            nodes=1,
            gpus=compress_names(gpus),
            time_us=max((row.p50_us for row in alike if row.p50_us is not None), default=None),
        )
        for (memory, blocks, _), alike in group_by(inside, lambda row: (row.memory, row.blocks, row.size_bytes)).items()
    ]


def scaling_table(rows: Sequence[ScalingRow], reason: Reason) -> list[ScalingRow]:
    """Return the rows in order of ranks with their efficiency, and mark where scaling breaks."""
    table: list[ScalingRow] = []
    largest = largest_rows(rows)
    for same in group_by(rows, lambda row: (row.measured, row.size_bytes)).values():
        same = sorted(same, key=lambda row: row.ranks)
        base = best = next((row for row in same if row.ranks > 1 and _speed(row)), None)
        can_break = same[0] in largest
        for row in same:
            speed = _speed(row)
            if base is None or best is None or row.ranks == 1 or not speed:
                table.append(row)
                continue
            changed, loss = replace(row, efficiency_percent=100 * speed / _speed(base)), 1 - speed / _speed(best)
            noise = ((row.ci95_percent or 0.0) + (best.ci95_percent or 0.0)) / 100
            if can_break and loss > max(_LEAST_LOSS, noise):
                can_break = False  # Only the first break is marked
                changed = replace(changed, breaks=True, reason=_why(row, best, loss, reason))
            table.append(changed)
            best = max(best, row, key=_speed)
    return table


def _speed(row: ScalingRow) -> float:
    """Return the bandwidth of a row, or for an overlap the steps per microsecond. 0 if nothing was measured."""
    return row.bandwidth_gb_s or (1 / row.time_us if row.time_us else 0.0)


def _why(row: ScalingRow, best: ScalingRow, loss: float, reason: Reason) -> str:
    found = reason(best.ranks, row.ranks)
    if row.expected_gb_s and best.expected_gb_s and row.expected_gb_s / best.expected_gb_s <= 1 - loss + _LEAST_LOSS:
        return ", because ".join(filter(None, (EXPECTED, found)))
    return SMALL if row.size_bytes < LARGE_BYTES else found or NO_REASON


def find_reason(wiring: Wiring, staged: Container[object], before: int, after: int) -> str:
    """Return the host-staged pair or slower path that the ranks from `before` to `after` add, or an empty text."""
    pairs = [(one, other) for one, other in product(range(after), range(before, after)) if one != other]
    through_host = next((pair for pair in pairs if pair in staged), None)
    if through_host is not None:
        hosts = ["" if wiring.share_node(through_host) else f"{wiring.host(gpu)} " for gpu in through_host]
        one, other = (f"{host}{wiring.place(gpu).device}" for host, gpu in zip(hosts, through_host, strict=True))
        return f"{one} → {other} goes through host memory" + (", by design" if wiring.why_staged(through_host) else "")
    known = {wiring.path((one, other)) for one, other in product(range(before), repeat=2) if one != other}
    added = {wiring.path(pair) for pair in pairs} - known
    crossed = next((words for path, words in _CROSSINGS.items() if path in added), "")
    leaves = bool(crossed) and all(path.startswith("NV") for path in known)
    return f"{crossed}, not NVLink" if leaves and not added & {MNNVL, NETWORK} else crossed
