"""What follows from what a witness knows: for every row that is measured, and in the end for all paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpubench.conditions.circumstances import Circumstances
from gpubench.measure.collective.cases import Case, SweepRequest
from gpubench.measure.collective.counting import Traffic
from gpubench.measure.collective.logged_choices import Choice, LoggedChoices, key_of
from gpubench.measure.collective.path_evidence import RowObservations, conclude
from gpubench.measure.paths.report import PathOutcome
from gpubench.model.paths.busbw_limit import Work, busbw_limit, exchange_limit
from gpubench.model.paths.selection import Used, without_idle
from gpubench.model.paths.topology import Limit
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.winners import took_another
from gpubench.model.terms.nccl_choice import AGAIN, taken_name
from gpubench.model.terms.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PathObservations:
    """What was found out of paths before anything was timed, as the first rank knows it.

    `heard` is of the library's own choice, `under` of settings by name. `due` are each rank's sent and received bytes
    for a byte of the size, at least; `traffic` is what each rank's GPU counted.
    """

    heard: LoggedChoices
    under: Mapping[str, LoggedChoices] = field(default_factory=dict)
    due: Sequence[tuple[float, float]]
    traffic: Sequence[Traffic]
    around: Circumstances


class PathJudge:
    """Has a testimony, and sees all rows. With `strict` paths are judged."""

    def __init__(
        self, request: SweepRequest, testimony: PathObservations, *, strict: bool, origin: Origin = Origin.MEASURED
    ) -> None:
        self.testimony = testimony
        self.strict = strict
        self._request = request
        self._origin = origin
        self._seen = RowObservations(testimony.traffic)
        self._limits: dict[tuple[str | None, int], Limit] = {}

    def row(self, case: Case, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> CollectiveRow:
        """The row with what is known of its paths."""
        if case.setting is None:
            self._seen.take(row, wrong_by_rank)
        known = self.testimony
        heard = known.heard if case.setting in (None, AGAIN) else known.under.get(str(case.setting), LoggedChoices())
        choice = heard.choices.get(key_of(case))
        return row if choice is None else _remarked(limited(choice.told(row), self._limit(choice)))

    def _limit(self, choice: Choice) -> Limit:
        """The ceiling of busbw; found out once for all operations that are done alike."""
        algorithm = None if choice.tuning is None else choice.tuning.algorithm
        key = algorithm, id(choice.used)
        if key not in self._limits:
            self._limits[key] = self._limit_of(algorithm, choice.used)
        return self._limits[key]

    def _limit_of(self, algorithm: str | None, used: Used) -> Limit:
        collective, known = self._request.collective, self.testimony
        wiring = known.around.wiring
        if len(known.due) == 1:
            return Limit(None, "one rank: nothing passes a link")
        if collective.point_to_point:
            work = Work(collective.busbw_factor(len(known.due)), known.due)
            return exchange_limit(work, used.pairs, wiring)
        if algorithm is None:
            return Limit(None, f"the algorithm is not known: {known.heard.no_tuning or 'NCCL named none'}")
        return busbw_limit(algorithm, without_idle(used.pairs, known.due), wiring)

    def outcome(self) -> PathOutcome:
        """What follows from all of it."""
        known = self.testimony
        return conclude(known.heard, self._seen, known.around, known.due, strict=self.strict, origin=self._origin)


def _remarked(row: CollectiveRow) -> CollectiveRow:
    """The row with a word about it, where the library did not do as it was told."""
    if not took_another(row):
        return row
    taken = taken_name(row.algorithm, row.protocol)
    return replace(row, note="; ".join(filter(None, (f"asked for {row.setting}, NCCL took {taken}", row.note))))


def limited(row: CollectiveRow, limit: Limit) -> CollectiveRow:
    """A row with the ceiling of its busbw, or why that is not known, behind what is to be said of it besides."""
    if limit.gb_s is None:
        return replace(row, note="; ".join(filter(None, (row.note, limit.note))) or None)
    return replace(row, limit_gb_s=limit.gb_s, limit_percent=100 * row.busbw_gb_s / limit.gb_s)
