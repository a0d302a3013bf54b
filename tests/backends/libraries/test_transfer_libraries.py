"""Copies of UCX in wheels and on the system, with their modules and programs."""

import os
from pathlib import Path

import pytest

from gpubench.backends.transfer_libraries import (
    SYSTEM,
    find_transfer_packages,
    read_ucx_version,
    ucx_copies,
    ucx_transports,
)
from gpubench.model.facts.process import MOONCAKE, NIXL, UCX_LIB
from tests.fakes.shared_objects import shared_object, wheel


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that Python searches for packages, first."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def add_modules(library: Path, *names: str) -> None:
    folder = library.parent / "ucx"
    folder.mkdir()
    for name in names:
        (folder / name).touch()


def found_below(folder: Path) -> list[tuple[Path, str]]:
    return [(library, package) for library, package in ucx_copies(os.environ).items() if library.is_relative_to(folder)]


def test_the_wheel_of_ucx_comes_before_the_copy_that_nixl_brought(site: Path) -> None:
    bundled = wheel(site, "nixl-cu13", "1.5.1", "nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0")
    add_modules(bundled, "libuct_cuda.so.0.0.0", "libuct_ib.so.0.0.0", "libuct_ib_efa.so.0.0.0", "libucm_cuda.so.0.0.0")
    own = wheel(site, "libucx-cu13", "1.22.0", "libucx/lib/libucp.so.0")
    add_modules(own, "libuct_cuda.a", "libuct_cuda.so", "libuct_cuda.so.0", "libuct_cma.so.0")
    assert found_below(site) == [(own, "libucx-cu13 1.22.0"), (bundled, "nixl-cu13 1.5.1")]
    assert (ucx_transports(own), ucx_transports(bundled)) == (("cma", "cuda"), ("cuda", "efa", "ib"))
    assert read_ucx_version(bundled, os.environ) == ""  # This copy does not load


def test_a_ucx_of_the_loader_is_found_once_and_may_lack_modules(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = wheel(site, "libucx-cu12", "1.20.0", "libucx/lib/libucp.so.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(own.parent))
    assert [package for _, package in found_below(site)] == ["libucx-cu12 1.20.0"]
    system = tmp_path / "usr/lib/x86_64-linux-gnu/libucp.so.0"
    system.parent.mkdir(parents=True)
    system.write_bytes(shared_object("libc.so.6"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(system.parent))
    assert found_below(tmp_path)[1:] == [(system, SYSTEM)]
    assert ucx_transports(system) == ()


def test_transports_are_named_by_their_modules(tmp_path: Path) -> None:
    names = ("ib_mlx5.so.0", "cuda_gdrcopy.so.0", "rdmacm.so", "xpmem.la")
    add_modules(tmp_path / "libucp.so.0", "libucm_cuda.so", *(f"libuct_{name}" for name in names))
    assert ucx_transports(tmp_path / "libucp.so.0") == ("gdrcopy", "mlx5", "rdmacm")


def add_plugin(folder: Path, name: str, *, ucx: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"libplugin_{name}.so"
    path.write_bytes(shared_object(*([ucx] if ucx else []), rpath="$ORIGIN"))
    return path


def test_nixl_is_found_with_the_plugins_and_the_ucx_that_it_loads(site: Path) -> None:
    wheel(site, "nixl", "1.5.1", "nixl/__init__.py")
    wheel(site, "nixl-cu13", "1.5.1", "nixl_cu13/__init__.py")
    wheel(site, "mooncake-transfer-engine-cuda13", "0.3.14", "mooncake/engine.so")
    plugins = site / ".nixl_cu13.mesonpy.libs/plugins"
    add_plugin(plugins, "POSIX")
    (plugins / "libtelemetry_exporter_doca.so").touch()
    add_plugin(plugins, "UCX", ucx="libucp-b39b3ed9.so.0.0.0")
    (plugins / "libucp-b39b3ed9.so.0.0.0").write_bytes(shared_object("libc.so.6"))
    add_plugin(site / "nixl_cu13.libs/nixl", "GDS")
    nixl, mooncake = find_transfer_packages({})
    assert (nixl.label, nixl.path, nixl.note) == (f"{NIXL} 1.5.1", str(site / "nixl_cu13"), "nixl-cu13")
    assert nixl.transports == ("POSIX", "UCX")
    assert nixl.loads == {UCX_LIB: str(plugins / "libucp-b39b3ed9.so.0.0.0")}
    assert (mooncake.label, mooncake.path) == (f"{MOONCAKE} 0.3.14", str(site / "mooncake"))


def test_the_variable_replaces_the_plugins_of_nixl(site: Path, tmp_path: Path) -> None:
    wheel(site, "nixl", "0.4.1", "nixl/__init__.py")
    add_plugin(site / ".nixl.mesonpy.libs/plugins", "UCX")
    other = tmp_path / "nixl"
    add_plugin(other, "GDS")
    (nixl,) = find_transfer_packages({"NIXL_PLUGIN_DIR": str(other)})
    assert (nixl.transports, nixl.loads) == (("GDS",), {})
