"""Watch under a launcher: the first rank of every node reads it, the first of all shows what all of them read."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubench.jobs.outputs import check_writable
from gpubench.jobs.sources import SECONDS_TO_READ_A_NODE, gathered, own_process
from gpubench.jobs.watch.pace import RealPace, sleep
from gpubench.jobs.watch.plan import LONGER_INTERVAL_SECONDS, WatchPlan
from gpubench.model.facts.launched_by import LaunchedBy
from gpubench.model.terms.hang import Phase

if TYPE_CHECKING:
    from gpubench.hardware.mpi import group as mpi
    from gpubench.hardware.watchdog.rank import RankProgress
    from gpubench.jobs.machines import Machines
    from gpubench.measure.watch.intervals import NodeWatch
    from gpubench.model.facts.snapshot import Snapshot
    from gpubench.model.facts.traffic import NodeReading

_SPARE_SECONDS = 10.0
"""A node may come so much later than an interval: its driver has a deadline of its own."""


def run_ranks(plan: WatchPlan, arguments: Sequence[str], launch: LaunchedBy) -> int:
    """Be one of the ranks; the exit code, the same on all of them."""
    from gpubench.jobs import rank

    timeout_s = plan.timeout_s + max(plan.interval_s, LONGER_INTERVAL_SECONDS) + _SPARE_SECONDS
    defaults = plan.presentation.job_defaults
    return rank.run(lambda group, progress: WatchRankJob(group, progress, plan, arguments), launch, timeout_s, defaults)


class WatchRankJob:
    """One rank's part in a watch."""

    def __init__(
        self, group: "mpi.MpiGroup", progress: "RankProgress", plan: WatchPlan, arguments: Sequence[str]
    ) -> None:
        from gpubench.jobs.rank import own_identity

        self._group, self._progress, self._plan, self._arguments = group, progress, plan, arguments
        self.identity, _ = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - a watch never launches itself
        """Read, hand on, show; the exit code. Raises AgreedError: a rank cannot do its part, and all know it."""
        from gpubench.jobs.agreement import agree

        group, plan = self._group, self._plan
        outputs = plan.presentation.outputs
        agree(group, lambda: check_writable(outputs, plan.recording.record) if group.rank == 0 else None)
        snapshots = agree(group, self._own_snapshots, place=str(self.identity))
        machines = gathered(group, snapshots, own_process(self.identity))
        agree(group, lambda: None if machines is None else self._check(machines))
        most = None if machines is None else max(len(node.gpus) for node in machines.nodes)
        self._plan = plan.with_interval_of(group.broadcast(most))
        with ExitStack() as stack:
            node = self._node(snapshots, stack)
            code = self._show(machines, node) if machines is not None else self._follow(node)
        return group.broadcast(code if machines is not None else None)

    def _check(self, machines: "Machines") -> None:
        from gpubench.jobs.watch.watching import check_watchable

        check_watchable(self._plan, machines)

    def _own_snapshots(self) -> "list[Snapshot]":
        from gpubench.hardware.node.probe import probe

        if self.identity.local_rank != 0:
            return []
        return [probe(max(self._plan.timeout_s, SECONDS_TO_READ_A_NODE), os.environ)]

    def _node(self, snapshots: "Sequence[Snapshot]", stack: ExitStack) -> "_OwnNode":
        from gpubench.jobs.watch.readers import reader_here
        from gpubench.measure.watch.course import joined_by
        from gpubench.measure.watch.intervals import NodeWatch
        from gpubench.model.paths.topology import Topology

        if not snapshots:
            return _OwnNode(None)
        reader = reader_here(self._plan, snapshots[0].host)
        watch = NodeWatch(reader, joined_by(Topology(snapshots[0])), self._plan.selection)
        stack.callback(watch.close)
        return _OwnNode(watch)

    def _show(self, machines: "Machines", node: "_OwnNode") -> int:
        """Show what all ranks read, until the watch ends; the exit code."""
        from gpubench.formats.presenter import Presenter, chosen_width, rank_style
        from gpubench.formats.registry import TABLE
        from gpubench.formats.text.watch_screen import NoScreen, PlainScreen
        from gpubench.jobs.watch.watching import watch

        shown = self._plan.presentation
        presenter = Presenter(shown, rank_style(shown), progress=False)
        readings = _ReadingsOfRanks(self._group, self._progress, node, machines)
        screen = PlainScreen(chosen_width(shown)) if shown.format is TABLE else NoScreen()
        pace = RealPace(sleep)
        report, metadata = watch(
            self._plan, self._arguments, machines, pace, screen, presenter, read_all=readings.read_all
        )
        if not readings.ended:
            readings.read_all(last=True)  # Ctrl-C reached this rank, and the others wait for its word
        self._progress.enter(Phase.OUTPUT)
        presenter.end(report)
        return shown.exit_code(metadata, report)

    def _follow(self, node: "_OwnNode") -> int:
        """Hand on what this rank reads until the first one says that it was the last time.

        It sleeps for an interval, and where it is early: waiting inside MPI would take a whole core.
        """
        self._progress.enter(Phase.OPERATION)
        pace = RealPace(sleep)
        next_moment = pace.now()
        while True:
            reading = node.read()
            self._group.meet()
            last: bool = self._group.broadcast(None)
            self._group.collect(reading)
            self._progress.completed()
            if last:
                return 0
            next_moment = max(next_moment + self._plan.interval_s, pace.now())
            pace.wait_until(next_moment)


class _OwnNode:
    """The node that this rank reads; none where another rank of its node does."""

    def __init__(self, watch: "NodeWatch | None") -> None:
        self._watch = watch

    def read(self) -> "NodeReading | None":
        """The node now."""
        return None if self._watch is None else self._watch.read()


class _ReadingsOfRanks:
    """The readings of all nodes on the first rank, named as the machines are; `ended` once it was the last time."""

    def __init__(self, group: "mpi.MpiGroup", progress: "RankProgress", node: _OwnNode, machines: "Machines") -> None:
        self._group, self._progress, self._node = group, progress, node
        self._hosts = [each.snapshot.host for each in machines.nodes]
        self.ended = False
        progress.enter(Phase.OPERATION)

    def read_all(self, last: bool) -> "list[NodeReading]":  # noqa: FBT001
        """Tell the others whether this is the last time, and have what all of them read."""
        self.ended = last
        reading = self._node.read()
        self._group.meet()
        self._group.broadcast(last)
        collected = self._group.collect(reading) or []
        self._progress.completed()
        found = [each for each in collected if each is not None]
        return [replace(each, host=host) for each, host in zip(found, self._hosts, strict=True)]
