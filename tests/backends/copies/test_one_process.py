"""Copies between GPUs with CuPy on NumPy: data, routes, and times without the host's share."""

import ctypes
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.backends import copies as copies_adapter
from gpubench.backends import cuda as cuda_gate
from gpubench.backends.copies import cuda_failed, open_copies
from gpubench.backends.cuda import MOST_WAITING, StreamGate
from gpubench.errors import CouldNotMeasureError
from gpubench.machine import host as host_memory
from gpubench.machine.nvml import Driver, NvmlCounters
from gpubench.model.terms.operation import POISON, Block, DataPattern, DataType, Engine, HostMemory, Place
from gpubench.ports.backend import Memory, Region
from gpubench.ports.copies import Copies, CopyStream, LinkBytes, LinkCounters
from tests.examples import examples
from tests.fakes import cupy_on_numpy
from tests.fakes.cupy_on_numpy import Cuda, CudaError, Runtime, Stream
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError
from tests.fakes.nvml import fields as nvml_fields

SIZE = 1000
WORDS = DataPattern(DataType.INT64, None, 4)
BLOCK = Block(row=3, buffers=1, stride=SIZE // 8, offset=0, count=SIZE // 8)


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 3, *, gate: bool = True) -> None:
        self.runtime = Runtime(gpus)
        self.cuda = Cuda(self.runtime, status=0 if gate else 801)
        cupy_on_numpy.install(monkeypatch, self.runtime, cuda=self.cuda)
        self.copies = open_copies(Driver(version="580"))

    def pair(self, source: Place, destination: Place, size: int = SIZE) -> tuple[Memory, Memory]:
        given, taken = self.copies.allocate(source, size), self.copies.allocate(destination, size)
        given.fill_sent(WORDS, BLOCK, 1)
        taken.fill_byte(size, POISON)
        return given, taken

    def stream(
        self, source: Place, destination: Place, engine: Engine = Engine.CE, by: int | None = None, size: int = SIZE
    ) -> CopyStream:
        given, taken = self.pair(source, destination, size)
        ends = [each for each in (source, destination) if isinstance(each, int)]
        return CopyStream(ends[0] if by is None else by, engine, Region(given, 0), Region(taken, 0), size)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def wrong(stream: CopyStream) -> int:
    return stream.destination.memory.count_wrong(WORDS, [(BLOCK, 1)])


def microseconds(copies: Copies, streams: list[CopyStream], repeats: int) -> float:
    return copies.seconds(streams, repeats) * 1e6


def test_gpus_are_named_by_the_drivers_index(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_on_numpy.install(monkeypatch, Runtime(2))
    copies = open_copies(Driver(version="580"), {"0000:0b:00.0": "GPU7"})
    assert [(gpu.device, gpu.index, gpu.bus_id, gpu.name) for gpu in copies.gpus] == [
        ("GPU0", 0, "0000:0a:00.0", "Fake GPU"),
        ("GPU7", 1, "0000:0b:00.0", "Fake GPU"),
    ]
    assert copies.gpus[1].uuid == "GPU-01010101-0101-0101-0101-010101010101"
    assert copies.libraries() == {"driver": "580 (runs CUDA 13.0)", "CuPy": "14.2.0 (CUDA 13.2)"}


@pytest.mark.parametrize("by", ["source", "destination"])
@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 1)])
def test_direct_copies_arrive(machine: Machine, pair: tuple[int, int], engine: Engine, by: str) -> None:
    first, second = pair if by == "source" else pair[::-1]
    machine.copies.enable(first, second)
    stream = machine.stream(pair[0], pair[1], engine, first)
    assert wrong(stream) == SIZE // 8
    assert machine.copies.seconds([stream], 2) > 0
    assert wrong(stream) == 0
    assert machine.runtime.staged_bytes == 0
    assert machine.runtime.direct_bytes == (2 * SIZE if engine is Engine.CE else 0)


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("enabled", [(0, 1), (1, 0)])
def test_copies_without_peer_access_go_through_the_host_and_arrive(
    machine: Machine, enabled: tuple[int, int], by: int
) -> None:
    stream = machine.stream(0, 1, by=by)
    slow = machine.copies.seconds([stream], 1)
    assert wrong(stream) == 0
    assert (machine.runtime.direct_bytes, machine.runtime.staged_bytes) == (0, SIZE)
    machine.copies.enable(*enabled)
    assert machine.copies.seconds([stream], 1) < slow
    assert machine.runtime.direct_bytes == SIZE


