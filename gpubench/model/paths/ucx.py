"""Paths that UCX chooses for GPU memory: its protocol tables, the route that each row of a table describes, and the
facts about one transfer between two processes.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

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
RDMA_TRANSPORTS = frozenset(("rc_mlx5", "dc_mlx5", "ud_mlx5", "rc_verbs", "ud_verbs", "gga_mlx5", "srd"))
_HOST = frozenset(("tcp", "sysv", "posix", "cma", "knem", "xpmem", "self", "mm", "cuda_copy", "rocm_copy", "ze_copy"))
_STAGED_WORDS = re.compile(r"copy-in|copy-out|\b(?:cuda|rocm|ze)_copy\b|frag host|attached|mapped remote|fragmented")
_DIRECT_WORDS = re.compile(r"zero-copy|\b(?:read from|write to) remote\b|\bshort\b")
_TRANSPORT = re.compile(r"([a-z][a-z0-9_]*)/\S+")


class ProtocolRange(Struct, frozen=True):
    """One row of a protocol table.

    - `first_bytes`, `last_bytes`: the message sizes; `last_bytes` is None without an upper limit
    - `description`: UCX's words for the protocol, such as `zero-copy` or `software emulation`
    - `config`: transports and devices that carry the data, such as `cuda_ipc/cuda` or `tcp/lo`
    """

    first_bytes: int
    last_bytes: int | None
    description: str
    config: str

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports without their devices: `('rc_mlx5', 'cuda_ipc')`."""
        return tuple(dict.fromkeys(_TRANSPORT.findall(self.config)))

    @property
    def route(self) -> UcxRoute:
        """The route of data between GPUs. It has no meaning if an end of the table is host memory."""
        if "software emulation" in self.description:
            return UcxRoute.EMULATED
        names = set(self.transports)
        if _STAGED_WORDS.search(self.description) or names & _HOST:
            return UcxRoute.STAGED
        if not names or not _DIRECT_WORDS.search(self.description):
            return UcxRoute.UNKNOWN
        if names <= _PEER:
            return UcxRoute.PEER
        return UcxRoute.RDMA if names <= _PEER | RDMA_TRANSPORTS else UcxRoute.UNKNOWN


class ProtocolTable(Struct, frozen=True):
    """A table that UCX prints for UCX_PROTO_INFO=y when it first uses an operation between two kinds of memory.

    - `process`: host and process ID as the log line has them, `node1:861`, or an empty text
    - `context`: the name of the UCX context and the endpoint's scope: `r0 intra-node cfg#2`
    - `operation`: UCX's words: `remote memory write by ucp_put*(multi)`
    - `local`, `remote`: memory at both ends: `cuda/GPU0`, `cuda/dev[2]`, `cuda`, `cuda-managed`, `host memory`. For
      messages, `remote` is an empty text, because the sender does not know the receiver's buffer.
    """

    process: str
    context: str
    operation: str
    local: str
    remote: str
    ranges: tuple[ProtocolRange, ...]

    @property
    def is_payload(self) -> bool:
        """True if both ends are GPU memory, or the local end is and the remote one is not named.

        All other tables are about metadata and notifications, which go over TCP even in a healthy job.
        """
        return is_gpu_memory(self.local) and (not self.remote or is_gpu_memory(self.remote))

    @property
    def is_intra_node(self) -> bool:
        """True if UCX regards the two processes as processes of one node."""
        return "intra-node" in self.context

    def at(self, size_bytes: int) -> ProtocolRange | None:
        """Return the row for a message size in bytes. None if the table has none."""
        return next(
            (
                row
                for row in self.ranges
                if row.first_bytes <= size_bytes and (row.last_bytes is None or size_bytes <= row.last_bytes)
            ),
            None,
        )


_GPU_MEMORY = re.compile(r"(?:cuda|rocm|ze)(?:-managed|-device|-shared)?\b")


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
    - `exportable`: whether CUDA IPC can export the memory (cuIpcGetMemHandle)
    - `same_pid_namespace`, `same_node`: whether the two processes share them
    - `same_nvlink_domain`: whether the two GPUs are in one NVLink domain (clique)
    - `variables`: environment variables of either process, such as UCX_TLS and PYTORCH_CUDA_ALLOC_CONF
    - `rdma_devices`: number of RDMA devices that the process can open
    - `ucx_transports`: transports that UCX has for this process, such as `cuda_ipc`, `rc_mlx5`, `tcp`
    - `block_us`: time per block in µs, for a transfer of several blocks
    """

    name: str
    route: UcxRoute
    places: tuple[DevicePlace, ...] = ()
    transport: str = ""
    local: str = ""
    remote: str = ""
    allocation: Allocation | None = None
    exportable: bool | None = None
    same_node: bool | None = None
    same_pid_namespace: bool | None = None
    same_nvlink_domain: bool | None = None
    peer_access: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    rdma_devices: int | None = None
    ucx_transports: tuple[str, ...] | None = None
    size_bytes: int | None = None
    blocks: int = 1
    gb_s: float | None = None
    expected_gb_s: float | None = None
    block_us: float | None = None

    @property
    def misses_cuda_ipc(self) -> bool:
        """True if CUDA IPC could carry the data between two GPUs of one node, but UCX takes another path.

        The other path is host memory, or a NIC if both processes are known to be on one node.
        """
        if self.same_node is False or self.peer_access is False:
            return False
        return self.route.host_staged is True or (self.route is UcxRoute.RDMA and self.same_node is True)

    @property
    def staged_between_nodes(self) -> bool:
        """True if the data pass through host memory on their way to another node."""
        return self.route.host_staged is True and self.same_node is False
