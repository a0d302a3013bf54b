"""CUDA and NCCL adapters on fakes: what they read, and errors for missing parts."""

import builtins
import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from gpubench.backends import cuda
from gpubench.backends.nccl import backend as nccl
from gpubench.backends.nccl.library import NcclError, NcclLibrary
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.machine.nvml import Driver, open_library, read_driver, visible_count
from tests.fakes import cupy_on_numpy


class NvmlError(Exception):
    pass


def fake_nvml(**functions: Any) -> ModuleType:
    module = ModuleType("pynvml")
    defaults = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlSystemGetDriverVersion": lambda: b"580.159.04",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
    }
    for name, function in (defaults | functions).items():
        setattr(module, name, function)
    return module


def raising() -> None:
    message = "Driver Not Loaded"
    raise NvmlError(message)


def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert read_driver({}) == Driver(version="580.159.04", cuda=13000, gpus=4, visible=4)
    assert read_driver({"CUDA_VISIBLE_DEVICES": "1,2"}).visible == 2


def test_a_host_without_the_library_is_told_as_pynvml_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr("gpubench.machine.nvml._FILE", "libno-nvml.so.1")
    told = read_driver({})
    assert "pynvml" not in sys.modules
    assert open_library() is None
    import pynvml

    assert told == Driver(absent=f"NVML does not start ({pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)})")


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_missing_driver_is_no_gpus_with_a_reason(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{function: raising}))
    driver = read_driver({})
    assert (driver.gpus, driver.visible) == (0, 0)
    assert "Driver Not Loaded" in driver.absent


def test_gpus_that_cannot_be_used_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    broken = Driver(absent="NVML does not start (Driver/library version mismatch)")
    assert broken.hidden_gpus(tmp_path) == ""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "version mismatch" in broken.hidden_gpus(tmp_path)
    assert "hides the 4 GPUs" in Driver(gpus=4).hidden_gpus(tmp_path)
    assert Driver(gpus=4, visible=2).hidden_gpus(tmp_path) == ""


def test_the_real_nvml_never_raises() -> None:
    assert read_driver({}).visible >= 0


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("0,1, 2", 3),
        ("0,-1,1", 1),
        ("7", 0),
        ("GPU-12ab,GPU-34", 2),
        ("MIG-1", 1),
        ("x", 0),
        ("3", 1),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-12345678", 2),
        ("0,1,2,3,0", 4),
    ],
)
def test_visible_devices_are_counted_as_cuda_counts_them(setting: str | None, count: int) -> None:
    assert visible_count(4, setting) == count


def test_a_small_gpu_keeps_half(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1, free_bytes=2**31))
    assert cuda.open_device(0, 1, "n0", Driver()).free_bytes() == 2**30


@pytest.mark.parametrize(
    ("runtime", "error", "seen"),
    [
        (cupy_on_numpy.Runtime(1, driver=0), CouldNotMeasureError, "no usable GPU: CUDA finds no driver"),
        (
            cupy_on_numpy.Runtime(1, driver=12040),
            CouldNotMeasureError,
            "CuPy is built for CUDA 13.2, but the driver supports CUDA 12.4",
        ),
        (cupy_on_numpy.Runtime(0), CouldNotMeasureError, "cudaErrorNoDevice"),
        (cupy_on_numpy.Runtime(2), UsageError, "5 ranks on n0, which shows 2 GPUs"),
    ],
    ids=["no driver", "CuPy too new", "no device", "too many ranks"],
)
def test_what_keeps_a_gpu_from_use_is_named(
    monkeypatch: pytest.MonkeyPatch, runtime: cupy_on_numpy.Runtime, error: type[Exception], seen: str
) -> None:
    cupy_on_numpy.install(monkeypatch, runtime)
    with pytest.raises(error, match=re.escape(seen)):
        cuda.open_device(4, 5, "n0", Driver())


def test_a_cupy_too_new_is_answered_with_the_right_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, advice in ((12040, "gpubench-cluster[cuda12]"), (11080, "update the NVIDIA driver")):
        cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1, driver=driver))
        with pytest.raises(CouldNotMeasureError) as caught:
            cuda.open_device(0, 1, "n0", Driver())
        assert advice in caught.value.next_step


@pytest.mark.parametrize(("driver", "extra"), [(13000, "[cuda13]"), (12080, "[cuda12]"), (0, "[cuda12]' or")])
def test_a_missing_cupy_is_answered_with_the_extra_for_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: int, extra: str
) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda _name: None)
    with pytest.raises(CouldNotMeasureError, match="CuPy is not installed") as caught:
        cuda.check_installed(Driver(cuda=driver))
    assert extra in caught.value.next_step


