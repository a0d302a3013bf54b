"""What `gpubench check` would measure on a machine that does not exist."""

import os
from collections.abc import Sequence
from dataclasses import replace

from gpubench.collectives.record import Collective
from gpubench.errors import GpubenchError
from gpubench.hardware.simulated.copies import SimulatedCopies
from gpubench.hardware.simulated.machine import SimulatedMachine
from gpubench.hardware.simulated.times import CollectiveTimes
from gpubench.jobs.check.plan import CheckMeasurements
from gpubench.jobs.check.repeats import measure_with_repeats
from gpubench.jobs.p2p import job as p2p_job
from gpubench.measure.check.documents import findings_beside_speed, together
from gpubench.measure.collective.cases import SweepRequest
from gpubench.measure.collective.simulated import simulate
from gpubench.measure.p2p.request import Method, P2pRequest, default_series
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import Fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measurements import Measurements, Need
from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Report, Table
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.copies import CopyPattern
from gpubench.profiles.nodes import profile_for

_PAIR_BYTES, _HOST_BYTES = 256 * 2**20, 64 * 2**20


class _Rows:
    """A listener that keeps the rows."""

    def __init__(self) -> None:
        self.pairs: list[PairRow] = []
        self.collectives: list[CollectiveRow] = []

    def begin(self, metadata: Metadata) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: PairRow | CollectiveRow) -> None:
        """Keep it."""
        if isinstance(row, PairRow):
            self.pairs.append(row)
        else:
            self.collectives.append(row)

    def end(self, report: Report) -> None:
        """Nothing."""


def measured(
    machine: SimulatedMachine,
    faults: Sequence[Fault],
    seed: int,
    nodes: Sequence[Snapshot],
    plan: CheckMeasurements,
    *,
    noise: float | None = None,
    profile: Profile | None = None,
) -> Measurements:
    """Copies on every node, and collectives over all of them; `noise` is the spread of every sample.

    `profile` is what rows are near to or not, and so are measured again.
    """
    parts = [_copies(machine, faults, seed, number, node, plan, noise) for number, node in enumerate(nodes)]
    parts.append(_collectives(machine, faults, seed, nodes, plan, noise, profile))
    no_data = "no data are moved on a simulated machine"
    parts.append(Measurements(left_out=dict.fromkeys((Need.VERIFIED_DATA, Need.HOST_MEMORY), no_data)))
    return together(parts)


def _copies(
    machine: SimulatedMachine,
    faults: Sequence[Fault],
    seed: int,
    number: int,
    snapshot: Snapshot,
    plan: CheckMeasurements,
    noise: float | None,
) -> Measurements:
    """What the GPUs of a node copy; one whose driver does not tell of its GPUs cannot be measured."""
    if snapshot.failures or snapshot.driver.absent:
        return Measurements(failed=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), f"{snapshot.host}: no driver"))
    spread = {} if noise is None else {"noise": noise}
    copies = SimulatedCopies(machine, faults, seed, node=number, **spread)
    if not copies.gpus:
        return Measurements(left_out=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "no GPU"))
    gpus = range(len(copies.gpus))
    several = len(copies.gpus) > 1
    request = P2pRequest(
        pairs=tuple((one, other) for one in gpus for other in gpus if one != other),
        series=default_series(_PAIR_BYTES, sm=plan.full) if several else (),
        host_bytes=_HOST_BYTES,
        patterns=tuple(CopyPattern) if plan.full and several else (),
        pattern_bytes=_PAIR_BYTES,
        method=Method(repeats=1),
        check=False,
    )
    heard = _Rows()
    node = Topology(snapshot)
    report = p2p_job.measured(copies, node, profile_for(node, os.environ), request, heard)
    section = report.sections[EVIDENCE_SECTION]
    rows = section.rows() if isinstance(section, Table) else ()
    return Measurements(
        pairs=tuple(heard.pairs),
        evidence=tuple(row for row in rows if isinstance(row, EvidenceRow)),
        findings=findings_beside_speed(report.findings),
        left_out={} if several else {Need.PEER_COPIES: "one GPU: it has nobody to copy to"},
    )


def _collectives(
    machine: SimulatedMachine,
    faults: Sequence[Fault],
    seed: int,
    nodes: Sequence[Snapshot],
    plan: CheckMeasurements,
    noise: float | None,
    profile: Profile | None,
) -> Measurements:
    times = CollectiveTimes(machine, faults, seed, noise=noise)
    ranks = times.gpus * machine.nodes
    if ranks < 2:
        return Measurements(left_out={Need.ALL_REDUCE: "one GPU: it has nobody to talk to"})
    if any(node.failures or node.driver.absent for node in nodes):
        return Measurements(failed={Need.ALL_REDUCE: "a node's driver does not answer"})
    limit = plan.limit_gb_s([Topology(node) for node in nodes])

    def rows(collective: Collective, sizes: Sequence[int], attempt: int) -> list[CollectiveRow]:
        heard = _Rows()
        simulate(
            SweepRequest(collective=collective, sizes=tuple(sizes), check=False),
            ranks,
            machine.nodes,
            lambda size, row: times.seconds(collective.name, size, row=1000 * attempt + row),
            heard,
            PathOutcome({}, ()),
        )
        return [replace(row, limit_gb_s=limit) for row in heard.collectives]

    try:
        found = [row for each in plan.collectives for row in measure_with_repeats(each, plan.sizes, rows, profile)]
    except GpubenchError as error:
        return Measurements(failed={Need.ALL_REDUCE: error.seen})
    return Measurements(collectives=tuple(found))
