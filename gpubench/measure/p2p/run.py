"""A run of copies: matrix by matrix, each judged when all its pairs are known, and what is odd at the end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpubench.conditions.circumstances import Together
from gpubench.measure.p2p.bench import Bench, P2pRequest, PatternResult, host_copies, label, steps
from gpubench.measure.p2p.evidence import conclude
from gpubench.measure.p2p.findings import findings_of
from gpubench.measure.p2p.rows import Machine, gb_s, host_row, pair_row
from gpubench.model.paths.p2p import (
    JUDGED_FROM_BYTES,
    LATENCY_BYTES,
    Cell,
    Pair,
    Reference,
    Series,
    is_near,
    judge,
    siblings_gb_s,
)
from gpubench.model.results.report import PAIRS_SECTION, Matrix, PairRow, Report, Section, Table
from gpubench.model.results.rows.causes import CAUSES_SECTION
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION
from gpubench.model.results.rows.patterns import PatternRow
from gpubench.model.terms.copies import Direction, Engine
from gpubench.model.terms.units import BYTES_PER_GB, format_size, percent
from gpubench.model.terms.verdict import Verdict, overall
from gpubench.ports.listener import Listener

SECTIONS = (
    PAIRS_SECTION,
    "matrices",
    "ratios",
    "patterns",
    EVIDENCE_SECTION,
    FALLBACK_SECTION,
    CAUSES_SECTION,
    "findings",
)
_MOST_REPEATS = 3

LookAgain = Callable[[Machine], Machine]
"""The machine when everything was measured: with the errors that its devices counted meanwhile."""


@dataclass(slots=True)
class P2pOutcome:
    """What a run has found so far: cells and verdicts of every matrix, and the copies that failed."""

    cells: dict[Series, dict[Pair, Cell]] = field(default_factory=dict)
    figures: dict[Series, dict[Pair, float]] = field(default_factory=dict)
    verdicts: dict[Series, dict[Pair, tuple[Verdict | None, str]]] = field(default_factory=dict)
    refused: dict[Pair, str] = field(default_factory=dict)
    host_wrong: list[str] = field(default_factory=list)
    patterns: list[PatternResult] = field(default_factory=list)


class MatrixRun(ABC):
    """Goes through a request matrix by matrix and tells a listener; how a pair is measured is for others to say."""

    def __init__(
        self, request: P2pRequest, machine: Machine, listener: Listener[PairRow], look_again: LookAgain | None = None
    ) -> None:
        self._request = request
        self._look_again = look_again
        self._machine = machine
        self._listener = listener
        self._outcome = P2pOutcome()
        self._paths = {pair: machine.wiring.path(pair) for pair in request.pairs}
        self._done = 0
        self._total = steps(request, len(machine.gpus))

    @abstractmethod
    def run(self, *, strict: bool) -> Report:
        """All of it."""

    @abstractmethod
    def _cell(self, series: Series, pair: Pair) -> Cell:
        """What was measured of a pair; nothing where it has no peer access."""

    @abstractmethod
    def _again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """More samples of a cell, for one that is near a threshold."""

    def _tell(self, what: str) -> None:
        self._listener.progress(self._done, self._total, what)
        self._done += 1

    def _matrix(self, series: Series) -> None:
        cells: dict[Pair, Cell] = {}
        for pair in self._request.pairs:
            self._tell(label(series))
            cells[pair] = self._cell(series, pair)
        figures = {pair: gb_s(series, cell) for pair, cell in cells.items() if cell.seconds}
        for pair in list(figures):
            for _ in range(_MOST_REPEATS):
                if not (self._is_judged(series) and is_near(figures[pair], self._reference(series, pair, figures))):
                    break
                cells[pair] = self._again(series, pair, cells[pair])
                if cells[pair].error:
                    break
                figures[pair] = gb_s(series, cells[pair])
        verdicts = {pair: self._verdict(series, pair, cells[pair], figures) for pair in cells}
        self._outcome.cells[series], self._outcome.figures[series] = cells, figures
        self._outcome.verdicts[series] = verdicts
        for pair, cell in cells.items():
            self._listener.row(pair_row(self._machine, series, pair, cell, verdicts[pair]))

    def _is_judged(self, series: Series) -> bool:
        return series.peer and series.size_bytes >= JUDGED_FROM_BYTES

    def _reference(self, series: Series, pair: Pair, figures: Mapping[Pair, float]) -> Reference:
        limit = self._machine.limit(series, pair).gb_s
        return Reference(
            limit,
            siblings_gb_s(figures, self._paths, pair),
            self._machine.expected(series.quantity, limit, self._paths[pair]),
        )

    def _verdict(
        self, series: Series, pair: Pair, cell: Cell, figures: Mapping[Pair, float]
    ) -> tuple[Verdict | None, str]:
        if cell.error:
            return Verdict.ERROR, cell.error
        if not cell.seconds:
            return Verdict.SKIP, f"no peer access: {self._machine.wiring.peer_access(pair).reason}"
        if cell.wrong:
            return Verdict.FAIL, f"{cell.wrong} wrong elements"
        if not self._is_judged(series):
            return None, ""
        users = self._machine.users(*pair)
        if users:
            return Verdict.SKIP, f"not judged: {users}"
        return judge(figures[pair], cell, self._reference(series, pair, figures))

    def _report(self, *, strict: bool) -> Report:
        if self._look_again is not None:
            self._machine = self._look_again(self._machine)
        outcome = self._outcome
        findings = findings_of(outcome.figures, outcome.cells, outcome.verdicts, self._machine.gpus, outcome.host_wrong)
        if not strict:
            findings = tuple(each.softened() for each in findings)
        paths = conclude(self._machine, outcome.cells, outcome.figures, self._together(), strict=strict)
        findings += paths.findings
        verdict = overall([Verdict.PASS, *(finding.severity for finding in findings)])
        if strict and verdict is Verdict.WARN:
            verdict = Verdict.FAIL
        sections: dict[str, Section] = {
            "matrices": Matrix({_title(series): self._named(cells) for series, cells in outcome.figures.items()}),
            "ratios": Matrix(self._named(_ratios(outcome.figures))),
            "patterns": Table(PatternRow.columns(), self._pattern_rows),
            **paths.sections,
        }
        return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=PAIRS_SECTION)

    def _named(self, figures: Mapping[Pair, float]) -> dict[str, dict[str, float]]:
        named: dict[str, dict[str, float]] = {}
        for (source, destination), figure in figures.items():
            named.setdefault(self._machine.gpus[source].device, {})[self._machine.gpus[destination].device] = figure
        return named

    def _pattern_rows(self) -> Iterator[PatternRow]:
        for result in self._outcome.patterns:
            total = self._total_gb_s(result)
            parts = None if total is None else self._parts(result)
            yield PatternRow(
                pattern=result.pattern,
                direction=result.direction,
                gpus=len(self._machine.gpus),
                pairs=len(result.pairs),
                size_bytes=self._request.pattern_bytes,
                total_gb_s=total,
                parts_gb_s=parts,
                share_percent=percent(total, parts),
                wrong=result.cell.wrong,
                origin=self._machine.origin,
                note=result.cell.error,
            )

    def _total_gb_s(self, result: PatternResult) -> float | None:
        """What the pairs of a pattern carried together."""
        if not result.cell.seconds:
            return None
        return len(result.pairs) * self._request.pattern_bytes / result.cell.typical_seconds / BYTES_PER_GB

    def _together(self) -> list[Together]:
        """The patterns that were measured both ways."""
        totals = {(each.pattern, each.direction): (each, self._total_gb_s(each)) for each in self._outcome.patterns}
        found = []
        for (pattern, direction), (result, write) in totals.items():
            _, read = totals.get((pattern, Direction.READ), (result, None))
            if direction is Direction.WRITE and write is not None and read is not None:
                found.append(Together(pattern.replace("_", " "), result.pairs, write, read))
        return found

    def _parts(self, result: PatternResult) -> float | None:
        """What the pairs of a pattern reach one at a time, added up."""
        wanted = replace(_PARTS, direction=result.direction, size_bytes=self._request.pattern_bytes)
        alone = self._outcome.figures.get(wanted, {})
        return sum(alone[pair] for pair in result.pairs) if all(pair in alone for pair in result.pairs) else None


class P2pRun(MatrixRun):
    """Measures the GPUs of one process."""

    def __init__(
        self,
        request: P2pRequest,
        bench: Bench,
        machine: Machine,
        listener: Listener[PairRow],
        look_again: LookAgain | None = None,
    ) -> None:
        super().__init__(request, machine, listener, look_again)
        self._bench = bench

    def run(self, *, strict: bool) -> Report:
        """All of it. Peer access is off until every matrix without it is measured."""
        if self._request.host_bytes:
            self._host()
        for series in (each for each in self._request.series if not each.peer):
            self._matrix(series)
        if any(series.peer for series in self._request.series) or self._request.patterns:
            self._outcome.refused = self._bench.enable_peer_access()
        for series in (each for each in self._request.series if each.peer):
            self._matrix(series)
        for pattern in self._request.patterns:
            for direction in (Direction.WRITE, Direction.READ):
                self._tell(f"{pattern.replace('_', ' ')} {direction}")
                self._outcome.patterns.append(self._bench.measure_pattern(pattern, direction))
        return self._report(strict=strict)

    def _host(self) -> None:
        for memory, gpu, to_gpu in host_copies(len(self._machine.gpus)):
            self._tell(f"{memory} host memory {'to' if to_gpu else 'from'} {self._machine.gpus[gpu].device}")
            size_bytes = self._request.host_bytes or 0
            cell = self._bench.measure_host(memory, gpu, to_gpu=to_gpu)
            row = host_row(self._machine, memory, gpu, cell, size_bytes, to_gpu=to_gpu)
            for _ in range(_MOST_REPEATS):
                if cell.error or cell.wrong or row.verdict not in (Verdict.WARN, Verdict.FAIL, Verdict.INCONCLUSIVE):
                    break
                more = self._bench.measure_host(memory, gpu, to_gpu=to_gpu)
                cell = more if more.error else replace(cell, seconds=(*cell.seconds, *more.seconds), wrong=more.wrong)
                row = host_row(self._machine, memory, gpu, cell, size_bytes, to_gpu=to_gpu)
            if cell.wrong:
                self._outcome.host_wrong.append(self._machine.gpus[gpu].device)
            self._listener.row(row)

    def _cell(self, series: Series, pair: Pair) -> Cell:
        if series.peer and pair in self._outcome.refused:
            return Cell(error=self._outcome.refused[pair])
        if series.peer and not self._bench.can_reach(pair):
            return Cell()
        return self._bench.measure(series, pair)

    def _again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        return self._bench.measure_again(series, pair, before)


_PARTS = Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=0)


def _title(series: Series) -> str:
    what = "latency" if series.size_bytes == LATENCY_BYTES else format_size(series.size_bytes)
    return f"{series.name} {what}"


def _ratios(figures: Mapping[Series, Mapping[Pair, float]]) -> dict[Pair, float]:
    """Bandwidth with peer access over that without, at the largest size that has both."""
    on = {
        series.size_bytes: cells
        for series, cells in figures.items()
        if series == replace(_PARTS, size_bytes=series.size_bytes)
    }
    off = {series.size_bytes: cells for series, cells in figures.items() if not series.peer}
    both = sorted(set(on) & set(off))
    if not both:
        return {}
    size = both[-1]
    return {pair: on[size][pair] / off[size][pair] for pair in on[size] if pair in off[size]}
