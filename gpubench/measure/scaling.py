"""Compare a measurement on more and more GPUs: its efficiency, and where and why scaling breaks."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.paths.transport import Pair
from gpubench.model.paths.wiring import MNNVL, NETWORK, Wiring
from gpubench.model.results.kv import KvRow
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import CollectiveRow, make_record
from gpubench.model.results.scaling import ScalingRow, largest_rows
from gpubench.model.results.sentence import find_worst
from gpubench.model.results.speed import LARGE_BYTES
from gpubench.model.terms.overlap import describe_cap
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import compress_names, format_ranges, format_size, group_by, plural
from gpubench.model.terms.verdict import FIGURES, PATH_REQUIRED, STRAGGLER, WRONG_DATA, Finding, Verdict

ALONE = "--np 1 is left out, because one rank cannot exchange data"
LOCAL_COPY = "a local copy: one rank has no bus bandwidth (nccl-tests shows 0)"
EXPECTED = "as expected of this machine"
NO_REASON = "no reason found"
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

_SYMPTOMS = {*FIGURES, "kv-slow", WRONG_DATA, PATH_REQUIRED} - {STRAGGLER}
"""Ids of findings that name no part or setting as the reason for a lower speed."""


class Causes(Struct, frozen=True):
    """Everything that may explain why ranks are slower than fewer ranks. `staged` has the host-staged pairs."""

    wiring: Wiring
    staged: Container[object]
    findings: Sequence[Finding]

    def fault(self, before: int, after: int, *, is_short: bool) -> str:
        """Return the host-staged pair or the finding that explains why `after` ranks are slower. '' if there is none.

        If they are `is_short` of what is expected, a warning counts too, and so does a part that all ranks have.
        """
        through_host = self._staged_pair(before, after)
        if through_host and not self.wiring.why_staged(through_host):
            return self._describe_staged(through_host)
        worst = (Verdict.FAIL, Verdict.WARN) if is_short else (Verdict.FAIL,)
        known = [finding for finding in self.findings if finding.severity in worst and finding.id not in _SYMPTOMS]
        new = [one for one in known if self._has_part(one, after) > self._has_part(one, before)]
        old = [one for one in known if is_short and self._has_part(one, after)]
        root = find_worst(new) or find_worst(old)
        return "" if root is None else f"{root.id}, {root.subject}"

    def crossing(self, before: int, after: int) -> str:
        """Return the slowest path that the ranks from `before` to `after` add, or ''."""
        if through_host := self._staged_pair(before, after):
            return f"{self._describe_staged(through_host)}, by design"
        known = {self.wiring.path((one, other)) for one, other in product(range(before), repeat=2) if one != other}
        added = {self.wiring.path(pair) for pair in _added_pairs(before, after)} - known
        crossed = next((words for path, words in _CROSSINGS.items() if path in added), "")
        leaves = bool(crossed) and all(path.startswith("NV") for path in known)
        return f"{crossed}, not NVLink" if leaves and not added & {MNNVL, NETWORK} else crossed

    def _has_part(self, finding: Finding, ranks: int) -> bool:
        """Whether one of the finding's GPUs, or of its nodes with other devices, belongs to the first `ranks` ranks."""
        used = [self.wiring.place(gpu) for gpu in range(ranks)]
        gpus, nodes = {(place.node, place.bus_id) for place in used}, {place.node for place in used}
        return not finding.places or any(
            (place.node, place.bus_id) in gpus if (place.device or "").startswith("GPU") else place.node in nodes
            for place in finding.places
        )

    def _staged_pair(self, before: int, after: int) -> Pair | None:
        """Return a host-staged pair with an added rank. Prefer one that is not by design."""
        staged = [pair for pair in _added_pairs(before, after) if pair in self.staged]
        return min(staged, key=lambda pair: bool(self.wiring.why_staged(pair)), default=None)

    def _describe_staged(self, pair: Pair) -> str:
        names = [self.wiring.place(gpu).device for gpu in pair]
        hosts = [self.wiring.host(gpu) for gpu in pair]
        if len({gpu.node for gpu in self.wiring.gpus}) > 1:
            names = [f"{hosts[0]} {names[0]}", names[1] if hosts[0] == hosts[1] else f"{hosts[1]} {names[1]}"]
        return f"{names[0]} → {names[1]} goes through host memory"


def _added_pairs(before: int, after: int) -> list[Pair]:
    return [(one, other) for one, other in product(range(after), range(before, after)) if one != other]


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
            expected_gb_s=None,  # It comes from this run, so that it is slow on a slow machine
            expected_percent=None,
            time_us=max((row.p50_us for row in alike if row.p50_us is not None), default=None),
        )
        for (memory, blocks, _), alike in group_by(inside, lambda row: (row.memory, row.blocks, row.size_bytes)).items()
    ]


def scaling_table(rows: Sequence[ScalingRow], find_causes: Callable[[], Causes]) -> list[ScalingRow]:
    """Return the rows in order of ranks with their efficiency, and mark where scaling breaks.

    It breaks where the efficiency or the percentage of the expected speed falls.
    """
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
            if row.expected_percent and best.expected_percent:
                loss = max(loss, 1 - row.expected_percent / best.expected_percent)
            if can_break and loss > max(_LEAST_LOSS, noise):
                can_break = False  # Only the first break is marked
                changed = replace(changed, breaks=True, reason=_why(row, best, find_causes()))
            table.append(changed)
            best = max(best, row, key=_speed)
    return table


def _speed(row: ScalingRow) -> float:
    """Return the bandwidth of a row, or for an overlap the steps per microsecond. 0 if nothing was measured."""
    return row.bandwidth_gb_s or (1 / row.time_us if row.time_us else 0.0)


def _why(row: ScalingRow, best: ScalingRow, causes: Causes) -> str:
    """Return a fault that explains the break, or else the topology if the speed is as expected."""
    is_short = row.expected_percent is not None and row.expected_percent < 100 * (1 - _LEAST_LOSS)
    if fault := causes.fault(best.ranks, row.ranks, is_short=is_short):
        return fault
    crossed = causes.crossing(best.ranks, row.ranks)
    if row.expected_percent is not None and not is_short:
        return ", because ".join(filter(None, (EXPECTED, crossed)))
    return SMALL if row.size_bytes < LARGE_BYTES else NO_REASON if is_short else crossed or NO_REASON
