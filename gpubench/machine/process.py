"""Reads this process: rights, container, limits, CPU time, debuggers, and user files that change NCCL's behavior."""

import ctypes
import os
import platform
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.machine import host
from gpubench.machine.environment import (
    can_look,
    effective,
    find_libraries,
    read_mpi,
    read_nccl_files,
    verbs_providers,
    wanted_libraries,
)
from gpubench.model.facts.process import CpuQuota, RankFacts, TopologyFile
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.terms.units import format_mask
from gpubench.readers.machines.nccl_topology import Element, Parser

_CAPABILITIES = {
    2: "DAC_READ_SEARCH",
    12: "NET_ADMIN",
    13: "NET_RAW",
    14: "IPC_LOCK",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
"""Capability numbers of linux/capability.h that memory sharing, RDMA and configuration spaces need."""

_EFFECTIVE = re.compile(r"^CapEff:\s*([0-9a-f]{1,16})$", re.ASCII | re.MULTILINE)
_MEMORY_NODES = re.compile(r"^Mems_allowed_list:\s*([\d,-]{1,300})$", re.ASCII | re.MULTILINE)
_TRACER = re.compile(r"^TracerPid:\s*([1-9]\d*)$", re.ASCII | re.MULTILINE)
_TOOLS = {
    "compute-sanitizer": re.compile(r"libsanitizer-(collection|public)"),
    "Nsight Systems (nsys)": re.compile(r"libToolsInjection(Proxy)?64|libnsys[\w-]*|libQuadDCommon"),
    "Nsight Compute (ncu)": re.compile(r"libcuda-injection|libnv-nsight-cu|libInterceptorInjectionTarget"),
    "compute-sanitizer or ncu": re.compile(r"libTreeLauncher\w*Injection"),
    "cuda-gdb": re.compile(r"libcudadebugger|libCUDBG"),
    "AddressSanitizer": re.compile(r"lib(clang_rt\.)?[at]san"),
    "Valgrind": re.compile(r"vgpreload_"),
}
"""Tools by the library that they load into a process. libcupti alone is no sign: PyTorch always loads it."""


def capabilities(status: str, unknown: host.UnknownFields) -> tuple[str, ...] | None:
    """Return the relevant capabilities in force, from the text of /proc/self/status."""
    match = _EFFECTIVE.search(status)
    if match is None:
        unknown.reasons["capabilities"] = "/proc/self/status has no CapEff"
        return None
    bits = int(match[1], 16)
    return tuple(name for bit, name in _CAPABILITIES.items() if bits >> bit & 1)


def memory_nodes(status: str, unknown: host.UnknownFields) -> str | None:
    """Return the memory nodes that this process may use, as a list of ranges."""
    match = _MEMORY_NODES.search(status)
    if match is None:
        unknown.reasons["memory_nodes"] = "/proc/self/status has no Mems_allowed_list"
        return None
    return match[1]


def denied(paths: Iterable[str], root: Path) -> tuple[str, ...]:
    """Return the device files that this process may not read and write, by access(2), which does not open them."""
    return tuple(
        path for path in paths if not os.access(root / path.removeprefix("/"), os.R_OK | os.W_OK, effective_ids=True)
    )


def tracer(status: str, root: Path) -> str | None:
    """Return the process that traces this one ('4711 (gdb)'), from the text of /proc/self/status, or None."""
    match = _TRACER.search(status)
    if match is None:
        return None
    name = host.printable(host.text_of(root / "proc" / match[1] / "comm") or "")
    return f"{match[1]} ({name})" if name else match[1]


def tools(root: Path) -> dict[str, str]:
    """Return each tool with its first mapped library."""
    found: dict[str, str] = {}
    lines = (host.text_of(root / "proc/self/maps") or "").splitlines()
    for path in dict.fromkeys(line.partition("/")[2].removesuffix(" (deleted)") for line in lines):
        file = path.rpartition("/")[2]
        for name, pattern in _TOOLS.items():
            if file and name not in found and pattern.match(file):
                found[name] = f"/{host.printable(path)}"
    return found


_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # Call numbers on every architecture. Python may not have them
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "ppc64le": 260}
_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred many", "weighted interleave")
"""MPOL_* in linux/mempolicy.h, from 0. Higher bits are flags."""

_MODE_BITS = 0xFF
_MOST_NODES = 4096
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FILTERED = 2
_NOT_TRIED = "not tried: a seccomp filter is in force, and whose is not known"


def may_call(seccomp: int | None, hints: Iterable[str]) -> bool:
    """True if system calls may be tried: no filter, or a container runtime's, which refuses calls without killing."""
    return seccomp != _FILTERED or not host.RUNTIMES.isdisjoint(hints)


