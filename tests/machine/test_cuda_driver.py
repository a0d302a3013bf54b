"""libcuda by ctypes, on an object that has the same functions."""

from typing import Any

import pytest

from gpubench.machine import drivers
from gpubench.machine.drivers import CudaFacts, CudaGpu, CudaUnavailableError, load_cuda, read_cuda
from gpubench.model.terms.plain import from_plain, to_plain

NO_DEVICE, INVALID_VALUE, PEER_UNSUPPORTED, SYSTEM_NOT_READY = 100, 1, 217, 802
NAMES = {
    NO_DEVICE: b"CUDA_ERROR_NO_DEVICE",
    SYSTEM_NOT_READY: b"CUDA_ERROR_SYSTEM_NOT_READY",
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
}


class FakeCuda:
    """Two GPUs; `fail` names functions that answer an error, and attributes by their number."""

    def __init__(self, gpus: int = 2, **fail: int) -> None:
        self.gpus = gpus
        self.fail = fail
        self.attributes = {16: 132, 124: 1}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name in self.fail:
                return self.fail[name]
            result: int = getattr(self, f"do_{name}")(*arguments)
            return result

        return call

    def do_cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def do_cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        if status not in NAMES:
            return INVALID_VALUE
        name._obj.value = NAMES[status]
        return 0

    def do_cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.gpus
        return 0

    def do_cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 10 + ordinal
        return 0

    def do_cuDeviceGetPCIBusId(self, text: Any, size: int, device: int) -> int:  # noqa: N802
        assert size == len(text)
        text.value = f"0000:{device - 4:02X}:00.0".encode()
        return 0

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        if attribute not in self.attributes:
            return INVALID_VALUE
        value._obj.value = self.attributes[attribute]
        return 0

    def do_cuDeviceCanAccessPeer(self, value: Any, device: int, peer: int) -> int:  # noqa: N802
        value._obj.value = int(device < peer)
        return 0


def test_gpus_and_peers() -> None:
    facts = read_cuda(FakeCuda(), "0,1")
    assert facts == CudaFacts(
        gpus=(
            CudaGpu(index=0, bus_id="0000:06:00.0", multiprocessors=132, dma_buf=True),
            CudaGpu(index=1, bus_id="0000:07:00.0", multiprocessors=132, dma_buf=True),
        ),
        peers={"0000:06:00.0": {"0000:07:00.0": True}, "0000:07:00.0": {"0000:06:00.0": False}},
        visible_devices="0,1",
    )
    assert from_plain(CudaFacts, to_plain(facts)) == facts


def test_an_attribute_that_an_older_driver_does_not_know() -> None:
    library = FakeCuda()
    del library.attributes[124]
    assert [gpu.dma_buf for gpu in read_cuda(library).gpus] == [None, None]
    assert read_cuda(library).gpus[0].multiprocessors == 132


def test_a_feature_that_the_driver_does_not_report_is_unknown_and_not_missing() -> None:
    library = FakeCuda()
    library.attributes |= {102: 1, 125: 1, 128: 0}
    assert read_cuda(library).gpus[0].features == {"virtual_memory": True, "cuda_ipc": True, "fabric_handles": False}


def test_a_pair_that_cannot_be_asked_is_left_out() -> None:
    facts = read_cuda(FakeCuda(cuDeviceCanAccessPeer=PEER_UNSUPPORTED))
    assert facts.peers == {}
    assert len(facts.gpus) == 2


@pytest.mark.parametrize(
    ("function", "status", "message", "absent"),
    [
        ("cuInit", SYSTEM_NOT_READY, "cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)", False),
        ("cuInit", NO_DEVICE, "cuInit answered CUDA_ERROR_NO_DEVICE (100)", True),
        ("cuInit", 4711, "cuInit answered error 4711", False),
        ("cuDeviceGetCount", INVALID_VALUE, "cuDeviceGetCount answered CUDA_ERROR_INVALID_VALUE (1)", False),
    ],
)
def test_a_driver_that_does_not_start(function: str, status: int, message: str, absent: bool) -> None:
    with pytest.raises(CudaUnavailableError) as caught:
        read_cuda(FakeCuda(**{function: status}))
    assert (str(caught.value), caught.value.absent) == (message, absent)


def test_a_host_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_LIBRARY", "libcuda-that-is-nowhere.so.1")
    with pytest.raises(CudaUnavailableError, match="libcuda-that-is-nowhere") as caught:
        load_cuda()
    assert caught.value.absent
