"""Judge measured copies by comparing them with a profile, siblings, earlier results, writes of the same pair, and
the limit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.paths import p2p
from gpubench.model.paths.topology import (
    ACROSS_SOCKETS,
    UNKNOWN_PATH,
    Topology,
    active_links,
    is_gpu_link,
    link_under_load,
    pcie_ceiling_gb_s,
)
from gpubench.model.profiles.profile import SHARE, Profile
from gpubench.model.results.figures import is_busy
from gpubench.model.results.report import SIBLINGS, PairRow, PatternRow
from gpubench.model.results.speed import is_lost_in_noise
from gpubench.model.terms.operation import Direction, Engine, HostMemory
from gpubench.model.terms.units import (
    BYTES_PER_GB,
    MICROSECONDS_PER_SECOND,
    format_bandwidth,
    format_time,
    group_by,
    percent,
)
from gpubench.model.terms.verdict import DOUBTED_FACTOR, Verdict, describe_doubt, gravity

NOISY_PERCENT = 10.0  # A slow copy whose confidence interval is wider than this is INCONCLUSIVE
OTHER_GPUS = "other GPUs, in this run"
WRONG = "wrong element"  # Note on a copy that delivered wrong data, so its verdict does not refer to bandwidth

# Each pair of shares below has a threshold for WARN and one for FAIL, relative to the expected bandwidth.
_LATE_US = 0.2  # Part of a small copy's measured time that the timer may add
LATE_SHARES = 0.57, 0.37
"""Thresholds for small copies.

On four H200s, 12 pairs took 1.7 to 2.2 µs for 64 bytes, and 4.9 to 5.0 µs for 1 MiB. From the latency and bandwidth in
their profile, 4.9 µs are expected for 1 MiB.
"""

_LONGEST_DIRECT_US = {True: 2.5, False: 4.0}
"""Latency of direct copies on the slowest known healthy machine, over NVLink (True) and over PCIe (False).

Host-staged copies take 8 to 20 µs.
"""

_DIRECT_SHARES = 0.5, 0.3  # Thresholds relative to the bandwidth that this latency implies

HOST_SHARES, HOST_PROFILE_SHARES, PAGEABLE_SHARES = (0.8, 0.6), (0.7, 0.6), (0.5, 0.35)
"""Thresholds for copies to and from host memory.

They apply to comparisons with GPUs of the same NUMA node, with a profile, and with siblings' copies of pageable memory.
On virtual machines the bandwidth varies by 10 %. Across sockets it is a quarter lower. A link with half its lanes
reaches half.
"""

_FROM_WRITES: Mapping[tuple[str | None, str | None], tuple[float, tuple[float, float]]] = {
    (Engine.CE, Direction.READ): (1.0, (0.8, 0.65)),
    (Engine.SM, Direction.WRITE): (1.0, (0.7, 0.6)),
    (Engine.CE, Direction.BOTH): (2.0, (0.75, 0.6)),
}
"""Expected bandwidth over NVLink as a multiple of the write bandwidth between the same GPUs, and its thresholds.

On an H200, reads reach 94 to 101 % of writes, kernels 94 %, and bidirectional copies 198 %.
"""

_PCIE_SHARES = {Direction.READ: (0.6, 0.0), Direction.BOTH: (0.55, 0.0)}
"""The same thresholds over PCIe. They only warn, because the read bandwidth through a root port is unknown.

If bidirectional copies are no faster than writes in one direction, the link is not full duplex.
"""

_ROOT_PORT_SHARES = 0.72, 0.5  # Between root ports, healthy copies reach 17 to 28 of 31.5 GB/s
ACROSS_SHARES = 0.6, 0.4  # Across sockets, healthy copies over PCIe 4 reach 12 to 19.5 GB/s
_SOCKETS_SHARES = 0.35, (0.43, 0.34)
"""For copies across sockets: the expected share of the limit, and its thresholds.

