"""KV-cache transfers between two processes: why UCX does not use CUDA IPC or GPUDirect RDMA."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from gpubench.conditions.circumstances import VERIFIED_COPIES, Sighting, transfer_sighting
from gpubench.conditions.condition import Condition, Family, Look
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.ucx import RDMA_TRANSPORTS, Allocation, Transfer, UcxRoute
from gpubench.model.terms.verdict import NO_CURE, Cure

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE, POOL = "expandable_segments:true", "backend:cudamallocasync"

_SETTLES = "UCX_PROTO_INFO=y prints the protocol that UCX chose"
CUDA_IPC, _ROCM_IPC, _BETWEEN_NODES = "zero-copy over cuda_ipc", "zero-copy over rocm_ipc", "GPUDirect RDMA"


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


_RESTART = "Do this for both processes, and restart them."


def _detector(look: Callable[[Transfer], Sighting | None]) -> Look:
    """Return a detector that examines each transfer separately."""
    return lambda run: filter(None, map(look, run.transfers))


def _ipc_detector(look: Callable[[Transfer], Sighting | None]) -> Look:
    """Return a detector for the transfers that CUDA IPC could carry, but does not."""
    return lambda run: filter(None, map(look, (transfer for transfer in run.transfers if transfer.misses_cuda_ipc)))


def _expandable(transfer: Transfer) -> Sighting | None:
    setting = allocator_setting(transfer.variables, EXPANDABLE)
    is_known = transfer.allocation is Allocation.EXPANDABLE
    if not is_known and (transfer.allocation is not None or not setting):
        return None
    # UCX names the GPU of a peer whose memory it can reach: cuda/dev[2].
    confidence = Confidence.PROVEN if is_known or transfer.remote == "cuda" else Confidence.LIKELY
    why = setting or "the memory is allocated with cuMemCreate"
    return transfer_sighting(transfer, why, confidence, cure=_without(transfer.variables, EXPANDABLE))


def _pool(transfer: Transfer) -> Sighting | None:
    setting = allocator_setting(transfer.variables, POOL)
    if transfer.allocation is Allocation.ASYNC:
        return transfer_sighting(transfer, setting or "the memory is allocated with cudaMallocAsync")
    # UCX names the GPU of a pool's memory. It does not name one for managed memory.
    words = next((name for name in (transfer.local, transfer.remote) if name.startswith("cuda-managed/")), "")
    if transfer.allocation is not None or not (setting or words):
        return None
    why = setting or f"UCX detects {words}, as it does for cudaMallocAsync"
    return transfer_sighting(transfer, why, Confidence.LIKELY, cure=_without(transfer.variables, POOL))


def _managed(transfer: Transfer) -> Sighting | None:
    if transfer.allocation is Allocation.MANAGED:
        return transfer_sighting(transfer, "the memory is allocated with cudaMallocManaged")
    if transfer.allocation is None and "cuda-managed" in transfer.local + transfer.remote:
        return transfer_sighting(transfer, "UCX detects cuda-managed memory", Confidence.LIKELY)
    return None


def _pid_namespaces(transfer: Transfer) -> Sighting | None:
    if transfer.same_pid_namespace is False:
        return transfer_sighting(transfer, "the two processes have different PID namespaces")
    why = "two host names of one node have processes with the same process ID, which is typical of two containers"
    return transfer_sighting(transfer, why, Confidence.LIKELY) if transfer.shares_pid else None


def _get_disabled(transfer: Transfer) -> Sighting | None:
    seen = "UCX disabled reads (GET) over CUDA IPC: it found no NVLinks, or an inactive one, on the first GPU"
    return transfer_sighting(transfer, seen) if transfer.get_disabled else None


def _nic_inside(transfer: Transfer) -> Sighting | None:
    if transfer.route is not UcxRoute.RDMA or transfer.same_node is not True or transfer.peer_access is False:
        return None
    of_amd = {"expected": _ROCM_IPC, "cure": Cure(comment=_GPUS_SEEN)} if transfer.is_of_amd else {}
    return transfer_sighting(transfer, "a NIC carries data between two GPUs of one node", Confidence.WEAK, **of_amd)


_GPUS_SEEN = "Both processes must see both GPUs."


def _no_rdma_device(transfer: Transfer) -> Sighting | None:
    if transfer.staged_between_nodes and "tcp" in transfer.transport:
        return transfer_sighting(transfer, "UCX uses no RDMA device", Confidence.WEAK)
    return None


def _no_gpudirect(transfer: Transfer) -> Sighting | None:
    if transfer.staged_between_nodes and any(name in transfer.transport for name in RDMA_TRANSPORTS):
        return transfer_sighting(transfer, "a NIC sends from copies in host memory", Confidence.LIKELY)
    return None


def _no_peer_access(transfer: Transfer) -> Sighting | None:
    if transfer.route.host_staged and transfer.same_node is not False and transfer.peer_access is False:
        return transfer_sighting(transfer, "the two GPUs have no peer access")
    return None


def _unexplained(transfer: Transfer) -> Sighting | None:
    if not transfer.route.host_staged:
        return None
    more: dict[str, Any] = {"seen": f"{transfer.path} (cause unknown)"}
    if transfer.same_node is not True and any(name in transfer.transport for name in RDMA_TRANSPORTS):
        more |= {"expected": _BETWEEN_NODES, "likely": "often no GPUDirect RDMA"}
        more["cure"] = Cure.of("lsmod | grep -E 'nvidia_peermem|^mlx5_ib'; env | grep UCX_", comment=_IN_BOTH)
    elif transfer.is_of_amd:
        why = (
            "often UCX_TLS without rocm_ipc, or NIXL's peer error handling, which rocm_ipc does not support in UCX 1.22"
        )
        more |= {"expected": f"{_ROCM_IPC} or {_BETWEEN_NODES}", "likely": why}
        more["cure"] = Cure.of("env | grep UCX_", comment=_IN_BOTH)
    return transfer_sighting(transfer, "", Confidence.WEAK, **more)


_IN_BOTH = "Run it in both processes. UCX_LOG_LEVEL=debug also shows which transports UCX excludes."


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
        look=_ipc_detector(_expandable),
    ),
    Condition(
        id="kv-memory-pool",
        title="cudaMallocAsync: CUDA IPC cannot export memory of a CUDA memory pool, so UCX bypasses NVLink",
        settles=_SETTLES,
        command="export PYTORCH_CUDA_ALLOC_CONF=backend:native",
        comment="Or allocate the KV cache with cudaMalloc, for example with CuPy's MemoryPool.",
        expected=CUDA_IPC,
        link="https://github.com/openucx/ucx/issues/11548",
        look=_ipc_detector(_pool),
    ),
    Condition(
        id="kv-memory-managed",
        title="cudaMallocManaged: CUDA IPC cannot export managed memory, so UCX bypasses NVLink",
        settles=_SETTLES,
        comment="Allocate the KV cache with cudaMalloc.",
        expected=CUDA_IPC,
        link="https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html",
        look=_ipc_detector(_managed),
    ),
    Condition(
        id="kv-pid-namespaces",
        title="Different PID namespaces (two containers or pods): UCX cannot use CUDA IPC",
        settles="`readlink /proc/self/ns/pid` in both processes",
        comment="Start both containers with `docker run --pid=host` (Kubernetes: `hostPID: true`), or run both "
        "processes in one pod with `shareProcessNamespace: true`. Both containers must see both GPUs. In Kubernetes, "
        "two pods may also need `privileged: true`.",
        expected="one PID namespace",
        link="https://github.com/vllm-project/vllm/pull/55906",
        look=_ipc_detector(_pid_namespaces),
    ),
    Condition(
        id="kv-get-without-nvlink",
        title="UCX disables reads (GET) over CUDA IPC if it finds no NVLinks ('cuda-ipc get zcopy disabled as no "
        "nvlinks detected'), and reads through host memory",
        settles=_SETTLES,
        command=f"{VERIFIED_COPIES} && export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on",
        comment="`gpubench p2p` first proves that direct copies are correct. Writes (PUT) use CUDA IPC without this.",
        expected=CUDA_IPC,
        link="https://github.com/ai-dynamo/nixl/issues/1097",
        look=_ipc_detector(_get_disabled),
    ),
    Condition(
        id="kv-no-rdma-device",
        title="UCX sends to other nodes over TCP, often because the container has no /dev/infiniband or the "
        "nodes have no RDMA",
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
        id="kv-nic-inside-node",
        title="UCX uses a NIC between GPUs of one node, instead of NVLink or PCIe",
        settles=_SETTLES,
        command="nvidia-smi -L",
        comment="Run it in both containers. Each must list both GPUs, or UCX cannot use CUDA IPC. If they do, "
        "and the processes send to no other node, try UCX_TLS=cuda_ipc,cuda_copy,sm,self,tcp.",
        expected=CUDA_IPC,
        link="https://github.com/ai-dynamo/nixl/issues/1195",
        look=_detector(_nic_inside),
    ),
    Condition(
        id="kv-staged-unexplained",
        title="UCX moves GPU memory through host memory for an unknown reason",
        settles=_SETTLES,
        likely="often expandable_segments:True, a PID namespace per process, or UCX_TLS without cuda_ipc",
        command="env | grep -E 'UCX_|ALLOC_CONF'; readlink /proc/self/ns/pid",
        comment=_IN_BOTH,
        expected=f"{CUDA_IPC} or {_BETWEEN_NODES}",
        link="https://github.com/llm-d/llm-d/pull/2371",
        look=_detector(_unexplained),
        general=True,
    ),
)
