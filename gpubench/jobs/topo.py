"""Show GPUs, NICs and how they are connected, or communication libraries.

They are read from one source of machines, or from the nodes of all ranks.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpubench.jobs import runner
from gpubench.jobs.plans import TopoPlan
from gpubench.jobs.runner import Place, RankPlace, Steps
from gpubench.jobs.sources import FromFile, Here, Replayed, Simulated, gathered, note_ignored_variables, own_process
from gpubench.model.terms.commands import LIBRARIES

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
        yield lambda: (source.machines(), _own_libraries(plan))


def _gather(rank: RankPlace) -> "Read":
    """Read each node on its first rank, and gather machines and libraries on the first rank of the job."""
    from gpubench.jobs.rank import agree

    group, identity, source = rank.group, rank.identity, rank.plan.source
    snapshots = agree(group, lambda: _own_snapshots(rank), place=str(identity))
    machines = gathered(group, snapshots, own_process(identity), source)
    libraries = group.collect(_own_libraries(rank.plan, identity.host) if identity.local_rank == 0 else [])
    return machines, [each for own in libraries or () for each in own]


def _own_snapshots(rank: RankPlace) -> "list[Snapshot]":
    source, identity = rank.plan.source, rank.identity
    if isinstance(source, (FromFile, Simulated)):
        return source.machines().snapshots if identity.rank == 0 else []
    if identity.local_rank != 0:
        return []
    own = Replayed(source.directory, identity.host) if isinstance(source, Replayed) else source
    return own.machines().snapshots


def _own_libraries(plan: TopoPlan, host: str | None = None) -> "list[LibrariesFacts]":
    """Return the libraries of this host if --software or --record needs them. None selects all recorded hosts."""
    source = plan.source
    if isinstance(source, Here) and (plan.software or plan.recording.record is not None):
        from gpubench.backends.libraries import read_libraries

        return [read_libraries(plan.timeout_s, os.environ)]
    if isinstance(source, Replayed) and plan.software:
        from gpubench.machine import recorded

        return [facts for facts in recorded.read_libraries(source.directory) if host in (None, facts.host)]
    return []


def _measure(place: Place, read: "Callable[[], Read]") -> "Report | None":
    plan: TopoPlan = place.plan
    if place.rank is None:
        place.presenter.waiting("reading this machine", _SECONDS_TO_READ)
        note_ignored_variables(plan.source, place.presenter)
    if place.is_first and not plan.software:
        import gpubench.measure.topo
        import gpubench.profiles  # noqa: F401 - both are needed once the machines are there
    machines, libraries = read()
    if machines is None:
        return None
    if plan.recording.record is not None:
        from gpubench.machine import recorded

        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        if libraries:
            recorded.write_libraries(plan.recording.record, libraries)
    return _report_libraries(place, machines, libraries) if plan.software else _report_devices(place, machines)


def _report_devices(place: Place, machines: "Machines") -> "Report":
    from gpubench.jobs.machines import check_any_gpu
    from gpubench.jobs.metadata import build_metadata
    from gpubench.measure.topo import examine
    from gpubench.profiles import match_nodes

    plan: TopoPlan = place.plan
    nodes = machines.nodes if plan.targets.gpus is None else machines.visible().nodes
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


def _report_libraries(place: Place, machines: "Machines", libraries: "Sequence[LibrariesFacts]") -> "Report":
    from gpubench.jobs.metadata import build_metadata
    from gpubench.measure.libraries import HostLibraries, report_on_libraries

    plan: TopoPlan = place.plan
    metadata = build_metadata(
        place.arguments,
        LIBRARIES.name,
        machines=machines,
        options={"strict": plan.strict, "timeout_s": plan.timeout_s, "python": [facts.python for facts in libraries]},
    )
    place.presenter.begin(metadata, ())
    exports = {snapshot.host: snapshot.gpudirect.dma_buf for snapshot in machines.snapshots}
    hosts = [HostLibraries(facts, exports.get(facts.host)) for facts in libraries]
    return report_on_libraries(hosts, machines.origin)


STEPS = Steps(NAME, _open, _measure, shows_progress=True, any_source_in_ranks=True)
