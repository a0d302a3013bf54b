"""A watch from its first reading to its report, whoever reads."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING

from gpubench.errors import no_gpu
from gpubench.jobs.sources import Here, Replayed
from gpubench.jobs.watch.pace import WatchPace
from gpubench.jobs.watch.plan import NAME, SAMPLES, WatchPlan
from gpubench.model.terms.origin import Origin

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.machines import Machines
    from gpubench.jobs.watch.loop import ReadAll, Screen
    from gpubench.measure.watch.course import Course
    from gpubench.model.facts.traffic import NodeReading
    from gpubench.model.paths.topology import Topology
    from gpubench.model.results.report import Metadata, Report
    from gpubench.ports.traffic import TrafficReader


def check_watchable(plan: WatchPlan, machines: "Machines") -> None:
    """Raise CouldNotMeasureError where there is neither a GPU nor a driver that may have some."""
    if isinstance(plan.source, Here) and not any(node.gpus or node.snapshot.failures for node in machines.nodes):
        reason = machines.nodes[0].snapshot.driver.absent or "the driver finds none on this host"
        raise no_gpu(reason, for_what=NAME)


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
) -> "tuple[Report, Metadata]":
    """Watch until it ends; what is read are `readers` here, or what `read_all` has of all ranks.

    Rows are handed on as they come; the report is left to be presented.
    """
    from gpubench.jobs.watch.loop import WatchLoop
    from gpubench.measure.watch.course import Course
    from gpubench.measure.watch.intervals import Intervals
    from gpubench.measure.watch.report import report_on
    from gpubench.measure.watch.rows import Limits
    from gpubench.model.results.rows.watch import TrafficRow

    topologies = {node.snapshot.host: node for node in machines.nodes}
    origin = Origin.RECORDED if isinstance(plan.source, Replayed) else machines.origin
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
    return report_on(course, origin, missing=_missing(plan, course)), metadata


def _missing(plan: WatchPlan, course: "Course") -> str:
    """Whose traffic was to be watched, where nothing of it was seen."""
    return "" if plan.selection.is_all or course.jobs else plan.selection.text


def _reading(
    plan: WatchPlan, readers: "Sequence[TrafficReader]", topologies: "dict[str, Topology]", stack: ExitStack
) -> "ReadAll":
    from gpubench.measure.watch.course import joined_by
    from gpubench.measure.watch.intervals import NodeWatch

    hosts = list(topologies)
    nodes = [
        NodeWatch(reader, joined_by(topologies.get(hosts[number] if number < len(hosts) else "")), plan.selection)
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
    """Keep machines and every reading in the folder of --record, where one was named."""
    directory = plan.recording.record
    if directory is None:
        yield lambda _: None
        return
    from gpubench.hardware import recorded

    recorded.write_recording(directory, machines.snapshots, machines.processes)
    with recorded.recording_samples(directory, SAMPLES) as write:
        yield write


def _metadata(plan: WatchPlan, arguments: Sequence[str], machines: "Machines", origin: Origin) -> "Metadata":
    from gpubench.jobs.metadata import metadata_of
    from gpubench.profiles.nodes import profiles_for

    matched = profiles_for(machines.nodes, os.environ)[0]
    return metadata_of(
        arguments,
        NAME,
        machines=machines,
        matched=matched,
        origin=origin,
        options={
            "strict": plan.strict,
            "interval_s": plan.interval_s,
            "seconds": plan.seconds,
            "until_traffic": plan.until_traffic,
            "gpus": None if plan.gpus is None else list(plan.gpus),
            "selection": plan.selection.text,
        },
    )
