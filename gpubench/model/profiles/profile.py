"""The schema of a profile, which has facts and expected values of a healthy machine, and its validation.

Fields are the keys of the file (docs/reference/profiles.md). GB/s means 1e9 bytes/s per direction.
"""

import math
import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from itertools import combinations

from msgspec import field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import NicKind, NvLink, NvlinkPeer
from gpubench.model.paths.topology import XGMI_LINK, nvlink_gb_s, pcie_gb_s
from gpubench.model.results.speed import LARGE_BYTES
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, plural

PROFILE_SCHEMA = 1
SHARE = "_share"
TIME = "time_us"
BUSBW = "busbw_gb_s"
P2P_OK = "OK"
_BITS_PER_BYTE = 8


class ExpectedKind(StrEnum):
    """The origin of an expected value. A THRESHOLD is a published minimum, not a measurement."""

    MEASURED = "measured"
    VENDOR = "vendor"
    THRESHOLD = "published threshold"
    DERIVED = "derived"


class Generic(StrEnum):
    """The machines that a generic profile, which names no GPU model, applies to.

    HOST is for machines without GPUs, and must be requested by name.
    """

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"


class MatchRule(Struct, frozen=True, kw_only=True):
    """The machines that a profile applies to.

    - gpus: names of the GPU model in NVML
    - visible: number of visible GPUs
    - board_gpus: number of GPUs of the whole board, if the machine has only a part of it
    """

    gpus: tuple[str, ...]
    visible: int
    board_gpus: int | None = None
    generic: Generic | None = None

    @property
    def board(self) -> int:
        return self.visible if self.board_gpus is None else self.board_gpus

    def covers(self, models: Collection[str]) -> bool:
        """True if the profile applies to all these GPU models.

        Names without 'NVIDIA' match too, since drivers before 470 and many users omit it.
        """
        return {*models} <= {*self.gpus, *(name.removeprefix("NVIDIA ") for name in self.gpus)}


class FactsSource(Struct, frozen=True, kw_only=True):
    """The source of all facts in a profile. Expected values have sources of their own."""

    kind: ExpectedKind
    source: str


class GpuKind(Struct, frozen=True, kw_only=True):
    """The GPU model.

    - pcie_generation, pcie_width: PCIe link under load, 0 if NVLink-C2C replaces it
    - shared_memory: True if GPU and CPU share one memory
    - places: name of the PCIe switch above each GPU, empty if each GPU has a root port of its own
    """

    name: str
    compute_capability: str
    multiprocessors: int
    memory_bytes: int
    pcie_generation: int
    pcie_width: int
    c2c_gb_s: float | None = None
    shared_memory: bool = False
    bar1_bytes: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    places: tuple[str, ...] = ()

    @property
    def pcie_gb_s(self) -> float:
        return pcie_gb_s(self.pcie_generation, self.pcie_width) or 0.0

    @property
    def host_gb_s(self) -> float:
        return self.c2c_gb_s or self.pcie_gb_s


NO_GPU = GpuKind(name="", compute_capability="", multiprocessors=0, memory_bytes=0, pcie_generation=0, pcie_width=0)


class NvlinkKind(Struct, frozen=True, kw_only=True):
    """The NVLinks of each GPU. If there are no NVSwitches, `pairs` has the first GPU, second GPU and number of
    links.
    """

    version: str
    raw_gb_s: float
    links: int
    to: NvlinkPeer
    switches: int = 0
    pairs: tuple[tuple[int, ...], ...] = ()

    @property
    def label(self) -> str:
        return self.version if self.version == XGMI_LINK else f"NVLink {self.version}"

    @property
    def link_gb_s(self) -> float:
        return nvlink_gb_s(NvLink(number=0, version=self.version, raw_gb_s=self.raw_gb_s)) or 0.0

    @property
    def pair_links(self) -> int:
        """Maximum number of NVLinks that a transfer between two GPUs can use."""
        return self.links if self.to is NvlinkPeer.SWITCH else max((pair[2] for pair in self.pairs), default=0)

    def least_links(self, gpus: int, board: int) -> int:
        """Return the minimum number of NVLinks that a GPU has to other visible GPUs.

        The minimum is over all selections of `gpus` GPUs from a board with `board` GPUs.
        """
        if gpus < 2 or self.to is NvlinkPeer.SWITCH:
            return self.links if gpus > 1 else 0
        return min(
            sum(links for one, other, links in self.pairs if gpu in (one, other) and {one, other} <= set(part))
            for part in combinations(range(board), gpus)
            for gpu in part
        )


