"""The rows of a collective on a simulated machine: a model's times in place of measured ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import JobFacts, cases, describe
from gpubench.measure.collective.speed_judge import SpeedJudge, middle
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.samples import RankTimes, RowTimes
from gpubench.model.terms.verdict import Verdict, overall
from gpubench.ports.listener import Listener

BACKEND = "simulated"

MOST_ROWS = 10**6
"""More than any sweep has, to number tries of rows apart from rows."""

Times = Callable[[int, int, int], Sequence[float]]
"""Seconds by rank of an operation of that many bytes; the other numbers tell rows apart, and tries of a row."""


def simulate(
    request: SweepRequest,
    ranks: int,
    nodes: int,
    times: Times,
    listener: Listener[CollectiveRow],
    outcome: PathOutcome,
    speed: SpeedJudge | None,
    keep: Callable[[Sequence[float]], object] = lambda _seconds: None,
    most_rows: int | None = None,
) -> Report:
    """Have every case of the request last as long as the model says; nothing is moved, so nothing is verified.

    Speed is judged as that of measured rows: those near the threshold are made again. `keep` gets the times of every
    row.

    `outcome` is what the model says of paths. No more than `most_rows` are made.
    """
    unchecked = replace(request, check=False)
    job = JobFacts(BACKEND, Origin.SIMULATED, ranks, nodes)
    every_case = tuple(cases(unchecked, ranks))
    rows: list[CollectiveRow] = []
    for number, case in enumerate(every_case[:most_rows]):
        listener.progress(number, len(every_case), f"{request.collective.name} {case.label}")
        tries: list[tuple[CollectiveRow, Sequence[float]]] = []
        while not tries or (speed is not None and speed.wants_another([row for row, _ in tries])):
            seconds = times(case.size_bytes, number, len(tries))
            row_times = RowTimes(RankTimes.of(seconds), unchecked.sampling.least_iterations)
            tries.append((describe(unchecked, case, job, row_times, 0), seconds))
        row, seconds = middle(tries, lambda each: each[0].time_us)
        keep(seconds)
        rows.append(row if speed is None else speed.row(row))
        listener.row(rows[-1])
    findings = outcome.findings if speed is None else speed.findings(outcome.findings, outcome.explained)
    judged = (Verdict(row.verdict) for row in rows if row.verdict is not None)
    return Report(
        verdict=overall([Verdict.SKIP, *judged, *(finding.severity for finding in findings)]),
        complete=True,
        findings=findings,
        sections=dict(outcome.sections),
    )
