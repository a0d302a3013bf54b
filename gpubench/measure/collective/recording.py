"""Record, check and replay the samples of a collective, and simulate its rows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import field
from msgspec.structs import replace

from gpubench.collectives.record import Asked, Collective, SweepRequest
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import UsageError, add_advice
from gpubench.measure.collective import paths
from gpubench.measure.collective.cases import (
    RECORDING_VERSION,
    Case,
    DescribedCollective,
    JobFacts,
    OwnTimes,
    cases,
    describe,
    drop_empty_sizes,
)
from gpubench.measure.collective.report import MeasuredRow, RowCollector, RowSample, SpeedJudge, middle, wrong_data
from gpubench.measure.collective.variants import NamedRows, PartReport, SiblingJudge, add_winners, merge_parts
from gpubench.measure.path_outcome import PathOutcome, unwatched
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.transport import Pair, Transport, Tuning, Used
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.ranks import UNWATCHED, RankGroup, RankIdentity, check_hosts
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.statistics import Percentiles, RankTimes, Sampling
from gpubench.model.terms.units import MOST_SIZES, plural
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict, worst_row_verdict, worst_verdict
from gpubench.ports.backend import LibraryLog
from gpubench.ports.group import Listener
from gpubench.readers.documents import check_version, read_json_line, walk_values


class RecordedPairs(Struct, frozen=True):
    """The ordered pairs of ranks that use the same transports."""

    transports: tuple[Transport, ...]
    pairs: tuple[tuple[int, ...], ...]


class RecordedUse(Struct, frozen=True):
    """The connections of an operation, grouped by transport. `unheard` are ranks without a connection in the log."""

    connections: tuple[RecordedPairs, ...]
    unheard: tuple[int, ...] = ()

    @classmethod
    def of(cls, used: Used) -> "RecordedUse":
        by_transports: dict[tuple[Transport, ...], list[Pair]] = {}
        for pair, transports in used.pairs.items():
            by_transports.setdefault(transports, []).append(pair)
        connections = tuple(RecordedPairs(transports, tuple(pairs)) for transports, pairs in by_transports.items())
        return cls(connections, used.unconnected)

    def restore(self) -> Used:
        pairs = {
            (source, destination): connection.transports
            for connection in self.connections
            for source, destination in connection.pairs
        }
        return Used({pair: pairs[pair] for pair in sorted(pairs)}, self.unheard)


class RecordedChoice(Struct, frozen=True):
    """The library's choice for an operation. `use` is an index into `RecordedLoggedChoices.uses`."""

    dtype: DataType
    op: ReduceOp | None
    size_bytes: int
    use: int
    tuning: Tuning | None = None


class RecordedLoggedChoices(Struct, frozen=True):
    """All choices of the library. `silence` is the reason why a rank's log could not be read, or empty."""

    uses: tuple[RecordedUse, ...] = ()
    choices: tuple[RecordedChoice, ...] = ()
    silence: str = ""
    no_tuning: str = ""

    @classmethod
    def of(cls, logged: paths.LoggedChoices) -> "RecordedLoggedChoices":
        uses = list(paths.distinct_uses(logged))
        choices = (
            RecordedChoice(dtype, op, size_bytes, uses.index(choice.used), choice.tuning)
            for (dtype, op, size_bytes), choice in logged.by_operation.items()
        )
        return cls(tuple(map(RecordedUse.of, uses)), tuple(choices), logged.no_log, logged.no_tuning)

    def restore(self) -> paths.LoggedChoices:
        uses = [use.restore() for use in self.uses]
        choices = {
            (choice.dtype, choice.op, choice.size_bytes): paths.Choice(uses[choice.use], choice.tuning)
            for choice in self.choices
        }
        return paths.LoggedChoices(choices, self.silence, self.no_tuning)

    def fits(self, ranks: int) -> bool:
        """True if all ranks, pairs and indices are valid for a job with this number of ranks."""
        pairs = [pair for use in self.uses for connection in use.connections for pair in connection.pairs]
        named = [rank for named_ranks in (*pairs, *(use.unheard for use in self.uses)) for rank in named_ranks]
        return (
            all(0 <= rank < ranks for rank in named)
            and all(len(pair) == 2 for pair in pairs)
            and all(0 <= choice.use < len(self.uses) for choice in self.choices)
        )


Write = Callable[[object], None]


