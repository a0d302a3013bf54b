"""The facts of this process: namespaces, shared memory, limits, devices, libraries."""

import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpubench.hardware.process.attached import tools, tracer
from gpubench.hardware.process.cpu_time import cpu_quota
from gpubench.hardware.process.kernel_calls import may_call, memory_policy, pidfd_getfd
from gpubench.hardware.process.library_search import verbs_providers
from gpubench.hardware.process.mpi_facts import read_mpi
from gpubench.hardware.process.rights import capabilities, container_hints, denied, memory_nodes
from gpubench.hardware.process.user_files import read_user_files
from gpubench.hardware.system_files import UnknownFields, below, names_in, number_of, printable, text_of
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.terms.cpu_ranges import ranges_of

UNLIMITED = -1
"""`memlock_bytes` of a process that may lock all memory."""

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
    """The facts of this process. `environment` is the allow-list already; memory that may be locked is in bytes, -1 for
    without limit.
    """
    unknown = UnknownFields()
    status = text_of(root / "proc/self/status") or ""
    seccomp = _SECCOMP.search(status)
    filtered = int(seccomp[1]) if seccomp else None
    hints = container_hints(root)
    libraries, device_files = mapped_libraries(root / "proc/self/maps"), _device_files(root)
    files = read_user_files(environment, libraries, root)
    channels = unknown.names("imex_channels", root / "dev" / _IMEX)
    driver_gpus = unknown.names("driver_gpus", root / "proc/driver/nvidia/gpus")
    shm_device, shm_bytes, shm_free_bytes = shared_memory_at(root / "dev/shm")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return RankFacts(
        rank=rank,
        host=socket.gethostname().split(".")[0],
        node=node,
        local_rank=local_rank,
        pid=os.getpid(),
        boot_id=text_of(root / "proc/sys/kernel/random/boot_id"),
        namespaces=namespaces_in(root / "proc/self/ns"),
        shm_device=shm_device,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        device_files=device_files,
        memlock_bytes=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock,
        affinity=ranges_of(sum(1 << cpu for cpu in os.sched_getaffinity(0))),
        ptrace_scope=number_of(root / "proc/sys/kernel/yama/ptrace_scope"),
        seccomp=filtered,
        libraries=libraries,
        environment=dict(environment),
        nccl_files=files.nccl_files,
        topology_file=files.topology_file,
        denied_device_files=denied(device_files, root),
        imex_channels=None if channels is None else tuple(sorted(map(printable, channels))),
        driver_gpus=None if driver_gpus is None else tuple(map(bus_id, sorted(map(printable, driver_gpus)))),
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
    """The same with what may have come since: a debugger, and tools and NCCL's plugins, which CUDA and NCCL load."""
    plugins = {
        name: file for name, file in mapped_libraries(root / "proc/self/maps").items() if name.startswith(_PLUGIN)
    }
    return replace(
        facts,
        libraries={**facts.libraries, **plugins},
        tracer=tracer(text_of(root / "proc/self/status") or "", root),
        tools=tools(root),
    )


def namespaces_in(folder: Path) -> dict[str, int]:
    """Inode numbers by kind. What new children would get (pid_for_children) is not this process's."""
    found = {}
    for name in names_in(folder):
        if name.endswith("_for_children"):
            continue
        try:
            match = _NAMESPACE.fullmatch((folder / name).readlink().name)
        except OSError:
            continue
        if match:
            found[name] = int(match[1])
    return found


def shared_memory_at(folder: Path) -> tuple[int | None, int | None, int | None]:
    """Device, size and free bytes of /dev/shm, None each where there is none."""
    try:
        device, space = folder.stat().st_dev, os.statvfs(folder)
    except OSError:
        return None, None, None
    return device, space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail


def _device_files(root: Path) -> tuple[str, ...]:
    gpus = [name for name in names_in(root / "dev") if _GPU_FILE.fullmatch(name)]
    gpus.sort(key=lambda name: int(name.removeprefix("nvidia")))
    verbs = names_in(root / "dev/infiniband")
    return (*(f"/dev/{name}" for name in gpus), *(f"/dev/infiniband/{name}" for name in verbs))


def _ucx_cuda(library: str | None, root: Path, unknown: UnknownFields) -> bool | None:
    """True where the loaded UCX has its module for GPU memory, which it looks for beside its library."""
    if library is None:
        unknown.reasons["ucx_cuda"] = "no UCX is loaded in this process"
        return None
    return any(name.startswith("libuct_cuda.so") for name in names_in(below(root, Path(library)).parent / "ucx"))


def mapped_libraries(maps: Path) -> dict[str, str]:
    """The files of the libraries that carry data, by name: the first of each that is mapped."""
    found: dict[str, str] = {}
    for line in (text_of(maps) or "").splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) < 6:
            continue
        path = columns[5].removesuffix(" (deleted)")
        match = _LIBRARY.match(path.rpartition("/")[2])
        if match and path.startswith("/"):
            found.setdefault(match[1], path)
    return found
