"""Judge the rows of a recorded check again, like the command that measured them."""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from gpubench.collectives.record import Collective
from gpubench.collectives.registry import collective_named
from gpubench.conditions.circumstances import Circumstances
from gpubench.jobs.collective.metadata import judge_by_model, speed_judge_maker
from gpubench.measure.collective.recording import SIMULATED_BACKEND
from gpubench.measure.collective.report import ExpectedTimes, SpeedJudge
from gpubench.model.facts.process import RankFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import OF_THE_PAST, ExpectedTime, between_nodes, judge_row
from gpubench.model.terms.operation import algbw_gb_s
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, group_by
from gpubench.model.terms.verdict import Verdict, worst_verdict
from gpubench.profiles import find_gpu_profile
from gpubench.simulated.machine import SimulatedMachine
from gpubench.simulated.times import CollectiveTimes

# Largest ratio between the times that the columns of a row imply. Columns are not rounded, so a larger ratio means that
# one was edited
_MOST_OFF = 1.01


def judge_again(
    rows: Sequence[CollectiveRow],
    nodes: Sequence[Topology],
    facts: Sequence[RankFacts],
    ranks: Sequence[RankIdentity],
    asked: str | None,
) -> tuple[CollectiveRow, ...]:
    """Return the rows with new verdicts, grouped by collective.

    They are judged by the profile `asked`, or by the profile of the machine if `asked` is None.
    """
    found = []
    for name, of_it in group_by(rows, lambda row: row.collective).items():
        collective = collective_named(name)
        bare = [_unjudged(row, collective) for row in of_it]
        judge = _choose_judge(collective, bare[0], nodes, facts, ranks, asked)
        judge.note_tries([(row, 1) for row in bare])
        found += [_judged(row, once, judge, asked) for row, once in zip(of_it, bare, strict=True)]
    return tuple(found)


def _unjudged(row: CollectiveRow, collective: Collective) -> CollectiveRow:
    """Return a row without its verdict on speed. If its time and bandwidths contradict each other, use the slowest."""
    factor = collective.busbw_factor(row.ranks)
    is_right = None if row.wrong is None else Verdict.PASS
    bare = replace(
        row,
        expected_us=None,
        expected_gb_s=None,
        expected_percent=None,
        expected_source=None,
        verdict=Verdict.FAIL if row.wrong else is_right,
    )
    figures = (row.algbw_gb_s, row.busbw_gb_s / factor if row.busbw_gb_s and factor else None)
    times = [row.time_us, *(row.size_bytes / figure / 1e3 for figure in figures if figure)]
    if max(times) < _MOST_OFF * min(times):
        return bare
    algbw = algbw_gb_s(row.size_bytes, max(times) / MICROSECONDS_PER_SECOND)
    busbw = None if row.busbw_gb_s is None else algbw * factor
    percent = None if not row.limit_gb_s else 100 * (algbw if busbw is None else busbw) / row.limit_gb_s
    return replace(bare, time_us=max(times), algbw_gb_s=algbw, busbw_gb_s=busbw, limit_percent=percent)


def _choose_judge(
    collective: Collective,
    row: CollectiveRow,
    nodes: Sequence[Topology],
    facts: Sequence[RankFacts],
    ranks: Sequence[RankIdentity],
    asked: str | None,
) -> SpeedJudge:
    per_node, rest = divmod(row.ranks, row.nodes)
    models = sorted({gpu.name for gpu in nodes[0].gpus if gpu.name})
    profile = None if rest else find_gpu_profile(models, per_node, nodes[0], os.environ, asked)
    if row.backend == SIMULATED_BACKEND and profile is not None:
        times = CollectiveTimes(SimulatedMachine(profile, row.nodes))
        return judge_by_model(collective, times, nodes, per_node, profile)
    if len(ranks) == row.ranks:
        circumstances = Circumstances(wiring=Wiring(ranks, dict(enumerate(nodes))), facts=facts)
        return speed_judge_maker(collective, ranks, None, asked)(circumstances)
    return SpeedJudge(ExpectedTimes(collective=collective, profile=profile), ())


def _judged(recorded: CollectiveRow, bare: CollectiveRow, judge: SpeedJudge, asked: str | None) -> CollectiveRow:
    """Return a row with its new verdict, or judged by its recorded expectation if there is no new one.

    A recorded check has no NCCL version, so the recorded verdict is kept if it is worse.
    """
    row = judge.row(bare)
    if row.expected_us is None and recorded.expected_us is not None and recorded.verdict is not None:
        tolerance = OF_THE_PAST if bare.nodes == 1 else between_nodes(bare.size_bytes)
        row = judge_row(bare, ExpectedTime(recorded.expected_us, recorded.expected_source or "recorded", tolerance))
    if asked is None and recorded.verdict is not None and row.verdict is not None:
        row = replace(row, verdict=worst_verdict([Verdict(recorded.verdict), Verdict(row.verdict)]))
    return row