def file_name(collective: str) -> str:
    return f"{collective}.jsonl"


class RecordedObservations(Struct, frozen=True, kw_only=True):
    """The recorded observations of paths. Facts about nodes and processes are in other files of the recording."""

    heard: RecordedLoggedChoices
    under: Mapping[str, RecordedLoggedChoices] = field(default_factory=dict)
    due: tuple[tuple[float, ...], ...]
    traffic: tuple[paths.Traffic, ...]
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    idle: tuple[IdleGpu, ...] = ()
    by_design: str = ""

    @classmethod
    def of(cls, observed: paths.PathObservations) -> "RecordedObservations":
        return cls(
            heard=RecordedLoggedChoices.of(observed.choices),
            under={name: RecordedLoggedChoices.of(choices) for name, choices in observed.choices_by_setting.items()},
            due=tuple(observed.expected_bytes),
            traffic=tuple(observed.traffic),
            settings={name: tuple(values) for name, values in observed.circumstances.settings.items()},
            waited={str(rank): share for rank, share in observed.circumstances.waited.items()},
            idle=tuple(observed.idle),
            by_design=observed.by_design,
        )

    def restore(self, circumstances: Circumstances) -> paths.PathObservations:
        """Return the observations. `circumstances` contain the recorded nodes and processes."""
        waited = {int(rank): share for rank, share in self.waited.items()}
        return paths.PathObservations(
            choices=self.heard.restore(),
            choices_by_setting={name: choices.restore() for name, choices in self.under.items()},
            expected_bytes=[(sent, received) for sent, received in self.due],
            traffic=self.traffic,
            circumstances=replace(circumstances, settings=self.settings, waited=waited),
            idle=self.idle,
            by_design=self.by_design,
        )


class RecordedCollective(DescribedCollective, frozen=True, kw_only=True):
    """The first line of a recording: the description of the run, and the observations before its first row."""

    testimony: RecordedObservations | None = None
    refused: tuple[RefusedRow, ...] | None = None

    @classmethod
    def of(cls, described: DescribedCollective, **known: Any) -> "RecordedCollective":
        """Return the description with the observations before the first row, which are the fields in `known`."""
        return cls(**{name: getattr(described, name) for name in described.__struct_fields__} | known)


class RecordedRow(Struct, frozen=True):
    """A recorded row: its case, backend, sample and group."""

    case: Case
    backend: str
    sample: RowSample
    group: str | None = None


class RecordingLine(Struct, frozen=True):
    """Any later line of a recording.

    It has one row, or it is the last line, with the number of rows and the idle GPUs.
    """

    row: RecordedRow | None = None
    rows: int | None = None
    idle: tuple[IdleGpu, ...] = ()


Collect = Callable[[RecordedRow | None], Sequence[RecordedRow | None] | None]
"""Collects the rows of every group's first rank on the first rank of the job. Every rank must call it."""


class RowWriter:
    """Writes rows to the recording on the first rank of the job."""

    def __init__(self, write: Write | None, collect: Collect, part: RankGroup | None) -> None:
        self._write = write
        self._collect = collect
        self._group = None if part is None else part.name
        self._rows = 0
        self._idle: tuple[IdleGpu, ...] = ()

    def row(self, case: Case, measured: MeasuredRow) -> None:
        """Write the row of this case, or of each group with --split. Every rank must call it."""
        sample, backend = measured.sample, measured.row.backend
        recorded = None if sample is None else RecordedRow(case, backend, sample, self._group)
        for row in self._collect(recorded) or ():
            if row is not None and self._write is not None:
                self._write(RecordingLine(row=row))
                self._rows += 1

    def after_rows(self, idle: Sequence[IdleGpu]) -> None:
        self._idle = tuple(idle)

    def end(self) -> None:
        """Write the last line with the number of rows, which shows that the run finished."""
        if self._write is not None:
            self._write(RecordingLine(rows=self._rows, idle=self._idle))


