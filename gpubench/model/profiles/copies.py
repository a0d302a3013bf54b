"""The judgement of measured copies by their rows: against a profile, siblings, past results, writes and the limit.

`gpubench p2p` judges the rows of a matrix as soon as it is measured, and `gpubench check` judges all its rows here too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.paths import p2p
from gpubench.model.paths.topology import ACROSS_SOCKETS, Topology, link_under_load, pcie_ceiling_gb_s
from gpubench.model.profiles.profile import SHARE, Profile
from gpubench.model.results.figures import is_busy
from gpubench.model.results.report import SIBLINGS, PairRow, PatternRow
from gpubench.model.results.speed import is_lost_in_noise
from gpubench.model.terms.operation import Direction, Engine, HostMemory
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, group_by, percent
from gpubench.model.terms.verdict import DOUBTED_FACTOR, Verdict, describe_doubt, gravity

_MEASURED_ENGINES = (Engine.CE, Engine.SM, "nccl")  # What managed memory reaches depends on where its pages are
NOISY_PERCENT = 10.0  # A mean that is less certain cannot clear a copy that looks slow
OTHER_GPUS = "other GPUs, in this run"
WRONG = "wrong elements"  # The note of a copy with wrong data, whose verdict no speed changes

_LATE_US = 0.2  # What the clock adds to a small copy
LATE_SHARES = 0.57, 0.37
"""Of the expected time over the time of a small copy. 12 pairs of four H200s took 1.7 to 2.2 µs for 64 bytes, and 4.9
to 5.0 µs for 1 MiB, where latency and bandwidth of their profile make 4.9."""

_LONGEST_DIRECT_US = {True: 2.5, False: 4.0}
"""The latency of direct copies over NVLink, and over PCIe, on the slowest known healthy machine. Through host memory
they take 8 to 20 µs."""

_DIRECT_SHARES = 0.5, 0.3  # Of that time over the time of a copy without a profile for it

HOST_SHARES, HOST_PROFILE_SHARES, PAGEABLE_SHARES = (0.8, 0.6), (0.7, 0.6), (0.5, 0.35)
"""Of copies with host memory: of what GPUs of the same NUMA node reach, of what a profile has, and of siblings' copies
with pageable memory. On virtual machines they vary by 10 %, and across sockets they are a quarter slower. A link with
half its lanes reaches half."""

_FROM_WRITES: Mapping[tuple[str | None, str | None], tuple[float, tuple[float, float]]] = {
    (Engine.CE, Direction.READ): (1.0, (0.8, 0.65)),
    (Engine.SM, Direction.WRITE): (1.0, (0.7, 0.6)),
    (Engine.CE, Direction.BOTH): (2.0, (0.75, 0.6)),
}
"""Over NVLink, what copies reach as a multiple of the writes between the same GPUs, and shares of it. On H200 reads
reach 94 to 101 % of writes, kernels 94 %, and both directions at once 198 %."""

_OVER_PCIE = {Direction.READ: (0.6, 0.0), Direction.BOTH: (0.55, 0.0)}
"""Over PCIe the same shares warn, and none fails: how fast a root port answers reads is not known. Both directions at
once that are no faster than one are not full duplex."""

_ROOT_PORT_SHARES = 0.72, 0.5  # Of a generic profile's share: between root ports 17 to 28 of 31.5 GB/s are healthy
ACROSS_SHARES = 0.6, 0.4  # Of what a profile has for pairs across sockets: 12 to 19.5 GB/s are healthy over PCIe 4
_SOCKETS_SHARES = 0.35, (0.43, 0.34)
"""Of the limit, and shares of it: across sockets healthy copies reach 38 to 62 % of PCIe 4, and 19 % of PCIe 5."""


class Bound(Struct, frozen=True):
    """What healthy copies reach in GB/s, from where that is known, and the shares below which one warns and fails."""

    gb_s: float
    source: str
    shares: tuple[float, float] = (p2p.SLOW_SHARE, p2p.FAILED_SHARE)
    slack_us: float = 0.0
    is_floor: bool = False  # What is faster may still be slow for its kind, and is not judged

    def share(self, row: PairRow) -> float:
        """The share of it that a row reaches."""
        slack = 1 + self.slack_us / row.latency_us if row.latency_us else 1.0
        return (row.bandwidth_gb_s or 0.0) / self.gb_s + (slack - 1)

    def verdict(self, row: PairRow) -> Verdict:
        """A slow row is INCONCLUSIVE if its 95 % interval is wide, and passes if a narrow one reaches what is not slow.

        That is as for collectives (`ExpectedTime.verdict`).
        """
        share, (warn, fail) = self.share(row), self.shares
        if share >= warn:
            return Verdict.PASS
        interval = row.ci95_percent or 0.0
        if share * (1 + interval / 100) < warn:
            return Verdict.FAIL if share < fail else Verdict.WARN
        return Verdict.INCONCLUSIVE if share < fail or interval > NOISY_PERCENT else Verdict.PASS


def _no_past(_row: PairRow) -> None:
    """For runs that keep no results."""


class CopyJudge(Struct, frozen=True):
    """Judges rows of copies by the profile and the nodes, by host, that they were measured on."""

    profile: Profile | None = None
    nodes: Mapping[str, Topology] = field(default_factory=dict)
    past: Callable[[PairRow], tuple[float, str] | None] = _no_past

    def judge(self, rows: Sequence[PairRow], before: Iterable[PairRow] = ()) -> list[PairRow]:
        """The rows in their order, with expectation and verdict; writes may be among those measured `before`."""
        found = dict(enumerate(rows))
        written = {_ends(row): row.bandwidth_gb_s or 0.0 for row in (*before, *rows) if _is_large_write(row)}
        numbers = [number for number, row in found.items() if _is_judged(row)]
        for same in group_by(numbers, lambda number: comparison_key(rows[number])).values():
            siblings = self._siblings([rows[number] for number in same])
            for number in same:
                found[number] = self._row(rows[number], siblings, written)
        return [self._staged(row) for row in found.values()]

    def skip_busy_gpus(self, rows: Iterable[PairRow]) -> list[PairRow]:
        """The rows, in which copies of GPUs that somebody else uses are not judged."""
        busy = {(host, gpu.bus_id) for host, node in self.nodes.items() for gpu in node.gpus if is_busy(gpu)}
        return [replace(row, verdict=Verdict.SKIP) if _is_judged(row) and busy & _gpus(row) else row for row in rows]

    def _row(self, row: PairRow, siblings: Mapping[str, float], written: Mapping[tuple[object, ...], float]) -> PairRow:
        bounds = self._bounds(row, siblings, written)
        if not bounds:
            return replace(row, verdict=Verdict.SKIP if _must_be_judged(row) else None)
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

    def _staged(self, row: PairRow) -> PairRow:
        """A copy through host memory that only compares: with what its profile expects of one, and no verdict."""
        compares = row.peer == "off" and row.verdict is None and row.bandwidth_gb_s is not None
        return add_expectation(row, bounds[0]) if compares and (bounds := self._modelled(row)) else row

    def _siblings(self, rows: Sequence[PairRow]) -> dict[str, float]:
        """What copies over a path reach, of those with enough of them; a GPU's path to host memory is its NUMA node."""
        alike: dict[str, list[float]] = {}
        for row in rows:
            alike.setdefault(self._path(row), []).append(row.bandwidth_gb_s or 0.0)
        least = 3 if _is_large(rows[0]) and not is_with_host(rows[0]) else 2
        return {path: p2p.upper_quartile(own) for path, own in alike.items() if len(own) >= least}

    def _path(self, row: PairRow) -> str:
        if not is_with_host(row):
            return row.path_class or ""
        node, own = self.nodes.get(row.source_node), row.source_bus_id or row.destination_bus_id
        gpus = () if node is None else node.gpus
        return next((f"{gpu.place.numa_node}" for gpu in gpus if gpu.bus_id == own), "")

    def _bounds(
        self, row: PairRow, siblings: Mapping[str, float], written: Mapping[tuple[object, ...], float]
    ) -> list[Bound]:
        """What the row is compared with, first what people read as its expectation."""
        usual_gb_s = siblings.get(self._path(row))
        if is_with_host(row):
            return self._host_bounds(row, usual_gb_s)
        shares = (p2p.SLOW_SHARE, p2p.FAILED_SHARE) if _is_large(row) and not _is_by_design(row) else HOST_SHARES
        among = [] if usual_gb_s is None else [Bound(usual_gb_s, SIBLINGS, shares)]
        if not _is_large(row):
            return self._small_bounds(row, [replace(each, shares=LATE_SHARES, slack_us=_LATE_US) for each in among])
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
        own = [each for each in profile.find(quantity) if each.path == row.path_class]
        # What a profile has for any pair is not for pairs across sockets, whose link between CPUs differs by board.
        value = profile.typical(quantity, row.path_class) if own or row.path_class != ACROSS_SOCKETS else None
        shares = ACROSS_SHARES if row.path_class == ACROSS_SOCKETS else shares
        return [] if value is None else [Bound(value * self._link_share(row), f"profile {profile.name}", shares)]

    def _link_share(self, row: PairRow) -> float:
        """The best PCIe link of the node as a share of the profile's: a board may have fewer lanes."""
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
        if bounds or row.limit_gb_s is None:
            return bounds
        return [_share_of_limit(row.limit_gb_s)]

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
    """In words that no expectation fits a large copy that passes: far above a profile's, or far below; else ''."""
    share = expected.share(row)
    is_fast = share > DOUBTED_FACTOR and expected.source.startswith("profile ")
    if not _is_large(row) or not (is_fast or share * DOUBTED_FACTOR < 1):
        return ""
    return f"speed not judged: {describe_doubt(share, expected.source)}"


