"""Watch traffic live: readers, clocks, the loop over intervals, and the screen."""

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from msgspec.structs import replace

from gpubench.errors import UsageError, add_advice, no_gpu
from gpubench.formats.registry import TABLE, Presentation
from gpubench.jobs import runner, sources
from gpubench.jobs.metadata import recorded_settings
from gpubench.jobs.plans import LONGER_INTERVAL_SECONDS, WatchPlan
from gpubench.jobs.runner import Place, RankPlace, Steps
from gpubench.machine import recorded
from gpubench.machine.traffic import NodeTraffic
from gpubench.measure.watch.jobs import WatchedJobs as WatchedJobs
from gpubench.measure.watch.report import SECTIONS as SECTIONS
from gpubench.measure.watch.report import Interval, Intervals, Limits, jobs_now, traffic_rows
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.facts.traffic import NodeReading, TaskFacts
from gpubench.model.results.report import Row
from gpubench.model.results.watch import WatchFrame
from gpubench.model.terms.ranks import Phase
from gpubench.model.terms.verdict import Origin
from gpubench.readers.documents import read_json_line
from gpubench.simulated.settings import nccl_links
from gpubench.simulated.traffic import SimulatedTraffic

if TYPE_CHECKING:
    from gpubench.backends.mpi import group as mpi
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.machines import Machines
    from gpubench.measure.watch.report import NodeWatch
    from gpubench.model.paths.topology import Topology
    from gpubench.model.results.report import Metadata, Report
    from gpubench.ports.traffic import TrafficReader
    from gpubench.ranks.watchdog.rank import RankProgress

NAME = "watch"
SAMPLES = "watch.jsonl"

Wait = Callable[[float], bool]  # Waits for some seconds. Returns true if the user ends the watch


class WatchPace(Protocol):
    """A clock that can wait for a point in time."""

    def now(self) -> float:
        """Return the time of a monotonic clock in seconds."""

    def wait_until(self, moment: float) -> bool:
        """Wait until `moment`, unless it has passed. Return true if the watch must end."""


class RealPace:
    """The real monotonic clock. `wait` also reacts to the keyboard."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> bool:
        return self._wait(max(moment - time.monotonic(), 0.0))


class LeapingPace:
    """A clock for simulations that do not run in real time. Instead of waiting, it jumps forward."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> bool:
        self._now = max(self._now, moment)
        return False


class RecordedPace:
    """The clock of a recording. `elapsed` returns the time of the last reading."""

    def __init__(self, elapsed: Callable[[], float]) -> None:
        self._elapsed = elapsed

    def now(self) -> float:
        return self._elapsed()

    def wait_until(self, _moment: float) -> bool:
        """Return at once, because the next reading is already recorded."""
        return False


