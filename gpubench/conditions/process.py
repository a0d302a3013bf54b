"""Processes and their containers: shared memory, namespaces, device files, privileges, CPUs, CUDA settings and
attached tools.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

from msgspec.structs import replace

from gpubench.conditions.circumstances import (
    VERIFIED_COPIES,
    Circumstances,
    Found,
    Sighting,
    Unread,
    joined,
    rank_names,
    transfer_sighting,
)
from gpubench.conditions.condition import Condition, Family, unread
from gpubench.conditions.kv import CUDA_IPC, EXPANDABLE, allocator_setting
from gpubench.conditions.logged import Complained, LoggedReason, Staged
from gpubench.conditions.nccl_settings import blame, nccl_number
from gpubench.conditions.node import cpus_in
from gpubench.model.facts.process import MpiSupport, RankFacts
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.units import format_ranges, plural
from gpubench.model.terms.verdict import NO_CURE, Cure, Finding, Verdict

_SMALLEST_SHM_BYTES = 64 * 2**20  # Docker's default size of /dev/shm
# RDMA libraries register more than this. Login sessions usually have 8 MiB or less.
_SMALLEST_MEMLOCK_BYTES = 64 * 2**20
_UNLIMITED = -1
_PTRACE_OF_ADMINS = 2


def _groups(ranks: list[RankFacts], key: Callable[[RankFacts], Any]) -> dict[Any, list[RankFacts]]:
    found: dict[Any, list[RankFacts]] = {}
    for rank in ranks:
        if key(rank) is not None:
            found.setdefault(key(rank), []).append(rank)
    return found


def _nodes(run: Circumstances) -> Iterator[tuple[int, list[RankFacts]]]:
    for number in dict.fromkeys(fact.node for fact in run.facts):
        yield number, run.node_ranks(number)


def _apart(run: Circumstances, groups: dict[Any, list[RankFacts]]) -> frozenset[Pair]:
    sides = [frozenset(gpu for rank in ranks for gpu in run.rank_gpus(rank)) for ranks in groups.values()]
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
        groups = _groups(ranks, lambda facts: facts.shm_device)
        if len(groups) > 1:
            yield run.rank_sighting(
                ranks,
                f"{len(ranks)} ranks of one host have {len(groups)} separate /dev/shm",
                gpus=None,
                pairs=_apart(run, groups),
                names=(f"ranks {', '.join(str(rank.rank) for rank in ranks)} on {ranks[0].host}",),
            )


def _log_shm_not_shared(staged: Staged) -> LoggedReason | None:
    if not staged.through_local_network or staged.settings("NCCL_HOSTID"):
        return None
    several = "" if staged.one_node else "; NCCL treats them as ranks of several hosts"
    return LoggedReason(
        f"ranks of one host use the network, as in containers with separate /dev/shm{several}",
        Cure(
            comment="Start the container with `docker run --ipc=host` (Kubernetes: `hostIPC: true`), or run "
            "all ranks of a host in one container."
        ),
    )


def _shm_small(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        small = [rank for rank in ranks if rank.shm_bytes is not None and rank.shm_bytes <= _SMALLEST_SHM_BYTES]
        if small:
            size = (small[0].shm_bytes or 0) // 2**20
            yield run.rank_sighting(small, f"/dev/shm has only {size} MiB", Confidence.WEAK)


def _differ_with_ucx(run: Circumstances, what: str, key: Callable[[RankFacts], Any], confidence: Confidence) -> Found:
    for _, ranks in _nodes(run):
        with_ucx = [rank for rank in ranks if "libucp" in rank.libraries]
        groups = _groups(with_ucx, key)
        if len(groups) > 1:
            seen = f"UCX is loaded, and ranks of one host have {len(groups)} different {what}"
            yield run.rank_sighting(with_ucx, seen, confidence)


def _namespaces(run: Circumstances) -> Found:
    """Find ranks in different PID namespaces. UCX does not use CUDA IPC between them.

    IPC namespaces do not matter: UCX 1.23 reaches 359 GB/s between them on two H200s.
    """
    yield from _differ_with_ucx(run, "PID namespaces", lambda facts: facts.namespaces.get("pid"), Confidence.LIKELY)


def _ptrace(run: Circumstances) -> Found:
    """Find ranks that may not pass file descriptors to each other.

    PyTorch's expandable segments use this to share GPU memory.
    """
    for _, ranks in _nodes(run):
        asking = [rank for rank in ranks if allocator_setting(rank.environment, EXPANDABLE)]
        refused = [rank for rank in asking if rank.pidfd_getfd is False or _may_not_ptrace(rank)]
        if refused:
            scope = refused[0].ptrace_scope
            seen = "pidfd_getfd is refused" if refused[0].pidfd_getfd is False else f"ptrace_scope is {scope}"
            yield run.rank_sighting(refused, f"expandable_segments is on, but {seen}", Confidence.LIKELY)
        elif asking and all(rank.pidfd_getfd is None for rank in asking):
            yield Unread(rank_names(asking), asking[0].unknown.get("pidfd_getfd", "pidfd_getfd was not tried"))


def _may_not_ptrace(facts: RankFacts) -> bool:
    allowed = facts.capabilities is None or "SYS_PTRACE" in facts.capabilities
    return (facts.ptrace_scope or 0) >= _PTRACE_OF_ADMINS and not allowed


def _gpus_hidden(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        groups = _groups(
            ranks, lambda rank: tuple(file for file in rank.device_files if file.startswith("/dev/nvidia")) or None
        )
        if len(groups) > 1:
            shown = joined([f"{rank_names(members)}: {joined(files)}" for files, members in groups.items()], 2)
            yield run.rank_sighting(ranks, f"device files differ ({shown})", Confidence.LIKELY)


def _denied(run: Circumstances) -> Found:
    for _, ranks in _nodes(run):
        groups = _groups(
            ranks, lambda facts: tuple(file for file in facts.denied_device_files if "/nvidia" in file) or None
        )
        for files, members in groups.items():
            seen = f"may not open {joined(files)}, because of the file mode or the control group's device list"
            yield run.rank_sighting(members, seen, Confidence.LIKELY)


def _memlock(run: Circumstances) -> Found:
    for number, ranks in _nodes(run):
        node = run.nodes.get(number)
        if node is None or not any(nic.rdma for nic in node.nics):
            continue
        low = [
            rank
            for rank in ranks
            if rank.memlock_bytes not in (None, _UNLIMITED)
            and (rank.memlock_bytes or 0) < _SMALLEST_MEMLOCK_BYTES
            and "IPC_LOCK" not in (rank.capabilities or ())
        ]
        if low:
            seen = f"only {(low[0].memlock_bytes or 0) // 1024:,} KiB of memory may be locked (ulimit -l)"
            yield run.rank_sighting(low, seen, Confidence.LIKELY)


_DATA_SHARING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

CONTAINER = Family.of(
    "container",
    "Containers and processes",
    Condition(
        id="shm-not-shared",
        title="Ranks of one host run in containers with separate /dev/shm: NCCL uses NET/Socket inside the node",
        settles="`stat -c %d /dev/shm` in every rank",
        check="ranks_alike",
        expected="one /dev/shm for all ranks of a host",
        likely="a separate container for each rank",
        comment="Start the container with `docker run --ipc=host` (Kubernetes: `hostIPC: true`), or run "
        "all ranks of a host in one container.",
        link="https://github.com/NVIDIA/nccl/pull/248",
        look=_shm_not_shared,
        in_log=_log_shm_not_shared,
        in_job=Complained(r"attaching to shared memory segment|could not map /dev/shm"),
        implies=("namespaces-differ", "gpus-not-visible", "nccl-net-in-node"),
    ),
    Condition(
        id="shm-too-small",
        title="/dev/shm is too small (Docker's 64 MB): NCCL `failed to extend /dev/shm`, no shared memory",
        settles="`df -h /dev/shm`, or `Error while creating shared memory segment` in a log with NCCL_DEBUG=WARN",
        expected="space for NCCL's segments, up to 33 MB each",
        likely="Docker's default of 64 MB for /dev/shm, or segments of ended jobs that fill it",
        command="df -h /dev/shm",
        comment="Start the container with `docker run --shm-size=1g --ulimit memlock=-1`, or with `--ipc=host`.",
        link=_DATA_SHARING,
        look=_shm_small,
        in_job=Complained(r"no space left|failed to extend|posix_fallocate|(?:creating|create) shared memory|shm_open"),
    ),
    Condition(
        id="gpus-not-visible",
        title="One GPU per container: ranks cannot open each other's GPU memory (cuMemImport, IPC error 101)",
        settles="`ls /dev/nvidia*` in every rank",
        comment="Give every rank all GPUs of the host (`docker run --gpus all`), and select one by local rank.",
        link="https://github.com/NVIDIA/nccl/issues/1647",
        look=_gpus_hidden,
    ),
    Condition(
        id="device-file-denied",
        title="A rank cannot open /dev/nvidiaN: permission denied (cgroup devices, file mode)",
        settles="`ls -l /dev/nvidia*` and `nvidia-smi` inside the container",
        comment="Start the container with `docker run --gpus all`. With Slurm, check ConstrainDevices in cgroup.conf.",
        link="https://github.com/NVIDIA/nccl/issues/324",
        look=_denied,
    ),
    Condition(
        id="memlock-limited",
        title="Locked memory is limited (ulimit -l, RLIMIT_MEMLOCK): RDMA cannot register memory",
        settles="`ulimit -l` and `ib_write_bw`, or a failed ibv_reg_mr in a log with NCCL_DEBUG=WARN",
        command="ulimit -l unlimited",
        comment="Set LimitMEMLOCK=infinity for slurmd and sshd, or start the container with `docker run --ulimit "
        "memlock=-1`.",
        link="https://github.com/NVIDIA/nccl-tests/issues/78",
        look=_memlock,
    ),
    Condition(
        id="namespaces-differ",
        title="Different PID namespaces: UCX refuses cuda_ipc and falls back to TCP",
        settles="UCX_PROTO_INFO=y prints the protocol that UCX chose",
        comment="Start the container with `docker run --pid=host`, or use one container per host.",
        link="https://github.com/vllm-project/vllm/pull/55906",
        look=_namespaces,
    ),
    Condition(
        id="ptrace-blocked",
        title="pidfd_getfd: Operation not permitted: PyTorch expandable_segments cannot share memory (IPC)",
        settles="cat /proc/sys/kernel/yama/ptrace_scope; grep -E 'Seccomp|CapEff' /proc/self/status",
        command="sysctl kernel.yama.ptrace_scope=0",
        comment="Start a container with `docker run --cap-add SYS_PTRACE`.",
        link="https://github.com/pytorch/pytorch/issues/130890",
        look=_ptrace,
    ),
    Condition(
        id="visible-devices-differ",
        title="CUDA_VISIBLE_DEVICES differs between ranks: GPU indices differ, and UCX before 1.8 cannot use CUDA IPC",
        settles="UCX_PROTO_INFO=y, and `gpubench topo`, which numbers GPUs as the driver does",
        command="unset CUDA_VISIBLE_DEVICES",
        comment="Set CUDA_DEVICE_ORDER=PCI_BUS_ID and select each rank's GPU by local rank.",
        link="https://github.com/openucx/ucx/issues/5022",
        # NCCL also reaches GPUs that are hidden from a process, and so does UCX since 1.8: 334 GB/s on two H200s.
        look=lambda run: _differ_with_ucx(
            run, "values of CUDA_VISIBLE_DEVICES", lambda rank: rank.visible_devices, Confidence.WEAK
        ),
    ),
)

_WAITED_SHARE, _SURELY_WAITED_SHARE = 0.1, 0.3
"""Share of its time that a rank was runnable but waited for a CPU.

