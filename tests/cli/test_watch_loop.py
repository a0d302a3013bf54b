"""The loop of a watch: how long it goes on, what it waits for, and how it ends."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpubench.jobs.plans import WatchPlan
from gpubench.jobs.sources import Recording
from gpubench.jobs.watch import LeapingPace, WatchLoop
from gpubench.measure.watch.report import Course, Intervals, Limits
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuReading, NodeReading
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Row
from gpubench.model.results.watch import WatchFrame
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots
from tests.measure.watch.traffic import KEY, task

NODE = Topology(snapshots(parse_machine("hgx-h200-4"))[0])


class Shown:
    def __init__(self) -> None:
        self.frames: list[WatchFrame] = []

    def show(self, frame: WatchFrame) -> None:
        self.frames.append(frame)


def plan(seconds: float | None, *, until_traffic: bool = False) -> WatchPlan:
    return WatchPlan(
        recording=Recording(replay=Path("nowhere")),
        interval=1.0,
        seconds=seconds,
        until_traffic=until_traffic,
        timeout_s=1.0,
    )


def reading(seconds: float, nvlink_gb: float) -> NodeReading:
    gpus = tuple(
        GpuReading(
            index=gpu.index,
            bus_id=gpu.bus_id or "",
            nvlink_sent_bytes=int(nvlink_gb * 1e9),
            nvlink_received_bytes=int(nvlink_gb * 1e9),
            pcie_sent_gb_s=0.0,
            pcie_received_gb_s=0.0,
            processes=(GpuProcess(pid=100 + gpu.index),),
        )
        for gpu in NODE.gpus
    )
    tasks = tuple(task(100 + n, KEY) for n in range(4))
    return NodeReading(host="node0", seconds=seconds, gpus=gpus, tasks=tasks)


def run(
    asked: WatchPlan, counts: Sequence[float], *, interrupted_at: int | None = None
) -> tuple[Shown, Course, list[Row]]:
    """A loop over readings whose NVLink counters say these, in GB, one a second."""
    pace, shown, rows = LeapingPace(), Shown(), list[Row]()
    course = Course({"node0": NODE}.get)
    loop = WatchLoop(asked, pace, Intervals(course), lambda _: Limits(NODE), Origin.MEASURED, shown, rows.append)
    numbers: Iterator[tuple[int, float]] = enumerate(counts)

    def read_all(_last: bool) -> list[NodeReading] | None:
        number, count = next(numbers, (-1, 0.0))
        if number == interrupted_at:
            raise KeyboardInterrupt
        return None if number < 0 else [reading(pace.now(), count)]

    loop.run(read_all)
    return shown, course, rows


MOVING = [n * 40.0 for n in range(50)]


@pytest.mark.parametrize("seconds", [1, 5, 30])
def test_a_watch_lasts_as_long_as_it_was_asked_to(seconds: int) -> None:
    shown, course, rows = run(plan(seconds), MOVING)
    assert [frame.seconds for frame in shown.frames] == list(range(1, seconds + 1))
    assert course.jobs["node0", f"python ({KEY})"].main.seconds == seconds
    assert len(rows) == 4 * seconds


def test_the_last_interval_is_as_long_as_there_is_time() -> None:
    shown, _, _ = run(replace(plan(3), interval=2.0), MOVING)
    assert [frame.seconds for frame in shown.frames] == [2, 3]


def test_nodes_with_many_gpus_are_read_less_often_where_nobody_says_how_often() -> None:
    asked, not_asked = plan(30), replace(plan(30), interval=None)
    assert [each.set_default_interval(8).interval_s for each in (asked, not_asked)] == [1.0, 2.0]
    assert not_asked.set_default_interval(4).interval_s == 1.0
    assert replace(not_asked, gpus=(0, 3)).set_default_interval(8).interval_s == 1.0
    assert replace(not_asked, seconds=1.5).set_default_interval(8).interval_s == 1.5
    assert replace(not_asked, seconds=None).set_default_interval(8).interval_s == 2.0


def test_it_ends_where_there_is_nothing_more_to_read() -> None:
    shown, _, _ = run(plan(None), MOVING[:4])
    assert len(shown.frames) == 3


def test_ctrl_c_keeps_what_was_seen() -> None:
    shown, course, _ = run(plan(None), MOVING, interrupted_at=3)
    assert len(shown.frames) == 2
    assert course.jobs


def test_time_counts_from_the_first_bytes_where_it_is_waited_for_them() -> None:
    still = [0.0] * 5
    shown, course, _ = run(plan(3, until_traffic=True), [*still, *(n * 40.0 for n in range(1, 40))])
    assert [frame.waiting for frame in shown.frames] == [True] * 4 + [False] * 4
    assert course.jobs["node0", f"python ({KEY})"].main.way == "direct"
    assert shown.frames[-1].seconds == 8


def test_a_counter_that_is_reset_while_it_is_watched_tells_nothing_of_that_interval() -> None:
    shown, course, rows = run(plan(None), [0.0, 40.0, 80.0, 0.0, 40.0, 80.0])
    ways = [frame.jobs[0].way for frame in shown.frames]
    assert ways == ["direct", "direct", "not told", "direct", "direct"]
    assert "the counter decreased" in shown.frames[2].jobs[0].seen
    assert course.jobs["node0", f"python ({KEY})"].main.way == "direct"
    assert any("the counter decreased" in (row.to_record()["note"] or "") for row in rows)


def test_a_ctrl_c_that_python_drops_ends_it_at_the_next_interval() -> None:
    """As one that arrives inside a destructor, where an exception is only printed."""
    pace, shown = LeapingPace(), Shown()
    course = Course({"node0": NODE}.get)
    loop = WatchLoop(
        plan(None), pace, Intervals(course), lambda _: Limits(NODE), Origin.MEASURED, shown, lambda _: None
    )
    before = signal.getsignal(signal.SIGINT)
    numbers = iter(range(50))

    def read_all(_last: bool) -> list[NodeReading]:
        number = next(numbers)
        if number == 3:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return [reading(pace.now(), number * 40.0)]

    loop.run(read_all)
    assert len(shown.frames) == 4
    assert signal.getsignal(signal.SIGINT) is before