class Interrupts:
    """Turns SIGINT (Ctrl-C) and SIGTERM into KeyboardInterrupt. `asked` stays true even if a destructor swallows
    the exception.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: object) -> None:
        self.asked = True
        raise KeyboardInterrupt


def sleep(seconds: float) -> bool:
    """Wait without reading the keyboard."""
    time.sleep(seconds)
    return False


# Fraction of an interval. The watch ends if less time is left, because the clock may be read slightly early
_SLACK = 0.25
# Returns the readings of all nodes, or None at the end. The argument is true for the last call.
ReadAll = Callable[[bool], Sequence[NodeReading] | None]


class Screen(Protocol):
    """Shows each interval as it ends."""

    def show(self, frame: WatchFrame) -> None: ...


class WatchLoop:
    """Reads counters, computes rates and shows them. `limits` returns the bandwidth limits of a host. `hand_on` is
    called with every row.
    """

    def __init__(
        self,
        plan: WatchPlan,
        pace: WatchPace,
        intervals: Intervals,
        limits: Callable[[str], Limits],
        origin: Origin,
        screen: Screen,
        hand_on: Callable[[Row], None],
    ) -> None:
        self._plan, self._pace, self._intervals = plan, pace, intervals
        self._limits, self._origin = limits, origin
        self._screen, self._hand_on = screen, hand_on

    def run(self, read_all: ReadAll) -> None:
        """Run until the time is up, the readings end, or the user presses Ctrl-C. Ctrl-C is a normal end."""
        with suppress(KeyboardInterrupt), Interrupts() as interrupts:
            self._run(read_all, interrupts)

    def _run(self, read_all: ReadAll, interrupts: Interrupts) -> None:
        plan, begun = self._plan, self._pace.now()
        next_moment = begun
        counted_from = None if plan.until_traffic else begun
        ended = False
        while True:
            end = math.inf if counted_from is None or plan.seconds is None else counted_from + plan.seconds
            ended = ended or end - next_moment < _SLACK * plan.interval_s
            readings = read_all(ended)
            if readings is None:
                return
            interval = self._intervals.add(readings)
            if interval is not None:
                self._show(interval, waiting=counted_from is None)
                if counted_from is None and self._intervals.course.traffic_seen:
                    counted_from = self._pace.now()
            if ended:
                return
            next_moment = max(min(next_moment + plan.interval_s, end), self._pace.now())
            ended = self._pace.wait_until(next_moment) or interrupts.asked

    def _show(self, interval: Interval, *, waiting: bool) -> None:
        rows = [
            row
            for rates, observed in interval.nodes
            for row in traffic_rows(rates, observed, self._limits(rates.host), self._origin, interval.seconds)
        ]
        for row in rows:
            self._hand_on(row)
        silences = [(rates.host, rates.driver_silent) for rates, _ in interval.nodes if rates.driver_silent]
        self._screen.show(
            WatchFrame(
                seconds=interval.seconds,
                rows=rows,
                jobs=list(jobs_now(interval, self._intervals.course, self._origin)),
                silences=silences,
                waiting=waiting and not self._intervals.course.traffic_seen,
            )
        )


def reader_here(plan: WatchPlan, host: str) -> NodeTraffic:
    """Return the reader of this node. Its first reading may take as long as --timeout, later readings one interval."""
    deadline = min(plan.timeout_s, max(plan.interval_s, 1.0))
    return NodeTraffic(host, os.environ, recorded_settings, plan.timeout_s, deadline, plan.gpus)


def _simulated_readers(
    simulation: sources.Simulation, nodes: Sequence[Snapshot], clock: Callable[[], float]
) -> list[SimulatedTraffic]:
    readers, profile = [], simulation.machine.profile
    for number, node in enumerate(nodes):
        faults = [fault for fault in simulation.faults if fault.node_number == number]
        links = nccl_links(profile, faults)
        readers.append(
            SimulatedTraffic(node, profile, faults, simulation.seed, clock, several=len(nodes) > 1, links=links)
        )
    return readers


class RecordedTraffic:
    """The recorded readings of one host. `elapsed` is the time between the first reading and the latest one, in
    seconds.
    """

    def __init__(self, readings: Sequence[NodeReading]) -> None:
        self._readings = iter(readings)
        self._began = readings[0].seconds
        self.elapsed = 0.0
        between = sorted(after.seconds - before.seconds for before, after in pairwise(readings))
        self.interval_s = between[len(between) // 2] if between else 0.0

    def read(self) -> NodeReading | None:
        """Return the next reading, or None after the last one."""
        reading = next(self._readings, None)
        if reading is not None:
            self.elapsed = reading.seconds - self._began
        return reading

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:  # noqa: ARG002
        """Return None, because the recorded readings already have these facts."""
        return None

    def close(self) -> None: ...


def _recorded_readers(directory: Path) -> list[RecordedTraffic]:
    """Return one reader per host in a recording. Raises UsageError if there are no readings or damaged ones."""
    by_host: dict[str, list[NodeReading]] = {}
    next_step = f"gpubench watch --for 10s --record {directory}-again"
    lines = recorded.read_samples(directory, SAMPLES, NAME)
    with add_advice(reason="the recording was edited by hand, or it comes from a newer gpubench", next_step=next_step):
        for line, where in lines:
            reading = read_json_line(NodeReading, line, where)
            earlier = by_host.setdefault(reading.host, [])
            if earlier and reading.seconds <= earlier[-1].seconds:
                raise UsageError(
                    f"{where}: {reading.host} at {reading.seconds:g} s, after {earlier[-1].seconds:g} s",
                    expected="the readings of a node in chronological order",
                )
            earlier.append(reading)
    if not by_host:
        raise UsageError(
            f"--replay {directory} has no readings",
            expected=f"lines in {SAMPLES}, one per node and interval",
            reason="the watch ended before its first interval",
            next_step=next_step,
        )
    return [RecordedTraffic(each) for each in by_host.values()]


def _check_watchable(plan: WatchPlan, machines: "Machines") -> None:
    """Raise GpubenchError if there is no GPU, or no path that --require-path requires."""
    if isinstance(plan.source, sources.Here) and not any(
        node.gpus or node.snapshot.failures for node in machines.nodes
    ):
        reason = machines.nodes[0].snapshot.driver.absent or "the driver finds none on this host"
        raise no_gpu(reason, for_what=NAME)
    if plan.require_path:
        from gpubench.conditions.circumstances import Facts
        from gpubench.model.results.required_path import check_possible

        check_possible(plan.require_path, Facts(machines.nodes).circumstances.wiring, sees_all_nodes=False)


def watch(
    plan: WatchPlan,
    arguments: Sequence[str],
    machines: "Machines",
    pace: WatchPace,
    screen: "Screen",
    presenter: "Presenter",
    *,
    readers: "Sequence[TrafficReader] | None" = None,
    read_all: "ReadAll | None" = None,
) -> "Report":
    """Watch the nodes of `readers`, or the nodes of all ranks by `read_all`. Present rows as they arrive, and
    return the report.
    """
    from gpubench.measure.watch.report import Course, report_course
    from gpubench.measure.watch.required_path import taken_paths
    from gpubench.model.results.required_path import require_paths
    from gpubench.model.results.watch import TrafficRow

    topologies = {node.snapshot.host: node for node in machines.nodes}
    origin = Origin.RECORDED if isinstance(plan.source, sources.Replayed) else machines.origin
    course = Course(topologies.get)
    limits = cache(lambda host: Limits(topologies.get(host)))
    metadata = _metadata(plan, arguments, machines, origin)
    presenter.begin(metadata, TrafficRow.columns())
    with keeping(plan, machines) as keep, ExitStack() as stack:
        if readers is not None:
            read_all = _reading(plan, readers, topologies, stack)
        assert read_all is not None
        loop = WatchLoop(plan, pace, Intervals(course, keep), limits, origin, screen, presenter.row)
        loop.run(read_all)
    missing = "" if plan.selection.is_all or course.jobs else plan.selection.text
    report = report_course(course, origin, missing=missing)
    return require_paths(report, plan.require_path, taken_paths(course, machines.nodes), what="job")


def _reading(
    plan: WatchPlan, readers: "Sequence[TrafficReader]", topologies: "dict[str, Topology]", stack: ExitStack
) -> "ReadAll":
    from gpubench.measure.watch.report import NodeWatch, nvlink_finder

    hosts = list(topologies)
    nodes = [
        NodeWatch(reader, nvlink_finder(topologies.get(hosts[number] if number < len(hosts) else "")), plan.selection)
        for number, reader in enumerate(readers)
    ]
    for node in nodes:
        stack.callback(node.close)

    def read_all(_last: bool) -> "list[NodeReading] | None":  # noqa: FBT001
        readings = [reading for node in nodes if (reading := node.read()) is not None]
        return readings or None

    return read_all


@contextmanager
def keeping(plan: WatchPlan, machines: "Machines") -> "Iterator[Callable[[NodeReading], None]]":
    """Yield a function that writes a reading to the folder of --record. Without --record, it does nothing."""
    directory = plan.recording.record
    if directory is None:
        yield lambda _: None
        return
    from gpubench.machine import recorded

    recorded.write_recording(directory, machines.snapshots, machines.processes)
    with recorded.recording_samples(directory, SAMPLES) as write:
        yield write


def _metadata(plan: WatchPlan, arguments: Sequence[str], machines: "Machines", origin: Origin) -> "Metadata":
    from gpubench.jobs.metadata import build_metadata
    from gpubench.profiles import match_nodes

    matched = match_nodes(machines.nodes, os.environ)[0]
    return build_metadata(
        arguments,
        NAME,
        machines=machines,
        matched=matched,
        origin=origin,
        options={
            "strict": plan.strict,
            "interval_s": float(plan.interval_s),  # msgspec cannot write the type TypedSeconds
            "seconds": None if plan.seconds is None else float(plan.seconds),
            "until_traffic": plan.until_traffic,
            "gpus": None if plan.gpus is None else list(plan.gpus),
            "selection": plan.selection.text,
        },
    )


_SPARE_SECONDS = 10.0  # Added to the timeout of a job, because a slow driver has its own timeout


@contextmanager
def _open(place: Place) -> "Iterator[tuple[Machines | None, _OwnNode]]":
    """Yield the machines and the reader for this rank's node. The machines are None on all ranks except the first."""
    plan: WatchPlan = place.plan
    if place.rank is None:
        sources.note_ignored_variables(plan.source, place.presenter)
        machines = plan.source.machines()
        _check_watchable(plan, machines)
        yield machines, _OwnNode(None)
        return
    with ExitStack() as stack:
        yield _open_in_ranks(place.rank, stack)


