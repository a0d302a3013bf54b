"""Show GPUs, NICs and how they are connected, for one source of machines or for the nodes of all ranks."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpubench.jobs import runner
from gpubench.jobs.plans import TopoPlan
from gpubench.jobs.runner import Place, RankPlace, Steps
from gpubench.jobs.sources import FromFile, Here, Replayed, Simulated, gathered, note_ignored_variables, own_process

if TYPE_CHECKING:
    from gpubench.jobs.machines import Machines
    from gpubench.model.facts.process import LibrariesFacts
    from gpubench.model.facts.snapshot import Snapshot
    from gpubench.model.results.report import Report

    Read = tuple[Machines | None, Sequence[LibrariesFacts]]  # The machines are None on all ranks except the first

NAME = "topo"
_SECONDS_TO_READ = 3.0  # Estimated time to read a machine with four GPUs


def run(plan: TopoPlan, arguments: Sequence[str]) -> int:
    """Show machines in one process or as one rank of a job; return the exit code. Raises GpubenchError."""
    return runner.run(STEPS, plan, arguments)


@contextmanager
def _open(place: Place) -> "Iterator[Callable[[], Read]]":
    plan: TopoPlan = place.plan
    source = plan.source
    if place.rank is not None:
        found = _gather(place.rank)
        yield lambda: found
    elif isinstance(source, Here):
        with source.being_read() as machines:
            yield lambda: (machines(), _own_libraries(plan))
    else:
        yield lambda: (source.machines(), [])


def _gather(rank: RankPlace) -> "Read":
    """Read each node on its first rank, and gather machines and libraries on the first rank of the job."""
    from gpubench.jobs.rank import agree

    group, identity, source = rank.group, rank.identity, rank.plan.source
    snapshots = agree(group, lambda: _own_snapshots(rank), place=str(identity))
    machines = gathered(group, snapshots, own_process(identity), source)
    libraries = group.collect(_own_libraries(rank.plan) if identity.local_rank == 0 else [])
    return machines, [each for own in libraries or () for each in own]


def _own_snapshots(rank: RankPlace) -> "list[Snapshot]":
    source, identity = rank.plan.source, rank.identity
    if isinstance(source, (FromFile, Simulated)):
        return source.machines().snapshots if identity.rank == 0 else []
    if identity.local_rank != 0:
        return []
    own = Replayed(source.directory, identity.host) if isinstance(source, Replayed) else source
    return own.machines().snapshots


def _own_libraries(plan: TopoPlan) -> "list[LibrariesFacts]":
    if plan.recording.record is None or not isinstance(plan.source, Here):
        return []
    from gpubench.backends.libraries import read_libraries

    return [read_libraries(plan.timeout_s, os.environ)]


def _measure(place: Place, read: "Callable[[], Read]") -> "Report | None":
    plan: TopoPlan = place.plan
    if place.rank is None:
        place.presenter.waiting("reading this machine", _SECONDS_TO_READ)
        note_ignored_variables(plan.source, place.presenter)
    if place.is_first:
        import gpubench.measure.topo
        import gpubench.profiles  # noqa: F401 - both are needed once the machines are there
    machines, libraries = read()
    if machines is None:
        return None
    from gpubench.jobs.machines import check_any_gpu
    from gpubench.jobs.metadata import build_metadata
    from gpubench.measure.topo import examine
    from gpubench.profiles import match_nodes

    nodes = machines.nodes if plan.targets.gpus is None else machines.visible().nodes
    if plan.recording.record is not None:
        from gpubench.machine import recorded

        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        if libraries:
            recorded.write_libraries(plan.recording.record, libraries)
    matches = match_nodes(nodes, os.environ, plan.profile)
    profiles = [None if found is None else found.profile for found in matches]
    asked = plan.profile is not None
    check_any_gpu(nodes, plan.expected_gpus, NAME)
    report = examine(nodes, machines.processes, profiles, asked=asked, expected_gpus=plan.expected_gpus)
    metadata = build_metadata(
        place.arguments,
        NAME,
        machines=machines,
        matched=matches[0],
        asked_profile=asked,
        options={"strict": plan.strict, "timeout_s": plan.timeout_s, "causes": plan.causes},
    )
    place.presenter.begin(metadata, ())
    return report


STEPS = Steps(NAME, _open, _measure, shows_progress=True, any_source_in_ranks=True)
