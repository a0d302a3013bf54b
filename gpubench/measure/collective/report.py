"""Collect the rows of a sweep, judge their speed, and build the report."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import Collective, SweepRequest
from gpubench.measure.collective.cases import Answer, Case, JobFacts, OwnTimes, RankTimings, describe
from gpubench.model.paths.transport import Confidence
from gpubench.model.results.neighbours import LONE, RowPlace, lone_slow_rows, shows_more
from gpubench.model.results.report import CollectiveRow, Effect, Report
from gpubench.model.results.speed import (
    LAUNCH_OF_SENDS_US,
    LAUNCH_US,
    ExpectedTime,
    Slowness,
    add_expectation,
    is_judged,
    is_lost_in_noise,
    is_slow,
    judge_row,
    refuse_above_limit,
    times_limit,
)
from gpubench.model.terms.operation import TORCH_NCCL, DataType, Placement, ReduceOp, describe_composition
from gpubench.model.terms.ranks import GPUS_ARE_SPLIT, DevicePlace, Phase, Progress, RankIdentity
from gpubench.model.terms.statistics import RankTimes
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_size, plural, shorten
from gpubench.model.terms.verdict import (
    HOST_STAGED,
    SLOW_UNEXPLAINED,
    STRAGGLER,
    WRONG_DATA,
    Cure,
    Finding,
    Verdict,
    parse_doubt,
    worst_row_verdict,
    worst_verdict,
)
from gpubench.ports.group import Listener

if TYPE_CHECKING:
    from gpubench.measure.collective.paths import PathJudge, PathObservations
    from gpubench.measure.paths import Explained
    from gpubench.model.facts.traffic import IdleGpu
    from gpubench.model.paths.wiring import NodeNetwork
    from gpubench.model.profiles.profile import Profile
    from gpubench.model.results.backends import RefusedRow


_MOST_TRIES = 3

_SIMULATED, _HOST = "simulated", "host"
_NCCL_BACKENDS = ("nccl", "rccl", _SIMULATED)  # Profiles and link limits apply to these backends
T = TypeVar("T")


def middle(tries: Sequence[T], time_of: Callable[[T], float]) -> T:
    """Return the try with the median time. Of two tries, return the faster one."""
    return sorted(tries, key=time_of)[(len(tries) - 1) // 2]


class ExpectedTimes(Struct, frozen=True, kw_only=True):
    """The sources from which a row's expected time can be derived.

    `past` returns the time from earlier runs on this machine. `unlike` is the reason why nothing can be expected.
    `assumed` names what was assumed about the NICs. `launches` is the number of GPUs on which one thread launches.
    """

    collective: Collective
    profile: "Profile | None" = None
    nccl: str | None = None
    past: Callable[[CollectiveRow], ExpectedTime | None] = lambda _row: None
    network: "NodeNetwork | None" = None
    unlike: str = ""
    assumed: str = ""
    launches: int = 1

    def of(self, row: CollectiveRow) -> ExpectedTime | None:
        """Return the expected time of a row, or None if no source provides one."""
        found = None if self.unlike or row.ranks == 1 else self._known(row)
        if found is not None and self.launches > 1:
            launch_us = LAUNCH_OF_SENDS_US if self.collective.point_to_point else LAUNCH_US
            found = found.add_launch_time(self.launches, launch_us)
        return found.doubted(self.assumed) if found is not None and self.assumed and row.nodes > 1 else found

    def _known(self, row: CollectiveRow) -> ExpectedTime | None:
        if row.backend not in _NCCL_BACKENDS and not _is_one_nccl_call(row):
            found = self.past(row)
            if found is None and self.network is not None and row.backend == _HOST:
                from gpubench.collectives.expected import time_from_links

                found = time_from_links(self.collective, row, self.network)
            return found
        from gpubench.collectives.expected import time_from_limit, time_from_network, time_from_profile

        found, like_model = None, row.backend == _SIMULATED
        if self.profile is not None:
            found = time_from_profile(self.profile, self.collective, row, nccl=self.nccl, like_model=like_model)
        found = found or self.past(row)
        if found is None and self.network is not None:
            found = time_from_network(
                self.collective, row, self.network, self.profile, like_model=like_model, nics_known=not self.assumed
            )
        return found or time_from_limit(self.collective, row)


def _is_one_nccl_call(row: CollectiveRow) -> bool:
    """True if a framework passes the operation to NCCL in a single call."""
    op = None if row.op is None else ReduceOp(row.op)
    parts = describe_composition(row.backend, row.collective, DataType(row.dtype), op, Placement(row.placement))
    return row.backend == TORCH_NCCL and not parts


_LEAST_STAGED_PERCENT = 75.0
"""Below this percentage of the expected speed, a host-staged row is no PASS, although small sizes have wide tolerances.
With NCCL_P2P_DISABLE=1, 1 KiB on two H200s took 1.7 times as long as expected, which a slow host could explain.
"""
_STAGED = "not judged: through host memory, and slower than expected"


class SpeedJudge(Struct):
    """Judges the speed of a sweep's rows and explains slow rows. A framework's rows next to NCCL's are not judged.

    `turns_on_cpus` is a note if ranks of the host backend share too few CPUs, or empty.
    """

    expected: ExpectedTimes
    hosts: Sequence[str]
    ranks: Sequence[RankIdentity] = ()
    turns_on_cpus: str = ""
    slow: list[CollectiveRow] = field(default_factory=list)
    _rows: list[CollectiveRow] = field(default_factory=list)
    _lone: frozenset[RowPlace] = frozenset()
    _first: str | None = None

    def note_tries(self, rows: Sequence[tuple[CollectiveRow, int]]) -> None:
        """Find single slow rows in a finished run. They become inconclusive if they were measured only once."""
        known = ((row, self.expected.of(row)) for row, _ in rows if is_judged(row))
        verdicts = {RowPlace.of(row): expected.verdict(row) for row, expected in known if expected is not None}
        once = {RowPlace.of(row) for row, tries in rows if tries == 1}
        self._lone = lone_slow_rows(verdicts) & once

    def needs_repetition(self, tries: Sequence[CollectiveRow]) -> bool:
        """True if a row is nearly slow or its tries disagree.

        Host-staged rows and rows with wrong data are never repeated.
        """
        first, *more = tries
        if not is_judged(first) or any(row.wrong or row.host_staged for row in tries) or len(tries) >= _MOST_TRIES:
            return False
        expected = self.expected.of(first)
        if expected is None:
            return all(is_lost_in_noise(row.ci95_percent) for row in tries)
        return (not more and expected.needs_repetition(first)) or len({expected.verdict(row) for row in tries}) > 1

    def row(self, row: CollectiveRow) -> CollectiveRow:
        """Return the row with its expected value and verdict. Rows that are only compared get no verdict on speed."""
        self._first = self._first or row.backend
        expected = self.expected.of(row)
        is_only_compared = row.backend == TORCH_NCCL and self._first != TORCH_NCCL
        if is_only_compared or not is_judged(row):
            return row if expected is None else add_expectation(row, expected)
        if expected is not None:
            row = judge_row(row, expected)
        else:
            if self.expected.unlike == GPUS_ARE_SPLIT:
                row = _add_note(row, GPUS_ARE_SPLIT)
            if not row.wrong and row.ranks > 1 and is_lost_in_noise(row.ci95_percent):
                row = replace(row, verdict=Verdict.INCONCLUSIVE)
        if self.turns_on_cpus and row.backend == _HOST and not row.wrong:
            row = replace(_add_note(row, self.turns_on_cpus), verdict=Verdict.INCONCLUSIVE)
        if is_slow(row) and RowPlace.of(row) in self._lone:
            row = replace(_add_note(row, LONE), verdict=Verdict.INCONCLUSIVE)
        is_below = parse_doubt(row.note) or (row.expected_percent or 100.0) < _LEAST_STAGED_PERCENT
        if row.host_staged and row.verdict == Verdict.PASS and is_below:
            row = replace(_add_note(row, _STAGED), verdict=None)
        if is_slow(row):
            self.slow.append(row)
        self._rows.append(row)
        return row

    def findings(self, found: Sequence[Finding], explained: "Explained | None") -> tuple[Finding, ...]:
        """Return all findings of the sweep, in which slow rows are added to the finding that explains them.

        If any row is slow, do not report inconclusive rows.
        """
        found = self._explain_slow_rows(found, explained)
        if not shows_more(self._rows):  # Skip the import, which takes a third of a rank's import time
            return found
        from gpubench.conditions.measured import sweep_findings

        rows = [row for row in self._rows if not (self.slow and row.verdict == Verdict.INCONCLUSIVE)]
        return (*found, *sweep_findings(rows, self.ranks))

    def _explain_slow_rows(self, found: Sequence[Finding], explained: "Explained | None") -> tuple[Finding, ...]:
        """Add slow rows to the finding on host-staged paths, or report their cause, or report them as unexplained."""
        if not self.slow:
            return tuple(found)
        slowness = Slowness.of(self.slow)
        for number, finding in enumerate(found):
            if finding.id == HOST_STAGED and finding.severity is Verdict.FAIL:
                staged = replace(finding, consequences=(*finding.consequences, str(slowness)))
                return (*found[:number], staged, *found[number + 1 :])
        where = self.hosts[0] if len(self.hosts) == 1 else plural(len(self.hosts), "host")
        cause, why = None, _NOT_LOOKED_AT
        if explained is not None:
            causes = explained.add_slow_rows(slowness.rows).slowing(
                small=slowness.is_of_small, percent=slowness.percent
            )
            cause = next((cause for cause in causes if cause.confidence is not Confidence.WEAK), None)
            weak = [cause.seen for cause in explained.diagnosis.of_effect(Effect.SLOW)]
            perhaps = f"; perhaps {', or '.join(weak)}" if weak else ""
            why = f"no setting, process, device or link that could be read explains it{perhaps}"
        if cause is None:
            places = tuple(map(DevicePlace, self.hosts))
            unexplained = slow_unexplained(slowness, where, why)
            return (*found, replace(unexplained, subjects=tuple(self.hosts), places=places))
        from gpubench.conditions.checks import merged
        from gpubench.conditions.condition import NONE_EXPECTED

        first, *others = merged(
            replace(finding, expected=slowness.expected) if finding.expected == NONE_EXPECTED else finding
            for finding in cause.findings()
        )
        severity = worst_verdict((slowness.severity, first.severity))
        return (*found, replace(first, severity=severity, consequences=(str(slowness),)), *others)


def _add_note(row: CollectiveRow, note: str) -> CollectiveRow:
    return replace(row, note="; ".join(filter(None, (row.note, note))))


_NOT_LOOKED_AT = "unknown: neither paths nor settings were examined"
_ADVICE = Cure.of(
    "gpubench p2p",
    comment="It finds a slow pair. `gpubench check` reads clocks, links and errors. With NCCL_DEBUG=INFO "
    "NCCL_DEBUG_SUBSYS=INIT,TUNING, NCCL logs its choices.",
)


def slow_unexplained(slowness: Slowness, where: str, why: str = _NOT_LOOKED_AT) -> Finding:
    """Return the finding on rows that are slow for an unknown reason."""
    return Finding(
        id=SLOW_UNEXPLAINED,
        severity=slowness.severity,
        subject=slowness.subject(where),
        seen=slowness.seen,
        expected=slowness.expected,
        cause=why,
        cure=_ADVICE,
        expected_percent=slowness.percent,
    )


class RowSample(Struct, frozen=True, forbid_unknown_fields=True):
    """The times of a row, with one answer per rank. `tries` is the number of times that the row was measured."""

    own: OwnTimes
    answers: tuple[Answer, ...]
    tries: int = 1

    def row(self, request: SweepRequest, case: Case, job: JobFacts) -> CollectiveRow:
        ranks = RankTimes.of([answer.seconds for answer in self.answers])
        row = describe(request, case, job, self.own, ranks, sum(answer.wrong for answer in self.answers))
        if self.tries > 1:
            row = _add_note(row, f"measured {self.tries} times")
        issued = [answer.issue_seconds for answer in self.answers if answer.issue_seconds is not None]
        return replace(row, issue_us=MICROSECONDS_PER_SECOND * max(issued)) if issued else row


class MeasuredRow(Struct, frozen=True):
    """A measured row. `sample` is None on all ranks but the first."""

    row: CollectiveRow
    sample: RowSample | None


class Recorder:
    """The interface for recording the inputs of rows and verdicts.

    Every rank calls it. This base class records nothing.
    """

    def begin(self, observations: "PathObservations | None", refused: "Sequence[RefusedRow] | None") -> None:
        """Record the observations from before the first row. `refused` is None for a sweep of one variant."""

    def row(self, case: Case, measured: MeasuredRow) -> None: ...

    def end(self, idle: "Sequence[IdleGpu]") -> None:
        """Record the state of idle GPUs after the last row."""


NO_RECORDER = Recorder()


class RowCollector:
    """Passes rows to the listener as they are measured, and builds the report. Only the first rank has judges."""

    def __init__(
        self,
        identities: Sequence[RankIdentity],
        listener: Listener[CollectiveRow],
        judge: "PathJudge | None",
        recorder: Recorder = NO_RECORDER,
        refused: "Sequence[RefusedRow] | None" = None,
        speed: "SpeedJudge | None" = None,
    ) -> None:
        self._identities, self._listener, self._judge, self._recorder = identities, listener, judge, recorder
        self._speed = speed
        self._rank_timings = RankTimings(identities)
        self._verdicts: list[Verdict] = []
        self._above: list[CollectiveRow] = []
        self._failures: list[tuple[CollectiveRow, Sequence[int]]] = []
        recorder.begin(None if judge is None else judge.observations, refused)

    def needs_repetition(self, case: Case, tries: Sequence[MeasuredRow], *, observed: bool = True) -> bool:
        """True if a case should be repeated because it is nearly slow or its tries disagree."""
        if self._speed is None:
            return False
        rows = [measured.row for measured in tries]
        if self._judge is not None and (observed or self._judge.has_log_of(rows[0].backend)):
            rows = [self._judge.describe(case, row) for row in rows]
        return self._speed.needs_repetition(rows)

    def note_tries(self, rows: Sequence[tuple[CollectiveRow, int]]) -> None:
        if self._speed is not None:
            self._speed.note_tries(rows)

    def add(self, case: Case, measured: MeasuredRow, progress: Progress, *, observed: bool = True) -> CollectiveRow:
        """Complete a row with path columns, if observed, and its verdict. Pass it to the listener, and return it."""
        row, answers = measured.row, () if measured.sample is None else measured.sample.answers
        wrong_by_rank = [answer.wrong for answer in answers]
        if answers:
            self._rank_timings.add(row, answers)
        progress.enter(Phase.OUTPUT, case.label)
        self._recorder.row(case, measured)
        if self._judge is not None and observed:
            row = self._judge.row(case, row, wrong_by_rank)
        elif self._judge is not None and self._judge.has_log_of(row.backend):
            row = self._judge.describe(case, row)
        row = refuse_above_limit(row)
        if times_limit(row) is not None:
            self._above.append(row)
        elif self._speed is not None:
            row = self._speed.row(row)
        self._listener.row(row)
        self._verdicts.append(Verdict(row.verdict) if row.verdict else Verdict.SKIP)
        if row.wrong and answers:
            self._failures.append((row, wrong_by_rank))
        return row

    def channels(self, case: Case, row: CollectiveRow) -> int | None:
        """Return the number of channels that NCCL logged for a case, or None if unknown."""
        return None if self._judge is None else self._judge.describe(case, replace(row, channels=None)).channels

    def after_rows(self, idle: "Sequence[IdleGpu] | None") -> None:
        """Add the state of idle GPUs after the last row. `idle` is None on all ranks but the first."""
        if idle and self._judge is not None:
            self._judge.add_idle(idle)
            self._recorder.end(idle)

    def report(self) -> Report:
        from gpubench.measure.path_outcome import PathOutcome

        wrong = (wrong_data(self._failures, self._identities),) if self._failures else ()
        above: tuple[Finding, ...] = ()
        if self._above:
            from gpubench.conditions.measured import impossible

            above = impossible(collectives=self._above)
        paths = (
            PathOutcome({}, ())
            if self._judge is None
            else self._judge.outcome([] if self._speed is None else self._speed.slow)
        )
        found = paths.findings if self._speed is None else self._speed.findings(paths.findings, paths.explained)
        verdict = worst_verdict([worst_row_verdict(self._verdicts), *(finding.severity for finding in found)])
        is_named = any(finding.id == STRAGGLER for finding in found)
        late = () if is_named else self._rank_timings.findings()
        return Report(
            verdict=worst_verdict([verdict, *(finding.severity for finding in late)]),
            complete=True,
            findings=(*wrong, *above, *found, *late),
            sections={**paths.sections, **self._rank_timings.sections()},
        )


ALL_CORRECT = "every element correct"
CORRUPTED = "data corrupted by a GPU, a link, ACS or an IOMMU, or a bug in the library"


def wrong_data_cure(command: str) -> Cure:
    return Cure.of(
        command,
        comment="Then run it with NCCL_P2P_DISABLE=1. If the data are then correct, peer copies are at fault.",
    )


def wrong_data(failures: Sequence[tuple[CollectiveRow, Sequence[int]]], identities: Sequence[RankIdentity]) -> Finding:
    """Return the finding on rows with wrong elements. `failures` are pairs of a row and its wrong elements per rank."""
    row, wrong_by_rank = failures[0]
    wrong_ranks = [identities[rank] for rank, wrong in enumerate(wrong_by_rank) if wrong]
    total = sum(failure.wrong or 0 for failure, _ in failures)
    wrong, size, placement = (
        plural(total, "wrong element"),
        format_size(row.size_bytes),
        row.placement.replace("_", " "),
    )
    size = f"{size} B" if size.isdigit() else size
    ranks = tuple(map(str, wrong_ranks))
    return Finding(
        id=WRONG_DATA,
        severity=Verdict.FAIL,
        subject=shorten(ranks) or plural(len(identities), "rank"),
        subjects=ranks if len(ranks) > 1 else (),
        seen=f"{wrong} in {plural(len(failures), 'row')} (first at {size}, {row.dtype}, {placement})",
        expected=ALL_CORRECT,
        cause=CORRUPTED,
        cure=wrong_data_cure(f"gpubench {row.command} --sizes {row.size_bytes} --dtype {row.dtype}"),
        places=tuple(identity.place for identity in wrong_ranks or identities),
    )
