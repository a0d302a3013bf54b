"""A machine type: the facts of a healthy machine and the figures it reaches, as one file of `profiles/` has them.

The fields are the keys of the file, as profiles/README.md explains them; `model.profiles.rules` says what holds between
them. GB/s is 1e9 bytes/s, one direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations

from gpubench.model.facts.snapshot import NicKind, NvLink, NvlinkPeer
from gpubench.model.paths.links import nvlink_gb_s, pcie_gb_s

PROFILE_SCHEMA = 1
SHARE = "_share"
TIME = "time_us"
BUSBW = "busbw_gb_s"
P2P_OK = "OK"
_BITS_PER_BYTE = 8
_HOST_COPIES = ("host_to_device", "device_to_host")


class ExpectedKind(StrEnum):
    """The origin of an expected value. A threshold is a floor that somebody set, no figure that was seen."""

    MEASURED = "measured"
    VENDOR = "vendor"
    THRESHOLD = "published threshold"
    DERIVED = "derived"


class Generic(StrEnum):
    """The machines of a profile that names no GPU model; `host` is one without GPUs, and only asked for."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRule:
    """The machines that a profile is for: NVML's names of the GPU model, and how many GPUs are visible.

    `board_gpus` counts the GPUs of the whole board where a part of it is handed out, as clouds do. A `generic` one is
    for models that no other profile names: its `[gpu]` and the rest are an example, with which nothing is compared.
    """

    gpus: tuple[str, ...]
    visible: int
    board_gpus: int | None = None
    generic: Generic | None = None

    @property
    def board(self) -> int:
        """GPUs of the whole board."""
        return self.visible if self.board_gpus is None else self.board_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsSource:
    """The source of a profile's facts, which are all that is no expected value."""

    kind: ExpectedKind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """The GPU model; `pcie_*` is the link as it trains under load; `ecc` and `mig` are missing where it has none.

    `c2c_gb_s` is NVLink-C2C, per direction, where a CPU has that to its GPUs; PCIe is then 0, for it carries nothing.
    With `shared_memory` GPU and CPU have one memory, and what goes through host memory is no slower for it.

    `places` says per GPU what it hangs on, the name of a `[[switch]]`; without it each has a root port of its own.
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
        """Usable GB/s per direction of its PCIe link."""
        return pcie_gb_s(self.pcie_generation, self.pcie_width) or 0.0

    @property
    def host_gb_s(self) -> float:
        """Usable GB/s per direction between it and host memory."""
        return self.c2c_gb_s or self.pcie_gb_s


NO_GPU = GpuKind(name="", compute_capability="", multiprocessors=0, memory_bytes=0, pcie_generation=0, pcie_width=0)
"""The GPU model of a machine that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkKind:
    """The NVLinks of each GPU: all to NVSwitches, or `pairs` of GPUs, each (first, second, links)."""

    version: str
    raw_gb_s: float
    links: int
    to: NvlinkPeer
    switches: int = 0
    pairs: tuple[tuple[int, ...], ...] = ()

    @property
    def link_gb_s(self) -> float:
        """Usable GB/s per direction of one link."""
        return nvlink_gb_s(NvLink(number=0, version=self.version, raw_gb_s=self.raw_gb_s)) or 0.0

    @property
    def pair_links(self) -> int:
        """The most links that one transfer between two GPUs can use: all through a switch, else those of the pair."""
        return self.links if self.to is NvlinkPeer.SWITCH else max((pair[2] for pair in self.pairs), default=0)

    def least_links(self, gpus: int, board: int) -> int:
        """The NVLinks that each GPU has at least to the others, whichever `gpus` of the board's GPUs are there."""
        if gpus < 2 or self.to is NvlinkPeer.SWITCH:
            return self.links if gpus > 1 else 0
        return min(
            sum(links for one, other, links in self.pairs if gpu in (one, other) and {one, other} <= set(part))
            for part in combinations(range(board), gpus)
            for gpu in part
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """The machine around the GPUs. `numa_nodes` of 0: it tells none; `flat_pci`: every device is on the root bus."""

    sockets: int
    cpus: int
    driver: str
    cuda: str
    numa_nodes: int = 0
    virtual_machine: bool = False
    flat_pci: bool = False
    peermem: bool | None = None
    dma_buf: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchKind:
    """A PCIe switch: its NUMA node, its uplink, and the switch it hangs on, if not on the CPU."""

    name: str
    pcie_generation: int
    pcie_width: int
    numa: int | None = None
    above: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NicKindOfMachine:
    """A port of a NIC; `place` as a GPU's. Without a generation it has no PCIe link to speak of (virtio).

    Devices of one `port` share its rate.
    """

    name: str
    kind: NicKind
    rate_gbit_s: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    place: str | None = None
    model: str | None = None
    port: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPeerAccess:
    """NVML's status of peer access between any two GPUs, with the reason where it is not OK.

    `unlinked` is the status of two that no NVLink joins, where others are joined.
    """

    status: str = P2P_OK
    reason: str | None = None
    unlinked: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One expected value.

    `gpus` counts the GPUs of a node that take part (None: all of the profile), `nodes` the nodes; `path` is the path
    class of the pairs that it holds for (None: every pair); `size_bytes` is nccl-tests' size, None for "large messages"
    where the source says no more. `source` is a key of `[sources]`.
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
        """True where NVSwitches did the reduction: busbw may then be above what the links carry."""
        return (self.algorithm or "").upper().startswith("NVLS")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCurve:
    """The times of one collective by size, as `points` of bytes and µs; the rest as in `Expected`."""

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
        """An expected time a point."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainKind:
    """An NVLink domain of several nodes, each of which is what the profile's facts say."""

    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One machine type. `sha256` is of the file's bytes, its first 12 hexadecimal digits.

    `all_expected` and what is found have the points of curves too, `expected` has them not.
    """

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

    def part(self, gpus: int) -> "Profile":
        """The profile of a machine that shows only the first `gpus` of these GPUs.

        A GPU alone has nobody to talk to: its own facts and its copies with host memory are all that is left.
        """
        if not 0 < gpus < self.match.visible:
            return self
        alone = gpus == 1
        pairs = tuple(pair for pair in self.nvlink.pairs if max(pair[:2]) < gpus) if self.nvlink else ()
        return replace(
            self,
            match=replace(self.match, visible=gpus, board_gpus=self.match.board),
            gpu=replace(self.gpu, places=self.gpu.places[:gpus]),
            nvlink=None if alone or self.nvlink is None else replace(self.nvlink, pairs=pairs),
            expected=tuple(
                replace(each, gpus=self.gpus_of(each))
                for each in self.expected
                if not alone or each.quantity.startswith(_HOST_COPIES)
            ),
            curve=() if alone else tuple(replace(each, gpus=each.gpus or self.match.visible) for each in self.curve),
        )

    @property
    def link_gb_s(self) -> float:
        """The most that a GPU can send to its peers, in GB/s: over all its NVLinks, or over PCIe where it has none."""
        return self.nvlink.links * self.nvlink.link_gb_s if self.nvlink else self.gpu.pcie_gb_s

    @property
    def nics_gb_s(self) -> float:
        """GB/s of all NICs together, those that share a port with no more than its rate."""
        ports: dict[str | int, float] = {}
        for number, nic in enumerate(self.nic):
            key = nic.port or number
            ports[key] = max(ports.get(key, 0.0), (nic.rate_gbit_s or 0.0) / _BITS_PER_BYTE)
        return sum(ports.values())

    def domain_as_node(self, nodes: int | None = None) -> "Profile":
        """A domain, or so many nodes of it, as one node of all its GPUs and NICs; itself where there is none.

        What is expected of as many nodes as the domain has is expected of any part of it, at the same busbw.
        """
        if self.domain is None:
            return self
        whole = self.domain.nodes
        nodes = nodes or whole
        return replace(
            self,
            domain=None,
            match=replace(self.match, visible=nodes * self.match.visible),
            nic=nodes * self.nic,
            expected=tuple(
                replace(each, nodes=1, gpus=(nodes if each.nodes == whole else 1) * self.gpus_of(each))
                for each in self.expected
                if each.nodes == whole or (each.nodes == 1 and not each.quantity.endswith((TIME, BUSBW)))
            ),
        )

    @property
    def all_expected(self) -> tuple[Expected, ...]:
        """Every expected value, those of curves last."""
        return (*self.expected, *(point for each in self.curve for point in each.expected))

    def gpus_of(self, expected: Expected) -> int:
        """GPUs of a node that an expected value is for."""
        return self.match.visible if expected.gpus is None else expected.gpus

    def typical(self, quantity: str, path: str | None = None) -> float | None:
        """The figure of healthy machines on one node; a threshold is a floor and no expectation.

        For pairs of a path class the figure of that class, else of any pair; None where there is none.
        """
        found = [each for each in self.find(quantity) if each.kind is not ExpectedKind.THRESHOLD]
        ranked = [each for wanted in (path, None) for each in found if each.path == wanted]
        return ranked[0].value if ranked else None

    def find(self, quantity: str, *, gpus: int | None = None, nodes: int = 1) -> tuple[Expected, ...]:
        """Every expected value of a quantity for that many GPUs a node (None: any number) and nodes."""
        points = (point for each in self.curve if f"{each.collective}.{TIME}" == quantity for point in each.expected)
        return tuple(
            each
            for each in (*self.expected, *points)
            if each.quantity == quantity and each.nodes == nodes and gpus in (None, self.gpus_of(each))
        )
