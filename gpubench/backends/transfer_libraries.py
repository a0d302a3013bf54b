"""Installations of UCX, NIXL and Mooncake, which move KV caches between inference processes, found from their files.

`libraries.py` reads the other libraries.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from gpubench.machine.children import module_command, package_environment
from gpubench.machine.environment import find_libraries, linked_files
from gpubench.machine.host import exists, list_names, printable
from gpubench.machine.probe import run_stages
from gpubench.machine.stage import VERSION
from gpubench.model.facts import process

UCX_FILE = "libucp.so.0"
SYSTEM = "system"  # The package of a UCX that the dynamic loader finds
_UCX_WHEEL = re.compile(r"libucx([-_]cu\d+)?", re.IGNORECASE)
_MODULE = re.compile(r"libuct_(\w+)\.so")
_NIXL = re.compile(r"nixl([-_]cu\d+)?", re.IGNORECASE)
_MOONCAKE = re.compile(r"mooncake[-_]transfer[-_]engine([-_].*)?", re.IGNORECASE)
_PLUGIN = re.compile(r"libplugin_(\w+)\.so")
_SECONDS_FOR_VERSION = 10


def ucx_copies(environment: Mapping[str, str], root: Path = Path("/")) -> dict[Path, str]:
    """Return the package of each copy of UCX that a program can load, by the path of its library: the wheel first, then
    conda's, the system's, and copies in wheels of other packages. No library is loaded.
    """
    by_file: dict[str, tuple[Path, str]] = {}
    for library, package in _ucx_candidates(environment, root):
        if exists(library):
            by_file.setdefault(os.path.realpath(library), (library, package))
    return dict(by_file.values())


def read_ucx_version(library: Path, environment: Mapping[str, str]) -> str:
    """Return the version that a UCX reports in a child process. Empty if it does not load."""
    command = module_command("gpubench.backends.libraries", VERSION, process.UCX_LIB, str(library))
    answers = run_stages({VERSION: command}, package_environment(environment), _SECONDS_FOR_VERSION)
    return (answers[VERSION].document or {}).get("version") or ""


def _ucx_candidates(environment: Mapping[str, str], root: Path) -> Iterator[tuple[Path, str]]:
    for name, wheel in _distributions(_UCX_WHEEL):
        yield Path(str(wheel.locate_file(f"libucx/lib/{UCX_FILE}"))), f"{name} {wheel.version}"
    if exists(Path(sys.prefix) / "conda-meta"):
        yield Path(sys.prefix) / "lib" / UCX_FILE, "conda"
    loaded = find_libraries((UCX_FILE,), {}, environment.get("LD_LIBRARY_PATH", ""), root)[UCX_FILE]
    if loaded is not None:
        yield Path(loaded), SYSTEM
    # auditwheel puts libraries into <package>.libs and adds a hash to their names: libucp-b39b3ed9.so.0.0.0
    versions = {re.sub("[-.]+", "_", wheel.metadata["Name"] or ""): wheel.version for wheel in distributions()}
    for folder in filter(None, sys.path):
        for library in sorted(Path(folder).glob("*.libs/libucp*.so*")):
            package = library.parent.name.removesuffix(".libs")
            yield library, f"{package.replace('_', '-')} {versions.get(package, '')}".strip()


def ucx_wheel_version(package: str) -> str:
    """Return the version of a UCX wheel. A wheel that contains a copy of UCX has a version of its own: return ''."""
    name, _, version = package.partition(" ")
    return version if _UCX_WHEEL.fullmatch(name) else ""


def ucx_modules(library: Path) -> Path | None:
    """Return the folder of UCX's transport modules, which UCX looks for next to its library."""
    folders = library.parent / "ucx", Path(os.path.realpath(library)).parent / "ucx"
    return next(filter(list_names, folders), None)


def ucx_transports(library: Path) -> tuple[str, ...]:
    """Return the transports of a UCX, such as 'cma', 'cuda', 'ib' and 'mlx5', from the names of its modules."""
    folder = ucx_modules(library)
    found = filter(None, map(_MODULE.match, list_names(folder) if folder else ()))
    return tuple(sorted({match[1].removeprefix("ib_").removeprefix("cuda_") for match in found}))


def find_transfer_packages(environment: Mapping[str, str]) -> Iterator[process.LibraryUser]:
    """Find NIXL and Mooncake in this Python environment, from their files."""
    nixl = _distributions(_NIXL)
    # The package nixl selects nixl-cu12 or nixl-cu13. Older versions of it are the library itself.
    for name, distribution in [found for found in nixl if found[0].lower() != "nixl"] or nixl:
        yield _nixl_user(name, distribution, environment)
    for name, distribution in _distributions(_MOONCAKE):
        yield process.LibraryUser(
            name=process.MOONCAKE,
            version=distribution.version,
            path=printable(str(distribution.locate_file("mooncake"))),
            purpose="KV cache transfers of vLLM and SGLang",
            note=name,
        )


def _distributions(pattern: re.Pattern[str]) -> list[tuple[str, Distribution]]:
    named = [(distribution.metadata["Name"] or "", distribution) for distribution in distributions()]
    return [(name, distribution) for name, distribution in named if pattern.fullmatch(name)]


def _nixl_user(name: str, distribution: Distribution, environment: Mapping[str, str]) -> process.LibraryUser:
    module = name.lower().replace("-", "_")
    # The plugins that NIXL loads: its variable, else those next to libnixl.so, where Meson's or pip's builds have them.
    places = [environment.get("NIXL_PLUGIN_DIR"), f".{module}.mesonpy.libs/plugins", f"{module}.libs/nixl"]
    plugins: dict[str, Path] = {}
    for folder in (Path(str(distribution.locate_file(place))) for place in places if place):
        found = {match[1]: folder / match[0] for match in map(_PLUGIN.match, list_names(folder)) if match}
        plugins = plugins or found
    linked = linked_files(plugins["UCX"]) if "UCX" in plugins else {}
    ucx = next((path for file, path in linked.items() if file.startswith("libucp") and path), None)
    return process.LibraryUser(
        name=process.NIXL,
        version=distribution.version,
        path=printable(str(distribution.locate_file(module))),
        purpose="KV cache transfers of vLLM, SGLang and Dynamo",
        note=name,
        loads={process.UCX_LIB: printable(ucx)} if ucx else {},
        transports=tuple(sorted(plugins)),
    )