Healthy copies reach 38 to 62 % of the limit with PCIe 4, and 19 % with PCIe 5.
"""


class Bound(Struct, frozen=True):
    """An expected bandwidth and its source. Copies below the first of its `shares` get WARN, below the second FAIL."""

    gb_s: float
    source: str
    shares: tuple[float, float] = (p2p.SLOW_SHARE, p2p.FAILED_SHARE)
    slack_us: float = 0.0
    is_floor: bool = False  # A faster copy gets no PASS, since it may still be slow for its kind

    def share(self, row: PairRow) -> float:
        """Return the row's bandwidth relative to the expected bandwidth, plus a tolerance for small copies."""
        slack = 1 + self.slack_us / row.latency_us if row.latency_us else 1.0
        return (row.bandwidth_gb_s or 0.0) / self.gb_s + (slack - 1)

    def verdict(self, row: PairRow) -> Verdict:
        """Return the verdict for a row.

        A slow row with a wide 95 % confidence interval is INCONCLUSIVE. If a narrow interval includes a bandwidth that
        is not slow, the row passes. Collectives follow the same rules (`ExpectedTime.verdict`).
        """
        share, (warn, fail) = self.share(row), self.shares
        if share >= warn:
            return Verdict.PASS
        interval = row.ci95_percent or 0.0
        if share * (1 + interval / 100) < warn:
            return Verdict.FAIL if share < fail else Verdict.WARN
        return Verdict.INCONCLUSIVE if share < fail or interval > NOISY_PERCENT else Verdict.PASS


def _no_past(_row: PairRow) -> None:
    """Return no earlier result, for runs without a history."""