class RecordedLog:
    """A `ports.LibraryLog` that keeps a copy of the lines that it reads from another log."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._kept: list[bytes] = []
        self.is_readable, self.switch_off = log.is_readable, log.switch_off

    @property
    def no_log(self) -> str:
        return self._log.no_log

    @property
    def no_tuning(self) -> str:
        return self._log.no_tuning

    def lines(self) -> list[bytes]:
        found = self._log.lines()
        self._kept += found
        return found

    def text(self) -> bytes:
        return b"".join(line + b"\n" for line in self._kept)


_MOST = 1e15  # Limit on fractional numbers, so that no product of two is infinite
_MOST_WHOLE = 2**63

_WHITE = str.maketrans("", "", "\n\t")  # White space that texts from libraries may contain
CasesByGroup = Mapping[str | None, frozenset[Case]]
"""The possible cases for each group. The key is None if all ranks measure together."""


def _check_recorded(found: RecordedCollective, collective: Collective, where: str) -> CasesByGroup:
    """Return the cases for which rows may follow. Raises UsageError if the first line is inconsistent."""
    check_version(found.schema_version, RECORDING_VERSION, where)
    if found.collective != collective.name:
        raise UsageError(f"{where}: samples of {found.collective[:40]!a}", expected=f"those of {collective.name}")
    _check_values(found, where, but=("environment", "testimony"))
    if found.testimony is not None:
        _check_values(found.testimony, where, but=("settings",))
    _check_ranks(found, where)
    _check_request(found.asked, collective, min(len(found.identities(part)) for part in found.groups), where)
    _check_paths(found, where)
    request = found.asked.request(collective)
    by_group = {}
    for part in found.groups:
        ranks = len(found.identities(part))
        if drop_empty_sizes(request, request.sizes, ranks):
            raise UsageError(f"{where}: a size without a share for each of {ranks} ranks", expected="sizes with data")
        by_group[None if part is None else part.name] = frozenset(cases(request, ranks))
    return by_group


def check_row(row: RecordedRow, found: RecordedCollective, by_group: CasesByGroup, where: str) -> None:
    """Raise UsageError if the group, case, ranks or values of a row do not fit the recorded run."""
    _check_values(row, where)
    if row.group not in by_group:
        raise UsageError(f"{where}: a row of the group {row.group!a}", expected="a group that the first line names")
    case = row.case
    if replace(case, setting=None) not in by_group[row.group]:
        raise UsageError(
            f"{where}: a row that was not requested", expected="only the sizes, types and placements that line 1 lists"
        )
    part = next((part for part in found.parts if part.name == row.group), None)
    ranks = len(found.identities(part))
    if len(row.sample.answers) != ranks:
        raise UsageError(f"{where}: answers of {len(row.sample.answers)} ranks", expected=f"{ranks} ranks")
    for entries in (answer.entries for answer in row.sample.answers if answer.entries is not None):
        if entries.last > entries.operations:
            raise UsageError(
                f"{where}: a rank that was last in {entries.last} of {entries.operations}", expected="a part"
            )


def _check_values(value: object, where: str, but: Collection[str] = ()) -> None:
    plain = {name: held for name, held in to_plain(value).items() if name not in but}
    for _, leaf in walk_values(plain, where):
        if isinstance(leaf, str):
            if not leaf.translate(_WHITE).isprintable():
                raise UsageError(f"{where}: {leaf[:40]!a}", expected="printable characters")
        elif leaf is not None and abs(leaf) > (_MOST if isinstance(leaf, float) else _MOST_WHOLE):
            raise UsageError(
                f"{where}: a number beyond {_MOST:g}", expected="a value that is possible on a real machine"
            )


def _check_ranks(found: RecordedCollective, where: str) -> None:
    count = len(found.ranks)
    if not count or [rank.rank for rank in found.ranks] != list(range(count)):
        raise UsageError(f"{where}: ranks that are not numbered from 0", expected="every rank of the job, in order")
    check_hosts(found.ranks, found.hosts, where)
    ranks = sorted(rank for part in found.parts for rank in part.ranks)
    names = {part.name for part in found.parts if part.ranks}
    if found.parts and (ranks != list(range(count)) or len(names) < len(found.parts)):
        raise UsageError(f"{where}: groups that do not have {count} ranks in total", expected="every rank in one group")


def _check_request(asked: Asked, collective: Collective, ranks: int, where: str) -> None:
    if not 1 <= len(asked.sizes) <= MOST_SIZES:
        raise UsageError(f"{where}: {len(asked.sizes)} sizes", expected=f"1 to {MOST_SIZES:,}")
    for words in (asked.dtypes, asked.ops, asked.placements):
        if not words or len(set(words)) < len(words):
            raise UsageError(f"{where}: {', '.join(words) or 'nothing'} requested", expected="distinct words")
    if Placement.IN_PLACE in asked.placements and not collective.in_place:
        raise UsageError(f"{where}: {collective.name} in place", expected="out of place: it has no other form")
    if not 0 <= asked.root < ranks:
        raise UsageError(f"{where}: root {asked.root} of {ranks} ranks", expected="a rank")


def _check_paths(found: RecordedCollective, where: str) -> None:
    ranks = len(found.ranks)
    known = found.testimony
    if known is not None and (
        found.parts
        or found.model is not None
        or not len(known.due) == len(known.traffic) == ranks
        or len(known.idle) not in (0, ranks)
        or not all(len(moved) == 2 and min(moved) >= 0 for moved in known.due)
        or not all(choices.fits(ranks) for choices in (known.heard, *known.under.values()))
    ):
        raise UsageError(f"{where}: the evidence on paths is not from {ranks} ranks", expected=_OF_RANKS)
    for pair in () if found.model is None else found.model.staged:
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= rank < ranks for rank in pair):
            raise UsageError(f"{where}: the pair {list(pair)}", expected=f"two different of {ranks} ranks")


_OF_RANKS = "pairs, bytes and counts of the ranks of the job"


SIMULATED_BACKEND = "simulated"

MOST_SIMULATED_ROWS = 10**6  # More than the rows of any sweep, so that `row + try * MOST_SIMULATED_ROWS` is unique
_FIRST_SINGLE = 1000  # Number of the first single operation, above the number of every try of a row
Times = Callable[[Case, int, int], Sequence[float]]
"""Returns the time on each rank in seconds. The arguments are the case, the row number and the number of the try."""


def simulated_cases(request: SweepRequest, ranks: int, settings: Sequence[str]) -> Iterator[Case]:
    """Yield each case without a setting, then with every setting, then without a setting again."""
    variants = (None, *settings, AGAIN) if settings else (None,)
    return (replace(case, setting=setting) for case in cases(request, ranks) for setting in variants)


def wrong_elements(case: Case, ranks: int, corrupted: Collection[int]) -> list[int]:
    """Return the number of wrong elements on each rank if data from one peer never reach the `corrupted` ranks."""
    part = max(1, case.layout.count // ranks)
    return [part if rank in corrupted else 0 for rank in range(ranks)]


def _single_percentiles(
    sampling: Sampling, times: Callable[[int], Sequence[float]], recorded: RowSample | None
) -> Percentiles | None:
    """Return percentiles of modeled or recorded single operations, or None if the sweep times none."""
    if recorded is not None or not sampling.percentiles:
        return None if recorded is None else recorded.own.percentiles
    single = range(_FIRST_SINGLE, _FIRST_SINGLE + sampling.least_iterations)
    return Percentiles.of([max(times(operation)) for operation in single])


def simulate(
    request: SweepRequest,
    ranks: int,
    nodes: int,
    times: Times,
    listener: Listener[CollectiveRow],
    outcome: PathOutcome,
    speed: SpeedJudge | None,
    keep: Callable[[Sequence[float], Percentiles | None], object] = lambda *_: None,
    recorded_rows: Sequence[RowSample] | None = None,
    identities: Sequence[RankIdentity] = (),
    settings: Sequence[str] = (),
    refused: Sequence[RefusedRow] = (),
    corrupted: Collection[int] = (),
) -> Report:
    """Make the rows of a sweep from modeled `times`, and repeat slow rows as a real sweep does.

    `keep` is called with each row's times and percentiles. `recorded_rows` are the rows of a recording, which cannot be
    repeated. `corrupted` ranks receive wrong elements. `refused` are the settings that NCCL refuses.
    """
    unchecked = replace(request, check=False)
    job = JobFacts(SIMULATED_BACKEND, Origin.SIMULATED, ranks, nodes)
    every_case = tuple(simulated_cases(unchecked, ranks, settings))
    rows: list[CollectiveRow] = []

    def measure(number: int, case: Case, attempt: int) -> tuple[CollectiveRow, Sequence[float], Percentiles | None]:
        seconds = times(case, number, attempt)
        recorded = None if recorded_rows is None else recorded_rows[number]
        single = _single_percentiles(request.sampling, partial(times, case, number), recorded)
        rank0 = OwnTimes(seconds[0], request.sampling.least_iterations, percentiles=single)
        row = describe(unchecked, case, job, rank0, RankTimes.of(seconds), sum(wrong_by_rank(number, case)))
        return row, seconds, single

    def wrong_by_rank(number: int, case: Case) -> Sequence[int]:
        if recorded_rows is not None:
            return [answer.wrong for answer in recorded_rows[number].answers]
        return wrong_elements(case, ranks, corrupted)

    if speed is not None and recorded_rows is not None:
        numbered = enumerate(zip(every_case, recorded_rows, strict=False))
        speed.note_tries([(measure(number, case, 0)[0], sample.tries) for number, (case, sample) in numbered])
    for number, case in enumerate(every_case if recorded_rows is None else every_case[: len(recorded_rows)]):
        listener.progress(number, len(every_case), f"{request.collective.name} {case.label}")
        tries = [measure(number, case, 0)]
        judge = speed if case.setting is None else None
        while judge is not None and recorded_rows is None and judge.needs_repetition([row for row, *_ in tries]):
            tries.append(measure(number, case, len(tries)))
        row, seconds, single = middle(tries, lambda attempt: attempt[0].time_us)
        keep(seconds, single)
        rows.append(row if judge is None else judge.row(row))
        listener.row(rows[-1])
    findings = outcome.findings if speed is None else speed.findings(outcome.findings, outcome.explained)
    wrong = [(row, wrong_by_rank(number, every_case[number])) for number, row in enumerate(rows) if row.wrong]
    findings = (wrong_data(wrong, identities), *findings) if wrong else findings
    judged = worst_row_verdict(Verdict(row.verdict) for row in rows if row.verdict is not None)
    verdict = worst_verdict([judged, *(finding.severity for finding in findings)])
    report = Report(verdict=verdict, complete=True, findings=findings, sections=dict(outcome.sections))
    return add_winners(report, rows, refused) if settings or refused else report


CUT_SHORT = "recording-cut-short"

MakeSpeedJudge = Callable[[Sequence[RankIdentity]], SpeedJudge | None]
"""Makes the speed judge for a group of ranks. Returns None if speed is not judged."""


class RecordedRows(Struct, frozen=True):
    """All lines after the first. `is_whole` is true if the run finished. `idle` are the GPUs after the last row."""

    rows: tuple[RecordedRow, ...]
    is_whole: bool
    idle: tuple[IdleGpu, ...] = ()


def read_recorded(
    lines: Sequence[tuple[str, str]], collective: Collective, name: str
) -> tuple[RecordedCollective, RecordedRows]:
    """Parse a recording. `lines` are pairs of a line's text and its location, for error messages. Raises UsageError."""
    command = f"record it again: gpubench {collective.name} --record DIR"
    with add_advice(reason="the recording was edited by hand, or is from a newer gpubench", next_step=command):
        if not lines:
            expected = f"a recorded run of {collective.name}"
            raise UsageError(f"{name}, {file_name(collective.name)}: empty", expected=expected)
        found = read_json_line(RecordedCollective, *lines[0])
        by_group = _check_recorded(found, collective, lines[0][1])
        rows: list[RecordedRow] = []
        for text, where in lines[1:]:
            line = read_json_line(RecordingLine, text, where)
            if line.row is None:
                _check_end(line, len(rows), where, is_last=(text, where) == lines[-1])
                for gpu in line.idle:
                    _check_values(gpu, where)
                if line.idle and (found.testimony is None or len(line.idle) != len(found.ranks)):
                    raise UsageError(f"{where}: {len(line.idle)} GPUs after the last row", expected=_OF_RANKS)
                return found, RecordedRows(tuple(rows), is_whole=True, idle=line.idle)
            check_row(line.row, found, by_group, where)
            rows.append(line.row)
        return found, RecordedRows(tuple(rows), is_whole=False)