PATTERN_SHARES = 0.85, 0.6
"""Of what links carry one copy after another, for NVLinks, and a lower bound for PCIe. Kind: derived."""


def judge_pattern(row: PatternRow) -> PatternRow:
    """The row of several pairs at once with the verdict on its speed."""
    if row.total_gb_s is None or row.expected_gb_s is None or row.wrong:
        return row
    warn, fail = PATTERN_SHARES
    share, interval = row.total_gb_s / row.expected_gb_s, row.ci95_percent or 0.0
    if is_lost_in_noise(interval) or (share < warn <= share * (1 + interval / 100)):
        return replace(row, verdict=Verdict.INCONCLUSIVE)
    verdict = Verdict.FAIL if share < fail else Verdict.WARN if share < warn else Verdict.PASS
    return replace(row, verdict=verdict)


def _small_copy_gb_s(moved_bytes: int, latency_us: float, gb_s: float) -> float:
    """GB/s of a small copy."""
    return moved_bytes / BYTES_PER_GB / (latency_us / MICROSECONDS_PER_SECOND + moved_bytes / (gb_s * BYTES_PER_GB))


def add_expectation(row: PairRow, bound: Bound) -> PairRow:
    """The row with what is expected of it."""
    return replace(
        row,
        expected_gb_s=bound.gb_s,
        expected_us=_moved(row) / (bound.gb_s * BYTES_PER_GB) * MICROSECONDS_PER_SECOND,
        expected_percent=percent(row.bandwidth_gb_s, bound.gb_s),
        expected_source=bound.source,
    )


