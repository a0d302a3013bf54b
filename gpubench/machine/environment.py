"""Find the libraries that this process has loaded or would load, and read NCCL's settings as NCCL reads them.

Like the dynamic loader, search loaded libraries, LD_LIBRARY_PATH, the loader cache, and the default directories.
RUNPATH is ignored. Tested with Open MPI 5 and MPICH 5 without GPUs, but not with GPUs or with MVAPICH.
"""

import ctypes
import errno
import os
import platform
import pwd
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpubench.machine.host import UnknownFields, exists, mapped_paths, printable, read_text, rebase_path
from gpubench.model.facts.process import MpiFacts

_LIBRARIES = (
    *("libcuda.so.1", "libnvidia-ml.so.1", "libibverbs.so.1", "libmlx5.so.1", "libfabric.so.1", "libgdrapi.so.2"),
    *("libucp.so.0",),
)
_MOST_CACHE_BYTES = 16 * 2**20
_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_MOST_FOLDERS = 64
_SHARED_OBJECT = re.compile(r"[\w.+-]+\.so(?:\.[\w.]+)?", re.ASCII)


def wanted_libraries(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the libraries whose absence may change a transport, including the network plugins named in
    NCCL_NET_PLUGIN.
    """
    named = settings.get("NCCL_NET_PLUGIN")
    if not named:
        return (*_LIBRARIES, "libnccl-net.so")
    plugins = [name.strip() for name in named.split(",")]
    files = [
        plugin if plugin.startswith("/") or _SHARED_OBJECT.fullmatch(plugin) else f"libnccl-net-{plugin}.so"
        for plugin in plugins
        if plugin != "none"
    ]
    return (*_LIBRARIES, *map(printable, files))


def find_libraries(
    names: Iterable[str], loaded: Mapping[str, str], search_path: str, root: Path
) -> dict[str, str | None]:
    """Return the path that the dynamic loader would use for each library, or None. `search_path` is LD_LIBRARY_PATH."""
    cache = b""
    with suppress(OSError), (root / "etc/ld.so.cache").open("rb") as file:
        cache = file.read(_MOST_CACHE_BYTES)
    folders = [folder for folder in search_path.split(":")[:_MOST_FOLDERS] if folder.startswith("/")]
    machine = f"{platform.machine()}-linux-gnu"
    found: dict[str, str | None] = {}
    for name in names:
        # Search only the strings in the cache, because they are library paths in every version of its format.
        end = b"/" + name.encode()
        texts = cache.split(b"\0") if end + b"\0" in cache else ()
        candidates = (
            *(f"{folder}/{name}" for folder in folders),
            *(text.decode(errors="replace") for text in texts if text.startswith(b"/") and text.endswith(end)),
            *(f"{folder}/{name}" for folder in (*_FOLDERS, f"/lib/{machine}", f"/usr/lib/{machine}")),
        )
        paths = (name,) if name.startswith("/") else candidates
        present = (path for path in paths if exists(rebase_path(root, Path(path))))
        path = loaded.get(name.partition(".so")[0]) or next(present, None)
        found[name] = printable(path) if path else None
    return found


def has_loader_folders(root: Path) -> bool:
    """True if one of the loader's default directories is visible. Otherwise a library that was not found may still
    exist.
    """
    return any(exists(rebase_path(root, Path(folder))) for folder in _FOLDERS)


_LINKS = re.compile(r"\s*(\S+) => (/.+) \(0x[0-9a-f]+\)|\s*(\S+) => not found")
_SECONDS_FOR_LDD = 20


def linked_files(path: Path) -> dict[str, str | None]:
    """Return the libraries that a shared object links, directly or indirectly, and the file that the loader would
    use.

    The file is None if the loader finds none. The result is empty for files that are no shared objects, or without ldd.
    No code of the shared object runs.
    """
    try:
        answer = subprocess.run(
            ["ldd", path], capture_output=True, text=True, errors="replace", timeout=_SECONDS_FOR_LDD, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = filter(None, map(_LINKS.fullmatch, answer.stdout.splitlines()))
    return {link[1] or link[3]: link[2] and os.path.realpath(link[2]) for link in found}


def verbs_providers(root: Path, unknown: UnknownFields) -> tuple[str, ...] | None:
    """Return the drivers that libibverbs is configured to load, such as 'mlx5' or 'efa'. None without a
    configuration directory.
    """
    names = unknown.names("verbs_providers", root / "etc/libibverbs.d")
    paths = [path for path in map(Path, names or ()) if path.suffix == ".driver"]
    return None if names is None else tuple(sorted(printable(path.stem) for path in paths))


def mapped_files(pattern: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the mapped files whose names match a pattern, without duplicates, in address order."""
    return [path for path in dict.fromkeys(mapped_paths(maps)) if re.match(pattern, path.rpartition("/")[2])]


_LONGEST_VERSION = 8192
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_FIELDS = ("cuda_built", "cuda_aware", "pml", "accelerator")


class _Component(ctypes.Structure):
    """The first fields of `mca_base_component_t`, which are the same in Open MPI 2 to 5 (opal/mca/mca.h)."""

    _fields_ = (
        ("version", ctypes.c_int * 3),
        ("project", ctypes.c_char * 16),
        ("project_version", ctypes.c_int * 3),
        ("kind", ctypes.c_char * 32),
        ("kind_version", ctypes.c_int * 3),
        ("name", ctypes.c_char * 64),
    )


def read_mpi(path: str | None) -> MpiFacts:
    """Read facts about the MPI library at `path`, which must be loaded in this process. All facts are unknown for
    None.
    """
    if path is None:
        return _unknown_mpi("no MPI library is loaded in this process")
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError as error:
        return _unknown_mpi(f"the MPI library cannot be asked: {printable(str(error))}")
    return read_library(library)


def read_library(library: Any) -> MpiFacts:
    """Read facts about a loaded MPI library."""
    if not _call_predicate(library, "MPI_Initialized") or _call_predicate(library, "MPI_Finalized"):
        return _unknown_mpi("MPI is not running in this process", version=_version(library))
    unknown: dict[str, str] = {}
    aware = _cuda_aware(library)
    if aware is None:
        unknown["cuda_aware"] = "the library has no function that reports it"
    built = cuda_built(library)
    pml = _component(library, "mca_pml_base_selected_component", b"pml")
    accelerator = _component(library, "opal_accelerator_base_selected_component", b"accelerator")
    for name, value in (("cuda_built", built), ("pml", pml), ("accelerator", accelerator)):
        if value is None:
            unknown[name] = "the library exports no Open MPI variable that reports it"
    return MpiFacts(
        version=_version(library),
        cuda_built=built,
        cuda_aware=aware,
        pml=pml,
        accelerator=accelerator,
        unknown=unknown,
    )


def cuda_built(library: Any) -> bool | None:
    """True if Open MPI was built with CUDA support. None for other libraries. Works even before MPI is initialized."""
    try:
        return bool(ctypes.c_bool.in_dll(library, "opal_built_with_cuda_support").value)
    except ValueError:
        return None


def _unknown_mpi(reason: str, version: str | None = None) -> MpiFacts:
    return MpiFacts(version=version, unknown=dict.fromkeys(_FIELDS, reason))


def _call_predicate(library: Any, name: str) -> bool:
    """Call MPI_Initialized or MPI_Finalized, the calls that are valid at any time."""
    value = ctypes.c_int(0)
    function = getattr(library, name, None)
    return function is not None and function(ctypes.byref(value)) == 0 and bool(value.value)


def _version(library: Any) -> str | None:
    function = getattr(library, "MPI_Get_library_version", None)
    text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int(0)
    if function is None or function(text, ctypes.byref(length)):
        return None
    lines = text.value.decode(errors="replace").strip().splitlines()
    return printable(" ".join(lines[0].split(",")[0].split())) if lines else None


def _cuda_aware(library: Any) -> bool | None:
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None:
        return None
    answer = ctypes.c_int(0)
    return None if query(_CUDA, ctypes.byref(answer)) else bool(answer.value)


def _component(library: Any, name: str, kind: bytes) -> str | None:
    """Return the name of Open MPI's selected component. None if the variable is missing or is not a component of
    this kind.
    """
    try:
        component = _Component.in_dll(library, name)
    except ValueError:
        return None
    return printable(component.name.decode(errors="replace")) if component.kind == kind and component.name else None


DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS = "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"

NODE_VARIABLE = "NCCL_HOSTID"  # NCCL identifies a process's host by this value instead of the host name
_CONF_FILE = "NCCL_CONF_FILE"
_SYSTEM_CONF = Path("/etc/nccl.conf")


def nccl_settings(environment: Mapping[str, str], files: Sequence[Path] | None = None) -> dict[str, str]:
    """Return NCCL's variables from `environment` and configuration files, in NCCL's order. The first value of a
    variable wins.
    """
    found = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    for path in configuration_files(environment) if files is None else files:
        found = found | _parse_assignments(read_text(path)) | found
    return found


def _parse_assignments(text: str | None) -> dict[str, str]:
    """Parse lines of the form NAME=VALUE. NCCL uses the first value of a variable."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, value)
    return found


def configuration_files(environment: Mapping[str, str], user: int | None = None) -> tuple[Path, ...]:
    """Return NCCL's configuration files: NCCL_CONF_FILE, or else ~/.nccl.conf of `user`, and then /etc/nccl.conf."""
    named = environment.get(_CONF_FILE)
    if named:
        return Path(named), _SYSTEM_CONF
    try:
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
    except KeyError:
        return (_SYSTEM_CONF,)
    return Path(home) / ".nccl.conf", _SYSTEM_CONF


def read_nccl_files(
    environment: Mapping[str, str], root: Path, user: int | None = None
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the NCCL_ variables in each configuration file, in NCCL's order, and a reason for each unreadable file."""
    found, unknown = {}, {}
    for path in configuration_files(environment, user):
        is_in_home = path.name == ".nccl.conf" and str(path) != environment.get(_CONF_FILE)
        name = "~/.nccl.conf" if is_in_home else printable(str(path))
        rebased = rebase_path(root, path)
        try:
            rebased.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                unknown[f"nccl_files.{name}"] = str(error.strerror)
            continue
        reader = UnknownFields()
        text = reader.text("file", rebased)
        if text is None and not reader.reasons["file"].endswith("is empty"):
            unknown[f"nccl_files.{name}"] = reader.reasons["file"]
            continue
        found[name] = {
            printable(key): printable(value)
            for key, value in _parse_assignments(text).items()
            if key.startswith("NCCL_")
        }
    return found, unknown


def merge_settings(environment: Mapping[str, str], files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Merge NCCL's variables from the environment and then from its files. The first value of a variable wins."""
    in_order = (environment, *files.values())
    return {
        name: value for settings in reversed(in_order) for name, value in settings.items() if name.startswith("NCCL_")
    }


@contextmanager
def set_environment(variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Set these variables temporarily, while a communicator is created. NCCL reads some variables for each
    communicator.
    """
    before = {name: environment.get(name) for name in variables}
    environment.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