def _check_end(line: RecordingLine, rows: int, where: str, *, is_last: bool) -> None:
    if line.rows != rows:
        counted = "a line that is neither a row nor the end" if line.rows is None else f"the end of {line.rows} rows"
        raise UsageError(f"{where}: {counted}", expected=f"the end of the {rows} rows before it")
    if not is_last:
        raise UsageError(f"{where}: unexpected lines after the last record", expected="the recording of one run")


def replay(
    found: RecordedCollective,
    recorded: RecordedRows,
    collective: Collective,
    circumstances: Circumstances,
    listener: Listener[CollectiveRow],
    make_speed_judge: MakeSpeedJudge,
) -> Report:
    """Pass the recorded rows to the listener, and return the same report as the recorded run."""
    request, rows = found.asked.request(collective), recorded.rows
    if found.model is not None:
        seconds = [[answer.seconds for answer in row.sample.answers] for row in rows]
        staged = [(source, destination) for source, destination in found.model.staged]
        nodes = circumstances.wiring.nodes
        outcome = paths.simulated(staged, found.ranks, nodes.__getitem__, circumstances.facts)
        report = simulate(
            request,
            len(found.ranks),
            len(found.hosts),
            lambda _case, row, _try: seconds[row],
            listener,
            outcome,
            make_speed_judge(found.ranks),
            recorded_rows=[row.sample for row in rows],
            identities=found.ranks,
            settings=found.options.settings,
        )
    else:
        judge = None
        if found.testimony is not None:
            observations = found.testimony.restore(circumstances).add_idle(recorded.idle)
            judge = paths.PathJudge(request, observations, origin=Origin.RECORDED)
        report = _replay_measured(found, rows, request, listener, judge, make_speed_judge)
    return report if recorded.is_whole else _cut_short(report, rows, collective)