class NodeKind(Struct, frozen=True, kw_only=True):
    """The machine around the GPUs.

    - numa_nodes: number of NUMA nodes, 0 if the machine shows no NUMA information
    - flat_pci: True if every device is on the root bus
    """

    sockets: int
    cpus: int
    driver: str
    cuda: str
    numa_nodes: int = 0
    virtual_machine: bool = False
    flat_pci: bool = False
    peermem: bool | None = None
    dma_buf: bool | None = None


class SwitchKind(Struct, frozen=True, kw_only=True):
    """A PCIe switch with its uplink, its NUMA node, and the name of the switch above it, if any."""

    name: str
    pcie_generation: int
    pcie_width: int
    numa: int | None = None
    above: str | None = None


class NicKindOfMachine(Struct, frozen=True, kw_only=True):
    """A NIC port. `place` names the PCIe switch above it. NICs with the same physical `port` share its rate."""

    name: str
    kind: NicKind
    rate_gbit_s: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    place: str | None = None
    model: str | None = None
    port: str | None = None


class ExpectedPeerAccess(Struct, frozen=True, kw_only=True):
    """The peer access status that NVML reports on a healthy machine, and the reason if it is refused.

    `unlinked` is the status of GPU pairs without NVLinks, if it differs.
    """

    status: str = P2P_OK
    reason: str | None = None
    unlinked: str | None = None


class Expected(Struct, frozen=True, kw_only=True):
    """One expected value.

    - gpus: number of GPUs per node that it applies to, None for all GPUs of the profile
    - nodes: number of nodes that it applies to
    - path: path class of the GPU pair, None for every path
    - size_bytes: message size as in nccl-tests, None for large messages
    - source: key of an entry in `[sources]`
    """

    quantity: str
    value: float
    kind: ExpectedKind
    source: str
    gpus: int | None = None
    nodes: int = 1
    path: str | None = None
    size_bytes: int | None = None
    nccl: str | None = None
    algorithm: str | None = None
    note: str | None = None

    @property
    def nvls(self) -> bool:
        """True if NVSwitches reduce the data (NVLS), so busbw may exceed the links' bandwidth."""
        return (self.algorithm or "").upper().startswith("NVLS")


