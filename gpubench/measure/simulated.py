"""The rows of a collective on a machine that does not exist: a model's times in the place of measured ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpubench.measure.cases import JobFacts, SweepRequest, cases, describe
from gpubench.measure.path_evidence import simulated
from gpubench.measure.path_report import Outcome
from gpubench.model.report import CollectiveRow, Origin, RankIdentity, Report
from gpubench.model.samples import RankTimes, RowTimes
from gpubench.model.selection import Pair
from gpubench.model.topology import Topology
from gpubench.model.verdict import Verdict, overall
from gpubench.model.wiring import Wiring
from gpubench.ports import Listener

BACKEND = "simulated"

Times = Callable[[int, int], Sequence[float]]
"""Seconds by rank of an operation of that many bytes; the second number tells rows apart."""


def simulate(
    request: SweepRequest,
    ranks: int,
    nodes: int,
    times: Times,
    listener: Listener[CollectiveRow],
    outcome: Outcome,
    most_rows: int | None = None,
) -> Report:
    """Have every case of the request last as long as the model says; nothing is moved, so nothing is verified.

    `outcome` is what the model says of paths. No more than `most_rows` are made.
    """
    unchecked = replace(request, check=False)
    job = JobFacts(BACKEND, Origin.SIMULATED, ranks, nodes)
    every_case = tuple(cases(unchecked, ranks))
    for number, case in enumerate(every_case[:most_rows]):
        listener.progress(number, len(every_case), f"{request.collective.name} {case.label}")
        rank_times = RankTimes.of(times(case.size_bytes, number))
        listener.row(describe(unchecked, case, job, RowTimes(rank_times, unchecked.sampling.least_iterations), 0))
    return Report(
        verdict=overall([Verdict.SKIP, *(finding.severity for finding in outcome.findings)]),
        complete=True,
        findings=outcome.findings,
        sections=dict(outcome.sections),
    )


def staged_paths(
    staged: Sequence[Pair],
    identities: Sequence[RankIdentity],
    node: Callable[[int], Topology],
    source: str,
    *,
    strict: bool,
) -> Outcome:
    """What the model says of the pairs of ranks that faults make go through host memory; only their nodes count."""
    used = {identities[rank].node for pair in staged for rank in pair}
    wiring = Wiring(identities, {number: node(number) for number in used})
    return simulated(staged, wiring, source, strict=strict)
