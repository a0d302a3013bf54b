"""Raw samples of a collective: written as rows are measured; `collective_replay` makes the report of them again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.measure.collective.cases import Asked, Case
from gpubench.measure.collective.counting import Traffic
from gpubench.measure.collective.path_judge import PathObservations
from gpubench.measure.collective.recorded_choices import RecordedLoggedChoices
from gpubench.measure.collective.row_collector import Measured, RowSample
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.results.winners import RefusedRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.split import RankGroup
from gpubench.model.terms.sweep import DroppedSize

VERSION = 1

Write = Callable[[object], None]


def file_of(collective: str) -> str:
    """The file of a collective in a recording."""
    return f"{collective}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run that its metadata name beside what was to be measured. `settings` are the names of its ways."""

    allocator: str
    timeout_s: float
    evidence: EvidenceUse
    strict: bool
    settings: tuple[str, ...] = ()
    split: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What made the times of a simulated run, and the pairs that its faults have go through host memory.

    `profile` is as the metadata have it.
    """

    source: str
    seed: int
    profile: Mapping[str, str]
    staged: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedObservations:
    """What was found out of paths. Nodes and processes, which are around it, have files of their own."""

    heard: RecordedLoggedChoices
    under: Mapping[str, RecordedLoggedChoices] = field(default_factory=dict)
    due: tuple[tuple[float, ...], ...]
    traffic: tuple[Traffic, ...]
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, known: PathObservations) -> "RecordedObservations":
        """To be written."""
        return cls(
            heard=RecordedLoggedChoices.of(known.heard),
            under={name: RecordedLoggedChoices.of(heard) for name, heard in known.under.items()},
            due=tuple(known.due),
            traffic=tuple(known.traffic),
            settings={name: tuple(values) for name, values in known.around.settings.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective:
    """The first line: what was asked for and of whom, and all that was known before the first row.

    `hosts` are the nodes in their order, by the names that the recording gives them. `testimony` is None where nobody
    watched; `unwatched` says why, and is empty where there was nothing to see. `refused` is None where the sweep had
    one way; `parts` are the groups that measured at once, none where all ranks did together.
    """

    schema_version: int
    collective: str
    backend: str
    origin: Origin
    asked: Asked
    options: RunOptions
    ranks: tuple[RankIdentity, ...]
    hosts: tuple[str, ...] = ()
    parts: tuple[RankGroup, ...] = ()
    dropped_sizes: tuple[DroppedSize, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unwatched: str = ""
    testimony: RecordedObservations | None = None
    refused: tuple[RefusedRow, ...] | None = None
    model: Model | None = None

    @property
    def groups(self) -> tuple[RankGroup | None, ...]:
        """Who measured rows: the groups, else None for all ranks together."""
        return self.parts or (None,)

    def ranks_of(self, part: RankGroup | None) -> tuple[RankIdentity, ...]:
        """The ranks of a group, or all."""
        return self.ranks if part is None else tuple(self.ranks[rank] for rank in part.ranks)


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A row: its case, the backend that ran it, what it is made of, and the group that measured it."""

    case: Case
    backend: str
    sample: RowSample
    group: str | None = None


@dataclass(frozen=True, slots=True)
class RecordingLine:
    """Every other line: a row, or, as the last one of a run that was not cut short, how many there are."""

    row: RecordedRow | None = None
    rows: int | None = None


Collect = Callable[[RecordedRow | None], Sequence[RecordedRow | None] | None]
"""Hands what the first ranks of groups have to the first rank of the job; every rank has to call it."""


class RowWriter:
    """Writes rows down on the first rank of the job. `begin` is for whoever opens the file."""

    def __init__(self, write: Write | None, collect: Collect, part: RankGroup | None) -> None:
        self._write = write
        self._collect = collect
        self._group = None if part is None else part.name
        self._rows = 0

    def row(self, case: Case, measured: Measured) -> None:
        """One more row, or one of every group."""
        sample, backend = measured.sample, measured.row.backend
        own = None if sample is None else RecordedRow(case, backend, sample, self._group)
        for row in self._collect(own) or ():
            if row is not None and self._write is not None:
                self._write(RecordingLine(row=row))
                self._rows += 1

    def end(self) -> None:
        """All rows were measured."""
        if self._write is not None:
            self._write(RecordingLine(rows=self._rows))
