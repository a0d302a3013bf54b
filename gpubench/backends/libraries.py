"""The communication libraries of this host. Child processes search for them or load them, and print a line of JSON."""

import ctypes
import json
import mmap
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpubench.backends.mpi import group
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.transfer_libraries import (
    SYSTEM,
    find_transfer_packages,
    ucx_copies,
    ucx_modules,
    ucx_transports,
    ucx_wheel_version,
)
from gpubench.errors import GpubenchError, UsageError
from gpubench.machine.children import module_command, package_environment
from gpubench.machine.environment import cuda_built, find_libraries, linked_files
from gpubench.machine.host import exists, list_names, printable, read_text
from gpubench.machine.probe import StageResult, run_stages
from gpubench.machine.process import mapped_libraries
from gpubench.machine.stage import MPI4PY, NCCL4PY, SEARCH, VERSION
from gpubench.model.facts import process
from gpubench.model.terms.operation import nccl_version
from gpubench.model.terms.plain import from_plain, to_plain

_FILES = {
    process.NCCL_LIB: "libnccl.so.2",
    process.RCCL_LIB: "librccl.so.1",
    process.UCX_LIB: "libucp.so.0",
    process.NVSHMEM_LIB: "libnvshmem_host.so.3",
    process.MSCCLPP_LIB: "libmscclpp.so",
}
"""The file name under which programs load each library."""

_PREFIXES = {name.partition(".so")[0] + ".so": library for library, name in _FILES.items()}
_WHEELS = re.compile(r"(nvidia[-_]nccl|nvidia[-_]nvshmem|mscclpp|rccl)([-_]cu\d+)?", re.IGNORECASE)
_PARTS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_nvshmem.so", "libtorch_cpu.so", "libtorch_xpu.so")
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_LINKED = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_MODULES = ("nvidia_peermem", "gdrdrv", "nvidia_fs", "efa_nv_peermem")
_COMPONENT = "mca_pml_ucx.so"
_COMPONENT_FOLDERS = ("openmpi", "openmpi/lib/openmpi3", "openmpi/lib/openmpi", "../lib/openmpi")


def _library_named(name: str) -> str | None:
    return next((library for prefix, library in _PREFIXES.items() if name.startswith(prefix)), None)


def wheel_files() -> Iterator[process.LibraryFile]:
    """Yield libraries that Python wheels installed in this environment, without those of UCX."""
    for distribution in distributions():
        name = distribution.metadata["Name"] or ""
        if not _WHEELS.fullmatch(name):
            continue
        for file in distribution.files or ():
            library = _library_named(file.name)
            path = Path(str(distribution.locate_file(file)))
            if library is not None and ".so" in file.name and exists(path):
                yield process.LibraryFile(
                    library=library, path=printable(str(path)), package=f"{name} {distribution.version}"
                )
                break


def _conda_files(prefix: Path) -> Iterator[process.LibraryFile]:
    """Yield libraries in the conda environment of this Python."""
    if exists(prefix / "conda-meta"):
        for library, name in _FILES.items():
            if exists(prefix / "lib" / name):
                yield process.LibraryFile(library=library, path=printable(str(prefix / "lib" / name)), package="conda")


def _loader_user(search_path: str, root: Path) -> process.LibraryUser:
    found = find_libraries(_FILES.values(), {}, search_path, root)
    loads = {library: path for library, name in _FILES.items() if (path := found[name]) is not None}
    purpose = "programs that use the dynamic loader, such as nccl-tests"
    return process.LibraryUser(name=process.LOADER, purpose=purpose, loads=loads)


def torch_user() -> process.LibraryUser | None:
    """Read PyTorch's version and linked libraries from its files, without importing PyTorch.

    Returns None if PyTorch is not installed.
    """
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if not places:
        return None
    folder = Path(places[0])
    text = read_text(folder / "version.py") or ""
    version = _VERSION.search(text)
    built = {match[1]: match[2] for match in _BUILT_FOR.finditer(text)}
    loads: dict[str, str] = {}
    inside: dict[str, str] = {}
    for part in _PARTS:
        path = folder / "lib" / part
        if not exists(path):
            continue
        linked = linked_files(path)
        for name, file in linked.items():
            library = process.MPI_LIB if name.startswith("libmpi.so") else _library_named(name)
            if library is not None and file is not None:
                loads.setdefault(library, printable(file))
        if part == "libtorch_cuda.so" and linked and not any(name.startswith("libnccl") for name in linked):
            inside[process.NCCL_LIB] = _linked_version(path)
    words = ", ".join(f"{name.upper()} {release}" for name, release in built.items())
    return process.LibraryUser(
        name="torch",
        version=version[1] if version else None,
        path=printable(str(folder)),
        purpose="torch.distributed, gpubench --backend torch:nccl",
        note=f"built for {words}" if words else "built for CPUs only",
        loads=loads,
        inside=inside,
    )


