"""Show what machines are: take them from a source, or gather them from ranks, then examine and present them."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpubench.jobs.outputs import check_writable, presenting
from gpubench.jobs.plans import TopoPlan
from gpubench.jobs.sources import FromFile, Here, Replayed, Simulated, gathered, own_process, say_what_is_ignored
from gpubench.model.facts.environment import launched_by

if TYPE_CHECKING:
    from gpubench.backends.mpi import group as mpi
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.machines import Machines
    from gpubench.model.facts.process import LibrariesFacts
    from gpubench.model.facts.snapshot import Snapshot

NAME = "topo"
_SECONDS_TO_READ = 3.0  # Of a machine with four GPUs; an estimate for whoever waits


def run(plan: TopoPlan, arguments: Sequence[str]) -> int:
    """Show machines, alone or as one rank; the exit code. Raises GpubenchError."""
    launch = launched_by(os.environ)
    if launch is None:
        check_writable(plan.presentation.outputs, plan.recording.record)
        if not isinstance(plan.source, Here):
            return _present(plan, arguments, plan.source.machines)
        with plan.source.being_read() as machines:
            return _present(plan, arguments, machines)
    from gpubench.jobs import rank

    defaults = plan.presentation.job_defaults
    return rank.run(lambda group, _progress: TopoRankJob(group, plan, arguments), launch, plan.timeout_s, defaults)


def _present(plan: TopoPlan, arguments: Sequence[str], machines: "Callable[[], Machines]") -> int:
    is_here = isinstance(plan.source, Here)
    with presenting(plan.presentation, plan.recording.record, progress=is_here) as presenter:
        presenter.waiting("reading this machine", _SECONDS_TO_READ)
        say_what_is_ignored(plan.source, presenter)
        import gpubench.measure.topo
        import gpubench.profiles  # noqa: F401 - both are needed once the machines are there

        return _show(plan, arguments, machines(), _own_libraries(plan), presenter)


def _own_libraries(plan: TopoPlan) -> "list[LibrariesFacts]":
    if plan.recording.record is None or not isinstance(plan.source, Here):
        return []
    from gpubench.backends.libraries import read_libraries

    return [read_libraries(plan.timeout_s, os.environ)]


class TopoRankJob:
    """One rank's part in showing a cluster: the first rank of every node reads it, the first of all shows them."""

    def __init__(self, group: "mpi.MpiGroup", plan: TopoPlan, arguments: Sequence[str]) -> None:
        from gpubench.jobs.rank import own_identity

        self._group, self._plan, self._arguments = group, plan, arguments
        self.identity, _ = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - topo never launches itself
        """Read, gather, show, and return the exit code. Raises AgreedError, known to every rank."""
        from gpubench.formats.presenter import Presenter, rank_style
        from gpubench.jobs.rank import agree

        group, plan, shown = self._group, self._plan, self._plan.presentation
        agree(group, lambda: check_writable(shown.outputs, plan.recording.record) if group.rank == 0 else None)
        snapshots = agree(group, self._own_snapshots, place=str(self.identity))
        machines = gathered(group, snapshots, own_process(self.identity), plan.source)
        libraries = group.collect(_own_libraries(plan) if self.identity.local_rank == 0 else [])
        code = None
        if machines is not None:
            found = [each for own in libraries or () for each in own]
            code = _show(plan, self._arguments, machines, found, Presenter(shown, rank_style(shown), progress=False))
        return group.broadcast(code)

    def _own_snapshots(self) -> "list[Snapshot]":
        source, identity = self._plan.source, self.identity
        if isinstance(source, (FromFile, Simulated)):
            return source.machines().snapshots if identity.rank == 0 else []
        if identity.local_rank != 0:
            return []
        own = Replayed(source.directory, identity.host) if isinstance(source, Replayed) else source
        return own.machines().snapshots


def _show(
    plan: TopoPlan,
    arguments: Sequence[str],
    machines: "Machines",
    libraries: "Sequence[LibrariesFacts]",
    presenter: "Presenter",
) -> int:
    from gpubench.jobs.machines import check_any_gpu
    from gpubench.jobs.metadata import metadata_of
    from gpubench.measure.topo import examine
    from gpubench.profiles import profiles_for

    nodes = machines.nodes
    if plan.recording.record is not None:
        from gpubench.machine import recorded

        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        if libraries:
            recorded.write_libraries(plan.recording.record, libraries)
    matches = profiles_for(nodes, os.environ, plan.profile)
    profiles = [None if found is None else found.profile for found in matches]
    asked = plan.profile is not None
    check_any_gpu(nodes, plan.expected_gpus, NAME)
    report = examine(nodes, machines.processes, profiles, asked=asked, expected_gpus=plan.expected_gpus)
    metadata = metadata_of(
        arguments,
        NAME,
        machines=machines,
        matched=matches[0],
        asked_profile=asked,
        options={"strict": plan.strict, "timeout_s": plan.timeout_s, "causes": plan.causes},
    )
    presenter.begin(metadata, ())
    presenter.end(report)
    return presenter.exit_code