class TimeCurve(Struct, frozen=True, kw_only=True):
    """Expected times of a collective for several sizes. Each of `points` has a size in bytes and a time in µs.

    The other fields have the same meaning as in `Expected`.
    """

    collective: str
    points: tuple[tuple[float, ...], ...]
    kind: ExpectedKind
    source: str
    gpus: int | None = None
    nccl: str | None = None
    algorithm: str | None = None
    note: str | None = None

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The points of the curve as expected values."""
        return tuple(
            Expected(
                quantity=f"{self.collective}.{TIME}",
                value=time_us,
                kind=self.kind,
                source=self.source,
                gpus=self.gpus,
                size_bytes=int(size_bytes),
                nccl=self.nccl,
                algorithm=self.algorithm,
                note=self.note,
            )
            for size_bytes, time_us in self.points
        )


class DomainKind(Struct, frozen=True, kw_only=True):
    """An NVLink domain of several nodes. The other facts in its profile describe a single node."""

    nodes: int


class Profile(Struct, frozen=True, kw_only=True):
    """One machine type. `sha256` holds the first 12 hex digits of the hash of its file."""

    schema: int
    name: str
    title: str
    match: MatchRule
    facts: FactsSource
    node: NodeKind
    gpu: GpuKind = NO_GPU
    note: str | None = None
    nvlink: NvlinkKind | None = None
    domain: DomainKind | None = None
    peer_access: ExpectedPeerAccess = ExpectedPeerAccess()
    switch: tuple[SwitchKind, ...] = ()
    nic: tuple[NicKindOfMachine, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[Expected, ...] = ()
    curve: tuple[TimeCurve, ...] = ()
    sha256: str = ""

    def first_gpus(self, gpus: int) -> "Profile":
        """Return the profile for a machine with only the first `gpus` GPUs of this one."""
        if not 0 < gpus < self.match.visible:
            return self
        single = gpus == 1
        return replace(
            self,
            match=replace(self.match, visible=gpus, board_gpus=self.match.board),
            gpu=replace(self.gpu, places=self.gpu.places[:gpus]),
            nvlink=None if single else self.nvlink,
            expected=tuple(
                replace(expected, gpus=self.gpus_per_node(expected))
                for expected in self.expected
                if not single or expected.quantity.startswith(("host_to_device", "device_to_host"))
            ),
            curve=() if single else self._sized_curves,
        )

    @property
    def link_gb_s(self) -> float:
        """Maximum bandwidth in GB/s from a GPU to its peers, over all its NVLinks. Without NVLinks, that of its
        PCIe link.
        """
        return self.nvlink.links * self.nvlink.link_gb_s if self.nvlink else self.gpu.pcie_gb_s

    def carried_gb_s(self, collective: str, gpus: int) -> float:
        """Return the maximum bandwidth in GB/s of a GPU for a collective on the first `gpus` GPUs.

        It is the bandwidth between the GPU with the fewest links and the others. For sendrecv, only links to the next
        GPU count.
        """
        nvlink = self.nvlink
        if nvlink is None or nvlink.to is NvlinkPeer.SWITCH or gpus < 2:
            return self.link_gb_s
        links = {frozenset(pair[:2]): pair[2] for pair in nvlink.pairs if max(pair[:2]) < gpus}
        if collective == "sendrecv":
            fewest = min(links.get(frozenset((gpu, (gpu + 1) % gpus)), 0) for gpu in range(gpus))
            return fewest * nvlink.link_gb_s or self.gpu.host_gb_s
        fewest = min(sum(count for pair, count in links.items() if gpu in pair) for gpu in range(gpus))
        pcie_gb_s = 0.0 if len(links) == math.comb(gpus, 2) else self.gpu.host_gb_s
        return fewest * nvlink.link_gb_s + pcie_gb_s

    @property
    def nics_gb_s(self) -> float:
        """Bandwidth of all NICs together in GB/s. NICs on the same physical port share its rate."""
        ports: dict[str | int, float] = {}
        for number, nic in enumerate(self.nic):
            key = nic.port or number
            ports[key] = max(ports.get(key, 0.0), (nic.rate_gbit_s or 0.0) / _BITS_PER_BYTE)
        return sum(ports.values())

    def merge_nodes(self, nodes: int | None = None) -> "Profile":
        """Return the NVLink domain as one node that has the GPUs and NICs of `nodes` nodes, or of all nodes of the
        domain.
        """
        if self.domain is None:
            return self
        nodes = nodes or self.domain.nodes
        return replace(
            self,
            domain=None,
            match=replace(self.match, visible=nodes * self.match.visible),
            nic=nodes * self.nic,
            expected=tuple(
                replace(expected, nodes=1, gpus=expected.nodes * self.gpus_per_node(expected))
                for expected in self.expected
            ),
            curve=self._sized_curves,
        )

    @property
    def _sized_curves(self) -> tuple[TimeCurve, ...]:
        """The curves with an explicit number of GPUs, even if the profile omits it."""
        return tuple(replace(curve, gpus=curve.gpus or self.match.visible) for curve in self.curve)

    def split_into_domains(self, nodes: int) -> "Profile":
        """Return the profile for a job on `nodes` nodes, split into as few NVLink domains of equal size as possible."""
        if self.domain is None:
            return self
        size = next(size for size in range(min(nodes, self.domain.nodes), 0, -1) if nodes % size == 0)
        return self.resize_domains(size) if 1 < size < nodes else self

    def resize_domains(self, nodes: int) -> "Profile":
        """Return the profile with `nodes` nodes per NVLink domain. Expected values are unchanged."""
        return self if self.domain is None else replace(self, domain=replace(self.domain, nodes=nodes))

    @property
    def all_expected(self) -> tuple[Expected, ...]:
        """All expected values, including the points of curves."""
        return (*self.expected, *(point for curve in self.curve for point in curve.expected))

    def gpus_per_node(self, expected: Expected) -> int:
        """Return the number of GPUs per node that an expected value applies to."""
        return self.match.visible if expected.gpus is None else expected.gpus

    def typical(self, quantity: str, path: str | None = None) -> float | None:
        """Return the expected value of a quantity on one node, without published thresholds.

        Prefer a value for this path class to one for every path. Return None if there is neither.
        """
        found = [expected for expected in self.find(quantity) if expected.kind is not ExpectedKind.THRESHOLD]
        ranked = [expected for wanted in (path, None) for expected in found if expected.path == wanted]
        return ranked[0].value if ranked else None

    def find(self, quantity: str, *, gpus: int | None = None, nodes: int = 1) -> tuple[Expected, ...]:
        """Return expected values of a quantity for a number of nodes and of GPUs per node. If `gpus` is None, any
        number matches.
        """
        points = (point for curve in self.curve if f"{curve.collective}.{TIME}" == quantity for point in curve.expected)
        return tuple(
            expected
            for expected in (*self.expected, *points)
            if (expected.quantity, expected.nodes) == (quantity, nodes) and gpus in (None, self.gpus_per_node(expected))
        )


P2P_STATUSES = (P2P_OK, "CNS", "GNS", "TNS", "DR", "NS", "U")  # In the order of the enum `nvmlGpuP2PStatus_t`
COPY_QUANTITIES = (
    "p2p.write_gb_s",
    "p2p.read_gb_s",
    "p2p.sm_write_gb_s",
    "p2p.bidirectional_gb_s",
    "p2p.latency_us",
    "p2p.staged_gb_s",
    "p2p.staged_latency_us",
    "host_to_device_gb_s",
    "device_to_host_gb_s",
)
"""Quantities of copies. Copy engines do `write` and `read`. `bidirectional` is the sum of both directions."""

SHARE_QUANTITIES = (
    "p2p.write_share",
    "p2p.read_share",
    "host_to_device_share",
    "device_to_host_share",
    "allreduce.busbw_share",
)
"""Quantities of generic profiles, as a share (0 to 1) of the machine's limit."""

