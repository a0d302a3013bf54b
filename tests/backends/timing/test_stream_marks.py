"""Where long loops on a stream have marks, and which progress they report."""

import ctypes

import pytest

from gpubench.backends import timing
from gpubench.backends.cuda import AbortedError, open_device
from gpubench.backends.mpi.group import AloneGroup
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.timing import MarkedLaunch
from gpubench.machine.nvml import Driver
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.ranks import Phase
from gpubench.ports.backend import Launch, Region
from tests.fakes import cupy_on_numpy
from tests.fakes.progress import FakeProgress


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nccl = cupy_on_numpy.Nccl(1)
        cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), self.nccl)
        self.progress = FakeProgress()
        device = open_device(0, 1, "n0", Driver(version="580.1"))
        self.backend = NcclBackend(AloneGroup(), device, NcclLibrary(), progress=self.progress)
        self.launches: list[Launch] = []
        self.issue_anew()

    def issue_anew(self) -> None:
        send, receive = (Region(self.backend.allocate(64), 0) for _ in range(2))
        self.launches = [
            self.backend.calls.all_reduce(send, receive, 16, DataType.FLOAT32, ReduceOp.SUM) for _ in range(10)
        ]

    def warmed_up(self, seconds: float) -> None:
        """Record a warm-up with this duration per operation."""
        self.backend.bind(self.launches[:2], 0)
        self.backend._marks.measured(2 * seconds)

    def done_after(self, launch: Launch) -> int:
        self.progress.enter(Phase.OPERATION, "", 10)
        self.backend.seconds(launch)
        return self.progress.state().done


@pytest.mark.parametrize(
    ("seconds", "marks"), [(1e-6, 0), (0.002, 0), (0.0021, 2), (0.006, 4), (0.02, 10), (0.5, 10), (7.0, 10)]
)
def test_a_mark_every_20_ms_of_work_and_none_in_a_shorter_loop(
    monkeypatch: pytest.MonkeyPatch, seconds: float, marks: int
) -> None:
    bench = Bench(monkeypatch)
    bench.warmed_up(seconds)
    launch = bench.backend.bind(bench.launches, 0)
    assert (len(launch.parts) if isinstance(launch, MarkedLaunch) else 0) == marks
    assert bench.done_after(launch) == 10


@pytest.mark.parametrize(("seconds", "marks"), [(1e-6, 0), (0.0002, 3), (0.001, 5), (0.5, 5)])
def test_marks_between_replays_of_a_graph(monkeypatch: pytest.MonkeyPatch, seconds: float, marks: int) -> None:
    bench = Bench(monkeypatch)
    bench.warmed_up(seconds * (2 if marks == 5 else 5 if marks else 1))
    launch = bench.backend.bind(bench.launches, 5)
    assert (len(launch.parts) if isinstance(launch, MarkedLaunch) else 0) == marks
    assert bench.done_after(launch) == 50


@pytest.mark.parametrize(
    ("operations", "parts", "seconds"),
    [
        pytest.param(8, 1, 5e-6, id="one part: with the beginning in it"),
        pytest.param(8, 3, 2e-6, id="without the first"),
        pytest.param(timing.MOST_QUEUED // 2, 5, 16e-6 / (timing.MOST_QUEUED // 2), id="two have room"),
        pytest.param(timing.MOST_QUEUED, 5, 40e-6 / timing.MOST_QUEUED, id="one has room"),
        pytest.param(timing.MOST_QUEUED + 1, 3, None, id="none surely has room"),
    ],
)
def test_the_time_to_issue_is_of_operations_that_found_room_in_the_queue(
    monkeypatch: pytest.MonkeyPatch, operations: int, parts: int, seconds: float | None
) -> None:
    """The parts take 40, 16, 16 and, while the host waits for the GPU, a million microseconds."""
    spent = iter([40e-6, 16e-6, 16e-6, 1.0, 1.0])
    clock = (instant for each in spent for instant in (0.0, each))
    monkeypatch.setattr(timing, "perf_counter", clock.__next__)

    class Event:
        done = True

    launch = MarkedLaunch([(list, operations)] * parts, [Event()] * parts, lambda _event: None, FakeProgress())
    assert launch.issue_seconds is None
    launch()
    assert launch.issue_seconds == (seconds if seconds is None else pytest.approx(seconds))


def test_a_marked_loop_that_fails_says_what_nccl_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    failing = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_ssize_t] * 7)(lambda *_: 3)
    bench.nccl.native.ncclAllReduce = failing  # type: ignore[attr-defined]
    bench.issue_anew()
    bench.warmed_up(1.0)
    launch = bench.backend.bind(bench.launches, 0)
    with pytest.raises(RuntimeError, match="NCCL error 3"):
        bench.backend.seconds(launch)


def test_what_a_hanging_rank_can_say_and_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    (communicator,) = bench.nccl.made
    assert bench.backend.trouble() == ""
    communicator.state = 6
    assert bench.backend.trouble() == "NCCL's asynchronous error: NCCL error 6"
    communicator.state = 7
    assert bench.backend.trouble() == "", "which is under way has no error"
    bench.backend.abort()
    assert communicator.aborted
    with pytest.raises(AbortedError):
        bench.backend.seconds(bench.backend.bind(bench.launches, 0))
