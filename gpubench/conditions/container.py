"""Limits of containers and processes: shared memory, namespaces, devices, locked memory, rights."""

from collections.abc import Callable, Iterator
from typing import Any

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.complaints import complained
from gpubench.conditions.definition.condition import Condition, Family, Found, Unread, joined
from gpubench.conditions.definition.log_evidence import LoggedReason, Staged
from gpubench.conditions.definition.sightings import of_ranks, rank_names
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair

_SMALLEST_SHM_BYTES = 64 * 2**20
"""Docker's default."""

_SMALLEST_MEMLOCK_BYTES = 64 * 2**20
"""Less than any library of RDMA registers; the usual limit of a login is 8 MiB or less, in a container 64 KiB."""

_UNLIMITED = -1
_PTRACE_OF_ADMINS = 2
_EXPANDABLE = "expandable_segments:true"
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _groups(ranks: list[RankFacts], key: Callable[[RankFacts], Any]) -> dict[Any, list[RankFacts]]:
    """Ranks by what is known of each; those of which nothing is known are left out."""
    found: dict[Any, list[RankFacts]] = {}
    for each in ranks:
        if key(each) is not None:
            found.setdefault(key(each), []).append(each)
    return found


def _nodes(run: Circumstances) -> Iterator[tuple[int, list[RankFacts]]]:
    for number in dict.fromkeys(each.node for each in run.facts):
        yield number, run.ranks_of(number)


def _apart(run: Circumstances, groups: dict[Any, list[RankFacts]]) -> frozenset[Pair]:
    """The ordered pairs of GPUs whose ranks are in different groups."""
    sides = [frozenset(gpu for each in ranks for gpu in run.gpus_of_rank(each)) for ranks in groups.values()]
    return frozenset(
        (one, other)
        for mine in sides
        for theirs in sides
        if mine is not theirs
        for one in mine
        for other in theirs
        if one != other
    )


