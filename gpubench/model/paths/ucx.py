"""Paths that UCX chooses for GPU memory: its protocol tables, the route that each row of a table describes, and the
facts about one transfer between two processes.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import field

from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.ranks import DevicePlace


class UcxRoute(StrEnum):
    """How UCX moves data between two GPUs.

    PEER is a direct copy between GPUs of one machine or NVLink domain, as with `cuda_ipc`. RDMA is GPUDirect RDMA.
    STAGED passes through host memory. EMULATED does too: UCX has no transport for this memory and sends messages that
    the peer's CPU copies. UNKNOWN stands for words that no known UCX release prints.
    """

    PEER = "direct"
    RDMA = "GPUDirect RDMA"
    STAGED = "host-staged"
    EMULATED = "host-staged by software emulation"
    UNKNOWN = "unknown"

    @property
    def host_staged(self) -> bool | None:
        """True if the data pass through host memory. None if unknown."""
        return None if self is UcxRoute.UNKNOWN else self in (UcxRoute.STAGED, UcxRoute.EMULATED)


_PEER = frozenset(("cuda_ipc", "rocm_ipc", "ze_ipc"))
RDMA_TRANSPORTS = frozenset(("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_mlx5", "ud_verbs", "gga_mlx5", "srd"))
_HOST = frozenset(
    ("tcp", "sysv", "posix", "cma", "knem", "xpmem", "self", "cuda_copy", "rocm_copy", "ze_copy", "gdr_copy")
)
_PREFIXES = re.compile(r"^(?:\(\?\) |rendezvous |rndv using |pipeline |multi-frag )*")
_EMULATED = re.compile(r"(?<!sgl )software emulation")
_SILENT = re.compile(r"no data fetch|stub protocol|$")
# UCX cuts descriptions: up to 1.18, "cuda_copy" at the end of a long one may be only "cuda".
_COPIES = re.compile(
    r"\b(?:cuda|rocm|ze|gdr)_copy\b|, (?:cuda|rocm|ze)(?:_\w*)?$|copy-in|copy-out|attached|mapped remote"
)
_GPU_FRAGMENTS = re.compile(r"frag (?:cuda|rocm|ze)")
_DIRECT = re.compile(r"zero-copy (?:\w+ )?(?:read from|write to) remote|tag offload|sgl|short|zero-copy$")
_TRANSPORT = re.compile(r"([a-z][a-z0-9_]*)/[^\s,]+")


class ProtocolRange(Struct, frozen=True):
    """One row of a protocol table.

    - `first_bytes`, `last_bytes`: the message sizes; `last_bytes` is None without an upper limit
    - `description`: UCX's words for the protocol, such as `zero-copy` or `software emulation`
    - `config`: transports and devices that carry the data, such as `cuda_ipc/cuda` or `tcp/lo`
    - `is_message`: true for active, tagged and stream messages, and for a rendezvous. The receiver of a message copies
      the data, even if its sender does not.
    """

    first_bytes: int
    last_bytes: int | None
    description: str
    config: str
    is_message: bool = False

    @property
    def devices(self) -> str:
        """Transports with their devices, without shares and paths: `rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1`."""
        return ", ".join(dict.fromkeys(found[0] for found in _TRANSPORT.finditer(self.config)))

    @property
    def is_estimate(self) -> bool:
        """True if UCX marks the row with `(?)`, because the peer decides."""
        return self.description.startswith("(?) ")

    @property
    def moves_data(self) -> bool:
        """False if the row is not about data: a message of no bytes, or endpoints that are not connected yet."""
        return not _SILENT.match(self._protocol)

    @property
    def _protocol(self) -> str:
        return _PREFIXES.sub("", self.description)

    @property
    def route(self) -> UcxRoute:
        """The route of data between GPUs. It has no meaning if an end of the table is host memory."""
        if _EMULATED.search(self.description):
            return UcxRoute.EMULATED
        names, protocol = set(_TRANSPORT.findall(self.config)), self._protocol
        if not self.moves_data or not names <= _PEER | RDMA_TRANSPORTS | _HOST:
            return UcxRoute.UNKNOWN
        fragments_on_gpu = _GPU_FRAGMENTS.search(protocol) and "frag host" not in protocol
        by_receiver = protocol == "zero-copy" and (self.is_message or "rndv using" in self.description)
        if names & _HOST or by_receiver or (_COPIES.search(protocol) and not fragments_on_gpu):
            return UcxRoute.STAGED
        if not names or not (fragments_on_gpu or _DIRECT.match(protocol)):
            return UcxRoute.UNKNOWN
        return UcxRoute.PEER if names <= _PEER else UcxRoute.RDMA


class ProtocolTable(Struct, frozen=True):
    """A table that UCX prints for UCX_PROTO_INFO=y when it first uses an operation between two kinds of memory.

    - `process`: host and process ID as the log line has them, `node1:861`, or an empty text
    - `context`: the name of the UCX context and the endpoint's scope: `r0 intra-node cfg#2`
    - `operation`: UCX's words: `remote memory write by ucp_put*(multi)`
    - `local`, `remote`: memory at both ends: `cuda/GPU0`, `cuda/dev[2]`, `cuda`, `cuda-managed`, `host memory`. For
      messages, `remote` is an empty text, because the sender does not know the receiver's buffer.
    """

    process: str = ""
    context: str = ""
    operation: str = ""
    local: str = ""
    remote: str = ""
    ranges: tuple[ProtocolRange, ...] = ()

    @property
    def is_payload(self) -> bool:
        """True if both ends are GPU memory, or the local end is and the remote one is not named.

        All other tables are about metadata and notifications, which go over TCP even in a healthy job. `self` is the
        scope of an endpoint between a process and itself.
        """
        return (
            not re.search(r"\bself cfg#", self.context)
            and is_gpu_memory(self.local)
            and (not self.remote or is_gpu_memory(self.remote))
        )

    @property
    def same_node(self) -> bool | None:
        """Whether UCX regards the two processes as processes of one node. None if unknown."""
        return True if "intra-node" in self.context else False if "inter-node" in self.context else None

    def at(self, size_bytes: int) -> ProtocolRange | None:
        """Return the row for a message size in bytes. None if the table has none."""
        for row in self.ranges:
            if row.first_bytes <= size_bytes and (row.last_bytes is None or size_bytes <= row.last_bytes):
                return row
        return None


_GPU_MEMORY = re.compile(r"(?:cuda|rocm|ze-device|ze-managed|ze-shared)(?:-managed)?\b")


def is_gpu_memory(words: str) -> bool:
    """True if UCX's words for a buffer mean GPU memory: `cuda/GPU0`, `cuda-managed`, `rocm/GPU1`."""
    return _GPU_MEMORY.match(words) is not None


