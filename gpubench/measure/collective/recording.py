"""The raw samples of a collective, written as rows are measured; fields are named as in files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.counting import Traffic
from gpubench.measure.collective.described import DescribedCollective
from gpubench.measure.collective.path_evidence import PathObservations
from gpubench.measure.collective.recorded_choices import RecordedLoggedChoices
from gpubench.measure.collective.row_collector import MeasuredRow, RowSample
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.results.winners import RefusedRow
from gpubench.model.terms.split import RankGroup
from gpubench.ports.library_log import LibraryLog

Write = Callable[[object], None]


def file_of(collective: str) -> str:
    """The file of a collective in a recording."""
    return f"{collective}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedObservations:
    """The observations of paths, but for nodes and processes, which have files of their own."""

    heard: RecordedLoggedChoices
    under: Mapping[str, RecordedLoggedChoices] = field(default_factory=dict)
    due: tuple[tuple[float, ...], ...]
    traffic: tuple[Traffic, ...]
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    idle: tuple[IdleGpu, ...] = ()
    by_design: str = ""

    @classmethod
    def of(cls, observed: PathObservations) -> "RecordedObservations":
        """The observations to be written; `restored` is the inverse."""
        return cls(
            heard=RecordedLoggedChoices.of(observed.choices),
            under={name: RecordedLoggedChoices.of(each) for name, each in observed.choices_by_setting.items()},
            due=tuple(observed.expected_bytes),
            traffic=tuple(observed.traffic),
            settings={name: tuple(values) for name, values in observed.circumstances.settings.items()},
            waited={str(rank): share for rank, share in observed.circumstances.waited.items()},
            idle=tuple(observed.idle),
            by_design=observed.by_design,
        )

    def restored(self, circumstances: Circumstances) -> PathObservations:
        """The observations as they were, with the nodes and processes of the recording."""
        waited = {int(rank): share for rank, share in self.waited.items()}
        return PathObservations(
            choices=self.heard.restored(),
            choices_by_setting={name: each.restored() for name, each in self.under.items()},
            expected_bytes=[(sent, received) for sent, received in self.due],
            traffic=self.traffic,
            circumstances=replace(circumstances, settings=self.settings, waited=waited),
            idle=self.idle,
            by_design=self.by_design,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective(DescribedCollective):
    """The first line: the run, and all that was known before the first row.

    `testimony` is None where paths were not observed. `refused` is None where the sweep had one variant.
    """

    testimony: RecordedObservations | None = None
    refused: tuple[RefusedRow, ...] | None = None

    @classmethod
    def of(cls, described: DescribedCollective, **known: Any) -> "RecordedCollective":
        """A run with what was known before its first row; `known` are further fields, or others."""
        return cls(**{each.name: getattr(described, each.name) for each in fields(described)} | known)


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A row: its case, its backend, its sample, and the group that measured it."""

    case: Case
    backend: str
    sample: RowSample
    group: str | None = None


@dataclass(frozen=True, slots=True)
class RecordingLine:
    """Every other line: a row, or the number of rows in the last line of a run that came to its end.

    With the number comes what was seen of the ranks' GPUs after the last row, while no operation ran.
    """

    row: RecordedRow | None = None
    rows: int | None = None
    idle: tuple[IdleGpu, ...] = ()


Collect = Callable[[RecordedRow | None], Sequence[RecordedRow | None] | None]
"""Collects the rows of all groups' first ranks on the first rank of the job; every rank has to call it."""


class RowWriter:
    """Writes rows on the first rank of the job."""

    def __init__(self, write: Write | None, collect: Collect, part: RankGroup | None) -> None:
        self._write = write
        self._collect = collect
        self._group = None if part is None else part.name
        self._rows = 0
        self._idle: tuple[IdleGpu, ...] = ()

    def row(self, case: Case, measured: MeasuredRow) -> None:
        """Write a row, or one of every group."""
        sample, backend = measured.sample, measured.row.backend
        own = None if sample is None else RecordedRow(case, backend, sample, self._group)
        for row in self._collect(own) or ():
            if row is not None and self._write is not None:
                self._write(RecordingLine(row=row))
                self._rows += 1

    def after_rows(self, idle: Sequence[IdleGpu]) -> None:
        """Keep what was seen of the ranks' GPUs after the last row, for the last line."""
        self._idle = tuple(idle)

    def end(self) -> None:
        """Write the number of rows: all were measured."""
        if self._write is not None:
            self._write(RecordingLine(rows=self._rows, idle=self._idle))


class RecordedLog:
    """`ports.LibraryLog` over another one, whose lines it keeps."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._kept: list[bytes] = []
        self.is_readable, self.switch_off = log.is_readable, log.switch_off

    @property
    def no_log(self) -> str:
        """As the log has it."""
        return self._log.no_log

    @property
    def no_tuning(self) -> str:
        """As the log has it."""
        return self._log.no_tuning

    def lines(self) -> list[bytes]:
        """The new lines of the log."""
        found = self._log.lines()
        self._kept += found
        return found

    def text(self) -> bytes:
        """All lines so far."""
        return b"".join(line + b"\n" for line in self._kept)