def comparison_key(row: PairRow) -> tuple[object, ...]:
    """What copies have in common that are compared with each other; one process measures its own node alone."""
    node = row.source_node if row.scope in (None, "process") else ""
    memory = HostMemory.parse_note(row.note) if is_with_host(row) else None
    return node, row.scope, row.engine, row.direction, row.peer, row.size_bytes, memory, row.source_bus_id is None


def is_with_host(row: PairRow) -> bool:
    """True of a copy between a GPU and host memory."""
    return (row.source_bus_id is None) != (row.destination_bus_id is None) and row.scope in (None, "process")


def is_over_nvlink(row: PairRow) -> bool:
    """True of a copy between GPUs that NVLinks join."""
    return (row.path_class or "").startswith("NV") or row.path_class == "P2P/MNNVL"


def is_slow_copy(row: PairRow) -> bool:
    """True if the verdict on a row is one on its speed."""
    return row.verdict in (Verdict.FAIL, Verdict.WARN) and WRONG not in (row.note or "")


def describe_slowness(row: PairRow) -> str:
    """What was seen of a slow row, with its scatter where that is more than 1 %, and what was expected."""
    if row.host_staged and row.peer == "on":
        return "the bytes did not go over NVLink: staged through host memory"
    if is_lost_in_noise(row.ci95_percent) or row.verdict == Verdict.INCONCLUSIVE:
        return f"samples differ too much to judge it{describe_scatter(row)}"
    if not _is_large(row):
        times = f"{row.latency_us or 0:.3g} µs{describe_scatter(row)}, {row.expected_us or 0:.3g} are expected"
        return f"{times} ({row.expected_source})"
    reached = f"{row.bandwidth_gb_s or 0:.4g} GB/s{describe_scatter(row)}"
    seen = f"{reached}, {row.expected_percent or 0:.0f}% of {row.expected_gb_s or 0:.4g}"
    return f"{seen} ({row.expected_source})"


