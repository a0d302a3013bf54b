"""Facts from the NCCL logs of a job: communicators with their ranks and connections, and lines that explain
choices.

A job with a thousand ranks has a million pairs, but few distinct sets of channels. Equal sets are therefore one object.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from statistics import median

from msgspec import Struct, field

from gpubench.model.paths.hang import Hang, ProcessStack, RankRecord, RasCommunicator
from gpubench.model.paths.transport import LoggedChannels, Route, Transport, TransportKind, Tuning, routes
from gpubench.model.paths.ucx import UcxLog
from gpubench.model.terms.operation import algbw_gb_s, all_but_own_factor, ring_allreduce_factor, whole_factor
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, group_by

MOST_CHANNELS = 1024  # NCCL has at most 64 channels. Larger numbers come from garbled lines.

_MOST_TRANSPORTS = 4096
_ONE_TOO_MANY = Transport("one of many more", TransportKind.UNKNOWN)
_KINDS_PER_TRANSPORT = 4  # Two sides (sender or receiver) times two NCCL connections (0 or 1)


def channel_code(channel: int, connection: int) -> int:
    """Encode a channel number and its NCCL connection: 0 for collectives, 1 for send and receive."""
    return connection * MOST_CHANNELS + channel


class ChannelSet:
    """The channels to one peer that one rank logs.

    `bits_by_kind` has a bit mask of channels for each kind of line, in ascending order. A kind encodes the transport,
    the side and the connection.

    `plus` caches the sets that result from adding a channel, by its code (`ChannelSets.line_code` + `channel_code`).
    """

    __slots__ = ("_sets", "bits_by_kind", "logged", "plus", "receives")

    def __init__(self, sets: "ChannelSets", bits_by_kind: tuple[tuple[int, int], ...]) -> None:
        self._sets = sets
        self.bits_by_kind = bits_by_kind
        self.logged = tuple(sets.logged(kind, bits) for kind, bits in bits_by_kind)
        self.receives = any(channels.received for channels in self.logged)
        self.plus: dict[int, ChannelSet] = {}

    def add_channel(self, code: int) -> "ChannelSet":
        """Return the set that also contains the channel with this code."""
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
        """True if the set contains the channel with this code, over any transport."""
        kind, channel = divmod(code, MOST_CHANNELS)
        return any(
            bits >> channel & 1 and not (other - kind) % _KINDS_PER_TRANSPORT for other, bits in self.bits_by_kind
        )

    def _add_bits(self, kind: int, bits: int) -> "ChannelSet":
        merged = dict(self.bits_by_kind)
        merged[kind] = merged.get(kind, 0) | bits
        return self._sets.channel_set(tuple(sorted(merged.items())))


class ChannelSets:
    """All distinct channel sets of a job, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[Transport, int] = {}
        self._transports: list[Transport] = []
        self._sets: dict[tuple[tuple[int, int], ...], ChannelSet] = {}
        self.empty = self.channel_set(())

    def line_code(self, transport: Transport, *, received: bool) -> int:
        """Encode the transport and the side (sender or receiver) of a line. Add `channel_code` to encode its
        channel.
        """
        if transport not in self._numbers and len(self._transports) >= _MOST_TRANSPORTS:
            transport = _ONE_TOO_MANY
        number = self._numbers.setdefault(transport, len(self._transports))
        if number == len(self._transports):
            self._transports.append(transport)
        return (number * _KINDS_PER_TRANSPORT + 2 * received) * MOST_CHANNELS

    def logged(self, kind: int, bits: int) -> LoggedChannels:
        """Decode a kind of line and its bit mask of channels. A kind is a code without the channel number."""
        number, end = divmod(kind, _KINDS_PER_TRANSPORT)
        received, connection = divmod(end, 2)
        return LoggedChannels(self._transports[number], bits, bool(connection), bool(received))

    def channel_set(self, bits_by_kind: tuple[tuple[int, int], ...]) -> ChannelSet:
        """Return the set with these channels. Equal sets are the same object."""
        if bits_by_kind not in self._sets:
            self._sets[bits_by_kind] = ChannelSet(self, bits_by_kind)
        return self._sets[bits_by_kind]


