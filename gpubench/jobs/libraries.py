"""Show the libraries of an environment: read here or recorded, reported and presented."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubench.backends.libraries import read_libraries
from gpubench.jobs.machines import Machines
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import check_writable, presenting
from gpubench.jobs.plans import LibrariesPlan
from gpubench.jobs.rank import agree, own_identity
from gpubench.jobs.sources import Replayed, gathered, own_process, refuse_under_launcher
from gpubench.machine import recorded
from gpubench.measure.libraries import SECTIONS as SECTIONS
from gpubench.measure.libraries import HostLibraries, report_on_libraries
from gpubench.model.facts.environment import launched_by
from gpubench.model.facts.process import LibrariesFacts
from gpubench.model.facts.snapshot import Snapshot

if TYPE_CHECKING:
    from gpubench.backends.mpi import group as mpi
    from gpubench.formats.presenter import Presenter

NAME = "libraries"


def run(plan: LibrariesPlan, arguments: Sequence[str]) -> int:
    """Read and show; the exit code. Raises GpubenchError: no recording, or an unwritable output."""
    launch = launched_by(os.environ)
    if launch is None or launch.size == 1:
        with presenting(plan.presentation, plan.recording.record) as presenter:
            return _show(plan, arguments, *_read(plan), presenter)
    refuse_under_launcher(NAME, plan.source, launch)
    from gpubench.jobs import rank

    defaults = plan.presentation.job_defaults
    return rank.run(lambda group, _progress: LibrariesRankJob(group, plan, arguments), launch, plan.timeout_s, defaults)


class LibrariesRankJob:
    """One rank's part in showing those of a job: the first rank of every node reads, the first of all shows them."""

    def __init__(self, group: "mpi.MpiGroup", plan: LibrariesPlan, arguments: Sequence[str]) -> None:
        self._group, self._plan, self._arguments = group, plan, arguments
        self.identity, _ = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - it never launches itself
        """Read, gather, show, and return the exit code. Raises AgreedError, known to every rank."""
        from gpubench.formats.presenter import Presenter, rank_style

        group, plan, shown = self._group, self._plan, self._plan.presentation
        agree(group, lambda: check_writable(shown.outputs, plan.recording.record) if group.rank == 0 else None)
        machines, facts = agree(group, self._own, place=str(self.identity))
        gathered_machines = gathered(group, machines, own_process(self.identity))
        gathered_facts = group.collect(facts)
        code = None
        if gathered_machines is not None and gathered_facts is not None:
            every = [each for own in gathered_facts for each in own]
            presenter = Presenter(shown, rank_style(shown), progress=False)
            code = _show(plan, self._arguments, gathered_machines, every, presenter)
        return group.broadcast(code)

    def _own(self) -> tuple[Sequence[Snapshot], Sequence[LibrariesFacts]]:
        if self.identity.local_rank != 0:
            return [], []
        machines, facts = _read(self._plan)
        return machines.snapshots, facts


def _show(
    plan: LibrariesPlan,
    arguments: Sequence[str],
    machines: Machines,
    facts: Sequence[LibrariesFacts],
    presenter: "Presenter",
) -> int:
    """Record where asked, then report and present; the exit code."""
    if plan.recording.record is not None:
        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        recorded.write_libraries(plan.recording.record, facts)
    metadata = metadata_of(
        arguments,
        NAME,
        machines=machines,
        options={"strict": plan.strict, "timeout_s": plan.timeout_s, "python": [each.python for each in facts]},
    )
    presenter.begin(metadata, ())
    report = report_on_libraries(_of_hosts(machines, facts), machines.origin)
    presenter.end(report)
    return presenter.exit_code


def _read(plan: LibrariesPlan) -> tuple[Machines, Sequence[LibrariesFacts]]:
    if isinstance(plan.source, Replayed):
        return plan.source.machines(), recorded.read_libraries(plan.source.directory)
    with plan.source.being_read() as machines:
        facts = read_libraries(plan.timeout_s, os.environ)
        return machines(), [facts]


def _of_hosts(machines: Machines, facts: Sequence[LibrariesFacts]) -> list[HostLibraries]:
    direct = {each.host: each.gpudirect for each in machines.snapshots}
    found = []
    for each in facts:
        known = direct.get(each.host)
        dma_buf = None if known is None else known.dma_buf
        found.append(HostLibraries(each, dma_buf, "" if dma_buf is not None else "CUDA did not say"))
    return found
