"""Check a cluster as one rank of a job: every node measures its copies, and all of them reduce together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.collectives.record import Collective
from gpubench.collectives.request import SweepRequest
from gpubench.errors import shared_gpu_under_launcher
from gpubench.formats.presenter import Presenter, rank_style
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.node.probe import probe, watch_errors
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import AgreedError, agree
from gpubench.jobs.check.child_commands import ChildCommands, measured_memory
from gpubench.jobs.check.judging import deliver, matches_of
from gpubench.jobs.check.measuring import measured
from gpubench.jobs.check.plan import CheckPlan, Depth, sampling
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.rank_job import CollectiveRankJob
from gpubench.jobs.listeners import NullListener, ReportCollector
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.rank import own_identity
from gpubench.jobs.sources import gathered, own_process
from gpubench.measure.check.documents import findings_beside_speed, of_node, of_nodes, together, without_wrong_data
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import Measurements
from gpubench.model.terms.rank_identity import RankIdentity


@dataclass(frozen=True)
class RankMeasurer:
    """Measures a job: copies by the first rank of every node, collectives by all ranks; every rank has to call it."""

    alone = ""
    group: mpi.MpiGroup
    progress: RankProgress
    identity: RankIdentity
    nodes: Sequence[Topology]
    plan: CheckPlan

    def copies(self) -> Measurements:
        """On every node at the same time, by a process of its own, while the other ranks wait without a context."""
        identity, own = self.identity, None
        memory = measured_memory(self.group, self.nodes, identity.node if identity.local_rank == 0 else None)
        if identity.local_rank == 0:
            node = self.nodes[identity.node]
            commands = ChildCommands([node], self.plan.depth, self.plan.timeout_s, self.plan.profile)
            own = of_node(commands.peer_and_host_copies(), node.snapshot.host)
        parts = [part for part in self.group.gather(own) if part is not None]
        hosts = [node.snapshot.host for node in self.nodes]
        return together([memory, of_nodes(dict(zip(hosts, parts, strict=True)))])

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """Over all ranks of the job. Raises GpubenchError: on every rank, where the collective cannot be."""
        collector = ReportCollector() if self.group.rank == 0 else NullListener()
        timed = sampling(on_gpus=any(node.gpus for node in self.nodes))
        request = SweepRequest(collective=collective, sizes=tuple(sizes), sampling=timed)
        plan = CollectivePlan(request=request, profile=self.plan.profile)
        try:
            CollectiveRankJob(self.group, self.progress, plan, (), collector).run(None)
        except AgreedError as agreed:
            raise agreed.error from agreed
        return self.group.broadcast(_measurements(collector) if isinstance(collector, ReportCollector) else None)


def _measurements(collector: ReportCollector) -> Measurements:
    metadata, report = collector.metadata, collector.report
    return Measurements(
        collectives=tuple(collector.collectives),
        ranks=() if metadata is None else tuple(metadata.ranks),
        findings=() if report is None else without_wrong_data(findings_beside_speed(report.findings)),
    )


class CheckRankJob:
    """One rank's part in checking a cluster: the first rank of every node measures it, the first of all judges."""

    def __init__(self, group: mpi.MpiGroup, progress: RankProgress, plan: CheckPlan, arguments: Sequence[str]) -> None:
        self._group, self._progress, self._plan, self._arguments = group, progress, plan, arguments
        self.identity, _ = own_identity(group)

    def _check_options(self) -> None:
        if self._plan.ranks_per_gpu > 1:
            raise shared_gpu_under_launcher(self._plan.ranks_per_gpu, self._group.size)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - check never launches itself
        """Read, measure, gather, judge, and return the exit code.

        Raises AgreedError: a rank cannot do its part, and every rank knows it.
        """
        group, plan, shown = self._group, self._plan, self._plan.presentation
        agree(group, self._check_options)
        agree(group, lambda: check_writable(shown.outputs, plan.recording.record) if group.rank == 0 else None)
        # The first rank of a node reads it, before any rank puts something on its GPUs.
        seconds, is_first = plan.facts_timeout_s, self.identity.local_rank == 0
        place = str(self.identity)
        own = agree(group, lambda: [probe(seconds, os.environ)] if is_first else [], place=place)
        machines = group.broadcast(gathered(group, own, own_process(self.identity)))
        matches = agree(group, lambda: matches_of(plan, machines))
        given = machines.given().nodes
        by = RankMeasurer(group, self._progress, self.identity, given, plan)
        measurements = measured(plan.depth, given, by)
        if plan.depth not in (Depth.QUICK, Depth.BRIEF):
            before = machines.snapshots[self.identity.node]
            watched = group.gather([watch_errors(before, seconds, os.environ)] if is_first else [])
            machines = machines.with_snapshots([each for node in watched for each in node])
        code = None
        if group.rank == 0:
            presenter = Presenter(shown, rank_style(shown), progress=False)
            code = deliver(plan, self._arguments, machines, matches, measurements, presenter)
        return group.broadcast(code)
