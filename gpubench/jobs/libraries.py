"""Show the communication libraries in an environment, read on this machine or from a recording."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpubench.backends.libraries import read_libraries
from gpubench.jobs import runner
from gpubench.jobs.machines import Machines
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import LibrariesPlan
from gpubench.jobs.rank import agree
from gpubench.jobs.runner import Place, Steps
from gpubench.jobs.sources import Replayed, gathered, own_process
from gpubench.machine import recorded
from gpubench.measure.libraries import SECTIONS as SECTIONS
from gpubench.measure.libraries import HostLibraries, report_on_libraries
from gpubench.model.facts.process import LibrariesFacts
from gpubench.model.results.report import Report

NAME = "libraries"


def run(plan: LibrariesPlan, arguments: Sequence[str]) -> int:
    """Show libraries in one process or as one rank of a job; return the exit code. Raises GpubenchError."""
    return runner.run(STEPS, plan, arguments)


@contextmanager
def _open(place: Place) -> Iterator[tuple[Machines | None, Sequence[LibrariesFacts]]]:
    """Read the libraries of this node, or of each node on its first rank.

    Yield the machines and library facts. On all ranks but the first, the machines are None and the facts are empty.
    """
    if place.rank is None:
        yield _read(place.plan)
        return
    group, identity = place.rank.group, place.rank.identity
    reads = identity.local_rank == 0
    own, facts = agree(group, lambda: _read(place.plan) if reads else (None, ()), place=str(identity))
    machines = gathered(group, [] if own is None else own.snapshots, own_process(identity))
    yield machines, [each for read in group.collect(facts) or () for each in read]


def _measure(place: Place, read: tuple[Machines | None, Sequence[LibrariesFacts]]) -> Report | None:
    plan: LibrariesPlan = place.plan
    machines, facts = read
    if machines is None:
        return None
    if plan.recording.record is not None:
        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        recorded.write_libraries(plan.recording.record, facts)
    metadata = build_metadata(
        place.arguments,
        NAME,
        machines=machines,
        options={"strict": plan.strict, "timeout_s": plan.timeout_s, "python": [fact.python for fact in facts]},
    )
    place.presenter.begin(metadata, ())
    direct = {snapshot.host: snapshot.gpudirect for snapshot in machines.snapshots}
    found = []
    for fact in facts:
        known = direct.get(fact.host)
        dma_buf = None if known is None else known.dma_buf
        found.append(HostLibraries(fact, dma_buf, "" if dma_buf is not None else "CUDA did not say"))
    return report_on_libraries(found, machines.origin)


STEPS = Steps(NAME, _open, _measure)


def _read(plan: LibrariesPlan) -> tuple[Machines, Sequence[LibrariesFacts]]:
    if isinstance(plan.source, Replayed):
        return plan.source.machines(), recorded.read_libraries(plan.source.directory)
    with plan.source.being_read() as machines:
        facts = read_libraries(plan.timeout_s, os.environ)
        return machines(), [facts]