@pytest.mark.parametrize("host", list(HostMemory))
@pytest.mark.parametrize("to_host", [False, True])
def test_copies_to_and_from_the_host_arrive(machine: Machine, host: HostMemory, to_host: bool) -> None:
    stream = machine.stream(1, host) if to_host else machine.stream(host, 1)
    assert wrong(stream) == SIZE // 8
    machine.copies.seconds([stream], 3)
    assert wrong(stream) == 0
    assert bool(machine.cuda.waits) == (host is HostMemory.PINNED), "the host copies pageable memory itself"


@pytest.mark.parametrize(("ends", "by"), [((0, 1), 0), ((0, 1), 1), ((0, HostMemory.PAGEABLE), 0)])
def test_sms_that_cannot_address_an_end_are_refused(machine: Machine, ends: tuple[Place, Place], by: int) -> None:
    stream = machine.stream(ends[0], ends[1], Engine.SM, by)
    with pytest.raises(CouldNotMeasureError, match=r"copying GPU0 → .*SMs of GPU.*cannot address") as caught:
        machine.copies.seconds([stream], 1)
    assert "peer access" in caught.value.expected
    assert wrong(stream) == SIZE // 8


def test_a_wrong_element_is_found_by_its_owner(machine: Machine) -> None:
    places: tuple[Place, ...] = (1, HostMemory.PINNED, HostMemory.PAGEABLE)
    for place in places:
        stream = machine.stream(0, place)
        machine.copies.seconds([stream], 1)
        stream.destination.memory.array(8 * 77, 1, "uint64")[:] ^= 1
        assert wrong(stream) == 1