LEAST_SHARE = 0.4  # Lowest plausible share of the limit, since host-staged transfers over PCIe reach 43 %
LEAST_LATENCY_US, MOST_LATENCY_US = 0.1, 1000.0  # Small copies take 2 µs on an H200 if direct, and 20 µs if host-staged
LEAST_TIME_US = 1.0  # The fastest known collective takes 5 µs (2 H200), since a kernel has to start
_ANOTHER_UNIT = "a unit other than µs"


def check_profile(profile: Profile, where: str) -> None:
    """Raise UsageError for the first impossible value. The message names the file (`where`) and the key."""
    if profile.schema != PROFILE_SCHEMA:
        raise UsageError(
            f"{where}.schema is {profile.schema}",
            expected=f"schema {PROFILE_SCHEMA}",
            reason="the file was written for another version of gpubench",
        )
    if profile.match.visible or profile.gpu is not NO_GPU:
        _check_gpus(profile, where)
    elif profile.match.generic is not Generic.HOST:
        raise UsageError(f"{where} has no [gpu]", expected='one, or match.generic = "host"')
    _check_counts({"node.sockets": profile.node.sockets, "node.cpus": profile.node.cpus}, where)
    if profile.domain is not None:
        _check_counts({"domain.nodes": profile.domain.nodes}, where)
    _check_nvlink(profile, where)
    _check_places(profile, where)
    for number, expected in enumerate(profile.expected):
        check_expected(profile, expected, f"{where}.expected[{number}] ({expected.quantity})")
    for number, curve in enumerate(profile.curve):
        _check_curve(profile, curve, f"{where}.curve[{number}] ({curve.collective})")
    unused = sorted(set(profile.sources) - {expected.source for expected in profile.all_expected})
    if unused:
        raise UsageError(
            f"{where}.sources.{unused[0]} is not used by any expected value", next_step="remove it, or use it"
        )


