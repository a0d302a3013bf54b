"""NCCL's log of a job as facts: communicators, their ranks and connections, and remarks that may explain these."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpubench.model.paths.connections import Connections
from gpubench.model.paths.transport import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a communicator. None is not logged.

    `bus_id` is written as lspci does. `nvml_index` counts as nvidia-smi does, whatever CUDA_VISIBLE_DEVICES says.
    `node` is what NCCL takes for the machine: the host, or NCCL_HOSTID where that is set; `machine` is the one that it
    is, as far as the log shows. `process` is `host:pid`.
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
        """Its process, as settings and remarks name it."""
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator as all logs together show it.

    `id` is NCCL's commId; of a split one its parent's with the colour; of NCCL before 2.17, which prints none, one made
    up from its order and size. None is that of lines whose communicator is not known. `size` and `nodes` are None where
    no line says them. `unfinished_ranks` log the start of their init and not its end. `candidates` are the ids of the
    communicators that ambiguous lines may be of.
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
        """Ranks of which there is no log."""
        present = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.size or 0) if rank not in present)


@dataclass(frozen=True, slots=True)
class LoggedSetting:
    """A variable that NCCL took from the environment or a configuration file, and the processes that logged it."""

    name: str
    value: str
    processes: tuple[str, ...]


class RemarkKind(StrEnum):
    """The kinds of lines that explain a choice. In brackets the values that such a line is about."""

    NO_RDMA_DEVICE = "no-rdma-device"
    RDMA_DEVICES = "rdma-devices"
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
    """(all direct, all possible for the driver: '' where not logged)"""
    DRIVER_REFUSED = "driver-refused"
    """(two NVML indices)"""
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
    """(architecture/vendor, as NCCL numbers them: 1/1 is Intel's x86, 1/2 AMD's)"""


_DEVICES = re.compile(r",| between dev | \d")


@dataclass(frozen=True, slots=True)
class Note:
    """A line that explains something: its kind, what it is about (devices, HCAs, numbers), and its text."""

    kind: RemarkKind
    about: tuple[str, ...]
    text: str

    @property
    def gist(self) -> str:
        """The line without the devices that it names: lines about many pairs have the same gist."""
        return _DEVICES.split(self.text)[0]


@dataclass(frozen=True, slots=True)
class Remark:
    """A note in the words of the first of the processes that logged it."""

    note: Note
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Complaint:
    """A warning of NCCL's, or an error that a program reports of it: how often, and the processes that wrote it."""

    text: str
    count: int
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A function of NCCL's that returned an error: its place in the source, the code, and the processes."""

    place: str
    code: int
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """A limit that the log went beyond: what was seen first, the most that is read, and how often there was more."""

    seen: str
    most: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """The facts in the logs of a job.

    `versions` are NCCL's; `networks` has the number of processes by network. `paths` is NCCL's own matrix of path types
    by host and bus ids, where the GRAPH subsystem printed it, and `nvlink_hosts` are those of which any line shows
    NVLinks. `complaints` and `failed_calls` are from before the end of the communicators: what closes them fails in
    healthy jobs too. `gpu_models` are those of the ranks where a program says so, `listed_models` others in the same
    text, maybe of another machine. `lines` are all that were read, `nccl_lines` those of NCCL, `unreadable` those of
    connections that were cut or garbled; `left_out` counts lines that a collector left out as repetitions, `cut_files`
    are those that end before their end, `limits` those behind which something was left unread.
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