def pidfd_getfd(unknown: host.UnknownFields, *, allowed: bool) -> bool | None:
    """True if pidfd_getfd can pass descriptors of GPU memory, as expandable segments do. Tried on this process."""
    if not allowed:
        unknown.reasons["pidfd_getfd"] = _NOT_TRIED
        return None
    library = ctypes.CDLL(None, use_errno=True)
    own = library.syscall(_PIDFD_OPEN, os.getpid(), 0)
    if own < 0:
        unknown.reasons["pidfd_getfd"] = f"pidfd_open: {os.strerror(ctypes.get_errno())}"
        return False
    taken = library.syscall(_PIDFD_GETFD, own, own, 0)
    if taken < 0:
        unknown.reasons["pidfd_getfd"] = f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    for descriptor in (own, taken):
        if descriptor >= 0:
            os.close(descriptor)
    return bool(taken >= 0)


def memory_policy(unknown: host.UnknownFields, *, allowed: bool) -> str | None:
    """Return the NUMA memory policy of this process: 'default', or for example 'bind 0-1' (set by numactl)."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if not allowed or number is None:
        unknown.reasons["memory_policy"] = _NOT_TRIED if number else f"not asked on {platform.machine()}"
        return None
    mode, words = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // _BITS_PER_WORD))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, ctypes.byref(mode), words, _MOST_NODES, None, 0):
        unknown.reasons["memory_policy"] = f"get_mempolicy: {os.strerror(ctypes.get_errno())}"
        return None
    nodes = format_mask(sum(word << _BITS_PER_WORD * position for position, word in enumerate(words)))
    policy = mode.value & _MODE_BITS
    name = _POLICIES[policy] if policy < len(_POLICIES) else f"policy {policy}"
    return f"{name} {nodes}".rstrip()


_LEAST_NS = 20_000_000


class RunDelay(NamedTuple):
    """Nanoseconds that the main thread ran, and that it waited for a CPU."""

    ran_ns: int
    waited_ns: int


def run_delay(root: Path = Path("/")) -> RunDelay | None:
    """Read both since the start of the thread (sched-stats.rst of the kernel). None if the kernel does not count."""
    fields = (host.text_of(root / "proc/self/schedstat") or "").split()
    if len(fields) < len(RunDelay._fields) or not all(each.isdecimal() for each in fields):
        return None
    return RunDelay(int(fields[0]), int(fields[1]))


def waited_share(before: RunDelay | None, after: RunDelay | None) -> float | None:
    """Return the share of runnable time spent waiting for a CPU. None below 20 ms of runnable time."""
    if before is None or after is None:
        return None
    waited_ns = after.waited_ns - before.waited_ns
    ready_ns = after.ran_ns - before.ran_ns + waited_ns
    return waited_ns / ready_ns if ready_ns >= _LEAST_NS else None


def cpu_quota(root: Path) -> CpuQuota | None:
    """Return the lowest CPU quota of this process's control groups, versions 1 and 2, or None without a limit."""
    found: list[CpuQuota] = []
    for entry in (host.text_of(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = entry.partition(":")[2].partition(":")
        if entry.startswith("0::"):
            found += _limits(root, "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            found += _limits(root, "sys/fs/cgroup/cpu", path)
            found += _limits(root, f"sys/fs/cgroup/{controllers}", path)
    return min(found, key=lambda each: each.cpus, default=None)


def _limits(root: Path, mount: str, path: str) -> Iterator[CpuQuota]:
    """Read the quotas from a group up to the root. Skip missing groups: in a container, its own group is the root."""
    top = root / mount
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            break
        cpus = _read_quota_v2(folder) or _read_quota_v1(folder)
        if cpus:
            file = "cpu.max" if host.exists(folder / "cpu.max") else "cpu.cfs_quota_us"
            yield CpuQuota(cpus=cpus, by=f"/{(folder / file).relative_to(root)}")


def _read_quota_v2(folder: Path) -> float | None:
    """Parse '200000 100000' as two CPUs, and 'max 100000' as no limit."""
    fields = (host.text_of(folder / "cpu.max") or "").split()
    if not fields or not fields[0].isdecimal():
        return None
    period_us = int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else 100_000
    return int(fields[0]) / period_us if period_us else None


def _read_quota_v1(folder: Path) -> float | None:
    quota_us, period_us = host.number_of(folder / "cpu.cfs_quota_us"), host.number_of(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


_SETTING = "NCCL_TOPO_FILE"
_DEFAULT = "/var/run/nvidia-topologyd/virtualTopology.xml"  # NCCL's default topology file (src/graph/topo.cc)
_MOST_BYTES = 4 * 2**20
_MOST_DEVICES = 4096


def read_topology_file(settings: Mapping[str, str], root: Path) -> TopologyFile | None:
    """Read the topology file that NCCL would read, or None. `settings` are NCCL's variables from any source."""
    named = settings.get(_SETTING)
    path, by = (named, _SETTING) if named else (_DEFAULT, "NCCL's default")
    unknown = host.UnknownFields()
    content = unknown.tail("file", host.below(root, Path(path)), _MOST_BYTES + 1)
    if content is None:
        return TopologyFile(path=host.printable(path), by=by, unusable=unknown.reasons["file"]) if named else None
    if len(content) > _MOST_BYTES:
        return TopologyFile(path=host.printable(path), by=by, unusable=f"it has more than {_MOST_BYTES // 2**20} MiB")
    try:
        system = Parser("the file").root_of(content.decode(errors="replace"))
    except (UsageError, RecursionError) as error:
        reason = error.seen if isinstance(error, UsageError) else "it is nested too deeply"
        return TopologyFile(path=host.printable(path), by=by, unusable=host.printable(reason))
    return TopologyFile(path=host.printable(path), by=by, links=_links(system), numa_nodes=_numa_nodes(system))


def _links(system: Element) -> dict[str, str]:
    found: dict[str, str] = {}
    for element in _all(system):
        address = element.text("busid") if element.tag == "pci" else None
        if address is not None and len(found) < _MOST_DEVICES:
            link = f"{element.text('link_speed') or '?'} x{element.text('link_width') or '?'}"
            found[host.printable(normalize_bus_id(address))] = host.printable(link)
    return found


def _numa_nodes(system: Element) -> tuple[int, ...]:
    numbers = []
    for cpu in system.named("cpu"):
        try:
            number = cpu.integer("numaid")
        except UsageError:
            continue
        numbers += [] if number is None else [number]
    return tuple(numbers)


def _all(element: Element) -> Iterator[Element]:
    yield element
    for child in element.children:
        yield from _all(child)


SECONDS_TO_ANSWER = 2.0

T = TypeVar("T")


class UserFiles(Struct, frozen=True, kw_only=True):
    """The contents of user files that NCCL reads. `unknown` has a reason per missing file."""

    nccl_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    topology_file: TopologyFile | None = None
    loadable: Mapping[str, str | None] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def _read_user_files(environment: Mapping[str, str], loaded: Mapping[str, str], root: Path) -> UserFiles:
    answer = in_time(lambda: _read(environment, loaded, root))
    if answer is not None:
        return answer
    return UserFiles(unknown=dict.fromkeys(("nccl_files", "topology_file", "loadable"), no_answer()))


def no_answer() -> str:
    """Return the reason for a file that was not read in time."""
    return f"no answer within {SECONDS_TO_ANSWER:g} s: a file system does not respond"


def in_time(read: Callable[[], T]) -> T | None:
    """Run `read` in a thread. None if the file system does not answer in time."""
    answer: list[T] = []
    thread = threading.Thread(target=lambda: answer.append(read()), daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return answer[0] if answer else None


def _read(environment: Mapping[str, str], loaded: Mapping[str, str], root: Path) -> UserFiles:
    nccl_files, unknown = read_nccl_files(environment, root)
    settings = effective(environment, nccl_files)
    search_path = os.environ.get("LD_LIBRARY_PATH", "")
    loadable = find_libraries(wanted_libraries(settings), loaded, search_path, root)
    if not can_look(root):
        loadable = {name: path for name, path in loadable.items() if path is not None}
        unknown = {**unknown, "loadable": "no folder of the dynamic loader's can be seen"}
    return UserFiles(
        nccl_files=nccl_files, topology_file=read_topology_file(settings, root), loadable=loadable, unknown=unknown
    )


UNLIMITED = -1  # `memlock_bytes` of a process without a limit
_NAMESPACE = re.compile(r"\w+:\[(\d+)\]", re.ASCII)
_SECCOMP = re.compile(r"^Seccomp:\s*(\d+)", re.ASCII | re.MULTILINE)
_IMEX = "nvidia-caps-imex-channels"
_PLUGIN = "libnccl-"
_GPU_FILE = re.compile(r"nvidia\d+", re.ASCII)
_LIBRARY = re.compile(
    r"(libnccl-(?:net|tuner|profiler)[\w-]*|libnccl|libmpi|libmpich|libucp|libcuda|libibverbs|libfabric)(?:-[0-9a-f]+)?\.so",
    re.ASCII,
)


def read_rank_facts(
    rank: int, node: int, local_rank: int, environment: Mapping[str, str], root: Path = Path("/")
) -> RankFacts:
    """Read the facts of this process. `environment` is the allow-list. Lockable memory is in bytes, -1 without
    limit.
    """
    unknown = host.UnknownFields()
    status = host.text_of(root / "proc/self/status") or ""
    seccomp = _SECCOMP.search(status)
    filtered = int(seccomp[1]) if seccomp else None
    hints = host.container_hints(root)
    libraries, device_files = mapped_libraries(root / "proc/self/maps"), _device_files(root)
    files = _read_user_files(environment, libraries, root)
    channels = unknown.names("imex_channels", root / "dev" / _IMEX)
    driver_gpus = unknown.names("driver_gpus", root / "proc/driver/nvidia/gpus")
    shm_device, shm_bytes, shm_free_bytes = read_shared_memory(root / "dev/shm")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return RankFacts(
        rank=rank,
        host=socket.gethostname().split(".")[0],
        node=node,
        local_rank=local_rank,
        pid=os.getpid(),
        boot_id=host.text_of(root / "proc/sys/kernel/random/boot_id"),
        namespaces=namespaces_in(root / "proc/self/ns"),
        shm_device=shm_device,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        device_files=device_files,
        memlock_bytes=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock,
        affinity=format_mask(sum(1 << cpu for cpu in os.sched_getaffinity(0))),
        ptrace_scope=host.number_of(root / "proc/sys/kernel/yama/ptrace_scope"),
        seccomp=filtered,
        libraries=libraries,
        environment=dict(environment),
        nccl_files=files.nccl_files,
        topology_file=files.topology_file,
        denied_device_files=denied(device_files, root),
        imex_channels=None if channels is None else tuple(sorted(map(host.printable, channels))),
        driver_gpus=None
        if driver_gpus is None
        else tuple(map(normalize_bus_id, sorted(map(host.printable, driver_gpus)))),
        container=hints,
        capabilities=capabilities(status, unknown),
        pidfd_getfd=pidfd_getfd(unknown, allowed=may_call(filtered, hints)),
        memory_nodes=memory_nodes(status, unknown),
        memory_policy=memory_policy(unknown, allowed=may_call(filtered, hints)),
        loadable=files.loadable,
        verbs_providers=verbs_providers(root, unknown),
        mpi=read_mpi(libraries.get("libmpi") or libraries.get("libmpich")),
        ucx_cuda=_ucx_cuda(libraries.get("libucp"), root, unknown),
        tracer=tracer(status, root),
        tools=tools(root),
        cpu_quota=cpu_quota(root),
        unknown={**unknown.reasons, **files.unknown},
    )


def read_again(facts: RankFacts, root: Path = Path("/")) -> RankFacts:
    """Read again what may have changed: a debugger, tools, and plugins that CUDA and NCCL load."""
    plugins = {
        name: file for name, file in mapped_libraries(root / "proc/self/maps").items() if name.startswith(_PLUGIN)
    }
    return replace(
        facts,
        libraries={**facts.libraries, **plugins},
        tracer=tracer(host.text_of(root / "proc/self/status") or "", root),
        tools=tools(root),
    )


def namespaces_in(folder: Path) -> dict[str, int]:
    """Return namespace inodes by kind, without those of future children (pid_for_children)."""
    found = {}
    for name in host.names_in(folder):
        if name.endswith("_for_children"):
            continue
        try:
            match = _NAMESPACE.fullmatch((folder / name).readlink().name)
        except OSError:
            continue
        if match:
            found[name] = int(match[1])
    return found


def read_shared_memory(folder: Path) -> tuple[int | None, int | None, int | None]:
    """Return device, size and free bytes of /dev/shm, each None if unknown."""
    try:
        device, space = folder.stat().st_dev, os.statvfs(folder)
    except OSError:
        return None, None, None
    return device, space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail


def _device_files(root: Path) -> tuple[str, ...]:
    gpus = [name for name in host.names_in(root / "dev") if _GPU_FILE.fullmatch(name)]
    gpus.sort(key=lambda name: int(name.removeprefix("nvidia")))
    verbs = host.names_in(root / "dev/infiniband")
    return (*(f"/dev/{name}" for name in gpus), *(f"/dev/infiniband/{name}" for name in verbs))


def _ucx_cuda(library: str | None, root: Path, unknown: host.UnknownFields) -> bool | None:
    """True if the loaded UCX has its module for GPU memory next to its library."""
    if library is None:
        unknown.reasons["ucx_cuda"] = "no UCX is loaded in this process"
        return None
    return any(
        name.startswith("libuct_cuda.so") for name in host.names_in(host.below(root, Path(library)).parent / "ucx")
    )


def mapped_libraries(maps: Path) -> dict[str, str]:
    """Return the first mapped file of each communication library by name."""
    found: dict[str, str] = {}
    for line in (host.text_of(maps) or "").splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) < 6:
            continue
        path = columns[5].removesuffix(" (deleted)")
        match = _LIBRARY.match(path.rpartition("/")[2])
        if match and path.startswith("/"):
            found.setdefault(match[1], path)
    return found