def _open_in_ranks(rank: RankPlace, stack: ExitStack) -> "tuple[Machines | None, _OwnNode]":
    from gpubench.jobs.rank import agree
    from gpubench.machine.probe import probe

    group, plan, seconds = rank.group, rank.plan, max(rank.plan.timeout_s, sources.SECONDS_TO_READ_A_NODE)
    reads = rank.identity.local_rank == 0
    snapshots = agree(group, lambda: [probe(seconds, os.environ)] if reads else [], place=str(rank.identity))
    machines = sources.gathered(group, snapshots, sources.own_process(rank.identity))
    agree(group, lambda: None if machines is None else _check_watchable(plan, machines))
    most = None if machines is None else max(len(node.gpus) for node in machines.nodes)
    rank.plan = plan.set_default_interval(group.broadcast(most))
    return machines, _own_node(rank.plan, snapshots, stack)


def _own_node(plan: WatchPlan, snapshots: "Sequence[Snapshot]", stack: ExitStack) -> "_OwnNode":
    from gpubench.measure.watch.report import NodeWatch, nvlink_finder
    from gpubench.model.paths.topology import Topology

    if not snapshots:
        return _OwnNode(None)
    reader = reader_here(plan, snapshots[0].host)
    watch = NodeWatch(reader, nvlink_finder(Topology(snapshots[0])), plan.selection)
    stack.callback(watch.close)
    return _OwnNode(watch)


