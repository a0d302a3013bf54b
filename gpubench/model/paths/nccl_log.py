"""Facts from NCCL's log of a job: communicators with their ranks and connections, and explanatory remarks.

A job of a thousand ranks has a million pairs but few distinct sets of channels. Equal sets are one object.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from statistics import median

from msgspec import Struct, field

from gpubench.model.paths.hang import Hang, ProcessStack, RankRecord, RasCommunicator
from gpubench.model.paths.transport import LoggedChannels, Route, Transport, TransportKind, Tuning, routes
from gpubench.model.terms.operation import algbw_gb_s, all_but_own_factor, ring_allreduce_factor, whole_factor
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, group_by

MOST_CHANNELS = 1024  # NCCL has 64. Larger numbers come from garbled lines.

_MOST_TRANSPORTS = 4096
_ONE_TOO_MANY = Transport("one of many more", TransportKind.UNKNOWN)
_KINDS_PER_TRANSPORT = 4  # Sent or received, over NCCL's connection 0 or 1


def channel_code(channel: int, connection: int) -> int:
    """Encode a channel of NCCL's connection 0 (collectives) or 1 (send and receive)."""
    return connection * MOST_CHANNELS + channel


class ChannelSet:
    """The channels to one peer that one rank logs. `bits_by_kind` has channel bits by kind of line, ascending.

    `plus` caches the sets with one more channel by code: `ChannelSets.line_code` + `channel_code`.
    """

    __slots__ = ("_sets", "bits_by_kind", "logged", "plus", "receives")

    def __init__(self, sets: "ChannelSets", bits_by_kind: tuple[tuple[int, int], ...]) -> None:
        self._sets = sets
        self.bits_by_kind = bits_by_kind
        self.logged = tuple(sets.logged(kind, bits) for kind, bits in bits_by_kind)
        self.receives = any(channels.received for channels in self.logged)
        self.plus: dict[int, ChannelSet] = {}

    def add_channel(self, code: int) -> "ChannelSet":
        """Return the set with one more channel."""
        if code not in self.plus:
            kind, channel = divmod(code, MOST_CHANNELS)
            self.plus[code] = self._add_bits(kind, 1 << channel)
        return self.plus[code]

    def union_channels(self, other: "ChannelSet") -> "ChannelSet":
        union = self
        for kind, bits in other.bits_by_kind:
            union = union._add_bits(kind, bits)
        return union

    def has(self, code: int) -> bool:
        """True if the channel of this code was logged with any transport."""
        kind, channel = divmod(code, MOST_CHANNELS)
        return any(
            bits >> channel & 1 and not (other - kind) % _KINDS_PER_TRANSPORT for other, bits in self.bits_by_kind
        )

    def _add_bits(self, kind: int, bits: int) -> "ChannelSet":
        merged = dict(self.bits_by_kind)
        merged[kind] = merged.get(kind, 0) | bits
        return self._sets.channel_set(tuple(sorted(merged.items())))


class ChannelSets:
    """All distinct channel sets of a job."""

    def __init__(self) -> None:
        self._numbers: dict[Transport, int] = {}
        self._transports: list[Transport] = []
        self._sets: dict[tuple[tuple[int, int], ...], ChannelSet] = {}
        self.empty = self.channel_set(())

    def line_code(self, transport: Transport, *, received: bool) -> int:
        """Encode the transport and the end of a line. Add `channel_code` for its channel."""
        if transport not in self._numbers and len(self._transports) >= _MOST_TRANSPORTS:
            transport = _ONE_TOO_MANY
        number = self._numbers.setdefault(transport, len(self._transports))
        if number == len(self._transports):
            self._transports.append(transport)
        return (number * _KINDS_PER_TRANSPORT + 2 * received) * MOST_CHANNELS

    def logged(self, kind: int, bits: int) -> LoggedChannels:
        """Decode channels from their bits and their kind, which is a code without the channel."""
        number, end = divmod(kind, _KINDS_PER_TRANSPORT)
        received, connection = divmod(end, 2)
        return LoggedChannels(self._transports[number], bits, bool(connection), bool(received))

    def channel_set(self, bits_by_kind: tuple[tuple[int, int], ...]) -> ChannelSet:
        """Return the shared set with these channels."""
        if bits_by_kind not in self._sets:
            self._sets[bits_by_kind] = ChannelSet(self, bits_by_kind)
        return self._sets[bits_by_kind]