class CopyJudge(Struct, frozen=True):
    """Judges copies by a profile, the measured nodes and earlier results. `nodes` are keyed by host name."""

    profile: Profile | None = None
    nodes: Mapping[str, Topology] = field(default_factory=dict)
    past: Callable[[PairRow], tuple[float, str] | None] = _no_past

    def judge(self, rows: Sequence[PairRow], before: Iterable[PairRow] = ()) -> list[PairRow]:
        """Return the rows with expected bandwidth and verdict.

        `before` are rows measured earlier, whose writes may serve for comparison.
        """
        found = dict(enumerate(rows))
        written = {
            _ends(row): row.bandwidth_gb_s
            for row in (*before, *rows)
            if (row.engine, row.direction, row.peer) == (Engine.CE, Direction.WRITE, "on")
            and _is_large(row)
            and row.bandwidth_gb_s is not None
        }
        numbers = [number for number, row in found.items() if _is_judged(row)]
        for same in group_by(numbers, lambda number: comparison_key(rows[number])).values():
            siblings = self._siblings([rows[number] for number in same])
            for number in same:
                found[number] = self._judge_row(rows[number], siblings, written)
        return [self._add_staged_expectation(row) for row in found.values()]

    def skip_busy_gpus(self, rows: Iterable[PairRow]) -> list[PairRow]:
        """Return the rows with verdict SKIP for copies that use a GPU in use by another process."""
        busy = {(host, gpu.bus_id) for host, node in self.nodes.items() for gpu in node.gpus if is_busy(gpu)}
        return [replace(row, verdict=Verdict.SKIP) if _is_judged(row) and busy & _gpus(row) else row for row in rows]

    def _judge_row(
        self, row: PairRow, siblings: Mapping[str, float], written: Mapping[tuple[object, ...], float]
    ) -> PairRow:
        bounds = self._bounds(row, siblings, written)
        if not bounds:
            is_pageable = HostMemory.parse_note(row.note) is HostMemory.PAGEABLE
            return replace(row, verdict=Verdict.SKIP if _is_large(row) and not is_pageable else None)
        verdicts = {bound: bound.verdict(row) for bound in bounds}
        slow = [bound for bound in bounds if verdicts[bound] is not Verdict.PASS]
        if not slow and bounds[0].is_floor:
            return replace(row, verdict=None)
        deciding = min(slow, key=lambda bound: (gravity(verdicts[bound]), bound.share(row))) if slow else bounds[0]
        verdict = verdicts[deciding] if slow else Verdict.PASS
        if verdict is Verdict.PASS and is_lost_in_noise(row.ci95_percent):
            verdict = Verdict.INCONCLUSIVE
        if row.host_staged and row.peer == "on":
            verdict = Verdict.FAIL
        if verdict is Verdict.PASS and (doubted := _doubt(row, bounds[0])):
            return replace(row, verdict=Verdict.SKIP, note="; ".join(filter(None, (row.note, doubted))))
        return add_expectation(replace(row, verdict=verdict), deciding)

    def _add_staged_expectation(self, row: PairRow) -> PairRow:
        """Add the profile's expected bandwidth to a copy without peer access that has no verdict."""
        compares = row.peer == "off" and row.verdict is None and row.bandwidth_gb_s is not None
        return add_expectation(row, bounds[0]) if compares and (bounds := self._modelled(row)) else row

    def _siblings(self, rows: Sequence[PairRow]) -> dict[str, float]:
        """Return the usual bandwidth for each path with enough copies. For host memory, the path is the GPU's NUMA
        node.
        """
        least = 3 if _is_large(rows[0]) and not is_with_host(rows[0]) else 2
        return {
            path: p2p.upper_quartile([row.bandwidth_gb_s or 0.0 for row in own])
            for path, own in group_by(rows, self._path).items()
            if len(own) >= least and path != UNKNOWN_PATH  # Different links may join GPUs without a known path
        }

    def _path(self, row: PairRow) -> str:
        """Return what must be equal for copies to be siblings: the wiring, or the NUMA node for host memory."""
        if not is_with_host(row):
            return self._intact_path(row)
        node, own = self.nodes.get(row.source_node), row.source_bus_id or row.destination_bus_id
        gpus = () if node is None else node.gpus
        numa_node = next((gpu.place.numa_node for gpu in gpus if gpu.bus_id == own), None)
        return UNKNOWN_PATH if numa_node is None and self.profile is None else f"{numa_node}"

    def _intact_path(self, row: PairRow) -> str:
        """Return the path class that a pair has if no NVLink is down, so that a GPU with lost links has siblings.

        Over NVSwitches, a pair has as many links as the GPU with fewer, to every peer. Links to a single GPU are a
        bridge, and other pairs may have a wider one.
        """
        node, path = self.nodes.get(row.source_node), row.path_class or ""
        ends = [gpu for gpu in node.gpus if gpu.bus_id in (row.source_bus_id, row.destination_bus_id)] if node else []
        models = {gpu.name for gpu in ends}
        if node is None or len(ends) < 2 or len(models) > 1:
            return path
        few = min(ends, key=lambda gpu: active_links(gpu) or 0)
        if path != f"NV{active_links(few)}" or [*node.matrix.get(few.device, {}).values()].count(path) < 2:
            return path
        most = max(active_links(gpu) or 0 for gpu in node.gpus if gpu.name in models)
        return f"NV{most}"

    def _bounds(
        self, row: PairRow, siblings: Mapping[str, float], written: Mapping[tuple[object, ...], float]
    ) -> list[Bound]:
        """Return the expected bandwidths to compare a row with. The first one is shown in reports."""
        usual_gb_s = siblings.get(self._path(row))
        if is_with_host(row):
            return self._host_bounds(row, usual_gb_s)
        if not _is_large(row):
            among = [] if usual_gb_s is None else [Bound(usual_gb_s, SIBLINGS, LATE_SHARES, _LATE_US)]
            return self._small_bounds(row, among)
        # Without peer access, a row is judged only if the pair is host-staged by design.
        is_by_design = row.peer == "off" and row.verdict is not None
        shares = HOST_SHARES if is_by_design else (p2p.SLOW_SHARE, p2p.FAILED_SHARE)
        among = [] if usual_gb_s is None else [Bound(usual_gb_s, SIBLINGS, shares)]
        bounds = [*self._expected(row, shares), *among]
        if not bounds and (known := self.past(row)) is not None:
            bounds.append(Bound(*known))
        return [*bounds, *_bounds_from_writes(row, written, bounds), *_bounds_from_limit(row, bounds)]

    def _expected(self, row: PairRow, shares: tuple[float, float]) -> list[Bound]:
        quantity, profile = _quantity(row), self.profile
        if profile is None or quantity is None:
            return []
        if profile.match.generic is not None:
            share = profile.typical(quantity.removesuffix("_gb_s") + SHARE)
            if share is None or row.limit_gb_s is None or row.path_class == ACROSS_SOCKETS:
                return []
            source = f"profile {profile.name}, a share of the limit"
            shares = _ROOT_PORT_SHARES if row.path_class in ("PHB", "NODE") else shares
            return [Bound(share * row.limit_gb_s, source, shares)]
        has_path = any(expected.path == row.path_class for expected in profile.find(quantity))
        # An expected value without a path does not apply across sockets, because the link between CPUs differs by
        # board.
        value = profile.typical(quantity, row.path_class) if has_path or row.path_class != ACROSS_SOCKETS else None
        shares = ACROSS_SHARES if row.path_class == ACROSS_SOCKETS else shares
        return [] if value is None else [Bound(value * self._link_share(row), f"profile {profile.name}", shares)]

    def _link_share(self, row: PairRow) -> float:
        """Return the bandwidth of the node's best PCIe link relative to the profile's, at most 1.

        A board may connect fewer lanes than the profile.
        """
        node, profile = self.nodes.get(row.source_node), self.profile
        if node is None or profile is None or is_over_nvlink(row) or profile.gpu.c2c_gb_s:
            return 1.0
        links = [pcie_ceiling_gb_s(link_under_load(gpu)) for gpu in node.gpus]
        best = max((link for link in links if link is not None), default=0.0)
        return min(1.0, best / profile.gpu.pcie_gb_s) if best and profile.gpu.pcie_gb_s else 1.0

    def _host_bounds(self, row: PairRow, usual_gb_s: float | None) -> list[Bound]:
        if HostMemory.parse_note(row.note) is not HostMemory.PINNED:
            return [] if usual_gb_s is None else [Bound(usual_gb_s, OTHER_GPUS, PAGEABLE_SHARES)]
        among = [] if usual_gb_s is None else [Bound(usual_gb_s, OTHER_GPUS, HOST_SHARES)]
        bounds = [*self._expected(row, HOST_PROFILE_SHARES), *among]
        return bounds or ([] if row.limit_gb_s is None else [_share_of_limit(row.limit_gb_s)])

    def _small_bounds(self, row: PairRow, among: list[Bound]) -> list[Bound]:
        bounds = [*self._modelled(row), *among]
        large_gb_s = p2p.LIMIT_WARN_SHARE * (row.limit_gb_s or 0.0)
        if row.engine != Engine.CE or any(bound.source != SIBLINGS for bound in bounds) or not large_gb_s:
            return bounds
        latency_us = _LONGEST_DIRECT_US[is_over_nvlink(row)]
        gb_s = _small_copy_gb_s(_moved(row), latency_us, large_gb_s)
        return [*bounds, Bound(gb_s, "the slowest known direct copies", _DIRECT_SHARES, _LATE_US, is_floor=True)]

    def _modelled(self, row: PairRow) -> list[Bound]:
        profile, quantity = self.profile, _quantity(row)
        if profile is None or profile.match.generic is not None or quantity is None:
            return []
        gb_s = profile.typical(quantity, row.path_class)
        latency = "p2p.latency_us" if row.peer == "on" else "p2p.staged_latency_us"
        latency_us = profile.typical(latency, row.path_class)
        if gb_s is None or latency_us is None:
            return []
        source = f"profile {profile.name}, latency and bandwidth"
        return [Bound(_small_copy_gb_s(_moved(row), latency_us, gb_s), source, LATE_SHARES, _LATE_US)]