def _measure(place: Place, opened: "tuple[Machines | None, _OwnNode]") -> "Report | None":
    (machines, node), rank = opened, place.rank
    if machines is None:  # All ranks except the first
        if rank is not None:
            _follow(rank, node)
        return None
    if rank is not None:
        return _watch_ranks(rank, machines, node)
    is_terminal = not place.is_launched and sys.stdout.isatty()
    with shown(place.plan, machines, is_terminal=is_terminal) as (screen, wait):
        plan, pace, readers = _paced(place.plan, machines, wait, is_terminal=is_terminal)
        return watch(plan, place.arguments, machines, pace, screen, place.presenter, readers=readers)


def _watch_ranks(rank: RankPlace, machines: "Machines", node: "_OwnNode") -> "Report":
    from gpubench.formats.presenter import chosen_width
    from gpubench.formats.text.watch import NoScreen, PlainScreen

    looks = rank.plan.presentation
    readings = _ReadingsOfRanks(rank.group, rank.progress, node, machines)
    screen = PlainScreen(chosen_width(looks)) if looks.format is TABLE else NoScreen()
    pace, read_all = RealPace(sleep), readings.read_all
    report = watch(rank.plan, rank.arguments, machines, pace, screen, rank.presenter, read_all=read_all)
    if not readings.ended:
        readings.read_all(last=True)  # After Ctrl-C, the other ranks still wait for the last message
    return report


def _follow(rank: RankPlace, node: "_OwnNode") -> None:
    """Send readings to the first rank until it ends the watch. Sleep between readings, because MPI would busy-wait."""
    rank.progress.enter(Phase.OPERATION)
    pace = RealPace(sleep)
    next_moment = pace.now()
    while True:
        reading = node.read()
        rank.group.meet()
        last: bool = rank.group.broadcast(None)
        rank.group.collect(reading)
        rank.progress.completed()
        if last:
            return
        next_moment = max(next_moment + rank.plan.interval_s, pace.now())
        pace.wait_until(next_moment)


