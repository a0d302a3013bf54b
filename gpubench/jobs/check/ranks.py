"""What `gpubench check` does as one rank of a job: every node checks itself, and all of them reduce together."""

import os
from collections.abc import Sequence
from dataclasses import replace

from gpubench.collectives.record import Collective
from gpubench.errors import GpubenchError
from gpubench.formats.presenter import Presenter, rank_style
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.node.probe import probe, watch_errors
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import AgreedError, agree
from gpubench.jobs.check.child_commands import measured_copies, measured_memory
from gpubench.jobs.check.here import deliver, refuse_without_gpu
from gpubench.jobs.check.plan import CheckPlan
from gpubench.jobs.check.repeats import measure_with_repeats
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.rank_job import CollectiveRankJob
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.rank import own_facts, own_identity
from gpubench.measure.check.documents import findings_beside_speed, of_node, paths_judged, together
from gpubench.measure.collective.cases import SweepRequest
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import with_own_names
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measurements import QUICK, Measurements, Need
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Table
from gpubench.model.results.rows.evidence import FALLBACK_SECTION, FallbackRow
from gpubench.model.terms.verdict import Finding
from gpubench.ports.listener import Listener
from gpubench.profiles.matching import ProfileMatch
from gpubench.profiles.nodes import profiles_for


class _CheckRow:
    """What the first rank hears of a collective."""

    def __init__(self) -> None:
        self.rows: list[CollectiveRow] = []
        self.metadata: Metadata | None = None
        self.report: Report | None = None

    def begin(self, metadata: Metadata) -> None:
        """Keep what is known of the ranks."""
        self.metadata = metadata

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: CollectiveRow) -> None:
        """Keep it."""
        self.rows.append(row)

    def end(self, report: Report) -> None:
        """Keep it."""
        self.report = report


class _CollectiveOfCheck(CollectiveRankJob):
    """A collective as a part of a check: its rows go to us, and to no terminal."""

    def __init__(self, group: mpi.MpiGroup, progress: RankProgress, options: CollectivePlan, heard: _CheckRow) -> None:
        super().__init__(group, progress, options, ())
        self._heard = heard

    def _listener(self, channel: str | None) -> Listener[CollectiveRow]:  # noqa: ARG002 - a check has no channel
        return self._heard


class CheckRanksJob:
    """One rank's part in checking a cluster: the first rank of every node measures it, the first of all judges."""

    def __init__(
        self, group: mpi.MpiGroup, progress: RankProgress, options: CheckPlan, arguments: Sequence[str]
    ) -> None:
        self._group = group
        self._progress = progress
        self._options = options
        self._arguments = arguments
        self.identity, _ = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - check never launches itself
        """Read, measure, gather, judge, and return the exit code.

        Raises:
            AgreedError: a rank cannot do its part, and every rank knows it.
        """
        group, options = self._group, self._options
        agree(group, self._prepare)
        snapshot = agree(group, self._own_snapshot, place=str(self.identity))
        gathered = group.gather((snapshot, own_facts(self.identity)))
        snapshots = [each for each, _ in gathered if each is not None]
        ranks = [facts for _, facts in gathered]
        nodes = [Topology(each) for each in with_own_names(snapshots)]
        matches = agree(group, lambda: self._matches(nodes))
        measurements = QUICK
        if options.plan.measures:
            measurements = self._measured(nodes, matches)
            watched = group.gather(None if snapshot is None else self._watched(nodes[self.identity.node]))
            nodes = [Topology(each) for each in watched if each is not None]
        code = None
        if group.rank == 0:
            presenter = Presenter(options.presentation, rank_style(options.presentation), progress=False)
            code = deliver(options, self._arguments, nodes, ranks, matches, measurements, presenter)
        return group.broadcast(code)

    def _prepare(self) -> None:
        if self._group.rank == 0:
            check_writable(self._options.presentation.outputs, self._options.record)

    def _own_snapshot(self) -> Snapshot | None:
        """The first rank of a node reads it, before any rank puts something on its GPUs."""
        return probe(self._options.facts_timeout_s, os.environ) if self.identity.local_rank == 0 else None

    def _watched(self, node: Topology) -> Snapshot:
        """This rank's node with the errors that its devices counted while it was measured."""
        return watch_errors(node.snapshot, self._options.facts_timeout_s, os.environ)

    def _matches(self, nodes: Sequence[Topology]) -> list[ProfileMatch | None]:
        matches = profiles_for(nodes, os.environ, self._options.profile)
        refuse_without_gpu(nodes, matches)
        return matches

    def _measured(self, nodes: Sequence[Topology], matches: Sequence[ProfileMatch | None]) -> Measurements:
        """Copies on every node at the same time, then collectives over all ranks."""
        first_of_node = self.identity.node if self.identity.local_rank == 0 else None
        memory = measured_memory(self._group, nodes, first_of_node)
        parts = self._group.gather(self._own_copies(nodes[self.identity.node]))
        profile = matches[0].profile if matches[0] is not None else None
        return together([memory, *(part for part in parts if part is not None), self._collectives(nodes, profile)])

    def _own_copies(self, node: Topology) -> Measurements | None:
        """What the first rank of a node measures, by a process of its own, while the others wait without a context."""
        if self.identity.local_rank != 0:
            return None
        if not node.gpus:
            return Measurements(left_out=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "no GPU"))
        measured = measured_copies(self._options.plan, self._options.timeout_s, node)
        return of_node(measured, node.snapshot.host)

    def _collectives(self, nodes: Sequence[Topology], profile: Profile | None) -> Measurements:
        limit = self._options.plan.limit_gb_s(nodes)
        parts: list[Measurements] = []

        def rows(collective: Collective, sizes: Sequence[int], attempt: int) -> list[CollectiveRow]:
            heard = _CheckRow()
            _CollectiveOfCheck(
                self._group,
                self._progress,
                CollectivePlan(request=SweepRequest(collective=collective, sizes=tuple(sizes))),
                heard,
            ).run(None)
            if not attempt and heard.report is not None:
                ranks = tuple(heard.metadata.ranks) if heard.metadata is not None else ()
                parts.append(Measurements(findings=_judged(heard.report), ranks=ranks))
            found = [replace(row, limit_gb_s=limit) for row in heard.rows]
            return self._group.broadcast(found)

        try:
            found = [
                row
                for each in self._options.plan.collectives
                for row in measure_with_repeats(each, self._sizes(nodes), rows, profile)
            ]
        except AgreedError as agreed:
            return together([*parts, _failed(agreed.error)])
        return together([*parts, Measurements(collectives=tuple(found))])

    def _sizes(self, nodes: Sequence[Topology]) -> tuple[int, ...]:
        plan = self._options.plan
        return plan.sizes if any(node.gpus for node in nodes) else plan.host_sizes


def _judged(report: Report) -> tuple[Finding, ...]:
    section = report.sections.get(FALLBACK_SECTION)
    rows = section.rows() if isinstance(section, Table) else ()
    return paths_judged(findings_beside_speed(report.findings), [row for row in rows if isinstance(row, FallbackRow)])


def _failed(error: GpubenchError) -> Measurements:
    return Measurements(failed={Need.ALL_REDUCE: str(error)})