def _doubt(row: PairRow, expected: Bound) -> str:
    """Return a note if the expected bandwidth is probably wrong, else an empty text.

    It is probably wrong if a large copy that passed is much faster than its profile, or much slower than expected.
    """
    share = expected.share(row)
    is_fast = share > DOUBTED_FACTOR and expected.source.startswith("profile ")
    if not _is_large(row) or not (is_fast or share * DOUBTED_FACTOR < 1):
        return ""
    return f"speed not judged: {describe_doubt(share, expected.source)}"


PATTERN_SHARES = 0.85, 0.6  # Derived thresholds, relative to the sum of the pairs' bandwidths alone


def judge_pattern(row: PatternRow) -> PatternRow:
    """Add the verdict on the total bandwidth of simultaneous copies."""
    if row.total_gb_s is None or row.expected_gb_s is None or row.wrong:
        return row
    warn, fail = PATTERN_SHARES
    share, interval = row.total_gb_s / row.expected_gb_s, row.ci95_percent or 0.0
    if is_lost_in_noise(interval) or (share < warn <= share * (1 + interval / 100)):
        return replace(row, verdict=Verdict.INCONCLUSIVE)
    verdict = Verdict.FAIL if share < fail else Verdict.WARN if share < warn else Verdict.PASS
    return replace(row, verdict=verdict)