class _OwnNode:
    def __init__(self, watch: "NodeWatch | None") -> None:
        self._watch = watch

    def read(self) -> "NodeReading | None":
        return None if self._watch is None else self._watch.read()


class _ReadingsOfRanks:
    """Collects the readings of all nodes on the first rank, and renames hosts as in `machines`. `ended` is true
    after the last reading.
    """

    def __init__(self, group: "mpi.MpiGroup", progress: "RankProgress", node: _OwnNode, machines: "Machines") -> None:
        self._group, self._progress, self._node = group, progress, node
        self._hosts = [each.snapshot.host for each in machines.nodes]
        self.ended = False
        progress.enter(Phase.OPERATION)

    def read_all(self, last: bool) -> "list[NodeReading]":  # noqa: FBT001
        self.ended = last
        reading = self._node.read()
        self._group.meet()
        self._group.broadcast(last)
        collected = self._group.collect(reading) or []
        self._progress.completed()
        found = [each for each in collected if each is not None]
        return [replace(each, host=host) for each, host in zip(found, self._hosts, strict=True)]


STEPS = Steps(NAME, _open, _measure)


def run(plan: WatchPlan, arguments: Sequence[str]) -> int:
    """Watch in one process or as one rank of a job; return the exit code. Raises GpubenchError."""
    timeout_s = plan.timeout_s + max(plan.interval_s, LONGER_INTERVAL_SECONDS) + _SPARE_SECONDS
    return runner.run(STEPS, plan, arguments, timeout_s)


def _paced(
    plan: WatchPlan, machines: "Machines", wait: Wait, *, is_terminal: bool
) -> "tuple[WatchPlan, WatchPace, Sequence[TrafficReader]]":
    """Return the plan, a clock and the readers. A replay uses the interval of the recording."""
    if isinstance(plan.source, sources.Replayed):
        recorded = _recorded_readers(plan.source.directory)
        interval_s = max(each.interval_s for each in recorded) or plan.interval_s
        return (
            dataclasses.replace(plan, interval=interval_s),
            RecordedPace(lambda: max(each.elapsed for each in recorded)),
            recorded,
        )
    pace: WatchPace = RealPace(wait) if _is_real(plan, is_terminal=is_terminal) else LeapingPace()
    if isinstance(plan.source, sources.Simulated):
        return plan, pace, _simulated_readers(plan.source.simulation, machines.snapshots, pace.now)
    plan = plan.set_default_interval(len(machines.nodes[0].gpus))
    return plan, pace, [reader_here(plan, machines.nodes[0].snapshot.host)]


def _is_real(plan: WatchPlan, *, is_terminal: bool) -> bool:
    if isinstance(plan.source, sources.Here):
        return True
    return isinstance(plan.source, sources.Simulated) and _is_live(plan.presentation, is_terminal=is_terminal)


def _is_live(shown: Presentation, *, is_terminal: bool) -> bool:
    return shown.format is TABLE and is_terminal and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def shown(plan: WatchPlan, machines: "Machines", *, is_terminal: bool) -> "Iterator[tuple[Screen, Wait]]":
    """Yield the screen for intervals, and the function that waits for the next interval."""
    from gpubench.formats.presenter import adapt_to_stream, chosen_width
    from gpubench.formats.text.watch import NoScreen, PlainScreen, live_screen

    presentation = plan.presentation
    if isinstance(plan.source, sources.Replayed) or not _is_live(presentation, is_terminal=is_terminal):
        yield (PlainScreen(chosen_width(presentation)) if presentation.format is TABLE else NoScreen()), sleep
        return
    color = adapt_to_stream(presentation, sys.stdout).is_colored
    with live_screen(sys.stdout, _header(plan, machines), color=color) as (screen, wait):
        yield screen, wait


def _header(plan: WatchPlan, machines: "Machines") -> Callable[[float], str]:
    hosts = [node.snapshot.host for node in machines.nodes]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
    origin = "" if machines.origin is Origin.MEASURED else f" ({machines.origin.upper()})"
    until = "" if plan.seconds is None else f" of {plan.seconds:g}"
    return lambda seconds: f"gpubench watch  {where}{origin}  {seconds:.0f}{until} s"
