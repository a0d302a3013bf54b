"""A search for libraries as the dynamic loader does it, without loading them: no foreign code runs for a fact.

Looked at are, in its order: what is loaded already, LD_LIBRARY_PATH, its cache, its own folders. Not followed is the
search path inside another library (RUNPATH), by which a wheel can bring libraries of its own.
"""

import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields, below, exists, printable

_LIBRARIES = (
    *("libcuda.so.1", "libnvidia-ml.so.1", "libibverbs.so.1", "libmlx5.so.1", "libfabric.so.1", "libgdrapi.so.2"),
    *("libucp.so.0",),
)
_NET_PLUGIN = "libnccl-net.so"
_PLUGIN_SETTING = "NCCL_NET_PLUGIN"
_CACHE = "etc/ld.so.cache"
_MOST_CACHE_BYTES = 16 * 2**20
_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_MOST_FOLDERS = 64
_PROVIDERS = "etc/libibverbs.d"
_SHARED_OBJECT = re.compile(r"[\w.+-]+\.so(?:\.[\w.]+)?", re.ASCII)


def wanted_libraries(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The libraries whose absence changes a path, with the network plugins that NCCL's settings ask for.

    NCCL_NET_PLUGIN names files, or what stands in libnccl-net-NAME.so; several with commas between them (NCCL 2.27).
    """
    named = settings.get(_PLUGIN_SETTING)
    if not named:
        return (*_LIBRARIES, _NET_PLUGIN)
    plugins = [each.strip() for each in named.split(",")]
    is_file = [each.startswith("/") or _SHARED_OBJECT.fullmatch(each) for each in plugins]
    files = [each if file else f"libnccl-net-{each}.so" for each, file in zip(plugins, is_file, strict=True)]
    return (*_LIBRARIES, *(printable(file) for file in files if file != "libnccl-net-none.so"))


def find_libraries(
    names: Iterable[str], loaded: Mapping[str, str], search_path: str, root: Path
) -> dict[str, str | None]:
    """The file that the loader would take for each name, None for none; a path stands for itself.

    `loaded` are the files of loaded libraries by name without suffix, `search_path` is LD_LIBRARY_PATH.
    """
    cache = _cache(root)
    machine = f"{platform.machine()}-linux-gnu"
    folders = [*search_path.split(":")[:_MOST_FOLDERS], *_FOLDERS, f"/lib/{machine}", f"/usr/lib/{machine}"]
    found: dict[str, str | None] = {}
    for name in names:
        places = [f"{folder}/{name}" for folder in folders if folder.startswith("/")]
        in_order = (*places[: -len(_FOLDERS) - 2], *_cached(cache, name), *places)
        candidates = (name,) if name.startswith("/") else in_order
        present = (path for path in candidates if exists(below(root, Path(path))))
        mapped = loaded.get(name.partition(".so")[0])
        found[name] = printable(path) if (path := mapped or next(present, None)) else None
    return found


def can_look(root: Path) -> bool:
    """True where a folder of the loader can be seen: where none can, a library that is not found may exist."""
    return any(exists(below(root, Path(folder))) for folder in _FOLDERS)


def verbs_providers(root: Path, unknown: UnknownFields) -> tuple[str, ...] | None:
    """The drivers that libibverbs is configured to load ('mlx5', 'efa'); None where it has no folder of them."""
    names = unknown.names("verbs_providers", root / _PROVIDERS)
    paths = [path for path in map(Path, names or ()) if path.suffix == ".driver"]
    return None if names is None else tuple(sorted(printable(path.stem) for path in paths))


def _cache(root: Path) -> bytes:
    """The loader's cache, of which only the texts are used: whatever its version, they are the libraries' paths."""
    try:
        with (root / _CACHE).open("rb") as file:
            return file.read(_MOST_CACHE_BYTES)
    except OSError:
        return b""


def _cached(cache: bytes, name: str) -> list[str]:
    pattern = rb"(?<=\0)(/[^\0]{0,4000}/" + re.escape(name.encode()) + rb")(?=\0)"
    return [path.decode(errors="replace") for path in re.findall(pattern, cache)]
