"""Read this process: permissions, container, limits, CPU quota, and user files that change NCCL's behavior."""

import ctypes
import os
import platform
import re
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.machine import host
from gpubench.machine.environment import (
    find_libraries,
    has_loader_folders,
    merge_settings,
    read_mpi,
    read_nccl_files,
    verbs_providers,
    wanted_libraries,
)
from gpubench.model.facts.process import CpuQuota, RankFacts, TopologyFile
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.terms.units import format_mask, format_ranges
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
"""Capability numbers in linux/capability.h that matter for shared memory, RDMA and PCI configuration spaces."""

# System call numbers, the same on every architecture. Python may have no function for them
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "ppc64le": 260}
_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred many", "weighted interleave")
"""Names of MPOL_* in linux/mempolicy.h, by value. Higher bits are flags."""

_MODE_BITS = 0xFF
_MOST_NODES = 4096
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FILTERED = 2
_NOT_TRIED = "not tried, because an unknown seccomp filter is active"


def may_call(seccomp: int | None, hints: Iterable[str]) -> bool:
    """True if trying a system call is safe: without a seccomp filter, or under a container runtime's filter.

    A container runtime's filter makes forbidden calls fail, but does not kill the process.
    """
    return seccomp != _FILTERED or not host.RUNTIMES.isdisjoint(hints)


def pidfd_getfd(unknown: host.UnknownFields, *, allowed: bool) -> bool | None:
    """True if pidfd_getfd works, tried on this process. With expandable segments, ranks need it to share GPU memory."""
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
        unknown.reasons["memory_policy"] = _NOT_TRIED if number else f"not read on {platform.machine()}"
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