def ceiling_gb_s(profile: Profile, expected: Expected) -> float | None:
    """Return the maximum bandwidth that the profile's links allow for this quantity, or None if it is no bandwidth.

    For a collective with n GPUs on k nodes, it is the bandwidth of one GPU's links. With NVLS, data is sent once
    instead of 2(n-1)/(n+1) times, so the maximum is higher by this factor. Between nodes, a hierarchical algorithm can
    reach the NIC bandwidth per GPU × (n-1)/(k-1).
    """
    if not expected.quantity.endswith("_gb_s"):
        return None
    if expected.quantity.endswith(f".{BUSBW}"):
        return _busbw_ceiling(profile, expected)
    if expected.quantity == "p2p.staged_gb_s" or not expected.quantity.startswith("p2p."):
        return profile.gpu.host_gb_s
    pair_gb_s, nvlink, path = profile.gpu.pcie_gb_s, profile.nvlink, expected.path
    if nvlink is not None and path is None:
        pair_gb_s = nvlink.pair_links * nvlink.link_gb_s
    elif nvlink is not None and (found := re.fullmatch(r"NV([1-9]\d*)", path or "", re.ASCII)):
        pair_gb_s = int(found[1]) * nvlink.link_gb_s
    return pair_gb_s * (2 if expected.quantity == "p2p.bidirectional_gb_s" else 1)


def _busbw_ceiling(profile: Profile, expected: Expected) -> float:
    gpus, nodes = profile.gpus_per_node(expected), expected.nodes
    ranks = gpus * nodes
    collective = expected.quantity.partition(".")[0]
    inside = profile.carried_gb_s(collective, gpus) * (2 * (ranks - 1) / (ranks + 1) if expected.nvls else 1)
    if nodes == 1 or (profile.domain is not None and nodes <= profile.domain.nodes):
        return inside
    inside = inside if gpus > 1 else math.inf
    return min(inside, profile.nics_gb_s / gpus * (ranks - 1) / (nodes - 1))


def _check_counts(counts: Mapping[str, int], where: str) -> None:
    for key, count in counts.items():
        if count < 1:
            raise UsageError(f"{where}.{key} is {count}", expected="at least 1")


def _check_gpus(profile: Profile, where: str) -> None:
    counts = {
        "match.visible": profile.match.visible,
        "gpu.multiprocessors": profile.gpu.multiprocessors,
        "gpu.memory_bytes": profile.gpu.memory_bytes,
    }
    _check_counts(counts, where)
    if profile.gpu.name not in profile.match.gpus:
        raise UsageError(f"{where}.gpu.name {profile.gpu.name!r} is not among match.gpus")
    if profile.match.board < profile.match.visible:
        raise UsageError(f"{where}.match.board_gpus is {profile.match.board}", expected="at least match.visible")
    if not profile.gpu.host_gb_s:
        raise UsageError(
            f"{where}.gpu.pcie_generation and pcie_width have no known bandwidth", expected="1 to 6, 1 to 16"
        )
    if not re.fullmatch(r"\d+\.\d+", profile.gpu.compute_capability, re.ASCII):
        raise UsageError(
            f"{where}.gpu.compute_capability is {profile.gpu.compute_capability!r}", expected="a version: '9.0'"
        )
    status = profile.peer_access.status
    for key, value in (("status", status), ("unlinked", profile.peer_access.unlinked or P2P_OK)):
        if value not in P2P_STATUSES:
            raise UsageError(f"{where}.peer_access.{key} is {value!r}", expected=f"one of {', '.join(P2P_STATUSES)}")
    if status != P2P_OK and not profile.peer_access.reason:
        raise UsageError(f"{where}.peer_access has no reason", expected="why a healthy machine refuses peer access")


def _check_nvlink(profile: Profile, where: str) -> None:
    nvlink = profile.nvlink
    if nvlink is None:
        return
    if not nvlink.link_gb_s or nvlink.links < 1:
        raise UsageError(f"{where}.nvlink has no known bandwidth", expected="links, and a known version or raw_gb_s")
    if nvlink.to is NvlinkPeer.SWITCH:
        if nvlink.pairs or nvlink.switches < 1:
            raise UsageError(
                f"{where}.nvlink leads to switches", expected="the number of switches in `switches`, and no `pairs`"
            )
        return
    used = [0] * profile.match.visible
    for pair in nvlink.pairs:
        if len(pair) != 3 or pair[0] == pair[1] or not all(0 <= gpu < len(used) for gpu in pair[:2]) or pair[2] < 1:
            raise UsageError(f"{where}.nvlink.pairs has {list(pair)}", expected="[first GPU, second GPU, links]")
        for gpu in pair[:2]:
            used[gpu] += pair[2]
    if not nvlink.pairs or max(used) > nvlink.links:
        raise UsageError(f"{where}.nvlink.pairs uses {used} links by GPU", expected=f"1 to {nvlink.links} per GPU")