def _replay_measured(
    found: RecordedCollective,
    rows: Sequence[RecordedRow],
    request: SweepRequest,
    listener: Listener[CollectiveRow],
    judge: paths.PathJudge | None,
    make_speed_judge: MakeSpeedJudge,
) -> Report:
    groups = {None if part is None else part.name: part for part in found.groups}
    siblings = _RowsOfCases(listener, len(groups))
    collectors = {
        name: RowCollector(
            found.identities(part),
            listener if part is None else NamedRows(part, siblings),
            judge,
            speed=make_speed_judge(found.identities(part)),
        )
        for name, part in groups.items()
    }
    measured = []
    for row in rows:
        job = JobFacts.of(row.backend, Origin.RECORDED, found.identities(groups[row.group]))
        measured.append(MeasuredRow(row.sample.row(request, row.case, job), row.sample))
    for name, collector in collectors.items():
        collector.note_tries(
            [(one.row, row.sample.tries) for one, row in zip(measured, rows, strict=True) if row.group == name]
        )
    shown = [
        collectors[row.group].add(row.case, one, UNWATCHED, observed=row.backend == found.backend)
        for one, row in zip(measured, rows, strict=True)
    ]
    reports = [collector.report() for collector in collectors.values()]
    report = siblings.report([PartReport.of(report) for report in reports]) if found.parts else reports[0]
    if found.refused is not None:
        report = add_winners(report, shown, found.refused)
    return report if judge is not None else unwatched(report, found.unwatched, Origin.RECORDED)