def _small_copy_gb_s(moved_bytes: int, latency_us: float, gb_s: float) -> float:
    return moved_bytes / BYTES_PER_GB / (latency_us / MICROSECONDS_PER_SECOND + moved_bytes / (gb_s * BYTES_PER_GB))


def add_expectation(row: PairRow, bound: Bound) -> PairRow:
    return replace(
        row,
        expected_gb_s=bound.gb_s,
        expected_us=_moved(row) / (bound.gb_s * BYTES_PER_GB) * MICROSECONDS_PER_SECOND,
        expected_percent=percent(row.bandwidth_gb_s, bound.gb_s),
        expected_source=bound.source,
    )


def comparison_key(row: PairRow) -> tuple[object, ...]:
    """Return the properties that copies must have in common to be compared as siblings."""
    # A single process measures only its own node, so compare only copies of that node.
    node = row.source_node if row.scope in (None, "process") else ""
    memory = HostMemory.parse_note(row.note) if is_with_host(row) else None
    return node, row.scope, row.engine, row.direction, row.peer, row.size_bytes, memory, row.source_bus_id is None


def is_with_host(row: PairRow) -> bool:
    """True for a copy between a GPU and host memory."""
    return (row.source_bus_id is None) != (row.destination_bus_id is None) and row.scope in (None, "process")


def is_over_nvlink(row: PairRow) -> bool:
    """True for a copy between two GPUs that NVLinks or xGMI links join."""
    return is_gpu_link(row.path_class or "") or row.path_class == "P2P/MNNVL"


def is_slow_copy(row: PairRow) -> bool:
    """True if the row has WARN or FAIL because of its bandwidth or latency."""
    return row.verdict in (Verdict.FAIL, Verdict.WARN) and WRONG not in (row.note or "")


def describe_slowness(row: PairRow) -> str:
    """Describe the measured and the expected value of a slow row."""
    if row.host_staged and row.peer == "on":
        return "the bytes did not go over NVLink, so they were staged through host memory"
    if is_lost_in_noise(row.ci95_percent) or row.verdict == Verdict.INCONCLUSIVE:
        return f"samples vary too much to be judged{describe_scatter(row)}"
    if not _is_large(row):
        times = (
            f"{format_time(row.latency_us or 0)}{describe_scatter(row)}, expected {format_time(row.expected_us or 0)}"
        )
        return f"{times} ({row.expected_source})"
    reached = f"{format_bandwidth(row.bandwidth_gb_s or 0, 4)}{describe_scatter(row)}"
    seen = (
        f"{reached}, {row.expected_percent or 0:.0f}% of "
        f"{format_bandwidth(row.expected_gb_s or 0, 4).removesuffix(' GB/s')}"
    )
    return f"{seen} ({row.expected_source})"


def describe_scatter(row: PairRow) -> str:
    """Describe the 95 % confidence interval as ' (±3%)'. Below 1 %, return an empty text."""
    return f" (±{row.ci95_percent:.0f}%)" if (row.ci95_percent or 0.0) >= 1 else ""


def _is_large(row: PairRow) -> bool:
    return p2p.is_large_copy(row.size_bytes)


