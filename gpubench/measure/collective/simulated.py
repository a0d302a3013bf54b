"""The rows of a collective on a simulated machine: a model's times in place of measured ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import JobFacts, cases, describe
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.samples import RankTimes, RowTimes
from gpubench.model.terms.verdict import Verdict, overall
from gpubench.ports.listener import Listener

BACKEND = "simulated"

Times = Callable[[int, int], Sequence[float]]
"""Seconds by rank of an operation of that many bytes; the second number tells rows apart."""


def simulate(
    request: SweepRequest,
    ranks: int,
    nodes: int,
    times: Times,
    listener: Listener[CollectiveRow],
    outcome: PathOutcome,
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