class RankConnections(dict[int, ChannelSet]):
    """The connections that one rank logs, by peer. `size` is the number of ranks in the communicator."""

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
        """Add connections from another log of the same rank."""
        for peer, channels in other.items():
            self[peer] = self[peer].union_channels(channels) if peer in self else channels


class PairRoutes(Struct, frozen=True, eq=False):
    """The routes from one rank to another.

    Pairs with equal channels share one object. It compares by identity, which is fast.
    """

    routes: tuple[Route, ...]


class Connections(Struct, frozen=True):
    """The logged connections of a communicator, by rank and peer."""

    ranks: Mapping[int, Mapping[int, ChannelSet]] = field(default_factory=dict)

    @property
    def joins_ranks(self) -> bool:
        """True if any two different ranks are connected. Connections to a reducing switch do not count."""
        return any(peer != rank for rank, peers in self.ranks.items() for peer in peers)

    def routes_by_source(self) -> Iterator[tuple[int, dict[int, PairRoutes]]]:
        """Yield each source rank with its routes by destination."""
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
    """One rank of a communicator. None means that the log does not show the value.

    - `nvml_index`: index in nvidia-smi, regardless of CUDA_VISIBLE_DEVICES
    - `node`: the host name or NCCL_HOSTID, by which NCCL groups ranks
    - `machine`: the actual host, as far as the log shows it
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
        """The process's name in settings and remarks, from its host and process id."""
        return f"{self.host}:{self.pid}"


