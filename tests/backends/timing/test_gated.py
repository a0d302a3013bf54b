"""The clock behind a gate excludes the host's time to issue operations."""

import pytest

from gpubench.backends.cuda import GatedClock, GatedLaunch, open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.machine.nvml import Driver
from gpubench.model.terms.ranks import Phase
from gpubench.ports.backend import Launch
from tests.fakes import cupy_on_numpy
from tests.fakes.cupy_on_numpy import Cuda, Runtime, Stream
from tests.fakes.progress import FakeProgress

OPERATION_US, PYTHON_US = 8.0, 30.0


class GatedBench:
    """A stream on which an operation takes 8 µs, and a host that takes 30 µs to issue one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gate: bool = True) -> None:
        self.runtime = Runtime(1)
        cupy_on_numpy.install(monkeypatch, self.runtime, cuda=Cuda(self.runtime, status=0 if gate else 801))
        device = open_device(0, 1, "n0", Driver(version="580.1"))
        self.stream: Stream = device.stream
        self.progress = FakeProgress()
        self.progress.enter(Phase.OPERATION, "", 1000)
        self.clock = GatedClock(device, AloneGroup(), self.progress)
        self.done = 0

    def launches(self, count: int) -> list[Launch]:
        def issue() -> None:
            self.runtime.host_us += PYTHON_US
            self.stream.submit(self._operate, OPERATION_US, self.runtime)

        return [issue] * count

    def _operate(self) -> None:
        self.done += 1


def test_the_gate_keeps_python_out_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GatedBench(monkeypatch)
    launch = bench.clock.bind(bench.launches(20), 0)
    assert bench.clock.together(launch) == pytest.approx(20 * OPERATION_US / 1e6)
    assert bench.done == 20
    assert bench.progress.state().done == 20
    issued = bench.clock.issue_seconds(launch, 20)
    assert issued is not None
    assert 0 < issued < 1e-3
    assert bench.clock.issue_seconds(lambda: None, 20) is None
    bench.clock.free_gate()


def test_without_a_gate_the_host_is_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GatedBench(monkeypatch, gate=False)
    launch = bench.clock.bind(bench.launches(20), 0)
    assert bench.clock.together(launch) > 15 * PYTHON_US / 1e6


def test_alone_an_operation_is_timed_with_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GatedBench(monkeypatch)
    launch = bench.clock.bind(bench.launches(1), 0)
    assert isinstance(launch, GatedLaunch)
    assert bench.clock.seconds(launch) > 0
    bench.clock.once(bench.launches(1)[0])
    assert bench.done == 2
    bench.clock.chain(bench.launches(2))()
    assert bench.done == 4