class _RowsOfCases:
    """Waits for every group's row of a case, compares the rows and passes them to the listener."""

    def __init__(self, listener: Listener[CollectiveRow], groups: int) -> None:
        self._listener, self._groups = listener, groups
        self.begin, self.progress, self.end = listener.begin, listener.progress, listener.end
        self._siblings = SiblingJudge()
        self._waiting: list[CollectiveRow] = []

    def row(self, row: CollectiveRow) -> None:
        self._waiting.append(row)
        if len(self._waiting) == self._groups:
            self._pass_on()

    def report(self, parts: Sequence[PartReport]) -> Report:
        """Return the report on all groups. If the recording was cut short, some groups may have fewer rows."""
        self._pass_on()
        return self._siblings.report(merge_parts(parts))

    def _pass_on(self) -> None:
        for row in self._siblings.judge(self._waiting):
            self._listener.row(row)
        self._waiting.clear()


def _cut_short(report: Report, rows: Sequence[RecordedRow], collective: Collective) -> Report:
    last = f"up to {rows[-1].case.label}" if rows else "because the run ended before the first one"
    finding = Finding(
        id=CUT_SHORT,
        severity=Verdict.ERROR,
        subject="the recording",
        seen=f"{plural(len(rows), 'row')} without a final line, {last}",
        expected="a finished run",
        cause="the run ended early (a rank failed or hung, or Ctrl-C), or the copy of the recording is incomplete",
        cure=Cure(comment=f"Record it again with `gpubench {collective.name} --record`."),
    )
    verdict = worst_verdict([report.verdict, Verdict.ERROR])
    return replace(report, verdict=verdict, complete=False, findings=(*report.findings, finding))