class Communicator(Struct, frozen=True, kw_only=True):
    """One communicator, combined from the logs of all its ranks.

    - `id`: NCCL's commId; for a split communicator, the parent's commId and the color; for NCCL before 2.17, which logs
      no commId, the order and the size; None for lines that belong to an unknown communicator
    - `candidates`: ids of the communicators that such lines may belong to
    - `unfinished_ranks`: ranks that logged the start of their initialization, but not its end
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
        """Ranks of the communicator whose logs are missing."""
        present = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.size or 0) if rank not in present)


class LoggedSetting(Struct, frozen=True):
    """A variable that NCCL read, and the processes that logged it.

    `is_from_command` is true if a command in the same text sets the variable for all processes.
    """

    name: str
    value: str
    processes: tuple[str, ...]
    is_from_command: bool = False


class RemarkKind(StrEnum):
    """Kinds of log lines that explain a choice. The parentheses show the values that a note takes from its line."""

    NO_RDMA_DEVICE = "no-rdma-device"
    RDMA_DEVICES = "rdma-devices"
    """(devices, or the provider of a network plugin)"""
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
    """(whether all paths are direct, whether the driver allows all; '' if the line does not show it)"""
    DRIVER_REFUSED = "driver-refused"
    """(two NVML indices), or empty if the line is about all GPUs of the machine"""
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
    """(two ranks, or '' if unknown)"""
    MNNVL_BROKEN = "mnnvl-broken"
    FABRIC = "fabric"
    """(cluster, clique), both in hexadecimal"""
    PROCESSOR = "processor"
    """(architecture and vendor in NCCL's numbers: 1/1 is Intel, 1/2 is AMD)"""


SIGNS_OF_RDMA = (RemarkKind.RDMA_DEVICES, RemarkKind.RDMA_UNOPENED)
"""Kinds of lines that name RDMA devices, whether usable or not."""

_DEVICES = re.compile(r",| between (?:dev |GPU\d)| \d")


class Note(Struct, frozen=True):
    """A log line that explains a choice. `about` has the values from the line, such as devices and HCAs."""

    kind: RemarkKind
    about: tuple[str, ...]
    text: str

    @property
    def gist(self) -> str:
        """The text without device names, so that lines about different devices compare equal."""
        return _DEVICES.split(self.text)[0]


class Remark(Struct, frozen=True):
    """A note, and the processes that logged it. The text is that of the first process."""

    note: Note
    processes: tuple[str, ...]


class Complaint(Struct, frozen=True):
    """A warning from NCCL or an error from a program, with the number of occurrences and the processes."""

    text: str
    count: int
    processes: tuple[str, ...]


class FailedCall(Struct, frozen=True):
    """An NCCL function that returned an error, with its source line, its error code and the processes.

    `warning` is the last warning of the first process before the error, or ''.
    """

    place: str
    code: int
    processes: tuple[str, ...]
    warning: str = ""


class ReachedLimit(Struct, frozen=True):
    """A limit of the log reader that was exceeded.

    `seen` is the first value above the limit, `most` the limit, and `times` how often it was exceeded.
    """

    seen: str
    most: str
    times: int = 1


class LogFacts(Struct, frozen=True, kw_only=True):
    """All facts from the logs of a job.

    - `networks`: number of processes by network
    - `paths`: NCCL's matrix of path types by host and two bus ids, from the GRAPH subsystem
    - `nvlink_hosts`: hosts with a log line about NVLinks
    - `complaints`, `failed_calls`: warnings and errors before the end of communicators, whose cleanup also fails in
      healthy jobs
    - `gpu_models`: GPU models of ranks
    - `listed_models`: GPU models in a list that may come from another machine
    - `lines`, `nccl_lines`: number of all lines, and of NCCL's lines
    - `unreadable`: number of cut or garbled lines about connections
    - `left_out`: number of repeated lines that a log collector omitted
    - `cut_files`: truncated files
    - `records`, `watchdogs`: dumps of PyTorch's Flight Recorder, and the output of its watchdog
    - `missed_barrier`: ranks that missed a monitored barrier
    - `ras`, `stacks`, `inspected`: data from NCCL's RAS, py-spy and NCCL's Inspector
    - `hangs`: hangs that were found in all of this data
    - `ucx`: what UCX and NIXL logged
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
    ucx: UcxLog = field(default_factory=UcxLog)


INSPECTED: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "AllReduce": ("allreduce", ring_allreduce_factor),
    "AllGather": ("allgather", all_but_own_factor),
    "ReduceScatter": ("reducescatter", all_but_own_factor),
    "Broadcast": ("broadcast", whole_factor),
    "Reduce": ("reduce", whole_factor),
}
"""gpubench's name and busbw factor for each collective in NCCL Inspector's output, by NCCL's name."""

_FACTORS = dict(INSPECTED.values())


class InspectedOperation(Struct, frozen=True):
    """One operation of a communicator. `times` has the duration of the kernel on each rank in microseconds.

    The latest rank has the shortest time, because the kernels of all other ranks wait for it.
    """

    communicator: str
    collective: str
    size_bytes: int
    ranks: int
    nodes: int
    times: Mapping[int, float]


class InspectedSize(Struct, frozen=True):
    """Summary of operations with one size.

    `time_us` is the median over operations of the shortest time over ranks, which excludes the wait for late ranks.
    """

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
        """The bus bandwidth in GB/s. None if there is only one rank."""
        return None if self.ranks == 1 else self.algbw_gb_s * _FACTORS[self.collective](self.ranks)


def summarize_by_size(operations: Iterable[InspectedOperation]) -> Iterator[InspectedSize]:
    """Summarize operations by collective, number of ranks, number of nodes, and size."""
    groups = group_by(operations, lambda call: (call.collective, call.ranks, call.nodes, call.size_bytes))
    for (collective, ranks, nodes, size), calls in sorted(groups.items()):
        time_us = median(min(call.times.values()) for call in calls)
        yield InspectedSize(collective, size, ranks, nodes, len(calls), time_us)
