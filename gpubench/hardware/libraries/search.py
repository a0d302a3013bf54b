"""Libraries that move data between GPUs, as files say: of wheels, of the loader, of PyTorch. No foreign code runs."""

import mmap
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpubench.hardware.libraries.elf import SharedObject, read_shared_object
from gpubench.hardware.process.library_search import find_libraries
from gpubench.hardware.system_files import exists, names_in, printable, text_of
from gpubench.model.facts.libraries import (
    LOADER,
    MPI,
    MSCCLPP,
    NCCL,
    NVSHMEM,
    RCCL,
    UCX,
    KernelModule,
    LibraryFile,
    LibraryUser,
)

_FILES = {
    NCCL: "libnccl.so.2",
    RCCL: "librccl.so.1",
    UCX: "libucp.so.0",
    NVSHMEM: "libnvshmem_host.so.3",
    MSCCLPP: "libmscclpp.so",
}
"""The name by which programs ask for each."""

_PREFIXES = {name.partition(".so")[0] + ".so": library for library, name in _FILES.items()}
_WHEELS = re.compile(r"(nvidia[-_]nccl|nvidia[-_]nvshmem|libucx|mscclpp|rccl)([-_]cu\d+)?", re.IGNORECASE)
_PARTS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_nvshmem.so", "libtorch_cpu.so", "libtorch_xpu.so")
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([\w.+-]+)['\"]", re.MULTILINE)
_LINKED = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_MODULES = ("nvidia_peermem", "gdrdrv", "nvidia_fs", "efa_nv_peermem")
_COMPONENT = "mca_pml_ucx.so"
_COMPONENT_FOLDERS = ("openmpi", "openmpi/lib/openmpi3", "openmpi/lib/openmpi", "../lib/openmpi")

Finder = Callable[[str, SharedObject], str | None]


def library_of(name: str) -> str | None:
    """The library that a file of that name is; None for any other file."""
    return next((library for prefix, library in _PREFIXES.items() if name.startswith(prefix)), None)


def wheel_files() -> Iterator[LibraryFile]:
    """The libraries that wheels of this environment brought."""
    for each in distributions():
        name = each.metadata["Name"] or ""
        if not _WHEELS.fullmatch(name):
            continue
        for file in each.files or ():
            library = library_of(file.name)
            path = Path(str(each.locate_file(file)))
            if library is not None and ".so" in file.name and exists(path):
                yield LibraryFile(library=library, path=printable(str(path)), package=f"{name} {each.version}")
                break


def conda_files(prefix: Path) -> Iterator[LibraryFile]:
    """Those of the conda environment that this Python belongs to, which it finds by its own folder."""
    if exists(prefix / "conda-meta"):
        for library, name in _FILES.items():
            if exists(prefix / "lib" / name):
                yield LibraryFile(library=library, path=printable(str(prefix / "lib" / name)), package="conda")


def loader_user(search_path: str, root: Path) -> LibraryUser:
    """What programs get that leave it to the dynamic loader."""
    found = find_libraries(_FILES.values(), {}, search_path, root)
    loads = {library: path for library, name in _FILES.items() if (path := found[name]) is not None}
    purpose = "what leaves it to the dynamic loader, such as nccl-tests"
    return LibraryUser(name=LOADER, purpose=purpose, loads=loads)


def finder(search_path: str, root: Path) -> Finder:
    """A search as the dynamic loader makes it for what a shared object needs."""

    def find(name: str, needing: SharedObject) -> str | None:
        places = (*needing.rpath, *search_path.split(":"), *needing.runpath)
        here = next((f"{folder}/{name}" for folder in places if folder and exists(Path(folder) / name)), None)
        return str(Path(here).resolve()) if here else find_libraries([name], {}, "", root)[name]

    return find


def torch_user(find: Finder) -> LibraryUser | None:
    """PyTorch and the libraries that its own need, by its files; None where there is none."""
    folder = _package_folder("torch")
    if folder is None:
        return None
    text = text_of(folder / "version.py") or ""
    version = _VERSION.search(text)
    built = {match[1]: match[2] for match in _BUILT_FOR.finditer(text)}
    loads: dict[str, str] = {}
    inside: dict[str, str] = {}
    for part in _PARTS:
        path = folder / "lib" / part
        if not exists(path):
            continue
        own = read_shared_object(path)
        for name in own.needed:
            library = MPI if name.startswith("libmpi.so") else library_of(name)
            if library is not None and (taken := find(name, own)) is not None:
                loads.setdefault(library, printable(taken))
        if part == "libtorch_cuda.so" and own.needed and own.needs("libnccl") is None:
            inside[NCCL] = _linked_version(path)
    words = ", ".join(f"{name.upper()} {release}" for name, release in built.items())
    return LibraryUser(
        name="torch",
        version=version[1] if version else None,
        path=printable(str(folder)),
        purpose="torch.distributed, gpubench --backend torch:nccl",
        note=f"built for {words}" if words else "built for CPUs alone",
        loads=loads,
        inside=inside,
    )


def _linked_version(path: Path) -> str:
    """The version in the words that a linked-in NCCL would print; '' where they are not found."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _LINKED.search(content)
            return found[1].decode() if found else ""
    except (OSError, ValueError):
        return ""


def mpi_component(library: Path, find: Finder) -> tuple[str, str] | None:
    """The UCX that an MPI library goes over: 'what needs it' and the file; None where it does not."""
    candidates = [library, *(library.parent / folder / _COMPONENT for folder in _COMPONENT_FOLDERS)]
    for each in filter(exists, candidates):
        own = read_shared_object(each)
        name = own.needs("libucp.so")
        path = None if name is None else find(name, own)
        if path is not None:
            return each.name, path
    return None


class Package(NamedTuple):
    """A distribution that is installed, by the name that it was installed by."""

    name: str
    version: str
    path: str


def package_of(module: str) -> Package | None:
    """The distribution that brought a module, by its name with or without a suffix such as -cuda13x; None for none."""
    for each in distributions():
        name = each.metadata["Name"] or ""
        if name.lower() == module or name.lower().startswith(f"{module}-cuda"):
            return Package(name, each.version, printable(str(each.locate_file(module))))
    return None


def kernel_modules(root: Path) -> tuple[KernelModule, ...]:
    """The modules by which other devices reach GPU memory."""
    present = set(names_in(root / "sys/module"))
    return tuple(
        KernelModule(name=name, loaded=name in present, version=text_of(root / "sys/module" / name / "version"))
        for name in _MODULES
    )


def _package_folder(name: str) -> Path | None:
    """The folder of a package, which is not imported."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        return None
    places = [] if found is None else list(found.submodule_search_locations or ())
    return Path(places[0]) if places else None


def own_prefix() -> Path:
    """The environment that this Python belongs to."""
    return Path(sys.prefix)


def loaded_of(maps: Mapping[str, str]) -> dict[str, str]:
    """Files of mapped libraries by library, from `mapped_libraries`."""
    names = {"libnccl": NCCL, "libucp": UCX, "libmpi": MPI, "libmpich": MPI}
    return {names[name]: path for name, path in maps.items() if name in names}