@given(offset=st.integers(0, 40), size=st.integers(1, 900), to=st.integers(0, 60))
@settings(max_examples=examples(30))
def test_exactly_the_bytes_asked_for_are_copied(offset: int, size: int, to: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = Machine(monkeypatch, 2)
        source, destination = machine.pair(0, 1)
        copy = CopyStream(0, Engine.CE, Region(source, offset), Region(destination, to), size)
        machine.copies.seconds([copy], 1)
        given, taken = source.array(0, SIZE, "uint8"), destination.array(0, SIZE, "uint8")
        assert (taken[to : to + size] == given[offset : offset + size]).all()
        assert (taken[:to] == POISON).all()
        assert (taken[to + size :] == POISON).all()


@pytest.mark.parametrize("repeats", [1, 100, MOST_WAITING])
def test_the_hosts_own_time_is_not_measured(machine: Machine, repeats: int) -> None:
    machine.copies.enable(0, 1)
    stream = machine.stream(0, 1, size=SIZE)
    each = 2 + SIZE / 400e3
    assert microseconds(machine.copies, [stream], repeats) == pytest.approx(repeats * each)


def test_streams_start_together_and_the_last_one_counts(machine: Machine) -> None:
    machine.copies.enable(0, 1)
    machine.copies.enable(1, 0)
    machine.copies.enable(0, 2)
    fast, back, far = machine.stream(0, 1), machine.stream(1, 0), machine.stream(0, 2, size=400_000)
    together = [fast, back, far]
    for streams in (together, together[::-1]):
        slowest = 10 * (2 + 400_000 / 400e3)
        assert microseconds(machine.copies, streams, 10) == pytest.approx(slowest)
    assert [wrong(each) for each in together] == [0, 0, 0]


def test_a_stream_never_fills_behind_the_gate(machine: Machine) -> None:
    """The fake allows at most 1024 waiting operations, and the gate fewer."""
    machine.copies.enable(0, 1)
    stream, other = machine.stream(0, 1), machine.stream(1, 0, by=0)
    machine.copies.seconds([stream], 3000)
    machine.copies.seconds([stream, other], 3000)
    most = max(each.most_queued for each in Stream._streams.values())
    assert MOST_WAITING <= most < Stream.PLACES


def test_copies_that_are_split_into_many_do_not_wait(machine: Machine) -> None:
    """Staged copies take more places the larger they are. A few of 40 MB exceed the gate's limit, 100 of 1 kB do
    not.
    """
    for each in Stream._streams.values():
        each.most_queued = 0
    machine.copies.seconds([machine.stream(0, 1, size=40_000_000)], 2)
    assert max(each.most_queued for each in Stream._streams.values()) < 10
    machine.copies.seconds([machine.stream(0, 1)], 100)
    assert max(each.most_queued for each in Stream._streams.values()) > 100


def test_a_failing_copy_names_both_ends_and_opens_the_gate(machine: Machine) -> None:
    stream = machine.stream(0, 1)
    machine.runtime.fail["memcpyPeerAsync"] = "cudaErrorInvalidValue: invalid argument"
    with pytest.raises(
        CouldNotMeasureError, match=r"GPU0 → GPU1 \(copy engine of GPU0, 1000 bytes\) failed: cudaErrorI"
    ) as caught:
        machine.copies.seconds([stream], 5)
    assert caught.value.reason == ""
    machine.runtime.fail.clear()
    assert machine.copies.seconds([stream], 5) > 0
    assert wrong(stream) == 0


def test_one_of_several_failing_says_how_many_there_were(machine: Machine) -> None:
    streams = [machine.stream(0, 1), machine.stream(1, 2), machine.stream(2, HostMemory.PINNED)]
    machine.runtime.fail["memcpyAsync"] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(CouldNotMeasureError, match=r"GPU0 → GPU1.*at once with 2 more, failed") as caught:
        machine.copies.seconds(streams, 5)
    assert "every further CUDA call" in caught.value.reason
    assert "Xid" in caught.value.next_step


def test_after_a_lasting_error_nothing_raises_a_second_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = machine.stream(0, 1)
    machine.copies.enable(0, 1)

    def broken(self: Stream) -> None:
        message = "cudaErrorLaunchFailure: unspecified launch failure"
        raise CudaError(message)

    monkeypatch.setattr(Stream, "synchronize", broken)
    machine.runtime.fail |= dict.fromkeys(("memcpyPeerAsync", "free", "deviceDisablePeerAccess"), "cudaErrorX: x")
    with pytest.raises(CouldNotMeasureError, match="copying"):
        machine.copies.seconds([stream], 1)
    with pytest.raises(CouldNotMeasureError, match="filling or checking memory of GPU1 failed") as caught:
        wrong(stream)
    assert "every further CUDA call" in caught.value.reason
    machine.copies.close()


@pytest.mark.parametrize(
    ("error", "sticky", "advice"),
    [
        ("cudaErrorIllegalAddress: x", True, "Xid"),
        ("CUDA_ERROR_LAUNCH_FAILED: x", True, "Xid"),
        ("CUDA_ERROR_MISALIGNED_ADDRESS: x", True, "Xid"),
        ("cudaErrorMemoryAllocation: out of memory", False, "nvidia-smi shows what uses the memory"),
        ("cudaErrorPeerAccessUnsupported: peer access is not supported", False, "topo -p2p"),
        ("cudaErrorInvalidValue: an illegaladdress in words only", False, ""),
    ],
)
def test_cudas_errors_say_what_they_mean(error: str, sticky: bool, advice: str) -> None:
    found = cuda_failed("copying", error)
    assert found.seen == f"copying failed: {error}"
    assert bool(found.reason) == sticky
    assert advice in found.next_step
    assert bool(found.next_step) == bool(advice)


def test_peer_access_is_asked_for_enabled_once_and_given_back(machine: Machine) -> None:
    assert machine.copies.can_reach(0, 1)
    machine.copies.enable(0, 1)
    machine.copies.enable(0, 1)
    machine.runtime.setDevice(2)
    machine.runtime.deviceEnablePeerAccess(1)
    machine.copies.enable(2, 1)
    assert machine.runtime.peers == {(0, 1), (2, 1)}
    machine.copies.close()
    assert machine.runtime.peers == set()


def test_peer_access_that_is_refused_is_named(machine: Machine) -> None:
    refusal = "cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices"
    machine.runtime.fail |= {"deviceEnablePeerAccess": refusal, "deviceCanAccessPeer": "cudaErrorUnknown: unknown"}
    with pytest.raises(CouldNotMeasureError, match=r"letting GPU0 address the memory of GPU2 failed: .*not supported"):
        machine.copies.enable(0, 2)
    with pytest.raises(CouldNotMeasureError, match="asking whether GPU0 can address GPU2 failed"):
        machine.copies.can_reach(0, 2)
    machine.copies.close()


def test_memory_that_there_is_not_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.runtime.fail |= dict.fromkeys(("malloc", "hostAlloc"), "cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(CouldNotMeasureError, match=r"allocating 1G on GPU1 failed: .*out of memory"):
        machine.copies.allocate(1, 2**30)
    with pytest.raises(CouldNotMeasureError, match="allocating 1K of pinned host memory failed"):
        machine.copies.allocate(HostMemory.PINNED, 1024)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 10 * 2**30)
    for kind in HostMemory:
        with pytest.raises(CouldNotMeasureError, match=f"9G of {kind} host memory do not fit: 8.0 GiB are available"):
            machine.copies.allocate(kind, 9 * 2**30)


def test_everything_is_given_back(machine: Machine) -> None:
    for place in (0, 1, HostMemory.PINNED, HostMemory.PAGEABLE):
        machine.copies.allocate(place, 64)
    assert (len(machine.runtime.allocations), len(machine.runtime.pinned)) == (2, 2)
    machine.copies.close()
    machine.copies.close()
    assert (machine.runtime.allocations, machine.runtime.pinned) == ({}, {})


def test_a_gpu_that_cuda_does_not_give_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(3)
    runtime.fail["setDevice 1"] = "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
    cupy_on_numpy.install(monkeypatch, runtime)
    copies = open_copies(Driver())
    assert len(copies.gpus) == 3
    for ask in (lambda: copies.allocate(1, 64), lambda: copies.enable(1, 0)):
        with pytest.raises(CouldNotMeasureError, match=r"GPU1 \(0000:0b:00.0\): cudaErrorDevicesUnavailable"):
            ask()
    assert copies.allocate(2, 64).size_bytes == 64
    runtime.fail |= {f"setDevice {gpu}": "cudaErrorDevicesUnavailable: busy" for gpu in range(3)}
    with pytest.raises(CouldNotMeasureError, match="GPU0"):
        open_copies(Driver())


def test_the_gate_opens_itself_when_the_host_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enqueueing may wait for the GPU, which waits for the gate."""
    machine = Machine(monkeypatch)
    gate, opened = StreamGate(machine.runtime), threading.Event()
    monkeypatch.setattr(cuda_gate, "_LONGEST_SECONDS", 0.001)
    stream = Stream(non_blocking=True)
    with gate.hold(stream.ptr) as hold:
        stream.submit(opened.set)
        while not opened.wait(0.001):
            Stream.go_on()
    hold.open()
    stream.synchronize()
    gate.free()
    gate.free()
    with gate.hold(stream.ptr):
        stream.submit(opened.clear)
        assert not opened.is_set()


def test_the_number_that_opens_the_gate_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    gate = StreamGate(machine.runtime)
    ctypes.c_uint32.from_address(gate._address).value = gate._turn = 0xFFFFFFFE
    stream = Stream(non_blocking=True)
    for expected in (0xFFFFFFFF, 0, 1):
        done: list[int] = []
        with gate.hold(stream.ptr):
            stream.submit(lambda done=done: done.append(1))  # type: ignore[misc]
            Stream.go_on()
            assert not done
        stream.synchronize()
        assert done
        assert machine.cuda.waits[-1] == expected


@pytest.mark.parametrize(
    ("library", "held"),
    [(SimpleNamespace(), False), (None, False), ("first version", True)],
    ids=["a driver without the operation", "no driver", "the older operation"],
)
def test_an_older_driver_has_an_older_gate_or_none(monkeypatch: pytest.MonkeyPatch, library: Any, held: bool) -> None:
    runtime = Runtime(1)
    if library == "first version":
        library = SimpleNamespace(cuStreamWaitValue32=Cuda(runtime).cuStreamWaitValue32_v2)
    cupy_on_numpy.install(monkeypatch, runtime, cuda=library)
    gate, stream, done = StreamGate(runtime), Stream(non_blocking=True), threading.Event()
    with gate.hold(stream.ptr):
        stream.submit(done.set)
        assert done.is_set() != held
    stream.synchronize()
    assert done.is_set()
    gate.free()


def with_counters(sent_kib: int | None, received_kib: int | None, pcie: int | None = None) -> FakeGpu:
    def values(scope: int) -> dict[int, int | None]:
        if scope == 0xFFFFFFFF:
            return {138: sent_kib, 139: received_kib}
        return {**nvml_fields(scope), 197: pcie, 198: None if pcie is None else pcie + 1}

    return FakeGpu(fields=values)


class CountingNvml(FakeNvml):
    """GPUs whose bus id is their number."""

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> FakeGpu:  # noqa: N802
        if bus_id == "gone":
            raise NVMLError(15)
        return self.gpus[int(bus_id)]


def test_counters_are_bytes_of_the_gpu_at_that_position(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = CountingNvml(
        with_counters(10, 3, 2**32 - 2), with_counters(0, 2**30), with_counters(None, None), with_counters(1, None)
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counters = NvmlCounters(["1", "0", "2", "3", "gone"])
    assert [counters.read(gpu) for gpu in range(5)] == [
        LinkBytes(0, 2**40),
        LinkBytes(10240, 3072, 2**32 - 2, 2**32 - 1),
        LinkBytes(),
        LinkBytes(nvlink_sent=1024),
        LinkBytes(),
    ]
    counters.close()
    counters.close()
    assert nvml.calls.count("nvmlShutdown") == 1
    assert counters.read(0) == LinkBytes()


def test_without_a_driver_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", CountingNvml(start_error=9))
    counters: LinkCounters = NvmlCounters(["0"])
    assert counters.read(0) == LinkBytes()


def test_no_gpu_no_driver_and_no_compiler_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for runtime, seen in ((Runtime(0), "cudaErrorNoDevice"), (Runtime(1, driver=0), "no driver")):
        cupy_on_numpy.install(monkeypatch, runtime)
        with pytest.raises(CouldNotMeasureError, match=seen):
            open_copies(Driver())
    cupy = cupy_on_numpy.install(monkeypatch, Runtime(1))

    def fail(code: str) -> None:
        message = "CuPy failed to load libnvrtc.so.12"
        raise RuntimeError(message)

    monkeypatch.setattr(cupy, "RawModule", fail)
    with pytest.raises(CouldNotMeasureError, match="cannot compile its kernels"):
        open_copies(Driver())


def test_the_kernel_is_in_the_package() -> None:
    source = Path(copies_adapter.__file__).with_name("copy.cu").read_text()
    assert 'extern "C" __global__ void copy_bytes' in source
