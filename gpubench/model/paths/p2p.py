"""Compare measured copies with limits and similar pairs, and find out which path the copies took."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

from msgspec.structs import replace

from gpubench.model.facts.traffic import FOREIGN_SHARE
from gpubench.model.paths.transport import Evidence, State, Transport
from gpubench.model.terms.operation import Direction, Engine
from gpubench.model.terms.plain import Bytes, Count, MeasuredSeconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import format_bandwidth, format_size, group_by

Pair = tuple[int, int]

JUDGED_FROM_BYTES = 64 * 2**20  # Smaller copies depend on the latency, which differs between machines.


def is_large_copy(size_bytes: int | None) -> bool:
    """True if a copy is large enough that its bandwidth depends only on the links."""
    return (size_bytes or 0) >= JUDGED_FROM_BYTES


LATENCY_BYTES = 16  # The time of a copy of this size counts as latency, as in NVIDIA's p2pBandwidthLatencyTest.
SLOW_SHARE, FAILED_SHARE = 0.9, 0.75
"""Shares of the bandwidth of similar pairs or of healthy machines. Warn below the first and fail below the second.

Copy engines of four H200s differ by 0.1 %.
"""

LIMIT_WARN_SHARE, LIMIT_FAIL_SHARE = 0.6, 0.4
"""Shares of the physical limit to warn and fail below, if there are no similar pairs and no profile.