def _check_places(profile: Profile, where: str) -> None:
    above: dict[str, str | None] = {}
    for number, switch in enumerate(profile.switch):
        key = f"{where}.switch[{number}]"
        if switch.name in above:
            raise UsageError(f"{key}.name {switch.name!r} is duplicated")
        if switch.above is not None and switch.above not in above:
            raise UsageError(
                f"{key}.above is {switch.above!r}", expected="the name of a switch that precedes it in the file"
            )
        numa_nodes = profile.node.numa_nodes
        if switch.numa is not None and not 0 <= switch.numa < numa_nodes:
            raise UsageError(f"{key}.numa is {switch.numa}", expected=f"below {numa_nodes}, node.numa_nodes")
        above[switch.name] = switch.above
    places, gpus = profile.gpu.places, profile.match.visible
    if places and len(places) != gpus:
        raise UsageError(f"{where}.gpu.places has {len(places)} entries", expected=f"{gpus}, one per GPU")
    named = {f"gpu.places[{i}]": place for i, place in enumerate(places)}
    named |= {f"nic[{i}].place": nic.place for i, nic in enumerate(profile.nic) if nic.place is not None}
    for key, place in named.items():
        if place not in above:
            raise UsageError(f"{where}.{key} is {place!r}", expected="the name of a [[switch]]")
    names = [nic.name for nic in profile.nic]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"{where}.nic {twice[0]!r} is duplicated")


def _check_curve(profile: Profile, curve: TimeCurve, where: str) -> None:
    """Raise UsageError unless each point has a size and a time, and larger sizes take no less time."""
    if not curve.points or any(len(point) != 2 or point[0] % 1 for point in curve.points):
        raise UsageError(f"{where}.points are not valid", expected="[size in bytes, µs], at least one")
    sizes, times = zip(*curve.points, strict=True)
    if list(sizes) != sorted(set(sizes)) or list(times) != sorted(times):
        raise UsageError(
            f"{where}.points are not in ascending order", expected="ascending sizes, with times that do not decrease"
        )
    for size_bytes, expected in zip(sizes, curve.expected, strict=True):
        check_expected(profile, expected, f"{where}, the point of {size_bytes:.0f} bytes,")


def check_expected(profile: Profile, expected: Expected, where: str) -> None:
    """Raise UsageError for a value that no machine with this profile could reach, or that every machine would
    exceed.
    """
    copies = (*COPY_QUANTITIES, *(SHARE_QUANTITIES if profile.match.generic else ()))
    is_collective = re.fullmatch(r"[a-z][a-z0-9_]*\.(?:time_us|busbw_gb_s)", expected.quantity, re.ASCII) is not None
    is_collective = is_collective and expected.quantity not in copies
    if not is_collective and expected.quantity not in copies:
        raise UsageError(
            f"{where} is not a quantity",
            expected=f"<collective>.{TIME}, <collective>.{BUSBW}, {', '.join(copies)}",
            reason="shares are for profiles with match.generic" if expected.quantity in SHARE_QUANTITIES else "",
        )
    if expected.source not in profile.sources:
        raise UsageError(f"{where}.source {expected.source!r} is not in [sources]", expected=", ".join(profile.sources))
    if not 0 < expected.value < float("inf"):
        raise UsageError(f"{where}.value is {expected.value}", expected="a number above 0")
    if not 1 <= profile.gpus_per_node(expected) <= profile.match.visible or expected.nodes < 1:
        raise UsageError(
            f"{where} is for {plural(profile.gpus_per_node(expected), 'GPU')} of {plural(expected.nodes, 'node')}",
            expected=f"1 to {profile.match.visible} GPUs of at least one node",
        )
    if is_collective:
        _check_collective(profile, expected, where)
    if expected.path is not None and not expected.quantity.startswith("p2p."):
        raise UsageError(f"{where}.path is {expected.path!r}", expected="no path, because only pairs of GPUs have one")
    _check_range(profile, expected, where)


