"""The torch of an environment: its version, and errors for missing parts."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from gpubench.backends.cuda import open_device
from gpubench.backends.registry import BackendSetup, backend_named
from gpubench.backends.torch import distributed
from gpubench.backends.torch.distributed import TorchDistributed, check_installed, load_torch
from gpubench.errors import CouldNotMeasureError
from gpubench.machine.environment import mapped_files
from gpubench.machine.nvml import Driver
from tests.fakes import cupy_on_numpy
from tests.fakes.progress import FakeProgress
from tests.fakes.ranks import ThreadGroup, World
from tests.fakes.torch_on_numpy import Torch


def install(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    """Make `import torch` return this module or raise this error."""
    if isinstance(torch, Exception):

        class Broken(ModuleType):
            __path__: list[str] = []  # noqa: RUF012

        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        module = cast("Any", torch)
        monkeypatch.setitem(sys.modules, "torch", module)
        monkeypatch.setitem(sys.modules, "torch.distributed", module.distributed)
    monkeypatch.setattr(distributed, "find_spec", lambda _name: object())


def fake(**given: Any) -> Torch:
    return Torch(ThreadGroup(World(1), 0), **given)


def test_no_torch_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "find_spec", lambda _name: None)
    with pytest.raises(CouldNotMeasureError, match="torch is not installed in this Python") as refused:
        check_installed()
    assert "in the environment that has torch" in refused.value.next_step
    with pytest.raises(CouldNotMeasureError, match="torch is not installed"):
        backend_named("torch:nccl").check_installed()


def test_a_torch_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ImportError())
    with pytest.raises(CouldNotMeasureError, match="torch cannot be imported: "):
        load_torch("gloo")


@pytest.mark.parametrize(
    ("word", "given", "for_cuda", "seen"),
    [
        ("nccl", {}, True, r"torch 2\.11\.0 \(CPUs alone\) was built without CUDA"),
        ("nccl", {"cuda": "13.0", "lacks": ("nccl",)}, True, "built without the nccl backend"),
        ("nccl", {"cuda": "14.1"}, True, r"\(CUDA 14\.1\) needs a newer CUDA than the driver has, 13\.0"),
        ("rccl", {"cuda": "13.0"}, False, "built without RCCL"),
        ("xccl", {"cuda": "13.0"}, False, "built without the xccl backend"),
    ],
)
def test_what_a_build_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, word: str, given: dict[str, Any], for_cuda: bool, seen: str
) -> None:
    install(monkeypatch, fake(**given))
    with pytest.raises(CouldNotMeasureError, match=seen):
        load_torch(word, for_cuda=for_cuda, driver_cuda=13000)


def test_a_torch_that_sees_no_gpu_where_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake(cuda="13.0")
    torch.cuda.is_available = lambda: False
    install(monkeypatch, torch)
    with pytest.raises(CouldNotMeasureError, match="sees no GPU, but the driver lists some"):
        load_torch("nccl", for_cuda=True, driver_cuda=13000)


def test_a_torch_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake()
    torch.distributed.is_available = lambda: False  # type: ignore[method-assign]
    install(monkeypatch, torch)
    with pytest.raises(CouldNotMeasureError, match=r"built without torch\.distributed"):
        load_torch("gloo")


def test_what_torch_was_built_for() -> None:
    versions = {"cuda": None, "hip": None, "xpu": None}
    for name, value, said in (("cuda", "13.0", "CUDA 13.0"), ("hip", "6.4", "ROCm 6.4"), ("xpu", "2025", "XPU 2025")):
        torch = SimpleNamespace(version=SimpleNamespace(**(versions | {name: value})))
        assert TorchDistributed(torch, "nccl").built_for == said
    assert TorchDistributed(fake(), "nccl").nccl() == ""
    linked = TorchDistributed(fake(cuda="13.0"), "nccl").nccl()
    assert linked == "2.28.9 from libtorch_cuda.so", "no libnccl is mapped in this process"


def test_backends_are_opened_by_what_the_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = cast("Any", fake())
    torch.cuda.is_available = lambda: False
    torch.version.hip = "6.4"
    install(monkeypatch, torch)
    group = ThreadGroup(World(1), 0)
    setup = BackendSetup(group=cast("Any", group), ranks_on_node=1, progress=cast("Any", FakeProgress()))
    cpu = backend_named("torch:gloo").open(setup)
    assert (cpu.name, type(cpu).__name__) == ("torch:gloo", "TorchOnCpu")
    with pytest.raises(CouldNotMeasureError, match="without a GPU for torch:rccl in this machine"):
        backend_named("torch:rccl").open(setup)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 4
    chosen: list[int] = []
    torch.cuda.set_device = chosen.append
    opened = backend_named("torch:rccl").open(setup)
    assert (opened.name, chosen) == ("torch:rccl", [0])
    assert backend_named("torch:gloo").load(0) == distributed.load_torch("gloo", for_cuda=False, driver_cuda=0)


def test_symmetric_memory_is_opened_on_the_gpu_where_this_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = cast("Any", Torch(ThreadGroup(World(1), 0), cuda="13.0"))
    install(monkeypatch, torch)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))
    kind = backend_named("torch:symm")
    with pytest.raises(CouldNotMeasureError, match=r"without torch\.distributed\._symmetric_memory"):
        kind.load(13000)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", torch.ops.symm_mem)
    assert cast("Any", kind.load(13000)).backend == "gloo", "which only makes ranks known to each other"
    device = open_device(0, 1, "n0", Driver(version="580", cuda=13000))
    given = cast("Any", {"group": ThreadGroup(World(1), 0), "progress": FakeProgress(), "device": device})
    opened = kind.open(BackendSetup(ranks_on_node=1, **given))
    assert (opened.name, type(opened).__name__, opened.buffers) == ("torch:symm", "TorchSymmetric", 3)


def test_libraries_that_are_mapped_are_found_by_name(tmp_path: Any) -> None:
    maps = tmp_path / "maps"
    lines = [
        "7f00-7f01 r--p 00000000 00:1f 1 /opt/torch/lib/libnccl.so.2",
        "7f01-7f02 r-xp 00000000 00:1f 1 /opt/torch/lib/libnccl.so.2",
        "7f02-7f03 r-xp 00000000 00:1f 2 /usr/lib/libnccl.so.2.29.1 (deleted)",
        "7f03-7f04 r-xp 00000000 00:1f 3 /opt/cupy/nccl.cpython-312.so",
        "7f04-7f05 rw-p 00000000 00:00 0",
    ]
    maps.write_text("\n".join(lines))
    assert mapped_files(r"libnccl\.so", maps) == ["/opt/torch/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.29.1"]
    assert mapped_files(r"libmpi", tmp_path / "none") == []