def _linked_version(path: Path) -> str:
    """Find the version of a statically linked NCCL by its version string in the file. Return '' if there is none."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _LINKED.search(content)
            return found[1].decode() if found else ""
    except (OSError, ValueError):
        return ""


def mpi_component(library: Path) -> tuple[str, str] | None:
    """Find the file of an MPI library that links UCX, such as Open MPI's mca_pml_ucx.so.

    Returns the name of that file and the path of UCX. None if no file links UCX.
    """
    candidates = [library, *(library.parent / folder / _COMPONENT for folder in _COMPONENT_FOLDERS)]
    for candidate in filter(exists, candidates):
        for name, file in linked_files(candidate).items():
            if name.startswith("libucp.so") and file is not None:
                return candidate.name, file
    return None


class Package(NamedTuple):
    """An installed Python distribution."""

    name: str
    version: str
    path: str


def _find_package(wanted: str, module: str | None = None) -> Package | None:
    """Find the distribution that is called `wanted`, also with a suffix such as -cuda13x."""
    for distribution in distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower() == wanted or name.lower().startswith(f"{wanted}-cuda"):
            return Package(name, distribution.version, printable(str(distribution.locate_file(module or wanted))))
    return None


def kernel_modules(root: Path) -> tuple[process.KernelModule, ...]:
    """Read the versions of kernel modules that give other devices, such as NICs, access to GPU memory."""
    present = set(list_names(root / "sys/module"))
    return tuple(
        process.KernelModule(name=name, loaded=name in present, version=read_text(root / f"sys/module/{name}/version"))
        for name in _MODULES
    )


_MAPS = Path("/proc/self/maps")

Answer = Mapping[str, Any]


def search(root: Path, environment: Mapping[str, str]) -> Answer:
    """Search for libraries and the packages that load them. No library is loaded."""
    search_path = environment.get("LD_LIBRARY_PATH", "")
    return {
        "files": [*wheel_files(), *_conda_files(Path(sys.prefix)), *_ucx_files(environment, root)],
        "users": [
            *filter(None, (_cupy_user(), torch_user())),
            *find_transfer_packages(environment),
            _loader_user(search_path, root),
        ],
        "modules": kernel_modules(root),
    }


def _ucx_files(environment: Mapping[str, str], root: Path) -> Iterator[process.LibraryFile]:
    for path, package in ucx_copies(environment, root).items():
        yield process.LibraryFile(
            library=process.UCX_LIB, path=printable(str(path)), package=None if package == SYSTEM else package
        )


def _cupy_user() -> process.LibraryUser | None:
    package = _find_package("cupy")
    if package is None:
        return None
    purpose = "gpubench: memory of GPUs, kernels and graphs"
    return process.LibraryUser(
        name="CuPy", version=package.version, path=package.path, purpose=purpose, note=package.name
    )


def _nccl4py_user() -> Answer:
    """Load nccl4py and its NCCL, which the nccl backend uses. This does not initialise a GPU."""
    package = _find_package("nccl4py", "nccl")
    if package is None:
        return {"user": None}
    loads, unread = {}, ""
    try:
        loads = {process.NCCL_LIB: printable(NcclLibrary().path)}
    except (GpubenchError, ImportError, OSError) as error:
        unread = printable(error.seen if isinstance(error, GpubenchError) else str(error))
    user = process.LibraryUser(
        name="nccl4py",
        version=package.version,
        path=package.path,
        purpose="gpubench --backend nccl",
        loads=loads,
        unread=unread,
    )
    return {"user": user}


def _mpi4py_user() -> Answer:
    """Load mpi4py and its MPI without initialising MPI."""
    package = _find_package("mpi4py")
    if package is None:
        return {"user": None}
    user = process.LibraryUser(
        name="mpi4py",
        version=package.version,
        path=package.path,
        purpose="gpubench --backend host and mpi, and the ranks of a job",
    )
    try:
        version = printable(group.load())
    except (RuntimeError, ImportError, OSError) as error:
        return {"user": replace(user, unread=printable(str(error)))}
    maps = mapped_libraries(_MAPS)
    names = {
        "libnccl": process.NCCL_LIB,
        "libucp": process.UCX_LIB,
        "libmpi": process.MPI_LIB,
        "libmpich": process.MPI_LIB,
    }
    loads = {names[name]: path for name, path in maps.items() if name in names}
    library = ctypes.CDLL(loads[process.MPI_LIB]) if process.MPI_LIB in loads else None
    through = mpi_component(Path(loads[process.MPI_LIB])) if process.MPI_LIB in loads else None
    user = replace(
        user,
        loads={**loads, **({process.UCX_LIB: printable(through[1])} if through else {})},
        note=f"UCX through {through[0]}" if through else "",
    )
    return {"user": user, "mpi": version, "cuda": None if library is None else cuda_built(library)}


def _nccl(library: Any) -> str:
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        raise OSError("ncclGetVersion failed")
    return nccl_version(number.value)


def _three(function: str, library: Any) -> str:
    numbers = [ctypes.c_int() for _ in range(3)]
    getattr(library, function)(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


_ASKED: Mapping[str, Callable[[Any], str]] = {
    process.NCCL_LIB: _nccl,
    process.RCCL_LIB: _nccl,
    process.UCX_LIB: lambda library: _three("ucp_get_version", library),
    process.NVSHMEM_LIB: lambda library: _three("nvshmemx_vendor_get_version_info", library),
}


def read_version(library: str, path: str) -> Answer:
    """Load a library and call its version function."""
    ask = _ASKED.get(library)
    if ask is None:
        return {"version": None, "unread": "the library has no function that reports it"}
    try:
        return {"version": ask(ctypes.CDLL(path))}
    except (OSError, AttributeError) as error:
        return {"version": None, "unread": printable(str(error))}


_ORDER = ("nccl4py", "CuPy", "torch", "mpi4py", process.NIXL, process.MOONCAKE, process.LOADER)


def read_libraries(timeout_s: float, environment: Mapping[str, str]) -> process.LibrariesFacts:
    """Read the communication libraries of this host, within about `timeout_s` seconds.

    `failures` in the result names the searches that failed or timed out.
    """
    inner = package_environment(environment)
    first = run_stages({task: _command(task) for task in (SEARCH, NCCL4PY, MPI4PY)}, inner, timeout_s)
    failures = {task: result.error for task, result in first.items() if result.document is None}
    try:
        files, users, modules = _merged_libraries(first)
    except UsageError as error:
        return _facts(failures={**failures, SEARCH: f"an invalid answer: {error.seen}"})
    asked = {file.path: _command(VERSION, file.library, file.path) for file in files if file.version is None}
    answers = run_stages(asked, inner, timeout_s) if asked else {}
    files = [_add_version(file, answers[file.path]) if file.path in answers else file for file in files]
    return _facts(files=tuple(files), users=tuple(users), modules=tuple(modules), failures=failures)


def _facts(**values: Any) -> process.LibrariesFacts:
    return process.LibrariesFacts(host=socket.gethostname().split(".")[0], python=sys.executable, **values)


def _command(*arguments: str) -> list[str]:
    return module_command("gpubench.backends.libraries", *arguments)


def _merged_libraries(
    results: Mapping[str, StageResult],
) -> tuple[list[process.LibraryFile], list[process.LibraryUser], Sequence[process.KernelModule]]:
    documents = {name: result.document or {} for name, result in results.items()}
    found = documents[SEARCH]
    users = [from_plain(process.LibraryUser, user) for user in found.get("users", ())]
    users += [
        from_plain(process.LibraryUser, user)
        for task in (NCCL4PY, MPI4PY)
        if (user := documents[task].get("user")) is not None
    ]
    users.sort(key=lambda user: _ORDER.index(user.name))
    files = {
        os.path.realpath(file.path): file
        for file in (from_plain(process.LibraryFile, plain) for plain in found.get("files", ()))
    }
    mpi = documents[MPI4PY]
    for user in users:
        for library, path in user.loads.items():
            file = process.LibraryFile(library=library, path=path)
            if library == process.MPI_LIB and user.name == "mpi4py":
                file = replace(file, version=mpi.get("mpi"), cuda=mpi.get("cuda"))
            files.setdefault(os.path.realpath(path), file)
    # Links may give one file several paths. Use the same one in files and users.
    users = [
        replace(user, loads={name: files[os.path.realpath(path)].path for name, path in user.loads.items()})
        for user in users
    ]
    modules = [from_plain(process.KernelModule, module) for module in found.get("modules", ())]
    return [_add_modules(file) if file.library == process.UCX_LIB else file for file in files.values()], users, modules


def _add_modules(file: process.LibraryFile) -> process.LibraryFile:
    library = Path(file.path)
    folder = ucx_modules(library)
    return replace(file, transports=ucx_transports(library), modules=None if folder is None else printable(str(folder)))


def _add_version(file: process.LibraryFile, result: StageResult) -> process.LibraryFile:
    """Add the version to a file: from the library itself, or else from its package or file name, with the reason."""
    answer = result.document or {}
    version = answer.get("version")
    if version is not None:
        return replace(file, version=version)
    return replace(file, version=_stated_version(file), unread=answer.get("unread") or result.error)


def _stated_version(file: process.LibraryFile) -> str | None:
    """Return the version in the name of the package or of the file."""
    if file.library == process.UCX_LIB:  # The file of every UCX is called libucp.so.0.0.0.
        return ucx_wheel_version(file.package or "") or None
    known = file.package.rpartition(" ")[2] if file.package else None
    named = Path(os.path.realpath(file.path)).name.partition(".so.")[2]
    return known if known and known[0].isdigit() else named if named.count(".") > 1 else None


def main(arguments: Sequence[str]) -> int:
    """Run one search in a child process. Print a line of JSON and return the exit code."""
    task, *rest = arguments
    root = Path("/")
    if task == SEARCH:
        answer = search(root, os.environ)
    elif task == NCCL4PY:
        answer = _nccl4py_user()
    elif task == MPI4PY:
        answer = _mpi4py_user()
    else:
        answer = read_version(*rest)
    sys.stdout.write("\n" + json.dumps(to_plain(answer)) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