def describe_scatter(row: PairRow) -> str:
    """Half the 95 % interval of its time in words; empty below 1 %."""
    return f" (±{row.ci95_percent:.0f}%)" if (row.ci95_percent or 0.0) >= 1 else ""


def _is_large(row: PairRow) -> bool:
    return p2p.is_large_copy(row.size_bytes)


def _is_by_design(row: PairRow) -> bool:
    """True of a copy without peer access that is judged, as healthy machines have no other way between these GPUs."""
    return row.peer == "off" and row.verdict is not None


def _must_be_judged(row: PairRow) -> bool:
    return _is_large(row) and HostMemory.parse_note(row.note) is not HostMemory.PAGEABLE


def _is_judged(row: PairRow) -> bool:
    if row.bandwidth_gb_s is None or row.verdict in (Verdict.SKIP, Verdict.ERROR) or WRONG in (row.note or ""):
        return False
    if row.engine not in _MEASURED_ENGINES or len(_gpus(row)) == 1:
        return False
    if is_with_host(row):
        return _is_large(row)
    if row.peer == "off":
        return _is_large(row) and row.verdict is not None
    return _is_large(row) or row.scope != "network"


def _is_large_write(row: PairRow) -> bool:
    usual_way = row.engine == Engine.CE and row.direction == Direction.WRITE and row.peer == "on"
    return usual_way and _is_large(row) and row.bandwidth_gb_s is not None


def _gpus(row: PairRow) -> set[tuple[str, str | None]]:
    return {(row.source_node, row.source_bus_id), (row.destination_node, row.destination_bus_id)}


def _ends(row: PairRow) -> tuple[object, ...]:
    return row.source_node, row.source, row.destination_node, row.destination, row.size_bytes


def _moved(row: PairRow) -> int:
    """Bytes that a copy moves, both directions together where both are copied."""
    return (row.size_bytes or 0) * (2 if row.direction == Direction.BOTH else 1)


_QUANTITIES: Mapping[tuple[str | None, str | None], str] = {
    (Engine.CE, Direction.WRITE): "p2p.write_gb_s",
    (Engine.CE, Direction.READ): "p2p.read_gb_s",
    (Engine.CE, Direction.BOTH): "p2p.bidirectional_gb_s",
    (Engine.SM, Direction.WRITE): "p2p.sm_write_gb_s",
}


def _quantity(row: PairRow) -> str | None:
    """The expected value of a profile that a row compares with; profiles have none for networks."""
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
    """Reads, kernels and both directions at once against the writes of the same pair, if no profile knows them."""
    known = any(bound.source not in (SIBLINGS,) for bound in bounds)
    rule, write_gb_s = _FROM_WRITES.get((row.engine, row.direction)), written.get(_ends(row))
    if rule is None or not write_gb_s or row.peer != "on" or (known and is_over_nvlink(row)):
        return []
    times, shares = rule
    if not is_over_nvlink(row):
        if row.engine != Engine.CE or row.direction not in _OVER_PCIE:
            return []
        shares = _OVER_PCIE[Direction(row.direction)]
    return [Bound(times * write_gb_s, "the writes between these GPUs", shares)]


def _bounds_from_limit(row: PairRow, bounds: Sequence[Bound]) -> list[Bound]:
    """A share of the limit that every healthy machine reaches; none is known for host memory, nor for both ways."""
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
