"""Judges measured copies against limit, siblings and profile, and as evidence for the path that they took."""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

from msgspec.structs import replace

from gpubench.model.facts.traffic import FOREIGN_SHARE
from gpubench.model.paths.transport import Evidence, State, Transport
from gpubench.model.terms.operation import Direction, Engine
from gpubench.model.terms.plain import Bytes, Count, MeasuredSeconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import format_size

Pair = tuple[int, int]

JUDGED_FROM_BYTES = 64 * 2**20  # The latency of smaller copies differs from machine to machine


def is_large_copy(size_bytes: int | None) -> bool:
    """True if the bandwidth of a copy of this size reflects the links."""
    return (size_bytes or 0) >= JUDGED_FROM_BYTES


LATENCY_BYTES = 16  # The copy whose time is called latency, as in NVIDIA's p2pBandwidthLatencyTest
SLOW_SHARE, FAILED_SHARE = 0.9, 0.75
"""Shares of the bandwidth of sibling pairs, or of healthy machines of the type. Below the first is a warning, below
the second a failure. Pairs of four H200s differ by 0.1 % with copy engines.
"""

LIMIT_WARN_SHARE, LIMIT_FAIL_SHARE = 0.6, 0.4
"""Shares of the physical limit, if there are no siblings and no profile: copies reach 80 to 92 % of it, and 69 to
72 % between root ports of PCIe 4 (https://github.com/NVIDIA/nvbandwidth/issues/50).
"""

ABOVE_HOST = 1.2  # A bandwidth by so much above what both GPUs' links to host memory carry did not come from there
MOVED_SHARE, STILL_SHARE = 0.5, 0.1
"""Shares of the copied bytes. Counters that moved by less than the first were not on the path, and by less than the
second stood still.
"""

MOST_SHARE = 1.1
"""Links that carried more than this multiple of the copied bytes also carried other traffic. NVLink counters move
by exactly the copied bytes, PCIe counters by up to 1.094 times as much.
"""

SOMEBODY_ELSE = "somebody else uses these links"


class Series(Struct, frozen=True):
    """A matrix of copies of one size, engine and direction, with or without peer access, or by NCCL (`network`)."""

    engine: Engine
    direction: Direction
    peer: bool
    size_bytes: Bytes
    network: bool = False

    @property
    def name(self) -> str:
        """Its name in sections: 'ce write', 'ce write peer off', with the size if there are several."""
        if self.network:
            return "nccl"
        return f"{self.engine} {self.direction}" + ("" if self.peer else " peer off")

    @property
    def is_large(self) -> bool:
        """True if the bandwidth of its copies reflects the links."""
        return is_large_copy(self.size_bytes)

    @property
    def is_judged(self) -> bool:
        """True if all its pairs get a verdict, as large copies with peer access do."""
        return self.peer and self.is_large

    @property
    def quantity(self) -> str | None:
        """The quantity in profiles to compare with. Profiles have none for networks."""
        if self.network:
            return None
        if not self.peer:
            return "p2p.staged_gb_s" if self.engine is Engine.CE and self.direction is Direction.WRITE else None
        if self.engine is Engine.SM:
            return "p2p.sm_write_gb_s" if self.direction is Direction.WRITE else None
        names = {Direction.WRITE: "p2p.write_gb_s", Direction.READ: "p2p.read_gb_s"}
        return names.get(self.direction, "p2p.bidirectional_gb_s")


class Carried(Struct, frozen=True):
    """Bytes that one end's links carried, and their multiple of the copied bytes. None if not counted."""

    nvlink_bytes: int | None = None
    nvlink_share: float | None = None
    pcie_bytes: int | None = None
    pcie_share: float | None = None


class Cell(Struct, frozen=True):
    """The measurement of one pair in one series.

    `seconds` are the samples, each the mean time of one copy. `carried` is what links counted in the last sample.
    `transports` are NCCL's, worst first, if NCCL sends.
    """

    seconds: tuple[MeasuredSeconds, ...] = ()
    wrong: Count | None = None
    carried: Carried = Carried()
    error: str | None = None
    transports: tuple[Transport, ...] = ()

    @property
    def is_staged(self) -> bool | None:
        """True if the counters show that it was host-staged. None if they show nothing, or moved too much."""
        carried = self.carried
        if carried.nvlink_share is not None and carried.nvlink_share <= MOST_SHARE:
            return carried.nvlink_share < MOVED_SHARE
        return False if carried.pcie_share is not None and carried.pcie_share < STILL_SHARE else None

    @property
    def typical_seconds(self) -> float:
        """The median sample."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The range of the samples, relative to their median."""
        return (max(self.seconds) - min(self.seconds)) / self.typical_seconds

    def extended(self, more: "Cell") -> "Cell":
        """Return this cell with the samples of a repeated measurement, and the wrong elements or error of either."""
        if more.error:
            return more
        wrong = None if self.wrong is None or more.wrong is None else self.wrong + more.wrong
        return replace(more, seconds=(*self.seconds, *more.seconds), wrong=wrong, transports=self.transports)