class Allocation(StrEnum):
    """How a program allocates GPU memory.

    MALLOC is cudaMalloc. EXPANDABLE is virtual memory management (cuMemCreate and cuMemMap), as PyTorch's
    expandable_segments uses. ASYNC is a pool of cudaMallocAsync. MANAGED is cudaMallocManaged.
    """

    MALLOC = "malloc"
    EXPANDABLE = "expandable"
    ASYNC = "async"
    MANAGED = "managed"


class Transfer(Struct, frozen=True, kw_only=True):
    """A transfer of GPU memory between two processes, with the facts that may explain its path. None is unknown.

    - `name`: the two ends, as findings name them: `GPU0 → GPU1` or `node1:861`
    - `transport`: what carries the data in UCX's words: `cuda_ipc/cuda`, `tcp/lo`
    - `local`, `remote`: UCX's words for the memory at the two ends
    - `same_pid_namespace`, `same_node`: whether the two processes share them
    - `shares_pid`: whether another host name of this node has a process with the same process ID
    - `variables`: environment variables of either process, such as UCX_TLS and PYTORCH_CUDA_ALLOC_CONF
    - `missing_transports`, `excluded_transports`: transports that UCX lacks, and those that its settings exclude
    - `get_disabled`: whether UCX disabled reads over CUDA IPC, as it does on GPUs without NVLink
    """

    name: str
    route: UcxRoute
    places: tuple[DevicePlace, ...] = ()
    transport: str = ""
    local: str = ""
    remote: str = ""
    allocation: Allocation | None = None
    same_node: bool | None = None
    same_pid_namespace: bool | None = None
    shares_pid: bool | None = None
    peer_access: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    missing_transports: tuple[str, ...] = ()
    excluded_transports: tuple[str, ...] = ()
    get_disabled: bool | None = None

    @property
    def path(self) -> str:
        """The route and the transports: `host-staged over tcp/lo`."""
        return f"{self.route} over {self.transport}" if self.transport else str(self.route)

    @property
    def is_of_amd(self) -> bool:
        """True if UCX says that the memory belongs to an AMD GPU."""
        return self.local.startswith("rocm")

    @property
    def misses_cuda_ipc(self) -> bool:
        """True if CUDA IPC could carry the data between two GPUs of one node, but UCX takes another path.

        The other path is host memory, or a NIC if both processes are known to be on one node.
        """
        if self.same_node is False or self.peer_access is False or self.is_of_amd:
            return False
        return self.route.host_staged is True or (self.route is UcxRoute.RDMA and self.same_node is True)

    @property
    def staged_between_nodes(self) -> bool:
        """True if the data pass through host memory on their way to another node."""
        return self.route.host_staged is True and self.same_node is False


class KvMetrics(Struct, frozen=True):
    """Averages that vLLM logs about its transfers: bandwidth in vLLM's MB/s, blocks per transfer, and µs per block."""

    mb_s: float
    blocks: float
    block_us: float


class UcxLog(msgspec.Struct):
    """What the log of a job shows about UCX and NIXL. Dicts without values keep the order of the log.

    - `tables`: distinct protocol tables of all processes
    - `releases`: UCX releases of all processes
    - `variables`: UCX's and PyTorch's variables by process. The process is an empty text if the log does not name it.
    - `missing`, `excluded`: transports that UCX does not have, and transports that its settings exclude
    - `get_disabled`: true if UCX disabled reads over CUDA IPC, because it found no NVLinks
    - `pid_namespaces_differ`: true if UCX reports a peer in another PID namespace
    - `lines`: number of lines by UCX and NIXL, except tables
    - `metrics`: the last transfers that vLLM counted
    """

    tables: dict[ProtocolTable, None] = {}
    releases: dict[str, None] = {}
    variables: dict[str, dict[str, str]] = {}
    missing: dict[str, None] = {}
    excluded: dict[str, None] = {}
    get_disabled: bool = False
    pid_namespaces_differ: bool = False
    lines: int = 0
    metrics: KvMetrics | None = None

    @property
    def payloads(self) -> list[ProtocolTable]:
        """Tables about GPU memory of two processes."""
        return [table for table in self.tables if table.is_payload]