def cpu_quota(root: Path) -> CpuQuota | None:
    """Return the lowest CPU quota in this process's control groups. None if there is no limit."""
    found: list[CpuQuota] = []
    for folder in host.control_groups(root, "cpu"):
        limits: dict[str, Sequence[str | None]] = {
            # '200000 100000' means two CPUs, and 'max 100000' means no limit.
            "cpu.max": (host.read_text(folder / "cpu.max") or "").split(),
            "cpu.cfs_quota_us": [host.read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")],
        }
        for file, words in limits.items():
            numbers = [number for number in map(host.parse_number, words) if number and number > 0]
            if len(numbers) == 2:
                found.append(CpuQuota(cpus=numbers[0] / numbers[1], by=f"/{(folder / file).relative_to(root)}"))
    return min(found, key=lambda quota: quota.cpus, default=None)


_SETTING = "NCCL_TOPO_FILE"
_DEFAULT = "/var/run/nvidia-topologyd/virtualTopology.xml"  # NCCL's default topology file (src/graph/topo.cc)
_MOST_BYTES = 4 * 2**20
_MOST_DEVICES = 4096


def read_topology_file(settings: Mapping[str, str], root: Path) -> TopologyFile | None:
    """Read the topology file that NCCL would read. None if there is none. `settings` are NCCL's merged variables."""
    path = settings.get(_SETTING) or _DEFAULT
    is_set = bool(settings.get(_SETTING))
    file = TopologyFile(path=host.printable(path), by=_SETTING if is_set else "NCCL's default")
    unknown = host.UnknownFields()
    content = unknown.tail("file", host.rebase_path(root, Path(path)), _MOST_BYTES + 1)
    if content is None:
        return replace(file, unusable=unknown.reasons["file"]) if is_set else None
    if len(content) > _MOST_BYTES:
        return replace(file, unusable=f"it has more than {_MOST_BYTES // 2**20} MiB")
    try:
        system = Parser("the file").root_of(content.decode(errors="replace"))
    except (UsageError, RecursionError) as error:
        reason = error.seen if isinstance(error, UsageError) else "it is nested too deeply"
        return replace(file, unusable=host.printable(reason))
    return replace(file, links=_links(system), numa_nodes=_numa_nodes(system))


def _links(system: Element) -> dict[str, str]:
    found: dict[str, str] = {}
    for element in _descendants(system):
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


def _descendants(element: Element) -> Iterator[Element]:
    yield element
    for child in element.children:
        yield from _descendants(child)


SECONDS_TO_ANSWER = 2.0
NO_ANSWER = f"no answer within {SECONDS_TO_ANSWER:g} s, because a file system does not respond"


def _read_user_files(
    environment: Mapping[str, str], loaded: Mapping[str, str], root: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the user files that NCCL reads. Return fields for RankFacts, and a reason for each unreadable file."""
    nccl_files, unknown = read_nccl_files(environment, root)
    settings = merge_settings(environment, nccl_files)
    search_path = os.environ.get("LD_LIBRARY_PATH", "")
    loadable = find_libraries(wanted_libraries(settings), loaded, search_path, root)
    if not has_loader_folders(root):
        loadable = {name: path for name, path in loadable.items() if path is not None}
        unknown["loadable"] = "no folder of the dynamic loader is visible"
    topology_file = read_topology_file(settings, root)
    return {"nccl_files": nccl_files, "topology_file": topology_file, "loadable": loadable}, unknown


UNLIMITED = -1  # Value of `memlock_bytes` for a process without a limit
_NAMESPACE = re.compile(r"\w+:\[(\d+)\]", re.ASCII)
_GPU_FILE = re.compile(r"nvidia\d+", re.ASCII)
_LIBRARY = re.compile(
    r"(libnccl-(?:net|tuner|profiler)[\w-]*|libnccl|libmpi|libmpich|libucp|libcuda|libibverbs|libfabric)(?:-[0-9a-f]+)?\.so",
    re.ASCII,
)


def read_rank_facts(
    rank: int, node: int, local_rank: int, environment: Mapping[str, str], root: Path = Path("/")
) -> RankFacts:
    """Read the facts about this process. `environment` contains only variables that may be recorded."""
    unknown = host.UnknownFields()
    status = host.parse_fields(host.read_text(root / "proc/self/status"))
    seccomp = host.parse_number(status.get("Seccomp"))
    memory_nodes = status.get("Mems_allowed_list")
    if memory_nodes is None:
        unknown.reasons["memory_nodes"] = "/proc/self/status has no Mems_allowed_list"
    hints = host.container_hints(root)
    may_try = may_call(seccomp, hints)
    libraries, device_files = mapped_libraries(root / "proc/self/maps"), _device_files(root)
    user_files, unread = host.call_with_deadline(
        lambda: _read_user_files(environment, libraries, root), SECONDS_TO_ANSWER
    ) or ({}, dict.fromkeys(("nccl_files", "topology_file", "loadable"), NO_ANSWER))
    channels = unknown.names("imex_channels", root / "dev/nvidia-caps-imex-channels")
    driver_gpus = unknown.names("driver_gpus", root / "proc/driver/nvidia/gpus")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return RankFacts(
        rank=rank,
        host=socket.gethostname().split(".")[0],
        node=node,
        local_rank=local_rank,
        pid=os.getpid(),
        boot_id=host.read_text(root / "proc/sys/kernel/random/boot_id"),
        namespaces=read_namespaces(root / "proc/self/ns"),
        **read_shared_memory(root / "dev/shm"),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        device_files=device_files,
        memlock_bytes=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock,
        affinity=format_ranges(os.sched_getaffinity(0)),
        ptrace_scope=host.read_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        seccomp=seccomp,
        libraries=libraries,
        environment=dict(environment),
        **user_files,
        denied_device_files=_denied_files(device_files, root),
        imex_channels=None if channels is None else tuple(sorted(map(host.printable, channels))),
        driver_gpus=None
        if driver_gpus is None
        else tuple(normalize_bus_id(host.printable(gpu)) for gpu in driver_gpus),
        container=hints,
        capabilities=_capabilities(status, unknown),
        pidfd_getfd=pidfd_getfd(unknown, allowed=may_try),
        memory_nodes=None if memory_nodes is None else host.printable(memory_nodes),
        memory_policy=memory_policy(unknown, allowed=may_try),
        verbs_providers=verbs_providers(root, unknown),
        mpi=read_mpi(libraries.get("libmpi") or libraries.get("libmpich")),
        ucx_cuda=_ucx_cuda(libraries.get("libucp"), root, unknown),
        cpu_quota=cpu_quota(root),
        unknown={**unknown.reasons, **unread},
    )


def _capabilities(status: Mapping[str, str], unknown: host.UnknownFields) -> tuple[str, ...] | None:
    """Return the relevant capabilities that this process has in effect."""
    bits = host.parse_number(f"0x{status.get('CapEff')}")
    if bits is None:
        unknown.reasons["capabilities"] = "/proc/self/status has no CapEff"
        return None
    return tuple(name for bit, name in _CAPABILITIES.items() if bits >> bit & 1)


def _denied_files(paths: Iterable[str], root: Path) -> tuple[str, ...]:
    """Return the device files that this process may not read and write. access(2) checks this without opening them."""
    return tuple(
        path for path in paths if not os.access(root / path.removeprefix("/"), os.R_OK | os.W_OK, effective_ids=True)
    )


def _ucx_cuda(library: str | None, root: Path, unknown: host.UnknownFields) -> bool | None:
    """True if the loaded UCX library has its CUDA module in the `ucx` directory next to it."""
    if library is None:
        unknown.reasons["ucx_cuda"] = "no UCX is loaded in this process"
        return None
    modules = host.list_names(host.rebase_path(root, Path(library)).parent / "ucx")
    return any(name.startswith("libuct_cuda.so") for name in modules)


def read_plugins(facts: RankFacts, root: Path = Path("/")) -> RankFacts:
    """Add the plugins that NCCL has loaded since these facts were read."""
    libraries = mapped_libraries(root / "proc/self/maps")
    plugins = {name: file for name, file in libraries.items() if name.startswith("libnccl-")}
    return replace(facts, libraries={**facts.libraries, **plugins})


def read_namespaces(folder: Path) -> dict[str, int]:
    """Return namespace inode numbers by type, except those for future children (pid_for_children)."""
    found = {}
    for name in host.list_names(folder):
        if name.endswith("_for_children"):
            continue
        try:
            match = _NAMESPACE.fullmatch((folder / name).readlink().name)
        except OSError:
            continue
        if match:
            found[name] = int(match[1])
    return found


def read_shared_memory(folder: Path) -> dict[str, Any]:
    """Return the RankFacts fields about /dev/shm. Empty if it is unreadable."""
    try:
        device, space = folder.stat().st_dev, os.statvfs(folder)
    except OSError:
        return {}
    return {
        "shm_device": device,
        "shm_bytes": space.f_frsize * space.f_blocks,
        "shm_free_bytes": space.f_frsize * space.f_bavail,
    }


def _device_files(root: Path) -> tuple[str, ...]:
    gpus = [name for name in host.list_names(root / "dev") if _GPU_FILE.fullmatch(name)]
    gpus.sort(key=lambda name: int(name.removeprefix("nvidia")))
    verbs = host.list_names(root / "dev/infiniband")
    return (*(f"/dev/{name}" for name in gpus), *(f"/dev/infiniband/{name}" for name in verbs))


def mapped_libraries(maps: Path) -> dict[str, str]:
    """Return the first mapped file of each communication library, by library name."""
    found: dict[str, str] = {}
    for path in host.mapped_paths(maps):
        match = _LIBRARY.match(path.rpartition("/")[2])
        if match:
            found.setdefault(match[1], path)
    return found
