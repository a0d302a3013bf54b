"""The folder that keeps a scan's rounds: each is on disk as it ends, and judged even where the job dies later."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.measure.scan.rounds import EndOfRoundsError, RoundMeasurer
from gpubench.model.results.scan_rounds import (
    ROUNDS,
    LocalFigure,
    NodePair,
    NodeRail,
    PlannedRound,
    RoundOutcome,
    ScanFabric,
)
from gpubench.model.results.stored_scan import StoredAbsent, StoredFabric, StoredLocal, StoredRound
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding
from gpubench.readers.documents.json_lines import json_line, read_json_line
from gpubench.readers.documents.text_files import Wanted, read_text

FILE = "scan.jsonl"
_PHASES = tuple(phase for phase, rounds in ROUNDS.items() for _ in range(rounds))
_MOST_BYTES = 512 * 2**20
_WANTED = Wanted("a folder that gpubench scan --rounds wrote", "gpubench scan --rounds DIR", _MOST_BYTES, "rounds/")


@dataclass(frozen=True, slots=True)
class KeptScan:
    """What a folder holds. Rounds are as they were, the last one whole; findings are None of an older gpubench."""

    stored: StoredFabric
    fabric: ScanFabric
    local: list[LocalFigure] = field(default_factory=list)
    outcomes: list[RoundOutcome] = field(default_factory=list)
    findings: Sequence[Finding] | None = None


class RoundsFolder:
    """Writes rounds as they end; of a scan that goes on, those that are not there yet."""

    def __init__(self, directory: Path | None, kept: KeptScan | None = None) -> None:
        self._path = None if directory is None else directory / FILE
        self._done = None if kept is None else len(kept.outcomes)

    def begin(self, stored: StoredFabric, local: Sequence[LocalFigure], findings: Sequence[Finding] = ()) -> None:
        """A new file with nodes, phase 0 and what was found before the first round, unless a scan goes on.

        Raises UsageError where the folder cannot be written, or holds a scan already.
        """
        if self._path is None or self._done is not None:
            return
        if self._path.exists():
            raise UsageError(
                f"{self._path} is there already",
                expected="a new or empty folder for --rounds",
                next_step=f"gpubench scan --resume {self._path.parent}, or name another",
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write(json_line(stored) + json_line(StoredLocal.of(local, findings)))
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written: {os.strerror(error.errno or 0)}",
                expected="a folder that you may write",
                next_step="name one with --rounds",
            ) from error

    def resume(self, absent: Mapping[int, str]) -> None:
        """Go on behind the last whole line, and note the nodes that are no more. Raises CouldNotMeasureError."""
        if self._path is None or self._done is None:
            return
        try:
            text = self._path.read_bytes()
            with self._path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
            if absent:
                self._write(json_line(StoredAbsent({str(node): seen for node, seen in absent.items()})))
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> CouldNotMeasureError:
        return CouldNotMeasureError(
            f"{self._path} cannot be written any more: {os.strerror(error.errno or 0)}",
            expected="room for every round",
            next_step=f"gpubench scan --replay {self._path.parent if self._path else ''} judges those before",
        )

    def keep(self, _planned: PlannedRound, outcome: RoundOutcome) -> None:
        """A round that has ended; on disk when this returns. Raises CouldNotMeasureError where it cannot be written."""
        if outcome.number <= (self._done or 0):
            return
        try:
            self._write(json_line(StoredRound.of(outcome)))
        except OSError as error:
            raise self._lost(error) from error

    def _write(self, lines: str) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


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
            phase_0 = read_json_line(StoredLocal, line, where)
            kept = replace(kept, local=phase_0.figures(kept.fabric), findings=phase_0.findings)
        elif '"absent"' in line and kept.outcomes:
            absent = read_json_line(StoredAbsent, line, where).nodes(kept.fabric)
            kept.outcomes[-1] = replace(kept.outcomes[-1], gone={**kept.outcomes[-1].gone, **absent})
        else:
            kept.outcomes.append(read_json_line(StoredRound, line, where).outcome(kept.fabric))
    _check_order(kept.outcomes, path)
    return kept


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
            self._kept[-1] = replace(last, gone={**last.gone, **absent})

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