class RankConnections(dict[int, ChannelSet]):
    """The connections that one rank logs, by peer. `size` is that of its communicator."""

    __slots__ = ("empty", "size")

    def __init__(self, sets: ChannelSets, size: int) -> None:
        super().__init__()
        self.empty = sets.empty
        self.size = size

    def channels_to(self, peer: int) -> ChannelSet:
        return self.get(peer, self.empty)

    def add(self, peer: int, code: int) -> None:
        self[peer] = self.channels_to(peer).add_channel(code)

    def add_all(self, other: Mapping[int, ChannelSet]) -> None:
        """Add the connections from another log of the same rank."""
        for peer, channels in other.items():
            self[peer] = self[peer].union_channels(channels) if peer in self else channels


class PairRoutes(Struct, frozen=True, eq=False):
    """The routes from one rank to another. Pairs with equal channels share this object, so it compares by identity."""

    routes: tuple[Route, ...]


class Connections(Struct, frozen=True):
    """The connections of a communicator by rank."""

    ranks: Mapping[int, Mapping[int, ChannelSet]] = field(default_factory=dict)

    @property
    def joins_ranks(self) -> bool:
        """True if any rank is connected to another rank, not only to a reducing switch."""
        return any(peer != rank for rank, peers in self.ranks.items() for peer in peers)

    def routes_by_source(self) -> Iterator[tuple[int, dict[int, PairRoutes]]]:
        """Yield every source with the routes to each destination."""
        joined = cache(_join_ends)
        receivers: dict[int, dict[int, ChannelSet]] = {}
        for rank, peers in self.ranks.items():
            for peer, channels in peers.items():
                if channels.receives:
                    receivers.setdefault(peer, {})[rank] = channels
        for src in sorted(self.ranks.keys() | receivers.keys()):
            sent, received = self.ranks.get(src, {}), receivers.get(src, {})
            destinations = sorted(sent.keys() | received.keys())
            found = {dst: joined(sent.get(dst), received.get(dst)) for dst in destinations}
            if found := {dst: pair for dst, pair in found.items() if pair.routes}:
                yield src, found


def _join_ends(source: ChannelSet | None, destination: ChannelSet | None) -> PairRoutes:
    sent = [channels for channels in source.logged if not channels.received] if source else []
    received = [channels for channels in destination.logged if channels.received] if destination else []
    return PairRoutes(routes([*sent, *received]))


class Member(Struct, frozen=True, kw_only=True):
    """A rank of a communicator. None was not logged.

    `nvml_index` is nvidia-smi's, regardless of CUDA_VISIBLE_DEVICES. `node` is the host or NCCL_HOSTID, by which NCCL
    groups ranks. `machine` is the real host, as far as the log shows it.
    """

    rank: int
    host: str
    pid: int
    bus_id: str | None = None
    nvml_index: int | None = None
    node: str = ""
    machine: str = ""
    local_rank: int | None = None

    @property
    def process(self) -> str:
        """The name of its process in settings and remarks."""
        return f"{self.host}:{self.pid}"