def upper_quartile(figures: Sequence[float]) -> float:
    """Return the upper quartile, which healthy values reach: one bad GPU of four affects half of all pairs."""
    return sorted(figures, reverse=True)[len(figures) // 4]


_STAGED_GAIN = 1.15  # Host-staged copies measured with peer access are within 15 % of those without
_STAGED_LATENCY_GAIN = 2.0  # 16-byte copies: H200 2.2 µs against 12 to 18 staged, RTX 3090 1.0 against 15


AS_SLOW_AS_STAGED = "copies are as slow as without peer access"  # What is seen of a pair that `looks_staged`


def looks_staged(on: Cell, off: Cell, latency_on: Cell | None, latency_off: Cell | None, *, outruns_host: bool) -> bool:
    """True if large copies with peer access are as slow as those without, and nothing else explains it.

    Latencies decide if measured (staged 8 to 20 µs, direct 1 to 2.5), else bandwidths if `outruns_host`.
    """
    if not (on.seconds and off.seconds) or off.typical_seconds / on.typical_seconds > _STAGED_GAIN:
        return False
    if latency_on is None or latency_off is None or not (latency_on.seconds and latency_off.seconds):
        return outruns_host
    return not is_direct_latency(latency_on, latency_off)


def is_direct_latency(on: Cell, off: Cell) -> bool:
    """True if a copy with peer access takes so much less time than without that it must be direct."""
    return on.typical_seconds <= off.typical_seconds / _STAGED_LATENCY_GAIN


class Oddity(Struct, frozen=True):
    """One GPU or pair that is slower than the rest: `gpus` has one or two positions, `role` its part in the copies."""

    role: str
    gpus: tuple[int, ...]
    figure: float
    usual: float


def find_oddities(
    figures: Mapping[Pair, float], gpus: int, paths: Mapping[Pair, str] | None = None
) -> tuple[Oddity, ...]:
    """Find the GPUs and pairs that make a matrix uneven: a GPU with a slow row, column or both, or a single slow
    pair.

    Slow is below `SLOW_SHARE` of the usual bandwidth of its path class. A GPU is named if more than half of its cells
    are.
    """
    if len(figures) < 2:
        return ()
    by_path: dict[str, list[float]] = {}
    for pair, figure in figures.items():
        by_path.setdefault((paths or {}).get(pair, ""), []).append(figure)
    common = {pair: upper_quartile(by_path[(paths or {}).get(pair, "")]) for pair in figures}
    slow = {pair for pair, figure in figures.items() if figure < SLOW_SHARE * common[pair]}
    sending = [gpu for gpu in range(gpus) if _mostly({pair for pair in figures if pair[0] == gpu}, slow)]
    receiving = [gpu for gpu in range(gpus) if _mostly({pair for pair in figures if pair[1] == gpu}, slow)]
    found = []
    for gpu in sorted({*sending, *receiving}):
        both = gpu in sending and gpu in receiving
        role = "both ways" if both else "sending" if gpu in sending else "receiving"
        own = [pair for pair in slow if (gpu in pair if both else pair[0 if gpu in sending else 1] == gpu)]
        found.append(Oddity(role, (gpu,), median(figures[pair] for pair in own), median(common[pair] for pair in own)))
    explained = {pair for pair in slow if pair[0] in sending or pair[1] in receiving}
    found += [Oddity("pair", pair, figures[pair], common[pair]) for pair in sorted(slow - explained)]
    return tuple(found)


def _mostly(cells: set[Pair], slow: set[Pair]) -> bool:
    return len(cells) > 1 and 2 * len(cells & slow) > len(cells)


def pairing_rounds(ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """Return all unordered pairs in as few rounds of disjoint pairs as possible, by the circle method."""
    seats: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    played = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats, reversed(seats), strict=True)
        met = [(one, other) for one, other in list(opposite)[: len(seats) // 2]]
        pairs = [(min(one, other), max(one, other)) for one, other in met if one is not None and other is not None]
        played.append(tuple(sorted(pairs)))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return tuple(each for each in played if each)


def parse_pairs(texts: Sequence[str]) -> tuple[Pair, ...]:
    """Parse '0-1,3-5' as ordered pairs of driver indices without duplicates. Raises ValueError."""
    found: dict[Pair, None] = {}
    for pair in (pair.strip() for text in texts for pair in text.split(",")):
        first, dash, second = pair.partition("-")
        if not (dash and first.isdecimal() and second.isdecimal() and int(first) != int(second)):
            raise ValueError(pair)
        found[int(first), int(second)] = None
    return tuple(found)


_ABOVE_HOST = 1.2  # So much more than the PCIe links carry, a bandwidth is not that of host memory
_MOST_COPIES = 3.0
"""Maximum multiple of the buffer that a rank sends or receives with any algorithm: in a tree it sends one to its
parent and one to each of two children.
"""

_MOST_FRAMED = 2.2
"""Maximum bytes that NVLinks count per byte of data: NCCL's protocol LL adds a flag to every 4 bytes, plus 10 %."""

_NARROW = 2.0  # NVLinks of less than so many times what PCIe carries are not told from it by bandwidth


class Speed(Struct, frozen=True, kw_only=True):
    """The speed of the largest operation. `passed_gb_s` is the minimum rate on the path."""

    size_bytes: int
    passed_gb_s: float
    busbw_gb_s: float | None


class Flow(Struct, frozen=True, kw_only=True):
    """The counters, speed and limits of a path in GB/s.

    `ends` are the counters of its GPUs, `most_shares` the maximum shares of each end that the operation can have moved,
    and `foreign_gb_s` the NVLink traffic while this job was idle.
    """

    ends: tuple[Carried, ...]
    speed: Speed | None
    has_nvlinks: bool
    limit_gb_s: float | None
    staged_gb_s: float | None
    most_shares: tuple[float, ...] = ()
    foreign_gb_s: float = 0.0


def most_share(expected: float) -> float:
    """Return the maximum multiple of an end's minimum bytes that may pass it, relative to the operation's size."""
    return _MOST_COPIES * _MOST_FRAMED / expected if expected else inf


def flow_evidence(flow: Flow) -> Evidence:
    """Return the evidence of counters, or else of bandwidth."""
    if not flow.has_nvlinks:
        return Evidence(seen="without NVLinks, counters and bandwidth do not tell direct from staged")
    return _foreign_traffic_evidence(flow) or _counted(flow.ends) or _timed(flow)


def _foreign_traffic_evidence(flow: Flow) -> Evidence | None:
    """Return missing evidence if other traffic moved the counters, which slows copies too. None if nothing shows
    that.
    """
    counted = (end.pcie_share if end.nvlink_share is None else end.nvlink_share for end in flow.ends)
    ends = zip(counted, flow.most_shares, strict=False)
    shares = [share for share, most in ends if share is not None and share > most]
    if shares:
        return Evidence(seen=f"counters moved by {max(shares):.2g} times our bytes: {SOMEBODY_ELSE}")
    if flow.limit_gb_s is not None and flow.foreign_gb_s > FOREIGN_SHARE * flow.limit_gb_s:
        passed = f"{flow.foreign_gb_s:.3g} GB/s passed the NVLinks while this job was idle"
        return Evidence(seen=f"{passed}: {SOMEBODY_ELSE}")
    return None


def _counted(ends: tuple[Carried, ...]) -> Evidence | None:
    """Return the evidence of both ends' counters. None if they neither clearly moved nor stood still."""
    nvlink = [end.nvlink_share for end in ends if end.nvlink_share is not None]
    if nvlink and min(nvlink) >= MOVED_SHARE:
        return Evidence(State.PRESENT, f"NVLink counters moved by {min(nvlink):.2g} times the bytes that had to pass")
    if nvlink and max(nvlink) < STILL_SHARE:
        return Evidence(State.CONTRADICTING, "NVLink counters, which moved elsewhere in this run, stood still here")
    if nvlink:
        return None
    pcie = [end.pcie_share for end in ends if end.pcie_share is not None and _nvlink_stood_still(end)]
    if pcie and len(pcie) == len(ends) and min(pcie) >= MOVED_SHARE:
        seen = f"PCIe counters moved by {min(pcie):.2g} times the bytes that had to pass, NVLink counters did not"
        return Evidence(State.CONTRADICTING, seen)
    return None


def _nvlink_stood_still(end: Carried) -> bool:
    """True if NVLink counters, which may not work, moved by a negligible share of PCIe's."""
    if end.nvlink_bytes is None or end.pcie_bytes is None:
        return False
    return end.nvlink_bytes < STILL_SHARE * end.pcie_bytes


def _timed(flow: Flow) -> Evidence:
    speed, through_host = flow.speed, flow.staged_gb_s
    if speed is None or through_host is None or flow.limit_gb_s is None:
        return Evidence(seen="nothing was counted, and nothing tells what host memory would carry")
    most = f"the way through host memory carries {through_host:.3g} GB/s at most"
    if speed.passed_gb_s > _ABOVE_HOST * through_host:
        return Evidence(State.PRESENT, f"{speed.passed_gb_s:.3g} GB/s passed, {most}")
    if speed.size_bytes < JUDGED_FROM_BYTES:
        return Evidence(seen=f"nothing was counted, and {format_size(speed.size_bytes)} is too little to tell by time")
    if speed.busbw_gb_s is None:
        return Evidence(seen="nothing was counted, and slower paths may have held this one up")
    if speed.busbw_gb_s < through_host and flow.limit_gb_s > _NARROW * through_host:
        seen = (
            f"{speed.busbw_gb_s:.3g} GB/s at {format_size(speed.size_bytes)}, NVLinks carry {flow.limit_gb_s:g}; {most}"
        )
        return Evidence(State.CONTRADICTING, seen)
    return Evidence(seen=f"nothing was counted, and {speed.busbw_gb_s:.3g} GB/s may be either: {most}")