def _check_range(profile: Profile, expected: Expected, where: str) -> None:
    """Raise UsageError for a value above the limit, or so low that every machine exceeds it. Either suggests a
    wrong unit.
    """
    if expected.quantity.endswith(SHARE) and not LEAST_SHARE <= expected.value <= 1:
        raise UsageError(f"{where}.value is {expected.value:g}", expected=f"a share of the limit, {LEAST_SHARE:g} to 1")
    if expected.quantity.endswith("latency_us") and not LEAST_LATENCY_US <= expected.value <= MOST_LATENCY_US:
        raise UsageError(
            f"{where}.value is {expected.value:g} µs",
            expected=f"{LEAST_LATENCY_US:g} to {MOST_LATENCY_US:g} µs",
            reason=_ANOTHER_UNIT,
        )
    ceiling = ceiling_gb_s(profile, expected)
    if ceiling is None:
        return
    is_large = expected.size_bytes is None or expected.size_bytes >= LARGE_BYTES
    # With 5 to 7 of 8 MI355X, RCCL's rings use one link of each GPU: 38 GB/s.
    is_mesh = profile.nvlink is not None and profile.nvlink.to is NvlinkPeer.GPU
    is_part_of_mesh = is_mesh and profile.gpus_per_node(expected) < profile.match.board
    judged = expected.quantity != "p2p.staged_gb_s" and expected.nodes == 1 and is_large and not is_part_of_mesh
    if judged and expected.value < LEAST_SHARE * ceiling:
        raise UsageError(
            f"{where}.value is {expected.value:g} GB/s",
            expected=f"at least {LEAST_SHARE * ceiling:g} GB/s, {LEAST_SHARE:.0%} of the limit of the profile's links",
            reason="a value that no machine can miss, or a unit other than GB/s of 1e9 bytes",
        )
    if expected.value > ceiling:
        raise UsageError(
            f"{where}.value is {expected.value:g} GB/s",
            expected=f"at most {ceiling:g} GB/s, the limit of this profile's links",
            reason="a sum of both directions, another number of nodes, or NVLS without `algorithm`",
        )


def _check_collective(profile: Profile, expected: Expected, where: str) -> None:
    ranks = profile.gpus_per_node(expected) * expected.nodes
    if ranks < 2:
        raise UsageError(f"{where} is for one GPU", expected="at least 2, because a collective moves data between GPUs")
    if expected.size_bytes is not None and expected.size_bytes < 1:
        raise UsageError(f"{where}.size_bytes is {expected.size_bytes}", expected="at least 1")
    if not expected.quantity.endswith(f".{TIME}"):
        return
    if expected.size_bytes is None:
        raise UsageError(f"{where} has no size_bytes", expected="the size for this time")
    # In every collective, the busiest GPU sends at least this share of the size over its links.
    least_bytes = expected.size_bytes * (ranks - 1) / ranks
    ceiling = _busbw_ceiling(profile, expected)
    least_us = least_bytes / (ceiling * BYTES_PER_GB) * MICROSECONDS_PER_SECOND if ceiling else float("inf")
    if expected.value < max(least_us, LEAST_TIME_US):
        needs = "the links of this profile need" if least_us > LEAST_TIME_US else "every collective needs"
        raise UsageError(
            f"{where}.value is {expected.value:g} µs",
            expected=f"at least {max(least_us, LEAST_TIME_US):.1f} µs, which {needs}",
            reason=_ANOTHER_UNIT,
        )
    # All-reduce has the largest ratio of busbw to algbw, which approaches 2.
    slowest = expected.size_bytes * 2 / (LEAST_SHARE * ceiling * BYTES_PER_GB)
    most_us = MOST_LATENCY_US + slowest * MICROSECONDS_PER_SECOND
    if expected.nodes == 1 and expected.value > most_us:
        raise UsageError(
            f"{where}.value is {expected.value:g} µs",
            expected=f"at most {most_us:.4g} µs, at {LEAST_SHARE:.0%} of the limit of the profile's links",
            reason=_ANOTHER_UNIT,
        )
