"""KV-cache transfers between two processes: why UCX does not use CUDA IPC, GPUDirect RDMA or NVLinks between nodes,
and why a direct transfer is slow.
"""

import shlex
from collections.abc import Callable, Mapping

from gpubench.conditions.circumstances import VERIFIED_COPIES, Circumstances, Found, transfer_sighting
from gpubench.conditions.condition import Condition, Family, Look
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.ucx import RDMA_TRANSPORTS, Allocation, Transfer, UcxRoute
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE, POOL = "expandable_segments:true", "backend:cudamallocasync"
_MNNVL = "UCX_CUDA_IPC_ENABLE_MNNVL"
_MOST_BLOCK_US = 20.0  # UCX 1.23 needs 7 to 8 µs per block with cuda_ipc on an H200
_HEALTHY_SHARE = 0.9  # Share of the expected bandwidth from which a transfer is not slow

_SETTLES = "UCX_PROTO_INFO=y prints the protocol that UCX chose"
CUDA_IPC, _BETWEEN_NODES = "zero-copy over cuda_ipc", "GPUDirect RDMA"
_BETWEEN_NVLINKS = "cuda_ipc over NVLinks between the nodes"


def _detector(why: Callable[[Transfer], str], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines each transfer separately. `why` describes the problem, or returns ''."""
    return lambda run: (
        transfer_sighting(transfer, found, confidence) for transfer in run.transfers if (found := why(transfer))
    )


def allocator_setting(variables: Mapping[str, str], word: str) -> str:
    """Return the PyTorch allocator setting that contains the word, as `NAME=value`."""
    return next((f"{name}={variables[name]}" for name in ALLOCATORS if word in variables.get(name, "").lower()), "")


def _without(variables: Mapping[str, str], word: str) -> Cure:
    """Return the commands that remove one option from PyTorch's allocator settings."""
    commands = []
    for name in ALLOCATORS:
        options = variables.get(name, "").split(",")
        kept = ",".join(option for option in options if word not in option.lower())
        if kept != ",".join(options):
            commands.append(f"export {name}={shlex.quote(kept)}" if kept else f"unset {name}")
    return Cure(tuple(commands), _RESTART) if commands else NO_CURE


_RESTART = "Set this for both processes and start them again."


def _expandable(run: Circumstances) -> Found:
    for transfer in filter(lambda transfer: transfer.misses_cuda_ipc, run.transfers):
        setting = allocator_setting(transfer.variables, EXPANDABLE)
        if transfer.allocation is Allocation.EXPANDABLE or (transfer.allocation is None and setting):
            # UCX names the GPU of a peer whose memory it can reach: cuda/dev[2].
            refused = transfer.allocation is not None or transfer.exportable is False or transfer.remote == "cuda"
            yield transfer_sighting(
                transfer,
                setting or "the memory is allocated with cuMemCreate",
                Confidence.PROVEN if refused else Confidence.LIKELY,
                cure=_without(transfer.variables, EXPANDABLE),
            )


def _pool(run: Circumstances) -> Found:
    for transfer in filter(lambda transfer: transfer.misses_cuda_ipc, run.transfers):
        setting = allocator_setting(transfer.variables, POOL)
        # UCX names the GPU of a pool's memory. It does not name one for managed memory.
        words = next((name for name in (transfer.local, transfer.remote) if name.startswith("cuda-managed/")), "")
        if transfer.allocation is Allocation.ASYNC:
            yield transfer_sighting(transfer, setting or "the memory is allocated with cudaMallocAsync")
        elif transfer.allocation is None and (setting or words):
            yield transfer_sighting(
                transfer,
                setting or f"UCX detects {words}, as it does for cudaMallocAsync",
                Confidence.LIKELY,
                cure=_without(transfer.variables, POOL),
            )


def _managed(run: Circumstances) -> Found:
    for transfer in filter(lambda transfer: transfer.misses_cuda_ipc, run.transfers):
        named = "cuda-managed" in transfer.local or "cuda-managed" in transfer.remote
        if transfer.allocation is Allocation.MANAGED:
            yield transfer_sighting(transfer, "the memory is allocated with cudaMallocManaged")
        elif transfer.allocation is None and named:
            yield transfer_sighting(transfer, "UCX detects cuda-managed memory", Confidence.LIKELY)


def _pid_namespaces(run: Circumstances) -> Found:
    for transfer in filter(lambda transfer: transfer.misses_cuda_ipc, run.transfers):
        if transfer.same_pid_namespace is False:
            yield transfer_sighting(transfer, "the two processes have different PID namespaces")
        elif transfer.shares_pid:
            why = "two host names of one node have processes with the same process ID, as two containers have"
            yield transfer_sighting(transfer, why, Confidence.LIKELY)


def _bypasses_nvlinks_between_nodes(transfer: Transfer) -> bool:
    unused = transfer.same_node is False and transfer.route not in (UcxRoute.PEER, UcxRoute.UNKNOWN)
    return bool(transfer.same_nvlink_domain and unused)


def _mnnvl_is_off(transfer: Transfer) -> bool:
    """True if the variable forbids NVLinks between nodes. UCX 1.18 and newer try to use them by default."""
    return transfer.variables.get(_MNNVL, "try").lower() in ("n", "no", "off", "0")


def _mnnvl_off(run: Circumstances) -> Found:
    for transfer in filter(_bypasses_nvlinks_between_nodes, run.transfers):
        if _mnnvl_is_off(transfer):
            why = f"both GPUs are in one NVLink domain, but {_MNNVL} is {transfer.variables[_MNNVL]}"
            yield transfer_sighting(transfer, why, severity=None)


def _no_fabric_memory(run: Circumstances) -> Found:
    for transfer in filter(_bypasses_nvlinks_between_nodes, run.transfers):
        if not _mnnvl_is_off(transfer):
            why = "both GPUs are in one NVLink domain, but UCX does not use its NVLinks"
            yield transfer_sighting(transfer, why, Confidence.LIKELY)


def _block_cost(transfer: Transfer) -> str:
    if transfer.block_us is None or transfer.gb_s is None or transfer.expected_gb_s is None or transfer.blocks == 1:
        return ""
    is_slow = transfer.gb_s < _HEALTHY_SHARE * transfer.expected_gb_s
    if not is_slow or transfer.route.host_staged is not False or transfer.block_us > _MOST_BLOCK_US:
        return ""
    return f"{transfer.blocks:,} blocks take {transfer.block_us:.1f} µs each: a cost per block, not a fallback"


def _nic_inside(transfer: Transfer) -> str:
    inside = transfer.same_node is True and transfer.peer_access is not False
    return "a NIC carries data between two GPUs of one node" if inside and transfer.route is UcxRoute.RDMA else ""


def _get_disabled(transfer: Transfer) -> str:
    return "UCX found no NVLinks and disabled GET" if transfer.misses_cuda_ipc and transfer.get_disabled else ""


def _no_rdma_device(transfer: Transfer) -> str:
    absent = transfer.staged_between_nodes and transfer.rdma_devices == 0
    return "the process can open no RDMA device" if absent and "tcp" in transfer.transport else ""


def _no_gpudirect(transfer: Transfer) -> str:
    through_nic = any(name in transfer.transport for name in RDMA_TRANSPORTS)
    return "a NIC sends copies in host memory" if transfer.staged_between_nodes and through_nic else ""


def _no_peer_access(transfer: Transfer) -> str:
    refused = transfer.route.host_staged and transfer.same_node is not False and transfer.peer_access is False
    return "the two GPUs have no peer access" if refused else ""


def _unexplained(run: Circumstances) -> Found:
    for transfer in run.transfers:
        if transfer.route.host_staged:
            # Nodes without RDMA NICs have only TCP, which is then by design.
            by_design = transfer.same_node is False and "tcp" in transfer.transport
            severity = {"severity": Verdict.WARN} if by_design else {}
            yield transfer_sighting(transfer, "the cause is unknown", Confidence.WEAK, **severity)


KV = Family.of(
    "kv",
    "KV-cache transfers between processes (NIXL, UCX)",
    Condition(
        id="kv-no-peer-access",
        title="The two GPUs have no peer access, so UCX copies through host memory",
        settles="gpubench p2p",
        command=VERIFIED_COPIES,
        comment="It shows whether the hardware, the driver or a setting refuses peer access.",
        expected="peer access",
        link="https://github.com/ai-dynamo/nixl/pull/2208",
        look=_detector(_no_peer_access),
    ),
    Condition(
        id="kv-memory-expandable",
        title="expandable_segments:True: CUDA IPC cannot export memory from cuMemCreate, so UCX bypasses NVLink",
        settles=_SETTLES,
        command="unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF",
        comment=f"{_RESTART} vLLM's --enable-sleep-mode allocates the KV cache with cuMemCreate too.",
        expected=CUDA_IPC,
        link="https://github.com/ai-dynamo/nixl/issues/1754",
        look=_expandable,
    ),
    Condition(
        id="kv-memory-pool",
        title="cudaMallocAsync: CUDA IPC cannot export memory of a CUDA memory pool, so UCX bypasses NVLink",
        settles=_SETTLES,
        command="export PYTORCH_CUDA_ALLOC_CONF=backend:native",
        comment="Or allocate the KV cache with cudaMalloc, for example with CuPy's MemoryPool.",
        expected=CUDA_IPC,
        link="https://github.com/openucx/ucx/issues/11548",
        look=_pool,
    ),
    Condition(
        id="kv-memory-managed",
        title="cudaMallocManaged: CUDA IPC cannot export managed memory, so UCX bypasses NVLink",
        settles=_SETTLES,
        comment="Allocate the KV cache with cudaMalloc.",
        expected=CUDA_IPC,
        link="https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html",
        look=_managed,
    ),
    Condition(
        id="kv-pid-namespaces",
        title="Different PID namespaces (two containers or pods): UCX cannot use CUDA IPC",
        settles="readlink /proc/self/ns/pid in both processes",
        comment="Start both containers with `docker run --pid=host` (Kubernetes: `hostPID: true`), or run both "
        "processes in one pod with `shareProcessNamespace: true`.",
        expected="one PID namespace",
        link="https://github.com/vllm-project/vllm/pull/55906",
        look=_pid_namespaces,
    ),
    Condition(
        id="kv-get-without-nvlink",
        title="cuda-ipc get zcopy disabled as no nvlinks detected: UCX reads GPU memory through host memory",
        settles=_SETTLES,
        command=f"{VERIFIED_COPIES} && export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on",
        comment="Writes (PUT) use CUDA IPC without it.",
        expected=CUDA_IPC,
        link="https://github.com/ai-dynamo/nixl/issues/1097",
        look=_detector(_get_disabled),
    ),
    Condition(
        id="kv-no-rdma-device",
        title="No /dev/infiniband in the container: UCX sends to other nodes over TCP",
        settles="ls /sys/class/infiniband /dev/infiniband",
        command="ls /sys/class/infiniband /dev/infiniband",
        comment="If the node has RDMA NICs, start the container with `docker run --device=/dev/infiniband "
        "--ulimit memlock=-1` (Kubernetes: an RDMA device plugin).",
        expected=_BETWEEN_NODES,
        link="https://github.com/vllm-project/vllm/issues/51518",
        look=_detector(_no_rdma_device),
    ),
    Condition(
        id="kv-no-gpudirect",
        title="UCX does not use GPUDirect RDMA: GPU memory is copied to host memory before the NIC sends it",
        settles="ucx_info -d | grep -A20 mlx5 | grep memory",
        command="lsmod | grep -E 'nvidia_peermem|^mlx5_ib'",
        comment="UCX needs dma-buf (open kernel modules) or nvidia-peermem, and cuda_copy in UCX_TLS.",
        expected=_BETWEEN_NODES,
        link="https://github.com/ai-dynamo/nixl/issues/1695",
        look=_detector(_no_gpudirect),
    ),
    Condition(
        id="kv-mnnvl-off",
        title=f"GPUs of one NVLink domain on two nodes, but {_MNNVL}=n: UCX takes the network",
        settles=f"{_MNNVL}=try UCX_PROTO_INFO=y prints cuda_ipc",
        command=f"unset {_MNNVL}",
        comment="UCX 1.18 and newer use these NVLinks by default. An older UCX needs the value y.",
        expected=_BETWEEN_NVLINKS,
        link="https://github.com/openucx/ucx/pull/10285",
        look=_mnnvl_off,
    ),
    Condition(
        id="kv-memory-not-fabric",
        title="GPUs of one NVLink domain on two nodes, but the KV cache is not in fabric memory: it takes the network",
        settles=_SETTLES,
        comment="Allocate the KV cache as fabric memory: vLLM --enable-cumem-allocator, SGLang "
        "SGLANG_MOONCAKE_CUSTOM_MEMPOOL=NVLINK. Both nodes need an IMEX channel.",
        expected=_BETWEEN_NVLINKS,
        link="https://github.com/ai-dynamo/nixl/issues/1240",
        look=_no_fabric_memory,
    ),
    Condition(
        id="kv-nic-inside-node",
        title="UCX uses a NIC between GPUs of one node, instead of NVLink or PCIe",
        settles=_SETTLES,
        command=f"{VERIFIED_COPIES} && export UCX_TLS=cuda_ipc,cuda_copy,sm,self,tcp",
        comment="First give both containers all GPUs of the node. Set UCX_TLS only for processes that send to no other "
        "node.",
        expected=CUDA_IPC,
        link="https://github.com/ai-dynamo/nixl/issues/1195",
        look=_detector(_nic_inside, Confidence.WEAK),
    ),
    Condition(
        id="kv-block-cost",
        title="Many small blocks: each block costs microseconds, although the path is direct",
        settles="a transfer with larger blocks",
        comment="Choose larger blocks (vLLM --block-size), or a KV layout that has all layers in one block.",
        expected="blocks that are large enough for the full bandwidth",
        link="https://github.com/vllm-project/vllm/issues/55434",
        look=_detector(_block_cost),
    ),
    Condition(
        id="kv-staged-unexplained",
        title="UCX moves GPU memory through host memory for an unknown reason",
        settles=_SETTLES,
        likely="often expandable_segments:True, a PID namespace per process, or UCX_TLS without cuda_ipc",
        command="env | grep -E 'UCX_|ALLOC_CONF'; readlink /proc/self/ns/pid",
        comment="Run it in both processes. UCX_LOG_LEVEL=debug also shows which transports UCX excludes.",
        expected=f"{CUDA_IPC} or {_BETWEEN_NODES}",
        link="https://github.com/llm-d/llm-d/pull/2371",
        look=_unexplained,
        general=True,
    ),
)