def _is_judged(row: PairRow) -> bool:
    if row.bandwidth_gb_s is None or row.verdict in (Verdict.SKIP, Verdict.ERROR) or WRONG in (row.note or ""):
        return False
    # Other engines copy managed memory, whose bandwidth depends on where its pages are.
    if row.engine not in (Engine.CE, Engine.SM, "nccl") or len(_gpus(row)) == 1:
        return False
    if is_with_host(row):
        return _is_large(row)
    if row.peer == "off":
        return _is_large(row) and row.verdict is not None
    return _is_large(row) or row.scope != "network"


def _gpus(row: PairRow) -> set[tuple[str, str | None]]:
    return {(row.source_node, row.source_bus_id), (row.destination_node, row.destination_bus_id)}


def _ends(row: PairRow) -> tuple[object, ...]:
    return row.source_node, row.source, row.destination_node, row.destination, row.size_bytes


def _moved(row: PairRow) -> int:
    """Return the number of bytes that a copy moves in all directions together."""
    return (row.size_bytes or 0) * (2 if row.direction == Direction.BOTH else 1)


_QUANTITIES: Mapping[tuple[str | None, str | None], str] = {
    (Engine.CE, Direction.WRITE): "p2p.write_gb_s",
    (Engine.CE, Direction.READ): "p2p.read_gb_s",
    (Engine.CE, Direction.BOTH): "p2p.bidirectional_gb_s",
    (Engine.SM, Direction.WRITE): "p2p.sm_write_gb_s",
}


def _quantity(row: PairRow) -> str | None:
    """Return the profile quantity that applies to a row, or None. Profiles have no quantities for network copies."""
    if is_with_host(row):
        return "host_to_device_gb_s" if row.source_bus_id is None else "device_to_host_gb_s"
    if row.scope == "network":
        return None
    way = row.engine, row.direction
    if row.peer == "off":
        return "p2p.staged_gb_s" if way == (Engine.CE, Direction.WRITE) else None
    return _QUANTITIES.get(way)


def _bounds_from_writes(
    row: PairRow, written: Mapping[tuple[object, ...], float], bounds: Sequence[Bound]
) -> list[Bound]:
    """Compare reads, copies by kernels and bidirectional copies with writes of the same pair.

    Over NVLink this applies only if neither a profile nor an earlier result has an expected value.
    """
    known = any(bound.source != SIBLINGS for bound in bounds)
    rule, write_gb_s = _FROM_WRITES.get((row.engine, row.direction)), written.get(_ends(row))
    if rule is None or not write_gb_s or row.peer != "on" or (known and is_over_nvlink(row)):
        return []
    times, shares = rule
    if not is_over_nvlink(row):
        if row.engine != Engine.CE or row.direction not in _PCIE_SHARES:
            return []
        shares = _PCIE_SHARES[Direction(row.direction)]
    return [Bound(times * write_gb_s, "writes between these GPUs", shares)]


def _bounds_from_limit(row: PairRow, bounds: Sequence[Bound]) -> list[Bound]:
    """Compare a row with the share of its limit that every healthy machine reaches.

    No such share is known for host-staged copies, or for bidirectional copies over PCIe.
    """
    both = row.direction == Direction.BOTH
    if row.limit_gb_s is None or row.peer == "off" or (both and not is_over_nvlink(row)):
        return []
    if any(bound.source != SIBLINGS for bound in bounds):
        return []
    if row.path_class == ACROSS_SOCKETS:
        share, shares = _SOCKETS_SHARES
        return [Bound(share * row.limit_gb_s, "a share of the limit, across sockets", shares)]
    return [_share_of_limit(row.limit_gb_s)]


def _share_of_limit(limit_gb_s: float) -> Bound:
    expected = p2p.LIMIT_WARN_SHARE * limit_gb_s
    return Bound(
        expected, f"{p2p.LIMIT_WARN_SHARE:.0%} of the limit", (1.0, p2p.LIMIT_FAIL_SHARE / p2p.LIMIT_WARN_SHARE)
    )