Copies reach 80 to 92 % of the limit, and 69 to 72 % between PCIe 4 root ports
(https://github.com/NVIDIA/nvbandwidth/issues/50).
"""

ABOVE_HOST = 1.2  # A bandwidth that exceeds the limit through host memory by this factor proves a direct path.
MOVED_SHARE, STILL_SHARE = 0.5, 0.1
"""Counted bytes as a share of the copied bytes. Below the first share, the links were not on the path. Below the
second share, the links were idle.
"""

MOST_SHARE = 1.1
"""If counters exceed the copied bytes by this factor, the links also carried other traffic.

NVLink counters count exactly the copied bytes, and PCIe counters up to 1.094 times as many.
"""

SOMEBODY_ELSE = "another program uses these links"


class Series(Struct, frozen=True):
    """A matrix of copies with one size, engine and direction. `peer` is false if peer access is off.

    `network` is true if NCCL sends the data.
    """

    engine: Engine
    direction: Direction
    peer: bool
    size_bytes: Bytes
    network: bool = False

    @property
    def name(self) -> str:
        """The name of the series in sections: 'ce write', 'ce write peer off', 'nccl'."""
        if self.network:
            return "nccl"
        return f"{self.engine} {self.direction}" + ("" if self.peer else " peer off")

    @property
    def is_large(self) -> bool:
        return is_large_copy(self.size_bytes)

    @property
    def is_judged(self) -> bool:
        """True if the pairs of this series get verdicts."""
        return self.peer and self.is_large

    @property
    def quantity(self) -> str | None:
        """The profile quantity to compare the bandwidth with. None if profiles have none."""
        if self.network:
            return None
        if not self.peer:
            return "p2p.staged_gb_s" if self.engine is Engine.CE and self.direction is Direction.WRITE else None
        if self.engine is Engine.SM:
            return "p2p.sm_write_gb_s" if self.direction is Direction.WRITE else None
        names = {Direction.WRITE: "p2p.write_gb_s", Direction.READ: "p2p.read_gb_s"}
        return names.get(self.direction, "p2p.bidirectional_gb_s")


class Carried(Struct, frozen=True):
    """Bytes that one GPU's links carried, and their ratio to the copied bytes. None if they were not counted."""

    nvlink_bytes: int | None = None
    nvlink_share: float | None = None
    pcie_bytes: int | None = None
    pcie_share: float | None = None


class Cell(Struct, frozen=True):
    """The measurement of one pair of GPUs in a series.

    Each value in `seconds` is the mean time of one copy. `carried` belongs to the last value. `transports` are NCCL's
    transports, slowest first, if NCCL sends the data.
    """

    seconds: tuple[MeasuredSeconds, ...] = ()
    wrong: Count | None = None
    carried: Carried = Carried()
    error: str | None = None
    transports: tuple[Transport, ...] = ()

    @property
    def is_staged(self) -> bool | None:
        """True if the counters show host staging. None if they are inconclusive, for example because of other
        traffic.
        """
        carried = self.carried
        if carried.nvlink_share is not None and carried.nvlink_share <= MOST_SHARE:
            return carried.nvlink_share < MOVED_SHARE
        return False if carried.pcie_share is not None and carried.pcie_share < STILL_SHARE else None

    @property
    def typical_seconds(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The range of the times, divided by their median."""
        return (max(self.seconds) - min(self.seconds)) / self.typical_seconds

    def extended(self, more: "Cell") -> "Cell":
        """Add the times, wrong elements and error from a repeated measurement."""
        if more.error:
            return more
        wrong = None if self.wrong is None or more.wrong is None else self.wrong + more.wrong
        return replace(more, seconds=(*self.seconds, *more.seconds), wrong=wrong, transports=self.transports)


def upper_quartile(figures: Sequence[float]) -> float:
    """Return the upper quartile, which serves as the usual value. The median does not, because one bad GPU of four
    slows half of all pairs.
    """
    return sorted(figures, reverse=True)[len(figures) // 4]


AS_SLOW_AS_STAGED = "copies are as slow as without peer access"  # Observation for a pair if `looks_staged` is true


def looks_staged(on: Cell, off: Cell, latency_on: Cell | None, latency_off: Cell | None, *, outruns_host: bool) -> bool:
    """True if copies with peer access (`on`) seem to be host-staged.

    Their bandwidth is then that of copies without peer access (`off`), and the latency confirms it. Without latencies,
    the bandwidth decides, but only if direct copies are faster than host memory (`outruns_host`).
    """
    # With peer access on, host-staged copies are at most 15 % faster than with peer access off.
    if not (on.seconds and off.seconds) or off.typical_seconds / on.typical_seconds > 1.15:
        return False
    if latency_on is None or latency_off is None or not (latency_on.seconds and latency_off.seconds):
        return outruns_host
    return not is_direct_latency(latency_on, latency_off)


def is_direct_latency(on: Cell, off: Cell) -> bool:
    """True if a small copy with peer access (`on`) takes at most half the time of one without (`off`), so it must
    be direct.

    On H200, 16 bytes take 2.2 µs directly and 12 to 18 µs through host memory. On RTX 3090 they take 1.0 and 15 µs.
    """
    return on.typical_seconds <= off.typical_seconds / 2


class Oddity(Struct, frozen=True):
    """A GPU or a pair that is slower than the others. `role` is sending, receiving, both ways, or pair."""

    role: str
    gpus: tuple[int, ...]
    figure: float
    usual: float


def find_oddities(
    figures: Mapping[Pair, float], gpus: int, paths: Mapping[Pair, str] | None = None
) -> tuple[Oddity, ...]:
    """Find slow GPUs (a slow row or column of the matrix), and slow pairs between other GPUs.

    A pair is slow if its bandwidth is below `SLOW_SHARE` of the usual bandwidth for its path class. A GPU is slow if
    more than half of its pairs are slow.
    """
    if len(figures) < 2:
        return ()
    classes = group_by(figures, lambda pair: (paths or {}).get(pair, ""))
    common: dict[Pair, float] = {}
    for pairs in classes.values():
        common |= dict.fromkeys(pairs, upper_quartile([figures[pair] for pair in pairs]))
    slow = {pair for pair, figure in figures.items() if figure < SLOW_SHARE * common[pair]}

    def slow_gpus(end: int) -> list[int]:
        ends = Counter(pair[end] for pair in figures)
        slow_ends = Counter(pair[end] for pair in slow)
        return [gpu for gpu in range(gpus) if ends[gpu] > 1 and 2 * slow_ends[gpu] > ends[gpu]]

    sending, receiving = slow_gpus(0), slow_gpus(1)
    found = []
    for gpu in sorted({*sending, *receiving}):
        both = gpu in sending and gpu in receiving
        role = "both ways" if both else "sending" if gpu in sending else "receiving"
        own = [pair for pair in slow if (gpu in pair if both else pair[0 if gpu in sending else 1] == gpu)]
        found.append(Oddity(role, (gpu,), median(figures[pair] for pair in own), median(common[pair] for pair in own)))
    explained = {pair for pair in slow if pair[0] in sending or pair[1] in receiving}
    found += [Oddity("pair", pair, figures[pair], common[pair]) for pair in sorted(slow - explained)]
    return tuple(found)


def pairing_rounds(ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """Distribute all unordered pairs over as few rounds as possible. Within a round, no rank occurs twice (circle
    method).
    """
    seats: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    played = []
    for _ in range(len(seats) - 1):
        met = list(zip(seats, reversed(seats), strict=True))[: len(seats) // 2]
        pairs = [(min(one, other), max(one, other)) for one, other in met if one is not None and other is not None]
        played.append(tuple(sorted(pairs)))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return tuple(filter(None, played))


def parse_pairs(texts: Sequence[str]) -> tuple[Pair, ...]:
    """Parse '0-1,3-5' into ordered pairs of driver indices, without duplicates. Raises ValueError."""
    found: dict[Pair, None] = {}
    for pair in (pair.strip() for text in texts for pair in text.split(",")):
        first, dash, second = pair.partition("-")
        if not (dash and first.isdecimal() and second.isdecimal() and int(first) != int(second)):
            raise ValueError(pair)
        found[int(first), int(second)] = None
    return tuple(found)


_MOST_COPIES = 3.0  # In a tree, a rank sends the buffer to its parent and to two children.
_MOST_OVERHEAD = 2.2  # NCCL's protocol LL adds a 4-byte flag to every 4 bytes of data. Allow another 10 %.


class Speed(Struct, frozen=True, kw_only=True):
    """The speed of the largest operation. `passed_gb_s` is a lower bound of the bandwidth on the path."""

    size_bytes: int
    passed_gb_s: float
    busbw_gb_s: float | None


class Flow(Struct, frozen=True, kw_only=True):
    """The counters, speed and limits of a path. Bandwidths are in GB/s.

    - `ends`: counters of the path's GPUs
    - `limit_gb_s`: limit of the direct path
    - `staged_gb_s`: limit through host memory
    - `most_shares`: maximum ratio of counted to expected bytes if no other program uses the links, per GPU
    - `foreign_gb_s`: NVLink traffic while this job was idle
    """

    ends: tuple[Carried, ...]
    speed: Speed | None
    has_nvlinks: bool
    limit_gb_s: float | None
    staged_gb_s: float | None
    most_shares: tuple[float, ...] = ()
    foreign_gb_s: float = 0.0


def most_share(expected: float) -> float:
    """Return the maximum ratio of a GPU's counted bytes to its `expected` bytes. Both are per byte of the operation."""
    return _MOST_COPIES * _MOST_OVERHEAD / expected if expected else inf


def flow_evidence(flow: Flow) -> Evidence:
    """Return the evidence from counters. If they are inconclusive, return the evidence from bandwidth."""
    if not flow.has_nvlinks:
        return Evidence(seen="without NVLinks, counters and bandwidth do not show whether a path is direct")
    return _foreign_traffic_evidence(flow) or _counted(flow.ends) or _timed(flow)


def _foreign_traffic_evidence(flow: Flow) -> Evidence | None:
    """Return absent evidence if other programs used the links. None if nothing indicates their traffic."""
    counted = (end.pcie_share if end.nvlink_share is None else end.nvlink_share for end in flow.ends)
    ends = zip(counted, flow.most_shares, strict=False)
    shares = [share for share, most in ends if share is not None and share > most]
    if shares:
        return Evidence(seen=f"counters show {max(shares):.2g} times the bytes of this job: {SOMEBODY_ELSE}")
    if flow.limit_gb_s is not None and flow.foreign_gb_s > FOREIGN_SHARE * flow.limit_gb_s:
        passed = f"the NVLinks carried {format_bandwidth(flow.foreign_gb_s, 3)} while this job was idle"
        return Evidence(seen=f"{passed}: {SOMEBODY_ELSE}")
    return None


def _counted(ends: tuple[Carried, ...]) -> Evidence | None:
    """Return the evidence from counters. None if they moved too little to be conclusive."""
    nvlink = [end.nvlink_share for end in ends if end.nvlink_share is not None]
    if nvlink and min(nvlink) >= MOVED_SHARE:
        return Evidence(State.PRESENT, f"NVLink counters show {min(nvlink):.2g} times the bytes of this path")
    if nvlink and max(nvlink) < STILL_SHARE:
        return Evidence(
            State.CONTRADICTING,
            "NVLink counters show no traffic here, although they show some on other paths of this run",
        )
    if nvlink:
        return None
    pcie = [
        end.pcie_share
        for end in ends
        if None not in (end.pcie_share, end.nvlink_bytes, end.pcie_bytes)
        # NVLink counters may not work. Trust them to be zero only if the PCIe counters moved far more.
        and (end.nvlink_bytes or 0) < STILL_SHARE * (end.pcie_bytes or 0)
    ]
    moved = min((share for share in pcie if share is not None), default=0.0)
    if len(pcie) == len(ends) and moved >= MOVED_SHARE:
        seen = f"PCIe counters show {moved:.2g} times the bytes of this path, and NVLink counters show no traffic"
        return Evidence(State.CONTRADICTING, seen)
    return None


def _timed(flow: Flow) -> Evidence:
    speed, through_host = flow.speed, flow.staged_gb_s
    if speed is None or through_host is None or flow.limit_gb_s is None:
        return Evidence(seen="there are no counters, and the bandwidth of host memory is unknown")
    most = f"host memory carries at most {format_bandwidth(through_host, 3)}"
    if speed.passed_gb_s > ABOVE_HOST * through_host:
        return Evidence(State.PRESENT, f"{format_bandwidth(speed.passed_gb_s, 3)} measured, but {most}")
    if speed.size_bytes < JUDGED_FROM_BYTES:
        return Evidence(
            seen=f"there are no counters, and {format_size(speed.size_bytes)} is too small to judge by time"
        )
    if speed.busbw_gb_s is None:
        return Evidence(seen="there are no counters, and this path may have been held up by slower ones")
    # Bandwidth proves a path over PCIe only if the NVLinks are more than twice as fast.
    if speed.busbw_gb_s < through_host and flow.limit_gb_s > 2 * through_host:
        seen = f"{format_bandwidth(speed.busbw_gb_s, 3)} at {format_size(speed.size_bytes)}"
        return Evidence(
            State.CONTRADICTING, f"{seen}, but NVLinks carry {format_bandwidth(flow.limit_gb_s, 3)}; {most}"
        )
    return Evidence(
        seen=f"there are no counters, and {format_bandwidth(speed.busbw_gb_s, 3)} may be either path: {most}"
    )
