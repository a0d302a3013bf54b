"""The measurements of a check on a simulated machine."""

import os
from collections.abc import Sequence

from gpubench.collectives.record import Collective
from gpubench.collectives.request import SweepRequest
from gpubench.errors import CouldNotMeasureError, GpubenchError
from gpubench.hardware.simulated.copies import SimulatedCopies
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.jobs.check.plan import Depth
from gpubench.jobs.collective.speed import judge_of_model
from gpubench.jobs.listeners import ReportCollector
from gpubench.jobs.p2p import job as p2p_job
from gpubench.jobs.simulation import Simulation
from gpubench.measure.check.documents import findings_beside_speed, of_nodes, together
from gpubench.measure.collective.simulated import MOST_ROWS, simulate
from gpubench.measure.p2p.machine import wiring_of_process
from gpubench.measure.p2p.request import Method, P2pRequest, default_series, sweep_series, with_latency
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import Measurements, Need
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.copies import CopyPattern
from gpubench.profiles.nodes import profile_for

_PAIR_BYTES, _HOST_BYTES = 256 * 2**20, 64 * 2**20


class SimulatedMeasurer:
    """Makes the figures of a simulated machine; `noise` is the spread of every sample, None for the model's own.

    `profile` is the name or file of the one to judge copies by, None for a match.
    """

    def __init__(
        self,
        simulation: Simulation,
        nodes: Sequence[Topology],
        depth: Depth,
        noise: float | None = None,
        profile: str | None = None,
    ) -> None:
        self._profile = profile
        self._machine, self._faults, self._seed = simulation.machine, simulation.faults, simulation.seed
        self._nodes, self._depth, self._noise = nodes, depth, noise
        self._times = CollectiveTimes(self._machine, self._faults, self._seed, noise=noise)
        self._ranks = self._times.gpus * self._machine.nodes
        self.alone = "one GPU: it has nobody to talk to" if self._ranks < 2 else ""
        if not self._times.has_network:
            self.alone = f"profile {self._machine.profile.name} has no NIC of a known rate between its nodes"

    def copies(self) -> Measurements:
        """Copies on every node; a model moves no data, and knows no host memory."""
        hosts = {node.snapshot.host: self._node_copies(number, node) for number, node in enumerate(self._nodes)}
        no_data = "no data are moved on a simulated machine"
        return together(
            [of_nodes(hosts), Measurements(left_out=dict.fromkeys((Need.VERIFIED_DATA, Need.HOST_MEMORY), no_data))]
        )

    def collective(self, collective: Collective, sizes: Sequence[int]) -> Measurements:
        """A collective over all GPUs.

        Raises CouldNotMeasureError: a node's driver does not answer, or a fault leaves nothing to simulate.
        """
        if any(node.snapshot.failures or node.snapshot.driver.absent for node in self._nodes):
            raise CouldNotMeasureError("a node's driver does not answer")
        collector = ReportCollector()
        speed = judge_of_model(collective, self._times, self._nodes, self._times.gpus, self._machine.profile)
        try:
            simulate(
                SweepRequest(collective=collective, sizes=tuple(sizes), check=False),
                self._ranks,
                self._machine.nodes,
                lambda size, row, attempt: self._times.seconds(collective.name, size, row=row + attempt * MOST_ROWS),
                collector,
                PathOutcome({}, ()),
                speed,
            )
        except GpubenchError as error:
            raise CouldNotMeasureError(error.seen) from error
        return Measurements(collectives=tuple(collector.collectives))

    def _node_copies(self, number: int, node: Topology) -> Measurements:
        """Copies on one node; a node whose driver is silent cannot be measured."""
        snapshot = node.snapshot
        if snapshot.failures or snapshot.driver.absent:
            return Measurements(
                failed=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "its driver does not answer")
            )
        spread = {} if self._noise is None else {"noise": self._noise}
        copies = SimulatedCopies(self._machine, self._faults, self._seed, node=number, **spread)
        if not copies.gpus:
            return Measurements(left_out=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "no GPU"))
        full = self._depth is Depth.FULL
        gpus = range(len(copies.gpus))
        several = len(copies.gpus) > 1
        brief = self._depth is Depth.BRIEF and several
        series = sweep_series((_PAIR_BYTES,)) if brief else default_series(_PAIR_BYTES, sm=full)
        pairs = tuple((one, other) for one in gpus for other in gpus if one != other)
        request = P2pRequest(
            pairs=pairs,
            series=with_latency(series, pairs, wiring_of_process(node, copies.gpus)) if several else (),
            host_bytes=None if brief else _HOST_BYTES,
            patterns=tuple(CopyPattern) if full and several else (),
            pattern_bytes=_PAIR_BYTES,
            method=Method(repeats=1),
            check=copies.corrupts,
        )
        collector = ReportCollector()
        report = p2p_job.measured(copies, node, profile_for(node, os.environ, self._profile), request, collector)
        return Measurements(
            pairs=tuple(collector.pairs),
            evidence=tuple(report.rows(EVIDENCE_SECTION, EvidenceRow)),
            findings=findings_beside_speed(report.findings),
            left_out={Need.HOST_COPIES: "gpubench check measures them"}
            if brief
            else {}
            if several
            else {Need.PEER_COPIES: "one GPU: it has nobody to copy to"},
        )