def _shm_not_shared(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        groups = _groups(ranks, lambda each: each.shm_device)
        if len(groups) > 1:
            yield of_ranks(
                run,
                ranks,
                f"{len(groups)} different /dev/shm among {len(ranks)} ranks of one host",
                gpus=None,
                pairs=_apart(run, groups),
                names=(f"ranks {', '.join(str(rank.rank) for rank in ranks)} on {ranks[0].host}",),
            )


def _log_shm_not_shared(staged: Staged) -> LoggedReason | None:
    if not staged.inside or staged.network is None or staged.settings("NCCL_HOSTID"):
        return None
    counted = "" if staged.one_node else ", for NCCL they are of several"
    return LoggedReason(
        f"ranks of one host use the network, as they do in containers that share no /dev/shm{counted}",
        "run the ranks in one container, or share it: docker run --ipc=host",
    )


def _shm_small(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        small = [each for each in ranks if each.shm_bytes is not None and each.shm_bytes <= _SMALLEST_SHM_BYTES]
        if small:
            size = (small[0].shm_bytes or 0) // 2**20
            yield of_ranks(run, small, f"/dev/shm has {size} MiB", Confidence.WEAK)


def _differ_with_ucx(run: Circumstances, what: str, key: Callable[[RankFacts], Any], confidence: Confidence) -> Found:
    """Ranks of a host that use UCX and differ: NCCL would not mind."""
    for _, ranks in _nodes(run):
        with_ucx = [each for each in ranks if "libucp" in each.libraries]
        groups = _groups(with_ucx, key)
        if len(groups) > 1:
            seen = f"{len(groups)} {what} among ranks of one host, with UCX loaded"
            yield of_ranks(run, with_ucx, seen, confidence)


def _namespaces(run: Circumstances) -> Found:
    """UCX takes no CUDA IPC between PID namespaces."""
    yield from _differ_with_ucx(run, "pid namespaces", lambda each: each.namespaces.get("pid"), Confidence.LIKELY)
    yield from _differ_with_ucx(run, "ipc namespaces", lambda each: each.namespaces.get("ipc"), Confidence.LIKELY)


def _ptrace(run: Circumstances) -> Found:
    """Handing on descriptors, which PyTorch's expandable segments need to share GPU memory."""
    for _, ranks in _nodes(run):
        asking = [
            each for each in ranks if any(_EXPANDABLE in each.environment.get(name, "").lower() for name in _ALLOCATORS)
        ]
        refused = [each for each in asking if each.pidfd_getfd is False or _is_kept_from_ptrace(each)]
        if refused:
            scope = refused[0].ptrace_scope
            seen = "pidfd_getfd is refused" if refused[0].pidfd_getfd is False else f"ptrace_scope is {scope}"
            yield of_ranks(run, refused, f"{seen}, and expandable_segments is on", Confidence.LIKELY)
        elif asking and all(each.pidfd_getfd is None for each in asking):
            yield Unread(rank_names(asking), asking[0].unknown.get("pidfd_getfd", "pidfd_getfd was not tried"))


def _is_kept_from_ptrace(facts: RankFacts) -> bool:
    allowed = facts.capabilities is None or "SYS_PTRACE" in facts.capabilities
    return (facts.ptrace_scope or 0) >= _PTRACE_OF_ADMINS and not allowed


def _gpu_files(facts: RankFacts) -> tuple[str, ...] | None:
    files = tuple(name for name in facts.device_files if name.startswith("/dev/nvidia"))
    return files or None


def _gpus_hidden(run: Circumstances) -> Found:
    """Ranks of one host that have device files of different GPUs cannot open each other's memory."""
    for _, ranks in _nodes(run):
        groups = _groups(ranks, _gpu_files)
        if len(groups) > 1:
            shown = joined([f"{rank_names(members)}: {joined(files)}" for files, members in groups.items()], 2)
            yield of_ranks(run, ranks, f"device files differ ({shown})", Confidence.LIKELY)


def _denied(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        groups = _groups(
            ranks, lambda each: tuple(file for file in each.denied_device_files if "/nvidia" in file) or None
        )
        for files, members in groups.items():
            seen = f"may not open {joined(files)}: its mode, or the device list of its control group"
            yield of_ranks(run, members, seen, Confidence.LIKELY)


def _visible(run: Circumstances) -> Found:
    """Only where MPI or UCX moves GPU memory by itself: NCCL reaches GPUs that CUDA_VISIBLE_DEVICES hides."""
    what = "values of CUDA_VISIBLE_DEVICES"
    return _differ_with_ucx(run, what, lambda each: each.visible_devices, Confidence.WEAK)


def _memlock(run: Circumstances) -> Found:
    """Locked memory, of ranks on nodes with RDMA NICs: verbs cannot register buffers beyond it."""
    for number, ranks in _nodes(run):
        node = run.nodes.get(number)
        if node is None or not any(nic.rdma for nic in node.nics):
            continue
        low = [
            each
            for each in ranks
            if each.memlock_bytes not in (None, _UNLIMITED)
            and (each.memlock_bytes or 0) < _SMALLEST_MEMLOCK_BYTES
            and "IPC_LOCK" not in (each.capabilities or ())
        ]
        if low:
            seen = f"{(low[0].memlock_bytes or 0) // 1024:,} KiB of memory may be locked (ulimit -l)"
            yield of_ranks(run, low, seen, Confidence.LIKELY)


_DATA_SHARING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

CONTAINER = Family.of(
    "container",
    "Containers and processes",
    Condition(
        id="shm-not-shared",
        title="Ranks of one host in separate containers share no /dev/shm: NCCL uses NET/Socket inside the node",
        seen_as=("via NET/Socket/0",),
        detection="st_dev of /dev/shm differs between ranks of one host; in NCCL's log `via NET` inside a node",
        settles="stat -c %d /dev/shm in every rank",
        check="ranks_alike",
        expected="one /dev/shm for all ranks of a host",
        likely="a container of its own for each rank: NCCL then uses the network inside the host",
        cure="run the ranks in one container, or share it: docker run --ipc=host, hostIPC: true in Kubernetes",
        link="https://github.com/NVIDIA/nccl/pull/248",
        look=_shm_not_shared,
        in_log=_log_shm_not_shared,
        in_job=complained(r"attaching to shared memory segment|could not map /dev/shm"),
        implies=("namespaces-differ", "gpus-not-visible", "nccl-net-in-node"),
    ),
    Condition(
        id="shm-too-small",
        title="/dev/shm is too small (Docker's 64 MB): NCCL `failed to extend /dev/shm`, no shared memory",
        seen_as=(
            "Error while creating shared memory segment /dev/shm/nccl-",
            "No space left on device",
            "failed to extend /dev/shm/nccl-",
            "ncclSystemError",
        ),
        detection="size of /dev/shm of every rank, at most 64 MiB",
        settles="df -h /dev/shm; NCCL_DEBUG=WARN prints `Error while creating shared memory segment`",
        expected="room for NCCL's segments, up to 33 MB each",
        likely="Docker gives a container 64 MB of /dev/shm unless told otherwise; or segments of dead jobs fill it",
        cure="docker run --shm-size=1g --ulimit memlock=-1, or --ipc=host; df -h /dev/shm shows what is left",
        link=_DATA_SHARING,
        look=_shm_small,
        in_job=complained(r"no space left|failed to extend|posix_fallocate|(?:creating|create) shared memory|shm_open"),
    ),
    Condition(
        id="gpus-not-visible",
        title="One GPU per container: ranks cannot open each other's GPU memory (cuMemImport, IPC error 101)",
        detection="device files /dev/nvidiaN differ between ranks of one host",
        settles="ls /dev/nvidia* in every rank",
        cure="give every rank all GPUs of the host, and let it choose by its local rank",
        link="https://github.com/NVIDIA/nccl/issues/1647",
        look=_gpus_hidden,
    ),
    Condition(
        id="device-file-denied",
        title="A rank may not open /dev/nvidiaN: permission denied (cgroup devices, file mode)",
        seen_as=("Failed to initialize NVML: Insufficient Permissions", "No CUDA GPUs are available"),
        detection="access(2) on the device files of every rank",
        settles="ls -l /dev/nvidia*; nvidia-smi inside the container",
        cure="docker run --gpus all, or the launcher's list of devices (Slurm ConstrainDevices)",
        link="https://github.com/NVIDIA/nccl/issues/324",
        look=_denied,
    ),
    Condition(
        id="memlock-limited",
        title="Locked memory is limited (ulimit -l, RLIMIT_MEMLOCK): RDMA cannot register memory",
        seen_as=("Call to ibv_reg_mr failed", "Call to ibv_create_cq failed", "Cannot allocate memory"),
        detection="RLIMIT_MEMLOCK of ranks on nodes with RDMA NICs, below 64 MiB and without CAP_IPC_LOCK",
        settles="ulimit -l; ib_write_bw; NCCL_DEBUG=WARN prints that ibv_reg_mr failed",
        cure="ulimit -l unlimited (LimitMEMLOCK=infinity of slurmd and sshd); docker run --ulimit memlock=-1",
        link=_DATA_SHARING,
        look=_memlock,
    ),
    Condition(
        id="namespaces-differ",
        title="Different PID or IPC namespaces: UCX refuses cuda_ipc and falls back to TCP",
        detection="/proc/self/ns/pid and ipc of ranks of one host, where UCX is loaded",
        settles="UCX_PROTO_INFO=y prints the protocol that UCX chose",
        cure="docker run --pid=host --ipc=host, or one container a host",
        link="https://github.com/vllm-project/vllm/pull/55906",
        look=_namespaces,
    ),
    Condition(
        id="ptrace-blocked",
        title="pidfd_getfd: Operation not permitted: PyTorch expandable_segments cannot share memory (IPC)",
        detection="pidfd_getfd tried on the process itself, yama's ptrace_scope, CapEff; where expandable_segments "
        "is asked for",
        settles="cat /proc/sys/kernel/yama/ptrace_scope; grep -E 'Seccomp|CapEff' /proc/self/status",
        cure="docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
        link="https://github.com/pytorch/pytorch/issues/130890",
        look=_ptrace,
    ),
    Condition(
        id="visible-devices-differ",
        title="CUDA_VISIBLE_DEVICES differs between ranks: MPI and UCX cannot use CUDA IPC, GPU indices differ",
        detection="CUDA_VISIBLE_DEVICES of ranks of one host, where UCX is loaded",
        settles="UCX_PROTO_INFO=y; gpubench topo numbers GPUs as the driver does",
        cure="show every rank all GPUs, in CUDA_DEVICE_ORDER=PCI_BUS_ID, and choose by local rank",
        link="https://github.com/openucx/ucx/issues/5022",
        look=_visible,
    ),
)