It is below 1 % if each rank has a free CPU, and 75 % with three busy loops on each rank's CPU.
"""

_WIDER = Cure(
    comment="Start the job with `mpirun --bind-to none`, without taskset, `numactl -C` and "
    "`--cpuset-cpus`. With Slurm, use `srun --cpus-per-task=8`."
)
_CPUS_A_RANK = 2  # One for the thread that launches kernels, and one for threads of NCCL and MPI


def _shared(run: Circumstances) -> Found:
    """Find groups of ranks that share fewer CPUs than there are ranks. Each rank keeps a CPU busy while it waits
    for its GPU.
    """
    for node in sorted({fact.node for fact in run.facts}):
        for ranks, cpus in _crowded(run.node_ranks(node)):
            shown = format_ranges(cpus)
            count = f"CPU {shown}" if len(cpus) == 1 else f"{len(cpus)} CPUs ({shown})"
            # mpirun binds ranks to different CPUs, so if all ranks share a binding, something else has set it.
            outside = len(ranks) == len(run.node_ranks(node))
            yield run.rank_sighting(
                ranks, f"{len(ranks)} ranks may run only on {count}", cure=_WIDER if outside else NO_CURE
            )
        for rank in run.node_ranks(node):
            yield from unread(run.subject(node, f"rank {rank.rank}"), rank.unknown, "affinity")


def _crowded(ranks: Sequence[RankFacts]) -> Iterator[tuple[list[RankFacts], set[int]]]:
    """Yield groups of ranks that share fewer CPUs than there are ranks: first with equal bindings, then with
    overlapping ones.
    """
    known = [(rank, frozenset(cpus)) for rank in ranks if (cpus := cpus_in(rank.affinity or ""))]
    for common in dict.fromkeys(mask for _, mask in known):
        alike = [rank for rank, mask in known if mask == common]
        if len(alike) > len(common):
            yield alike, set(common)
            known = [(rank, mask) for rank, mask in known if mask != common]
    while known:
        union, within = set(known[0][1]), [known[0]]
        while more := [other for other in known if other not in within and not union.isdisjoint(other[1])]:
            within += more
            union.update(*(mask for _, mask in more))
        if len(within) > len(union):
            yield [rank for rank, _ in within], union
        known = [other for other in known if other not in within]


def _quota(run: Circumstances) -> Found:
    """Find control groups with a quota of less than one CPU per rank. Separate containers have separate groups."""
    groups: dict[tuple[int, int | None, str], list[RankFacts]] = {}
    for fact in run.facts:
        if fact.cpu_quota is not None:
            key = fact.node, fact.namespaces.get("cgroup"), fact.cpu_quota.by
            groups.setdefault(key, []).append(fact)
    for (_, _, by), ranks in groups.items():
        cpus = min(rank.cpu_quota.cpus for rank in ranks if rank.cpu_quota is not None)
        if cpus < len(ranks):
            count, enough = len(ranks), _CPUS_A_RANK * len(ranks)
            cure = Cure(
                comment=f"Start the container with `docker run --cpus={enough}`. In Kubernetes set `limits.cpu: "
                f"{enough}`, in systemd `CPUQuota={enough}00%`."
            )
            seen = f"{by} grants {cpus:g} CPUs to {count} rank{'s' * (count > 1)}"
            yield run.rank_sighting(ranks, seen, cure=cure)


def _oversubscribed(run: Circumstances) -> Found:
    for node in sorted({fact.node for fact in run.facts}):
        waited = {rank.rank: run.waited.get(rank.rank, 0.0) for rank in run.node_ranks(node)}
        late = [rank for rank in run.node_ranks(node) if waited[rank.rank] >= _WAITED_SHARE]
        if late:
            most = max(waited.values())
            sure = Confidence.PROVEN if most >= _SURELY_WAITED_SHARE else Confidence.LIKELY
            yield run.rank_sighting(late, f"waited for a CPU for {most:.0%} of their time", sure)


_BINDING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ignore-cpu-affinity"
_CONTROL_GROUPS = "https://github.com/kubernetes/kubernetes/issues/67577"
_LATENCY = "compare `gpubench allreduce --sizes 1K` with a run "

CORES = Family.of(
    "cores",
    "CPUs of the ranks",
    Condition(
        id="cores-shared",
        title="Ranks share CPU cores: several are bound to the same cores (mpirun --bind-to core, taskset, cpuset)",
        settles=f"{_LATENCY}with mpirun --bind-to none",
        comment="Start the job with `mpirun --bind-to none`, or with `--bind-to numa --map-by numa`. "
        "With Slurm, use `srun --cpus-per-task=8 --cpu-bind=cores`.",
        link=_BINDING,
        look=_shared,
        implies=("cpu-oversubscribed",),
    ),
    Condition(
        id="cpu-quota",
        title="A control group grants fewer CPUs than there are ranks (cpu.max, cfs quota, Kubernetes limits)",
        settles="`grep throttled /sys/fs/cgroup/cpu.stat` before and after a run",
        command="cat /sys/fs/cgroup/cpu.max",
        comment="Grant at least two CPUs for each rank (docker run --cpus, or resources.limits.cpu of the pod).",
        link=_CONTROL_GROUPS,
        look=_quota,
        implies=("cpu-oversubscribed",),
    ),
    Condition(
        id="cpu-oversubscribed",
        title="Ranks wait for a CPU: other programs use the same cores (oversubscription)",
        settles=f"{_LATENCY}while no other program runs",
        command="ps -eo pid,psr,pcpu,comm --sort=-pcpu | head",
        comment="End the other programs, or move them to other cores.",
        link=_BINDING,
        look=_oversubscribed,
    ),
)

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _blocking(run: Circumstances) -> Found:
    on = [value for value in run.values(_BLOCKING) if nccl_number(value)]
    if on:
        yield blame(run, {_BLOCKING: on}, Confidence.PROVEN, None)


def _connections(run: Circumstances) -> Found:
    few = [value for value in run.values(_CONNECTIONS) if nccl_number(value) == 1]
    if few:
        found = blame(run, {_CONNECTIONS: few}, Confidence.WEAK, None)
        yield replace(found, cure=found.cure.add_comment("Keep it if the framework needs 1, as Megatron does."))


PROCESS = Family.of(
    "process",
    "CUDA's settings, and tools in the process",
    Condition(
        id="cuda-launch-blocking",
        title="CUDA_LAUNCH_BLOCKING=1: every kernel launch blocks until the kernel has finished",
        settles="compare `gpubench allreduce` with `env -u CUDA_LAUNCH_BLOCKING gpubench allreduce`",
        command="unset CUDA_LAUNCH_BLOCKING",
        link="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html",
        look=_blocking,
    ),
    Condition(
        id="cuda-max-connections",
        title="CUDA_DEVICE_MAX_CONNECTIONS=1: all streams of a process share one queue to the GPU",
        settles="compare `gpubench overlap` with `env -u CUDA_DEVICE_MAX_CONNECTIONS gpubench overlap`",
        command="unset CUDA_DEVICE_MAX_CONNECTIONS",
        comment="Keep it if the framework needs 1.",
        link="https://github.com/NVIDIA/nccl/issues/2238",
        look=_connections,
    ),
)


_OFF_VALUES = ("0", "false", "no", "n", "off")
_SWITCHES = (
    *("OMPI_MCA_opal_cuda_support", "MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA"),
    *("MVP_USE_CUDA", "MPICH_RDMA_ENABLED_CUDA"),
)
_LLAMA, _LLAMA_SWITCH = "GGML_CUDA_", "GGML_CUDA_P2P"
_UCX_TLS, _UCX_RDMA = "UCX_TLS", "UCX_IB_GPU_DIRECT_RDMA"


def _switched_off(run: Circumstances) -> Found:
    for facts in run.facts:
        off = [name for name in _SWITCHES if facts.environment.get(name, "").lower() in _OFF_VALUES]
        if off:
            yield run.rank_sighting([facts], joined(f"{name}={facts.environment[name]}" for name in off))
        elif facts.mpi is not None and facts.mpi.cuda_built and facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} was built with CUDA support, but it is off in this run"
            yield run.rank_sighting([facts], seen, Confidence.LIKELY)


def _not_aware(run: Circumstances) -> Found:
    """Find MPI libraries that fail on GPU memory, or that report no support for it.

    The report alone is weak evidence, since few programs need that support.
    """
    if run.mpi_support is not None:
        yield from _tried(run.mpi_support)
        return
    for facts in run.facts:
        if facts.mpi is None:
            continue
        if facts.mpi.cuda_aware is False:
            seen = f"{facts.mpi.version or 'MPI'} reports that it does not support GPU memory"
            yield run.rank_sighting([facts], seen, Confidence.WEAK)
        elif facts.mpi.cuda_aware is None:
            yield from unread(run.subject(facts.node, f"rank {facts.rank}"), facts.mpi.unknown, "cuda_aware")


def _tried(support: MpiSupport) -> Found:
    failing, working = support.failing, support.working
    if not failing:
        return
    first = support.asked if support.asked in failing else failing[0]
    taken = f"; {', '.join(working)} {'work' if len(working) > 1 else 'works'}" if working else ""
    others = len(failing) - 1
    more = f"; {plural(others, 'other operation')} fail{'s' * (others == 1)} too" if others else ""
    claims = "; ".join(f"{name} {value}" for name, value in support.claims.items())
    yield Sighting(
        subject=support.library,
        seen=f"{support.why_not(first)}{more}{taken}",
        severity=Verdict.WARN if support.works(support.asked) else Verdict.FAIL,
        expected="GPU buffers sent and received like host buffers",
        likely=f"MPI, or the UCX it uses, was built without CUDA (the library reports: {claims or 'nothing'})",
    )


def mpi_findings(support: MpiSupport) -> tuple[Finding, ...]:
    """Return a finding if MPI failed on GPU memory in any operation."""
    return tuple(NOT_CUDA_AWARE.findings(Circumstances(wiring=Wiring([], {}), mpi_support=support)))


def _excluded_transports(listed: str) -> tuple[str, ...]:
    """Return which of cuda_copy and cuda_ipc a value of UCX_TLS excludes."""
    names = {name.strip() for name in listed.removeprefix("^").split(",")}
    listed_here = {name: bool(names & {name, "cuda", "all"}) for name in ("cuda_copy", "cuda_ipc")}
    return tuple(name for name, is_listed in listed_here.items() if listed and is_listed == listed.startswith("^"))


_PROVES = "`gpubench p2p` first proves that direct copies are correct."
_UNSET_TLS = Cure.of(f"{VERIFIED_COPIES} && unset UCX_TLS", comment=f"{_PROVES} Or add cuda_copy,cuda_ipc to UCX_TLS.")
_UNSET_RDMA = Cure.of(f"{VERIFIED_COPIES} && unset UCX_IB_GPU_DIRECT_RDMA", comment=_PROVES)


def _ucx_tls(run: Circumstances) -> Found:
    for facts in run.facts:
        listed = facts.environment.get(_UCX_TLS, "")
        excluded = _excluded_transports(listed)
        if "cuda_copy" in excluded or (excluded and len(run.node_ranks(facts.node)) > 1):
            seen = f"{_UCX_TLS}={listed} excludes {' and '.join(excluded)}"
            yield run.rank_sighting([facts], seen, Confidence.LIKELY, cure=_UNSET_TLS)
        if facts.environment.get(_UCX_RDMA, "").lower() in _OFF_VALUES:
            seen = f"{_UCX_RDMA}={facts.environment[_UCX_RDMA]}"
            yield run.rank_sighting([facts], seen, Confidence.LIKELY, cure=_UNSET_RDMA)
    for transfer in run.transfers:
        listed = transfer.variables.get(_UCX_TLS, "")
        if transfer.misses_cuda_ipc and "cuda_ipc" in _excluded_transports(listed):
            seen = f"{_UCX_TLS}={listed} excludes cuda_ipc"
            yield transfer_sighting(transfer, seen, expected=CUDA_IPC, cure=_UNSET_TLS)
        elif transfer.misses_cuda_ipc and "cuda_ipc" in transfer.excluded_transports:
            seen = "UCX closed cuda_ipc, because UCX_TLS or UCX_NET_DEVICES excludes it"
            yield transfer_sighting(transfer, seen, expected=CUDA_IPC)
        if transfer.staged_between_nodes and transfer.variables.get(_UCX_RDMA, "").lower() in _OFF_VALUES:
            seen = f"{_UCX_RDMA}={transfer.variables[_UCX_RDMA]}"
            yield transfer_sighting(transfer, seen, expected="GPUDirect RDMA", cure=_UNSET_RDMA)


def _ucx_without_cuda(run: Circumstances) -> Found:
    for facts in run.facts:
        if facts.ucx_cuda is False:
            yield run.rank_sighting([facts], "the loaded UCX has no libuct_cuda.so", Confidence.LIKELY)
    for transfer in run.transfers:
        missing = [name for name in transfer.missing_transports if name in ("cuda_copy", "cuda_ipc")]
        if transfer.route.host_staged and missing and not transfer.is_of_amd:
            yield transfer_sighting(transfer, f"UCX lacks {joined(missing)}", expected=CUDA_IPC)


def _not_enabled(run: Circumstances) -> Found:
    """Find llama.cpp processes without peer access. Newer versions need a setting for it.

    Evidence is weak because the version is unknown.
    """
    for facts in run.facts:
        set_up = [name for name in facts.environment if name.startswith(_LLAMA) and name != _LLAMA_SWITCH]
        pairs = permutations(sorted(run.node_gpus(facts.node)), 2)
        has_peer_access = any(run.wiring.peer_access(pair).possible for pair in pairs)
        if set_up and not facts.environment.get(_LLAMA_SWITCH) and has_peer_access:
            seen = f"{joined(set_up)} is set but {_LLAMA_SWITCH} is not, although peer access is possible"
            yield run.rank_sighting([facts], seen, Confidence.WEAK)


_OPEN_MPI = "https://www.open-mpi.org/faq/?category=runcuda"

NOT_CUDA_AWARE = Condition(
    id="mpi-not-cuda-aware",
    title="MPI is not CUDA-aware: GPU buffers crash it, or are copied through the host",
    settles="gpubench allreduce --backend mpi; "
    "ompi_info --parsable --all | grep mpi_built_with_cuda_support; mpichversion",
    command="ompi_info --parsable --all | grep mpi_built_with_cuda_support",
    comment="Use an MPI built with CUDA for programs that pass it GPU memory. NCCL does not need one.",
    link=_OPEN_MPI,
    look=_not_aware,
)

MPI = Family.of(
    "mpi",
    "MPI, UCX and other programs",
    Condition(
        id="mpi-cuda-off",
        title="MPI's GPU support is built in but switched off (opal_cuda_support, MPICH_GPU_SUPPORT_ENABLED=0)",
        settles="ompi_info --parsable --all | grep mpi_built_with_cuda_support",
        comment="OMPI_MCA_opal_cuda_support=true gpubench allreduce --backend mpi. Keep the setting if the data "
        "are right. This variable is Open MPI's (conda). Cray MPICH needs MPICH_GPU_SUPPORT_ENABLED=1, "
        "and MVAPICH needs MV2_USE_CUDA=1.",
        link="https://github.com/conda-forge/openmpi-feedstock/issues/83",
        look=_switched_off,
        implies=("mpi-not-cuda-aware",),
    ),
    Condition(
        id="ucx-tls",
        title="UCX_TLS excludes cuda_copy or cuda_ipc: GPU memory is staged, or the program crashes",
        settles="UCX_PROTO_INFO=y prints the protocol that UCX chose",
        command=_UNSET_TLS.commands[0],
        comment=_UNSET_TLS.comment,
        link="https://github.com/openucx/ucx/issues/10929",
        look=_ucx_tls,
    ),
    Condition(
        id="ucx-without-cuda",
        title="UCX was built without CUDA (ucx_info -d shows no cuda)",
        settles="ucx_info -v; ucx_info -d | grep cuda",
        command="ucx_info -d | grep cuda",
        comment="Install UCX built --with-cuda, or the package ucx-cuda.",
        link="https://github.com/openucx/ucx/issues/3156",
        look=_ucx_without_cuda,
    ),
    NOT_CUDA_AWARE,
    Condition(
        id="peer-access-not-enabled",
        title="Peer access is possible but the program never enables it (cudaDeviceEnablePeerAccess; llama.cpp "
        "without GGML_CUDA_P2P=1): cudaMemcpyPeer goes through host memory",
        settles="`gpubench p2p`, which measures with peer access on and off, or `nsys profile`, which shows "
        "`[CUDA memcpy Peer-to-Peer]` if peer access is used",
        command=f"{VERIFIED_COPIES} && export GGML_CUDA_P2P=1",
        comment="Set it only after the copies are verified, because some machines grant peer access that "
        "corrupts data. The variable is llama.cpp's. Other programs must call cudaDeviceEnablePeerAccess.",
        link="https://github.com/ggml-org/llama.cpp/issues/21910",
        look=_not_enabled,
    ),
)