def test_a_cupy_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def broken(name: str, *arguments: Any, **settings: Any) -> Any:
        if name == "cupy":
            message = "numpy.core.multiarray failed"
            raise ImportError(message)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(cuda, "find_spec", lambda _name: object())
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(CouldNotMeasureError, match="multiarray failed"):
        cuda.open_device(0, 1, "n0", Driver())


def test_a_cupy_without_its_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))

    def fail(code: str) -> None:
        message = "CuPy failed to load libnvrtc.so.12"
        raise RuntimeError(message)

    monkeypatch.setattr(cupy, "RawModule", fail)
    with pytest.raises(CouldNotMeasureError, match="cannot compile its kernels: CuPy failed to load libnvrtc"):
        cuda.open_device(0, 1, "n0", Driver())


def test_a_failed_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))
    device = cuda.open_device(0, 1, "n0", Driver())

    def fail() -> None:
        message = "not capturable"
        raise ValueError(message)

    with pytest.raises(ValueError, match="not capturable"):
        device.capture(fail, 1)
    assert device.stream.capturing is None


def test_no_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cupy_on_numpy.Nccl(1)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), library)

    def missing() -> int:
        raise RuntimeError('Failure finding "libnccl.so.2": No such file: libnccl.so.2\n  in many folders')

    monkeypatch.setattr(library, "get_version", missing)
    with pytest.raises(
        CouldNotMeasureError, match=r"no NCCL library was found: Failure .*: libnccl\.so\.2\n  expected"
    ):
        NcclLibrary()


def test_the_library_that_was_asked_for_is_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cupy_on_numpy.Nccl(1)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), library)
    assert NcclLibrary(cupy_on_numpy.LIBRARY).path == cupy_on_numpy.LIBRARY
    with pytest.raises(CouldNotMeasureError, match="but the process loaded /fake"):
        NcclLibrary("/other/libnccl.so.2")


def test_a_file_that_is_no_nccl_library_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be loaded"):
        NcclLibrary(__file__)
    maps = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in maps if "libc.so" in line)
    with pytest.raises(UsageError, match="ncclGetVersion"):
        NcclLibrary(libc)


def test_without_the_bindings_what_brings_them_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), cupy_on_numpy.Nccl(1))
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(CouldNotMeasureError, match="bindings for NCCL cannot be imported") as refused:
        NcclLibrary()
    assert "nccl4py" in refused.value.expected


def test_a_failing_native_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpubench.backends.mpi.group import AloneGroup
    from gpubench.model.terms.operation import DataType
    from gpubench.ports.backend import Region

    library = cupy_on_numpy.Nccl(1)
    library.native.ncclGather = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_ssize_t] * 7)(lambda *_: 3)  # type: ignore[attr-defined]
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), library)
    device = cuda.open_device(0, 1, "n0", Driver())
    backend = nccl.NcclBackend(AloneGroup(), device, NcclLibrary())
    region = Region(backend.allocate(64), 0)
    launch = backend.calls.gather(region, region, 4, DataType.FLOAT32, 0)
    with pytest.raises(RuntimeError, match="NCCL error 3"):
        backend.seconds(launch)
    assert backend.free_bytes() > 0
    assert list(backend.libraries()) == ["NCCL", "driver", "CuPy"]


def test_nccls_last_words_and_its_log_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cupy_on_numpy.Nccl(1)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), fake)
    library = NcclLibrary()
    assert (library.last_error(), library.can_reset_log, library.error) == ("", False, NcclError)
    resets: list[int] = []
    fake.said = " No transport found \n"
    assert library.last_error() == "", "before NCCL 2.13 there is none"
    fake.native.ncclGetLastError = fake.native.ncclGetVersion  # type: ignore[attr-defined]
    fake.native.ncclResetDebugInit = ctypes.CFUNCTYPE(None)(lambda: resets.append(1))  # type: ignore[attr-defined]
    assert library.last_error() == "No transport found"
    assert library.can_reset_log
    library.reset_log()
    assert resets == [1]


@pytest.mark.parametrize("whole", [bytes(range(1, 17)), b"\x07\x00" + bytes(range(2, 16))])
def test_a_uuid_is_asked_of_the_driver(whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy cuts the UUID at its first zero byte."""
    cupy_on_numpy.install(monkeypatch, runtime := cupy_on_numpy.Runtime(2))
    monkeypatch.setattr(cupy_on_numpy.CudaDriver, "uuid", lambda _self, _device: whole)
    assert cuda.identify(runtime, 1).uuid == f"GPU-{UUID(bytes=whole)}"


def test_a_driver_that_does_not_tell_a_uuid_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1))
    monkeypatch.setattr(cuda, "load_cuda", lambda: cupy_on_numpy.CudaDriver(fail=802))
    with pytest.raises(CouldNotMeasureError, match="no usable GPU: cuInit answered error 802"):
        cuda.open_device(0, 1, "n0", Driver())
