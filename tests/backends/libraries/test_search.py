"""Libraries found from files: links of shared objects, wheels, and PyTorch."""

import os
from pathlib import Path

import pytest

from gpubench.backends import libraries
from gpubench.backends.libraries import read_version
from gpubench.machine.environment import linked_files
from gpubench.model.facts.process import LOADER, MPI_LIB, NCCL_LIB, NVSHMEM_LIB, UCX_LIB, LibraryFile
from tests.fakes.shared_objects import shared_object, torch, wheel


def test_links_are_found_as_the_loader_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RPATH precedes LD_LIBRARY_PATH, which precedes RUNPATH."""
    for folder in ("own", "users"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libnccl.so.2").write_bytes(shared_object("libc.so.6"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "users"))
    path = tmp_path / "libx.so"
    path.write_bytes(shared_object("libnccl.so.2", "libmissing.so.1", rpath="$ORIGIN/own"))
    found = linked_files(path)
    assert (found["libnccl.so.2"], found["libmissing.so.1"]) == (f"{tmp_path}/own/libnccl.so.2", None)
    path.write_bytes(shared_object("libnccl.so.2", runpath="$ORIGIN/own"))
    assert linked_files(path)["libnccl.so.2"] == f"{tmp_path}/users/libnccl.so.2"


def test_what_is_no_shared_object_links_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linked_files(tmp_path / "missing") == {}
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n")
    assert linked_files(text) == {}
    text.write_bytes(b"\x7fELF\x02\x01" + bytes(range(256)))
    assert linked_files(text) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert linked_files(text) == {}, "there is no ldd"


def test_wheels_tell_what_they_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = wheel(tmp_path, "nvidia-nccl-cu13", "2.28.9", "nvidia/nccl/lib/libnccl.so.2")
    wheel(tmp_path, "nvidia-cudnn-cu13", "9.1", "nvidia/cudnn/lib/libcudnn.so.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {file.library: file for file in libraries.wheel_files() if file.path.startswith(str(tmp_path))}
    assert found == {
        NCCL_LIB: LibraryFile(library=NCCL_LIB, path=str(nccl), package="nvidia-nccl-cu13 2.28.9"),
    }


def test_torch_is_read_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = wheel(tmp_path, "nvidia-nccl-cu13", "2.28.9", "nvidia/nccl/lib/libnccl.so.2")
    shmem = wheel(tmp_path, "nvidia-nvshmem-cu13", "3.4.5", "nvidia/nvshmem/lib/libnvshmem_host.so.3")
    where = "$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/nvshmem/lib"
    folder = torch(
        tmp_path,
        libtorch_cuda=shared_object("libtorch_nvshmem.so", "libnccl.so.2", rpath=where),
        libtorch_nvshmem=shared_object("libnvshmem_host.so.3", rpath=where),
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    user = libraries.torch_user()
    assert user is not None
    assert (user.label, user.path, user.note) == ("torch 2.11.0+cu130", str(folder), "built for CUDA 13.0")
    assert user.loads == {NCCL_LIB: str(nccl), NVSHMEM_LIB: str(shmem)}
    assert user.inside == {}


def test_an_nccl_that_is_linked_into_torch_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = shared_object("libc.so.6") + b"....NCCL version 2.21.5+cuda12.4\0...."
    torch(tmp_path, libtorch_cuda=content)
    monkeypatch.syspath_prepend(str(tmp_path))
    user = libraries.torch_user()
    assert user is not None
    assert (user.loads, user.inside) == ({}, {NCCL_LIB: "2.21.5"})


def test_a_torch_for_cpus_and_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = torch(
        tmp_path, version="2.11.0+cpu", cuda=None, libtorch_cpu=shared_object("libmpi.so.40", rpath="$ORIGIN")
    )
    (folder / "lib/libmpi.so.40").write_bytes(shared_object("libc.so.6"))
    monkeypatch.syspath_prepend(str(tmp_path))
    user = libraries.torch_user()
    assert user is not None
    assert (user.note, user.loads) == ("built for CPUs only", {MPI_LIB: f"{folder}/lib/libmpi.so.40"})
    monkeypatch.setattr(libraries, "find_spec", lambda _name: None)
    assert libraries.torch_user() is None


def test_open_mpi_goes_over_ucx_by_a_component_of_its_own(tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so.40"
    library.write_bytes(shared_object("libc.so.6"))
    assert libraries.mpi_component(library) is None
    (tmp_path / "openmpi").mkdir()
    (tmp_path / "openmpi" / "mca_pml_ucx.so").write_bytes(shared_object("libucp.so.0", rpath="$ORIGIN/.."))
    (tmp_path / "libucp.so.0").write_bytes(shared_object("libc.so.6"))
    assert libraries.mpi_component(library) == ("mca_pml_ucx.so", f"{tmp_path}/libucp.so.0")


def test_kernel_modules_with_their_versions(tmp_path: Path) -> None:
    module = tmp_path / "sys/module/gdrdrv"
    module.mkdir(parents=True)
    (module / "version").write_text("2.5\n")
    found = {each.name: (each.loaded, each.version) for each in libraries.kernel_modules(tmp_path)}
    assert found["gdrdrv"] == (True, "2.5")
    assert found["nvidia_peermem"] == (False, None)


def test_what_does_not_load_says_why(tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_text("no library")
    answer = read_version(NCCL_LIB, str(path))
    assert answer["version"] is None
    assert str(path) in answer["unread"] or "libnccl" in answer["unread"]
    assert read_version("MSCCL++", str(path))["unread"] == "the library has no function that reports it"


def test_this_environment_is_read_by_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    wheel(one, "nvidia-nccl-cu12", "2.27.3", "nvidia/nccl/lib/libnccl.so.2")
    wheel(other, "nvidia-nccl-cu13", "2.28.9", "nvidia/nccl/lib/libnccl.so.2")
    torch(other, libtorch_cuda=shared_object("libnccl.so.2", rpath="$ORIGIN/../../nvidia/nccl/lib"))
    modules = tmp_path / "other/nixl_cu13.libs/ucx"
    bundled = wheel(other, "nixl-cu13", "1.5.1", "nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0")
    modules.mkdir()
    (modules / "libuct_cuda.so.0.0.0").touch()
    plugins = other / "nixl_cu13.libs/nixl"
    plugins.mkdir()
    (plugins / "libplugin_UCX.so").write_bytes(shared_object(bundled.name, rpath="$ORIGIN/.."))
    linked = tmp_path / "linked"  # An environment's lib64 is often a link to lib.
    linked.symlink_to(other)
    monkeypatch.setenv("PYTHONPATH", f"{one}{os.pathsep}{linked}")
    facts = libraries.read_libraries(60, os.environ)
    assert facts.failures == {}
    nccl = {file.package: file for file in facts.files if file.library == NCCL_LIB and file.package}
    assert {file.version for file in nccl.values()} == {"2.27.3", "2.28.9"}
    assert all(file.unread for file in nccl.values()), "an empty library does not load, and its wheel tells"
    users = {user.name: user for user in facts.users}
    assert users["torch"].loads[NCCL_LIB] == nccl["nvidia-nccl-cu13 2.28.9"].path
    assert users["mpi4py"].loads[MPI_LIB] in {file.path for file in facts.files}
    assert LOADER in users
    ucx = next(file for file in facts.files if file.package == "nixl-cu13 1.5.1")
    assert (ucx.version, ucx.transports) == (None, ("cuda",))
    assert users["NIXL"].loads == {UCX_LIB: ucx.path}


def test_a_child_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = libraries.read_libraries(0.0, os.environ)
    assert set(facts.failures) == {"search", "nccl4py", "mpi4py"}
    assert "no answer within 0 s" in facts.failures["search"]
    assert (facts.files, facts.users) == ((), ())
