"""A child that looks for libraries, or loads one and asks it: `python -P -m gpubench.hardware.libraries.stage TASK`.

Each task is a process of its own, for a library that is loaded may crash, hang, or load others. It writes one line of
JSON.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubench.errors import GpubenchError
from gpubench.hardware.libraries import search
from gpubench.hardware.mpi import group
from gpubench.hardware.nccl.backend import NcclLibrary
from gpubench.hardware.process.facts import mapped_libraries
from gpubench.hardware.process.mpi_facts import cuda_built
from gpubench.hardware.system_files import printable
from gpubench.model.facts.libraries import MPI, NCCL, NVSHMEM, RCCL, UCX, LibraryUser
from gpubench.model.terms.nccl_choice import nccl_version
from gpubench.model.terms.plain import to_plain

SEARCH, CUPY, MPI4PY, VERSION = "search", "cupy", "mpi4py", "version"
_MAPS = Path("/proc/self/maps")

Answer = Mapping[str, Any]


def found(root: Path, environment: Mapping[str, str]) -> Answer:
    """What files say."""
    search_path = environment.get("LD_LIBRARY_PATH", "")
    find = search.finder(search_path, root)
    torch = search.torch_user(find)
    return {
        "files": [*search.wheel_files(), *search.conda_files(search.own_prefix())],
        "users": [*([torch] if torch else []), search.loader_user(search_path, root)],
        "modules": search.kernel_modules(root),
    }


def cupy_user() -> Answer:
    """CuPy and the NCCL that it loads, which gpubench's own backend then uses; no GPU is touched."""
    package = search.package_of("cupy")
    if package is None:
        return {"user": None}
    loads, unread = {}, ""
    try:
        loads = {NCCL: printable(NcclLibrary().path)}
    except (GpubenchError, ImportError, OSError) as error:
        unread = printable(error.seen if isinstance(error, GpubenchError) else str(error))
    user = LibraryUser(
        name="CuPy",
        version=package.version,
        path=package.path,
        purpose="gpubench --backend nccl",
        note=package.name,
        loads=loads,
        unread=unread,
    )
    return {"user": user}


def mpi4py_user(environment: Mapping[str, str], root: Path) -> Answer:
    """mpi4py and the MPI that it loads, which is not started."""
    package = search.package_of("mpi4py")
    if package is None:
        return {"user": None}
    user = LibraryUser(
        name="mpi4py",
        version=package.version,
        path=package.path,
        purpose="gpubench --backend host and mpi, and the ranks of a job",
    )
    try:
        version = printable(group.load())
    except (RuntimeError, ImportError, OSError) as error:
        return {"user": replace(user, unread=printable(str(error)))}
    loads = search.loaded_of(mapped_libraries(_MAPS))
    library = ctypes.CDLL(loads[MPI]) if MPI in loads else None
    find = search.finder(environment.get("LD_LIBRARY_PATH", ""), root)
    through = search.mpi_component(Path(loads[MPI]), find) if MPI in loads else None
    user = replace(
        user,
        loads={**loads, **({UCX: printable(through[1])} if through else {})},
        note=f"UCX through {through[0]}" if through else "",
    )
    return {"user": user, "mpi": version, "cuda": None if library is None else cuda_built(library)}


def _nccl(library: Any) -> str:
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        raise OSError("ncclGetVersion failed")
    return nccl_version(number.value)


def _three(function: str, library: Any) -> str:
    """The version of a library that tells major, minor and patch."""
    numbers = [ctypes.c_int() for _ in range(3)]
    getattr(library, function)(*map(ctypes.byref, numbers))
    return ".".join(str(each.value) for each in numbers)


_ASKED: Mapping[str, Callable[[Any], str]] = {
    NCCL: _nccl,
    RCCL: _nccl,
    UCX: lambda library: _three("ucp_get_version", library),
    NVSHMEM: lambda library: _three("nvshmemx_vendor_get_version_info", library),
}


def version_of(library: str, path: str) -> Answer:
    """A library's own word on its version; it is loaded for that."""
    ask = _ASKED.get(library)
    if ask is None:
        return {"version": None, "unread": "it has no function that tells"}
    try:
        return {"version": ask(ctypes.CDLL(path))}
    except (OSError, AttributeError) as error:
        return {"version": None, "unread": printable(str(error))}


def main(arguments: Sequence[str]) -> int:
    """The child: one line of JSON on stdout. Returns the exit code."""
    task, *rest = arguments
    root = Path("/")
    if task == SEARCH:
        answer = found(root, os.environ)
    elif task == CUPY:
        answer = cupy_user()
    elif task == MPI4PY:
        answer = mpi4py_user(os.environ, root)
    else:
        answer = version_of(*rest)
    sys.stdout.write("\n" + json.dumps(to_plain(answer)) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
