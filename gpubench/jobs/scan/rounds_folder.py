"""The folder that keeps a scan's rounds: each is on disk as it ends, and judged even where the job dies later."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.measure.scan.inside_findings import not_measured_inside, wrong_data_inside
from gpubench.measure.scan.local_figures import slow_figures, slowest_of
from gpubench.measure.scan.rounds import EndOfRoundsError, RoundMeasurer
from gpubench.model.results.scan_rounds import (
    ROUNDS,
    BeforeRounds,
    LocalFigure,
    NodePair,
    NodeRail,
    PlannedRound,
    RoundOutcome,
    ScanFabric,
    ScanPhase,
)
from gpubench.model.results.stored_scan import StoredAbsent, StoredFabric, StoredLocal, StoredRound
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding
from gpubench.readers.documents.json_lines import json_line, read_json_line
from gpubench.readers.documents.text_files import Wanted, read_text

FILE = "scan.jsonl"
_PHASES = tuple(phase for phase, rounds in ROUNDS.items() for _ in range(rounds))
_SCREENING = ROUNDS[ScanPhase.SCREENING]
_MOST_BYTES = 512 * 2**20
_WANTED = Wanted("a folder that gpubench scan --rounds wrote", "gpubench scan --rounds DIR", _MOST_BYTES, "rounds/")


@dataclass(frozen=True, slots=True)
class KeptScan:
    """What a folder holds. Rounds are as they were, the last one whole.

    `phases_0` are of the scan and of each job that went on with it, `before` is what did not work in any of them.
    """

    stored: StoredFabric
    fabric: ScanFabric
    phases_0: list[StoredLocal] = field(default_factory=list)
    outcomes: list[RoundOutcome] = field(default_factory=list)
    before: BeforeRounds = field(default_factory=BeforeRounds)

    def local(self) -> dict[LocalFigure, float]:
        """What fell behind in a phase 0, with its share of what is usual."""
        return slowest_of(*(slow_figures(each.figures(self.fabric)) for each in self.phases_0))

    def findings(self) -> list[Finding]:
        """What phase 0, facts, clocks and profiles showed; of an older gpubench, which kept none, of its figures."""
        found: list[Finding] = []
        for each in self.phases_0:
            if each.findings is not None:
                found += each.findings
                continue
            figures = each.figures(self.fabric)
            found += wrong_data_inside(self.fabric, figures)
            found += not_measured_inside(self.fabric, [figures], list(slow_figures(figures)))
        return each_once(found)


def each_once(findings: Iterable[Finding]) -> list[Finding]:
    """Of findings of one id and subject the last one."""
    return list({(each.id, each.subject): each for each in findings}.values())


class RoundsFolder:
    """Writes rounds as they end; of a scan that goes on, those that are not there yet."""

    def __init__(self, directory: Path | None, kept: KeptScan | None = None) -> None:
        self._path = None if directory is None else directory / FILE
        self._kept = kept

    def begin(self, stored: StoredFabric) -> None:
        """A new file with the nodes; of a scan that goes on, go on behind the last whole line.

        Raises UsageError where the folder cannot be written, or holds another scan; CouldNotMeasureError where one that
        goes on cannot be written.
        """
        if self._path is None:
            return
        if self._kept is not None:
            self._cut()
            return
        if self._path.exists():
            raise UsageError(
                f"{self._path} is there already",
                expected="a new or empty folder for --rounds",
                next_step=f"gpubench scan --resume {self._path.parent}, or name another",
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write(json_line(stored))
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written: {os.strerror(error.errno or 0)}",
                expected="a folder that you may write",
                next_step="name one with --rounds",
            ) from error

    def _cut(self) -> None:
        if self._path is None:
            return
        try:
            text = self._path.read_bytes()
            with self._path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
        except OSError as error:
            raise self._lost(error) from error

    def found(self, before: BeforeRounds) -> None:
        """What does not work before the next round. Raises CouldNotMeasureError where it cannot be written."""
        if before.gone or before.failed:
            self._add(json_line(StoredAbsent.of(before)))

    def phase_0(self, local: Sequence[LocalFigure], findings: Sequence[Finding] = ()) -> None:
        """The figures of phase 0, and what it showed. Raises CouldNotMeasureError where they cannot be written."""
        stored = StoredLocal.of(local, findings)
        if self._kept is None or stored not in self._kept.phases_0:
            self._add(json_line(stored))

    def _lost(self, error: OSError) -> CouldNotMeasureError:
        return CouldNotMeasureError(
            f"{self._path} cannot be written any more: {os.strerror(error.errno or 0)}",
            expected="room for every round",
            next_step=f"gpubench scan --replay {self._path.parent if self._path else ''} judges those before",
        )

    def keep(self, _planned: PlannedRound, outcome: RoundOutcome) -> None:
        """A round that has ended; on disk when this returns. Raises CouldNotMeasureError where it cannot be written."""
        if self._kept is None or outcome.number > len(self._kept.outcomes):
            self._add(json_line(StoredRound.of(outcome)))

    def _add(self, lines: str) -> None:
        try:
            self._write(lines)
        except OSError as error:
            raise self._lost(error) from error

    def _write(self, lines: str) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def is_quick(asked: bool, kept: KeptScan | None) -> bool:  # noqa: FBT001 - what --quick is
    """Whether to end after the screening: kept rounds behind it are judged all the same."""
    return asked and (kept is None or len(kept.outcomes) <= _SCREENING)


def check_same(kept: KeptScan, now: StoredFabric, directory: Path) -> KeptScan:
    """The scan that was kept, which goes on. Raises UsageError where it is of other nodes or measured otherwise."""
    for what, before, here in (
        ("nodes", kept.stored.hosts, now.hosts),
        ("rails", kept.stored.rails, now.rails),
        ("seed", kept.stored.seed, now.seed),
        ("backend", kept.stored.backend, now.backend),
    ):
        if before != here:
            raise UsageError(
                f"--resume {directory}: its {what} are {_shown(before)}, here {_shown(here)}",
                expected="the job that was begun, with all its nodes or what is left of them",
                next_step=f"gpubench scan --replay {directory} judges what is there; --rounds DIR begins anew",
            )
    return kept


def _shown(value: object) -> str:
    return f"{len(value)} of other names" if isinstance(value, tuple) else str(value)


def read_rounds(directory: Path) -> KeptScan:
    """What a folder holds; a last line that was cut off is left out.

    Raises UsageError where there is none, or it cannot be read.
    """
    path = directory / FILE
    text = read_text(path, _WANTED)
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    if not lines:
        raise _WANTED.unfit(f"{path} is cut off in its first line", reason="the job ended as it began")
    stored = read_json_line(StoredFabric, lines[0], f"{path}, line 1")
    kept = KeptScan(stored, stored.fabric())
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        if '"quantities"' in line:
            kept.phases_0.append(read_json_line(StoredLocal, line, where))
            kept.phases_0[-1].figures(kept.fabric)
        elif '"absent"' in line:
            kept = _without(kept, read_json_line(StoredAbsent, line, where))
        else:
            kept.outcomes.append(read_json_line(StoredRound, line, where).outcome(kept.fabric))
    _check_order(kept.outcomes, path)
    return kept


def _without(kept: KeptScan, absent: StoredAbsent) -> KeptScan:
    """Nodes that were absent are gone in the round before, those of a first phase 0 before all."""
    gone = absent.nodes(kept.fabric)
    before = BeforeRounds(kept.before.gone, {**absent.rails(kept.fabric), **kept.before.failed})
    if kept.outcomes:
        kept.outcomes[-1] = replace(kept.outcomes[-1], gone={**gone, **kept.outcomes[-1].gone})
        return replace(kept, before=before)
    return replace(kept, before=replace(before, gone={**gone, **kept.before.gone}))


def _check_order(outcomes: Sequence[RoundOutcome], path: Path) -> None:
    numbers = [each.number for each in outcomes]
    phases = [each.phase for each in outcomes]
    if numbers != list(range(1, len(numbers) + 1)) or phases != list(_PHASES[: len(phases)]):
        raise UsageError(
            f"{path} has rounds {', '.join(map(str, numbers[:12]))}",
            expected="every round once, in order: three of screening, three of suspects, five of confirmation",
            reason="two scans wrote to one folder, or it was edited by hand",
        )


class ResumedRounds:
    """Hands out the rounds that were kept, then measures; nodes that are here no more are gone from then on."""

    def __init__(
        self, kept: Sequence[RoundOutcome], measurer: RoundMeasurer | None, absent: Mapping[int, str] | None = None
    ) -> None:
        self._kept = list(kept)
        self._measurer = measurer
        if self._kept and absent:
            last = self._kept[-1]
            self._kept[-1] = replace(last, gone={**absent, **last.gone})

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        """The round of that number, measured before or now. Raises EndOfRoundsError where nobody measures any more."""
        if planned.number <= len(self._kept):
            return self._kept[planned.number - 1]
        if self._measurer is None:
            raise EndOfRoundsError
        return self._measurer.measure(planned)


class RenumberedRounds:
    """Measures the rounds of a scan that goes on with some of its nodes, which have other numbers in this job."""

    def __init__(self, measurer: RoundMeasurer, numbers: Mapping[int, int]) -> None:
        """`numbers` are those of the scan, by those of this job."""
        self._measurer = measurer
        self._then = numbers
        self._now = {then: now for now, then in numbers.items()}

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        """The round, with nodes numbered as in the scan."""
        now = self._now
        pairs = tuple(NodePair(now[first], now[second]) for first, second in planned.pairs)
        retired = frozenset(NodeRail(now[node], rail) for node, rail in planned.retired if node in now)
        outcome = self._measurer.measure(replace(planned, pairs=pairs, retired=retired))
        samples = (
            each._replace(
                first=self._then[each.first],
                second=self._then[each.second],
                culprit=None if each.culprit is None else self._then[each.culprit],
            )
            for each in outcome.samples
        )
        gone = {self._then[node]: seen for node, seen in outcome.gone.items()}
        return replace(outcome, samples=tuple(samples), gone=gone)


def numbered(found: BeforeRounds, numbers: Mapping[int, int]) -> BeforeRounds:
    """What phase 0 of a job found, with nodes numbered as in the scan."""
    failed = {NodeRail(numbers[node], rail): seen for (node, rail), seen in found.failed.items()}
    return BeforeRounds({numbers[node]: seen for node, seen in found.gone.items()}, failed)


def numbers_of_kept(kept: KeptScan, hosts: Sequence[str], directory: Path) -> dict[int, int]:
    """The numbers in a scan that goes on, by those in this job. Raises UsageError for nodes that were not in it."""
    then = {host: number for number, host in enumerate(kept.fabric.hosts)}
    strangers = [host for host in hosts if host not in then]
    if strangers or not kept.outcomes:
        raise UsageError(
            f"--resume {directory}: {some_of(strangers)} took no part in it"
            if strangers
            else f"--resume {directory}: it finished no round",
            expected="the nodes that are left of the scan that was begun",
            next_step=f"gpubench scan --replay {directory} judges what is there; --rounds DIR begins anew",
        )
    return {number: then[host] for number, host in enumerate(hosts)}