class Communicator(Struct, frozen=True, kw_only=True):
    """One communicator in the logs of all its ranks.

    `id` is NCCL's commId. For a split communicator it is the parent's with the color. NCCL before 2.17 prints none, so
    there it has order and size. It is None for lines of an unknown communicator, and `candidates` are then the ids that
    are possible. `unfinished_ranks` logged the start of their init but not its end.
    """

    id: str | None
    size: int | None
    nodes: int | None = None
    members: tuple[Member, ...] = ()
    unfinished_ranks: tuple[int, ...] = ()
    connections: Connections = field(default_factory=Connections)
    tunings: tuple[Tuning, ...] = ()
    candidates: tuple[str, ...] = ()

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks without a log."""
        present = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.size or 0) if rank not in present)


class LoggedSetting(Struct, frozen=True):
    """A variable that NCCL read, with the processes that logged it.

    `is_from_command` is true if a command in the same text sets it for all processes.
    """

    name: str
    value: str
    processes: tuple[str, ...]
    is_from_command: bool = False


class RemarkKind(StrEnum):
    """The kinds of lines that explain a choice. In brackets are the values of a line."""

    NO_RDMA_DEVICE = "no-rdma-device"
    RDMA_DEVICES = "rdma-devices"
    """(devices, or the provider of a plugin)"""
    RDMA_UNOPENED = "rdma-unopened"
    NICS_MIXED = "nics-mixed"
    """(device)"""
    NO_VERBS_LIBRARY = "no-verbs-library"
    GDR_ENABLED = "gdr-enabled"
    """(HCA number, HCA name)"""
    GDR_DISABLED = "gdr-disabled"
    """(HCA number, HCA name)"""
    GDR_NEAR = "gdr-near"
    """(bus id, HCA number)"""
    GDR_DISTANT = "gdr-distant"
    GDR_FAR = "gdr-far"
    """(bus id, HCA number)"""
    DMA_BUF = "dma-buf"
    """(CUDA device)"""
    P2P_TYPE = "p2p-type"
    """(all direct, all possible for the driver; '' if not logged)"""
    DRIVER_REFUSED = "driver-refused"
    """(two NVML indices), or nothing if the line is about all GPUs of the machine"""
    NVLINK_REFUSED = "nvlink-refused"
    """(two NVML indices)"""
    PEER_ACCESS_REFUSED = "peer-access-refused"
    """(two bus ids)"""
    PEER_QUERY_FAILED = "peer-query-failed"
    """(two bus ids)"""
    LEGACY_IPC_REFUSED = "legacy-ipc-refused"
    MULTICAST = "multicast"
    """('not ' or '', CUDA device)"""
    CONFIDENTIAL = "confidential"
    BOOTSTRAP = "bootstrap"
    """(interface, address)"""
    NETWORK_PLUGIN = "network-plugin"
    SOCKET_INTERFACES = "socket-interfaces"
    """(interfaces)"""
    NO_TRANSPORT = "no-transport"
    """(two ranks, or '')"""
    MNNVL_BROKEN = "mnnvl-broken"
    FABRIC = "fabric"
    """(cluster, clique), both in hexadecimal"""
    PROCESSOR = "processor"
    """(NCCL's numbers architecture/vendor: 1/1 is Intel, 1/2 is AMD)"""


SIGNS_OF_RDMA = (RemarkKind.RDMA_DEVICES, RemarkKind.RDMA_UNOPENED)
"""Lines that name RDMA devices, usable or not."""

_DEVICES = re.compile(r",| between (?:dev |GPU\d)| \d")


class Note(Struct, frozen=True):
    """An explanatory line. `about` has its values, such as devices and HCAs."""

    kind: RemarkKind
    about: tuple[str, ...]
    text: str

    @property
    def gist(self) -> str:
        """The text without its devices, to compare lines."""
        return _DEVICES.split(self.text)[0]


class Remark(Struct, frozen=True):
    """A note with the processes that logged it. Its text is from the first process."""

    note: Note
    processes: tuple[str, ...]


class Complaint(Struct, frozen=True):
    """A warning of NCCL, or an error that a program reports, with its count and processes."""

    text: str
    count: int
    processes: tuple[str, ...]


class FailedCall(Struct, frozen=True):
    """An NCCL function that returned an error: its place in the source, the code, and the processes.

    `warning` is the first process's last warning before the error, or ''.
    """

    place: str
    code: int
    processes: tuple[str, ...]
    warning: str = ""


class ReachedLimit(Struct, frozen=True):
    """An exceeded limit of the reader: the first excess, the limit, and the number of excesses."""

    seen: str
    most: str
    times: int = 1


class LogFacts(Struct, frozen=True, kw_only=True):
    """The facts in the logs of a job.

    `networks` has the number of processes by network. `paths` is NCCL's matrix of path types by host and bus ids, from
    the GRAPH subsystem. `nvlink_hosts` are hosts with a line about NVLinks. `complaints` and `failed_calls` happened
    before communicators ended, because their cleanup also fails in healthy jobs. `gpu_models` are those of ranks.
    `listed_models` may belong to another machine.

    `lines` counts all lines, `nccl_lines` those of NCCL, `unreadable` cut or garbled lines of connections, and
    `left_out` repetitions that a collector omitted. `cut_files` are truncated.

    `records` are dumps of PyTorch's Flight Recorder, and `watchdogs` the output of its watchdog. `missed_barrier` are
    ranks that a monitored barrier reports. `ras` are answers of NCCL's RAS, `stacks` are from py-spy, and `inspected`
    operations from NCCL's Inspector. `hangs` are the conclusions from all of these.
    """

    versions: tuple[str, ...] = ()
    settings: tuple[LoggedSetting, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    networks: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    paths: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    nvlink_hosts: frozenset[str] = frozenset()
    complaints: tuple[Complaint, ...] = ()
    failed_calls: tuple[FailedCall, ...] = ()
    gpu_models: tuple[str, ...] = ()
    listed_models: tuple[str, ...] = ()
    lines: int = 0
    nccl_lines: int = 0
    unreadable: int = 0
    left_out: int = 0
    cut_files: tuple[str, ...] = ()
    limits: tuple[ReachedLimit, ...] = ()
    records: tuple[RankRecord, ...] = ()
    watchdogs: tuple[RankRecord, ...] = ()
    missed_barrier: tuple[int, ...] = ()
    ras: tuple[RasCommunicator, ...] = ()
    stacks: tuple[ProcessStack, ...] = ()
    inspected: tuple["InspectedOperation", ...] = ()
    hangs: tuple[Hang, ...] = ()


INSPECTED: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "AllReduce": ("allreduce", ring_allreduce_factor),
    "AllGather": ("allgather", all_but_own_factor),
    "ReduceScatter": ("reducescatter", all_but_own_factor),
    "Broadcast": ("broadcast", whole_factor),
    "Reduce": ("reduce", whole_factor),
}
"""gpubench's name and busbw factor by NCCL's name, for collectives in the Inspector's output."""

_FACTORS = dict(INSPECTED.values())


class InspectedOperation(Struct, frozen=True):
    """One operation of a communicator, with its kernel's time on each rank in microseconds.

    A late rank has the shortest time, because the kernels of the others wait for it.
    """

    communicator: str
    collective: str
    size_bytes: int
    ranks: int
    nodes: int
    times: Mapping[int, float]


class InspectedSize(Struct, frozen=True):
    """The operations of one size. `time_us` is the median of their shortest times, without waiting for late ranks."""

    collective: str
    size_bytes: int
    ranks: int
    nodes: int
    operations: int
    time_us: float

    @property
    def algbw_gb_s(self) -> float:
        return algbw_gb_s(self.size_bytes, self.time_us / MICROSECONDS_PER_SECOND)

    @property
    def busbw_gb_s(self) -> float | None:
        """Bus bandwidth, None for one rank."""
        return None if self.ranks == 1 else self.algbw_gb_s * _FACTORS[self.collective](self.ranks)


def summarize_by_size(operations: Iterable[InspectedOperation]) -> Iterator[InspectedSize]:
    """Summarize operations by collective, ranks, nodes and size."""
    groups = group_by(operations, lambda call: (call.collective, call.ranks, call.nodes, call.size_bytes))
    for (collective, ranks, nodes, size), calls in sorted(groups.items()):
        time_us = median(min(call.times.values()) for call in calls)
        yield InspectedSize(collective, size, ranks, nodes, len(calls), time_us)
