"""The judgement of paths from observations: for every row as it is measured, and in the end for all paths."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.collectives.request import SweepRequest
from gpubench.conditions.definition.circumstances import IssueTime
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.logged_choices import Choice, LoggedChoices, key_of
from gpubench.measure.collective.path_evidence import PathObservations, RowObservations, conclude
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.busbw_limit import Work, busbw_limit, exchange_limit, network_limit, networks
from gpubench.model.paths.selection import Used, without_idle
from gpubench.model.paths.topology import Limit
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.results.winners import took_another
from gpubench.model.terms.nccl_choice import AGAIN, taken_name
from gpubench.model.terms.origin import Origin


class PathJudge:
    """Fills in what is known of each row's paths, and judges them in the end."""

    def __init__(
        self, request: SweepRequest, observations: PathObservations, *, origin: Origin = Origin.MEASURED
    ) -> None:
        self.observations = observations
        self._request = request
        self._origin = origin
        self._rows = RowObservations()
        self._limits: dict[tuple[str | None, str | None], Limit] = {}

    def row(self, case: Case, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> CollectiveRow:
        """The row with what is known of its paths, which are judged by it too."""
        if case.setting is None:
            self._rows.add(row, wrong_by_rank)
        return self.described(case, row)

    def described(self, case: Case, row: CollectiveRow) -> CollectiveRow:
        """The row with the choices of the library, and its limit."""
        setting = None if case.setting == AGAIN else case.setting
        if setting is None and self.heard(row.backend):
            setting = row.backend
        choices = self.observations.choices
        if setting is not None:
            choices = self.observations.choices_by_setting.get(setting, LoggedChoices())
        choice = choices.by_operation.get(key_of(case))
        return row if choice is None else _remarked(limited(choice.in_row(row), self._limit(setting, choice)))

    def heard(self, backend: str) -> bool:
        """True of a backend beside the first whose choices were logged too."""
        return backend in self.observations.choices_by_setting

    def _limit(self, setting: str | None, choice: Choice) -> Limit:
        """The ceiling of busbw; operations with one algorithm under one setting have the same."""
        key = setting, None if choice.tuning is None else choice.tuning.algorithm
        if key not in self._limits:
            self._limits[key] = self._limit_of(key[1], choice.used)
        return self._limits[key]

    def _limit_of(self, algorithm: str | None, used: Used) -> Limit:
        collective, expected_bytes = self._request.collective, self.observations.expected_bytes
        wiring = self.observations.circumstances.wiring
        if len(expected_bytes) == 1:
            return Limit(None, ONE_RANK)
        if why := wiring.why_not_judged:
            return Limit(None, f"no limit: {why}")
        joined = networks(wiring)
        if joined is not None and joined[0].nodes > 1:
            return network_limit(algorithm, collective, joined[0])
        if collective.point_to_point:
            work = Work(collective.busbw_factor(len(expected_bytes)), expected_bytes)
            return exchange_limit(work, used.pairs, wiring)
        if algorithm is None:
            reason = self.observations.choices.no_tuning or "NCCL named none"
            return Limit(None, f"the algorithm is not known: {reason}")
        return busbw_limit(algorithm, without_idle(used.pairs, expected_bytes), wiring)

    def add_idle(self, after: Sequence[IdleGpu]) -> None:
        """Add what was seen of the ranks' GPUs after the last row, while no operation ran."""
        self.observations = self.observations.with_idle(after)

    def outcome(self, slow: Sequence[CollectiveRow] = ()) -> PathOutcome:
        """The verdict on all paths, and the causes of what they do; of rows that are `slow` too."""
        around = replace(self.observations.circumstances, issued=IssueTime.of(slow))
        observed = replace(self.observations, circumstances=around)
        return conclude(observed, self._rows, origin=self._origin)


def _remarked(row: CollectiveRow) -> CollectiveRow:
    """The row with a note where the library did not take the setting."""
    if not took_another(row):
        return row
    taken = taken_name(row.algorithm, row.protocol)
    return replace(row, note="; ".join(filter(None, (f"asked for {row.setting}, NCCL took {taken}", row.note))))


def limited(row: CollectiveRow, limit: Limit) -> CollectiveRow:
    """A row with the ceiling of its busbw, or with a note why that is not known."""
    if limit.gb_s is None:
        why = "" if limit.note in (row.note or "") else limit.note
        return replace(row, note="; ".join(filter(None, (row.note, why))) or None)
    return replace(row, limit_gb_s=limit.gb_s, limit_percent=100 * row.reached_gb_s / limit.gb_s)
