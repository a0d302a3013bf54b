"""Measure all requested copies. Judge each matrix when its pairs are measured, and all paths at the end."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from msgspec.structs import replace

from gpubench.conditions import checks
from gpubench.conditions.circumstances import Circumstances, Together, user_settings
from gpubench.conditions.folding import fold
from gpubench.conditions.measured import impossible
from gpubench.measure.p2p.findings import copy_findings, managed_findings, staged_pairs
from gpubench.measure.p2p.request import (
    NETWORK,
    Bench,
    CopyMachine,
    HostCopy,
    ManagedCopy,
    P2pRequest,
    PairCopy,
    PatternCopy,
    label,
)
from gpubench.measure.p2p.rows import (
    CopyMatrix,
    Judged,
    PastBandwidth,
    bandwidth_gb_s,
    bidirectional_patterns,
    host_row,
    managed_row,
    pair_row,
    pattern_row,
    verdict_without_bandwidth,
)
from gpubench.measure.path_outcome import PathOutcome, report_on
from gpubench.measure.paths import Explained
from gpubench.model.facts.traffic import FOREIGN_SHARE, combine_idle_gpus
from gpubench.model.paths import p2p
from gpubench.model.paths.transport import Conclusion, Evidence, PathEvidence, State, Transport, is_staged, join_names
from gpubench.model.profiles.copies import CopyJudge, describe_slowness, is_slow_copy, is_with_host
from gpubench.model.results import report
from gpubench.model.results.fallback import End, KnownPath, fallback_rows
from gpubench.model.results.topo import TreeRow, tree_rows
from gpubench.model.terms.operation import Direction, Engine, ManagedWay
from gpubench.model.terms.units import format_bandwidth, format_size, group_by, plural
from gpubench.model.terms.verdict import Verdict, worst_verdict
from gpubench.ports.group import Listener

_REFUSED_HERE = "CUDA refuses it for this process"


def conclude(machine: CopyMachine, matrices: Sequence[CopyMatrix], together: Sequence[Together] = ()) -> PathOutcome:
    """Return the verdict on the path of every pair. `together` are patterns, which may explain slow copies."""
    seen = _PairObservations(machine, matrices)
    paths = [seen.path(pair) for pair in dict.fromkeys(pair for matrix in matrices for pair in matrix.cells)]
    explained = Explained(replace(seen.circumstances(paths), together=together))
    paths = explained.add_causes(paths, seen.pair)
    rows = fallback_rows(paths, machine.origin, lambda members: explained.first(seen.staged(members)))
    return report_on(paths, rows, machine.origin, explained.rows())


class _PairObservations:
    def __init__(self, machine: CopyMachine, matrices: Sequence[CopyMatrix]) -> None:
        self._machine, self._matrices = machine, matrices
        self._staged = staged_pairs(matrices, machine.wiring.outruns_host)
        self._positions = {machine.label(gpu): gpu for gpu in range(len(machine.gpus))}

    def path(self, pair: p2p.Pair) -> KnownPath:
        wiring = self._machine.wiring
        source, destination = (self._end(gpu) for gpu in pair)
        return KnownPath(
            source=source,
            destination=destination,
            evidence=PathEvidence(
                capability=wiring.capability(pair),
                selection=self._selection(pair),
                measurement=self._measurement(pair),
                correctness=self._correctness(pair),
                by_design=self._by_design(pair),
                in_doubt=wiring.is_refusal_doubtful(pair),
            ),
            transports=self._transports(pair),
            path_class=wiring.path(pair),
            bandwidth_gb_s=self._bandwidth_gb_s(pair),
            limit_gb_s=wiring.limit(pair).gb_s,
        )

    def staged(self, paths: Sequence[KnownPath]) -> dict[p2p.Pair, Sequence[Transport]]:
        staged = [path for path in paths if path.judgement.conclusion is Conclusion.STAGED]
        return {self.pair(path): path.transports for path in staged}

    def circumstances(self, paths: Sequence[KnownPath]) -> Circumstances:
        facts, staged = self._machine.processes, self.staged(paths)
        return Circumstances(
            wiring=self._machine.wiring,
            facts=facts,
            settings=user_settings(facts),
            staged=staged,
            copied=dict.fromkeys(staged, _REFUSED_HERE) | self._staged,
            wrong=frozenset(self.pair(path) for path in paths if path.judgement.conclusion is Conclusion.WRONG),
            idle_gpus=self._machine.idle_gpus,
            beyond=self._foreign_traffic(),
        )

    def _foreign_traffic(self) -> dict[int, float]:
        """Return the GPUs whose NVLinks moved more than this run sent, with the ratio of the two."""
        found: dict[int, float] = {}
        for (source, _), cell in ((pair, cell) for matrix in self._matrices for pair, cell in matrix.cells.items()):
            share = cell.carried.nvlink_share or 0.0
            if share > max(p2p.MOST_SHARE, found.get(source, 0.0)):
                found[source] = share
        return found

    def pair(self, path: KnownPath) -> p2p.Pair:
        return self._positions[path.source.short], self._positions[path.destination.short]

    def _end(self, gpu: int) -> End:
        machine = self._machine
        known = machine.gpus[gpu]
        return End(known.device, machine.label(gpu), machine.host(gpu), known.bus_id, known.device)

    def _by_design(self, pair: p2p.Pair) -> str:
        """Return the reason why host staging is by design, or an empty string.

        Inside a node the copies use CUDA, so only the driver's policy counts, not NCCL's.
        """
        wiring = self._machine.wiring
        return wiring.why_refused(pair) if wiring.share_node(pair) else wiring.why_staged(pair)

    def _selection(self, pair: p2p.Pair) -> Evidence:
        """Return evidence of the chosen path.

        Without peer access CUDA stages copies. Between nodes, NCCL logs its choice.
        """
        if self._machine.scope(pair) != NETWORK:
            on = self._cells(pair, peer=True)
            if on and not any(cell.seconds or cell.error for _, cell in on):
                return Evidence(State.CONTRADICTING, "without peer access, CUDA copies through host memory")
            return Evidence()
        transports = self._transports(pair)
        if not transports:
            return Evidence(seen="NCCL's choice between these nodes is unknown")
        staged, seen = is_staged(transports), f"NCCL chose {join_names(transports)}"
        if staged is None:
            return Evidence(seen=seen)
        return Evidence(State.CONTRADICTING if staged else State.PRESENT, seen)

    def _transports(self, pair: p2p.Pair) -> tuple[Transport, ...]:
        return next((cell.transports for _, cell in self._cells(pair, peer=True) if cell.transports), ())

    def _measurement(self, pair: p2p.Pair) -> Evidence:
        if pair in self._staged:
            return Evidence(State.CONTRADICTING, self._staged[pair])
        on = self._cells(pair, peer=True)
        broken = next((cell.error for _, cell in on if cell.error), None)
        if broken:
            return Evidence(seen=broken)
        found = self._foreign_traffic_evidence(pair, on) or self._counter_evidence(on) or self._speed_evidence(pair)
        return found or Evidence(seen="no measurement shows it")

    def _foreign_traffic_evidence(self, pair: p2p.Pair, on: Sequence[tuple[p2p.Series, p2p.Cell]]) -> Evidence | None:
        shares = [cell.carried.nvlink_share for _, cell in on if cell.carried.nvlink_share is not None]
        if max(shares, default=0.0) > p2p.MOST_SHARE:
            seen = f"NVLink counters show {max(shares):.2g} times the bytes of this job: {p2p.SOMEBODY_ELSE}"
        else:
            idle, limit_gb_s = self._machine.idle_gpus.get(pair[0]), self._machine.wiring.limit(pair).gb_s
            foreign_gb_s = 0.0 if idle is None else idle.rates.nvlink_sent or 0.0
            if limit_gb_s is None or foreign_gb_s <= FOREIGN_SHARE * limit_gb_s:
                return None
            seen = (
                f"the GPU sent {format_bandwidth(foreign_gb_s, 3)} over NVLink while this job was idle: "
                f"{p2p.SOMEBODY_ELSE}"
            )
        if any(cell.carried.pcie_share is not None and cell.carried.pcie_share < p2p.STILL_SHARE for _, cell in on):
            return Evidence(State.PRESENT, f"PCIe counters showed no traffic during the copy; {seen}")
        return Evidence(seen=seen)

    def _counter_evidence(self, on: Sequence[tuple[p2p.Series, p2p.Cell]]) -> Evidence | None:
        shares = [
            share for _, cell in on if (share := cell.carried.nvlink_share) is not None and share <= p2p.MOST_SHARE
        ]
        if shares:
            return Evidence(State.PRESENT, f"NVLink counters show {min(shares):.0%} of the copied bytes")
        if any(cell.is_staged is False for _, cell in on):
            return Evidence(State.PRESENT, "PCIe counters showed no traffic during the copy")
        return None

    def _speed_evidence(self, pair: p2p.Pair) -> Evidence | None:
        """Return evidence if copies are faster than host memory allows, or much faster than without peer access."""
        through_host = self._machine.wiring.staged_gb_s(pair)
        on, off = self._copied(pair, peer=True), dict(self._copied(pair, peer=False))
        best = max((bandwidth_gb_s(series, cell) for series, cell in on), default=None)
        if best is not None and through_host is not None and best > p2p.ABOVE_HOST * through_host:
            most = f"more than host memory can carry (at most {format_bandwidth(through_host, 3)})"
            return Evidence(State.PRESENT, f"{format_bandwidth(best, 3)}, {most}")
        for series, cell in on:
            other = off.get(replace(series, peer=False))
            if other is not None and p2p.is_direct_latency(cell, other):
                times = other.typical_seconds / cell.typical_seconds
                size = format_size(series.size_bytes) + (" bytes" if series.size_bytes == p2p.LATENCY_BYTES else "")
                seen = f"copies of {size} are {times:.3g} times as fast as with peer access off"
                return Evidence(State.PRESENT, seen)
        return None

    def _correctness(self, pair: p2p.Pair) -> Evidence:
        checked = [(series, cell.wrong) for series, cell in self._cells(pair, peer=None) if cell.wrong is not None]
        wrong = next(((series, count) for series, count in checked if count), None)
        if wrong is not None:
            return Evidence(State.CONTRADICTING, f"{plural(wrong[1], 'wrong element')} arrived, {wrong[0].name}")
        if not checked:
            return Evidence(seen="data were not verified")
        return Evidence(State.PRESENT, "the destination verified the data")

    def _bandwidth_gb_s(self, pair: p2p.Pair) -> float | None:
        """Return the bandwidth in GB/s of the largest copies that copy engines wrote, with peer access if possible."""
        for peer in (True, False):
            written = [copy for copy in self._copied(pair, peer=peer) if copy[0].direction is Direction.WRITE]
            if written:
                series, cell = max(written, key=lambda copy: copy[0].size_bytes)
                if series.is_large:
                    return bandwidth_gb_s(series, cell)
        return None

    def _copied(self, pair: p2p.Pair, *, peer: bool) -> list[tuple[p2p.Series, p2p.Cell]]:
        cells = self._cells(pair, peer=peer)
        return [(series, cell) for series, cell in cells if series.engine is Engine.CE and cell.seconds]

    def _cells(self, pair: p2p.Pair, *, peer: bool | None) -> list[tuple[p2p.Series, p2p.Cell]]:
        return [
            (matrix.series, matrix.cells[pair])
            for matrix in self._matrices
            if pair in matrix.cells
            and matrix.series.direction is not Direction.BOTH
            and (peer is None or matrix.series.peer is peer)
        ]


SECTIONS = ("pairs", "matrices", "ratios", "patterns", "evidence", "fallback", "causes", "tree", "findings")
_MOST_REPEATS = 3
# Limit on copies to measure again per round, because all slow copies of a large machine would take minutes
_MOST_AGAIN = 64
_ALARMS = (Verdict.WARN, Verdict.FAIL, Verdict.INCONCLUSIVE)
_MOST_TREES = 4  # Limit on nodes whose PCI tree is in the report
Copied = TypeVar("Copied", HostCopy, PairCopy)
ReadErrors = Callable[[CopyMachine], CopyMachine]
"""Reads the machine again after all copies, to include the errors that they caused."""


class P2pRun:
    """Measures a request, and passes rows to a listener. Every rank runs it and builds the same report."""

    def __init__(
        self,
        request: P2pRequest,
        bench: Bench,
        machine: CopyMachine,
        listener: Listener[report.PairRow],
        read_errors: ReadErrors | None = None,
        past: PastBandwidth = lambda _row: None,
    ) -> None:
        self._request = request
        self._bench = bench
        self._machine = machine
        self._listener = listener
        self._read_errors = read_errors
        profile = None if machine.matched is None else machine.matched.profile
        self._judge = CopyJudge(profile, {node.snapshot.host: node for node in machine.nodes}, past)
        self._rows: list[report.PairRow] = []
        self._refused: Mapping[p2p.Pair, str] = {}
        self._matrices: list[CopyMatrix] = []
        self._patterns: dict[PatternCopy, p2p.Cell] = {}
        self._wrong_with_host: list[str] = []
        self._host_cells: list[tuple[HostCopy, p2p.Cell]] = []
        self._managed: dict[ManagedCopy, p2p.Cell] = {}
        self._done = 0
        self._total = request.steps(len(machine.gpus))

    def run(self) -> report.Report:
        """Measure all copies. Copies without peer access come before peer access is enabled."""
        before = self._bench.look_while_idle()
        self._measure_host()
        self._measure_series(peer=False)
        if any(series.peer for series in self._request.series) or self._request.patterns:
            self._refused = self._bench.enable_peer_access()
        self._measure_series(peer=True)
        self._measure_managed()
        copies = self._request.pattern_copies
        measured = self._bench.measure(copies)
        for copy in copies:
            self._show_progress(str(copy).replace("_", " "))
            cell = next(measured)
            for _ in range(_MOST_REPEATS):
                row = pattern_row(self._machine, self._request, copy, cell, self._matrices)
                if row.verdict not in _ALARMS:
                    break
                cell = self._bench.measure_again(copy, cell)
            self._patterns[copy] = cell
        idle = combine_idle_gpus(before, self._bench.look_while_idle())
        self._machine = replace(self._machine, idle_gpus=dict(enumerate(idle)))
        return self._report()

    def _show_progress(self, text: str) -> None:
        self._listener.progress(self._done, self._total, text)
        self._done += 1

    def _measure_host(self) -> None:
        size_bytes = self._request.host_bytes or 0
        copies = list(self._request.host_copies(len(self._machine.gpus)))
        measured = self._bench.measure(copies)
        for alike in group_by(copies, lambda copy: (copy.memory, copy.to_gpu)).values():
            cells: dict[HostCopy, p2p.Cell] = {}
            for copy in alike:
                self._show_progress(f"{copy.label} {self._machine.gpus[copy.gpu].device}")
                cells[copy] = next(measured)
            rows = self._judge_rows(cells, lambda copy, cell: host_row(self._machine, copy, cell, size_bytes))
            self._host_cells += cells.items()
            self._wrong_with_host += [self._machine.gpus[copy.gpu].device for copy, cell in cells.items() if cell.wrong]
            for row in rows.values():
                self._listener.row(row)

    def _judge_rows(
        self, cells: dict[Copied, p2p.Cell], make_row: Callable[[Copied, p2p.Cell], report.PairRow]
    ) -> dict[Copied, report.PairRow]:
        """Judge copies by comparing them with each other. First measure again the copies that would raise an alarm."""
        for _ in range(_MOST_REPEATS):
            rows = self._judge.judge([make_row(copy, cell) for copy, cell in cells.items()], self._rows)
            doubtful = [copy for copy, row in zip(cells, rows, strict=True) if _needs_repeat(row, cells[copy])]
            again = {copy: self._bench.measure_again(copy, cells[copy]) for copy in doubtful[:_MOST_AGAIN]}
            if all(cells[copy] == cell for copy, cell in again.items()):
                break
            cells |= again
        rows = self._judge.judge([make_row(copy, cell) for copy, cell in cells.items()], self._rows)
        rows = [_add_reason(row) for row in rows]
        self._rows += rows
        return dict(zip(cells, rows, strict=True))

    def _measure_managed(self) -> None:
        """Measure copies in managed memory.

        If a GPU's driver does not support a copy, its row has the reason instead.
        """
        size_bytes, support = self._request.managed_bytes or 0, self._request.managed
        lacks: dict[ManagedCopy, str] = {}
        for copy in self._request.managed_copies(len(self._machine.gpus)):
            ends = [end for end in (copy.source, copy.destination) if end is not None and copy.way.is_managed]
            lacks[copy] = next((support[end].missing_feature for end in ends if support[end].missing_feature), "")
        measured = self._bench.measure([copy for copy, reason in lacks.items() if not reason])
        for copy, reason in lacks.items():
            self._show_progress(str(copy))
            self._managed[copy] = p2p.Cell() if reason else next(measured)
            if copy.way is not ManagedWay.RESIDENT:
                self._listener.row(managed_row(self._machine, copy, self._managed[copy], size_bytes, reason))

    def _measure_series(self, *, peer: bool) -> None:
        for series in (one_series for one_series in self._request.series if one_series.peer is peer):
            scoped = [pair for pair in self._request.pairs if (self._machine.scope(pair) == NETWORK) == series.network]
            if scoped:
                self._measure_matrix(series, scoped)

    def _measure_matrix(self, series: p2p.Series, pairs: Sequence[p2p.Pair]) -> None:
        without = {pair: cell for pair in pairs if (cell := self._cell_without_peer_access(series, pair)) is not None}
        measured = self._bench.measure([PairCopy(series, pair) for pair in pairs if pair not in without])
        cells: dict[p2p.Pair, p2p.Cell] = {}
        for pair in pairs:
            self._show_progress(label(series))
            cells[pair] = without[pair] if pair in without else next(measured)
        copies = {PairCopy(series, pair): cell for pair, cell in cells.items()}
        rows = self._judge_rows(copies, self._pair_row)
        cells = {copy.pair: cell for copy, cell in copies.items()}
        gb_s = {pair: bandwidth_gb_s(series, cell) for pair, cell in cells.items() if cell.seconds}
        verdicts = {
            copy.pair: (None if row.verdict is None else Verdict(row.verdict), row.note or "")
            for copy, row in rows.items()
        }
        self._matrices.append(CopyMatrix(series, cells, gb_s, verdicts))
        for row in rows.values():
            self._listener.row(row)

    def _pair_row(self, copy: PairCopy, cell: p2p.Cell) -> report.PairRow:
        return pair_row(self._machine, copy.series, copy.pair, cell, self._verdict(copy.series, copy.pair, cell))

    def _cell_without_peer_access(self, series: p2p.Series, pair: p2p.Pair) -> p2p.Cell | None:
        """Return an empty cell, or one with the error, if a pair lacks the peer access that the series needs.

        Return None if the pair can be measured.
        """
        if not series.peer:
            return None
        if pair in self._refused:
            return p2p.Cell(error=self._refused[pair])
        return None if self._machine.can_reach(pair) else p2p.Cell()

    def _verdict(self, series: p2p.Series, pair: p2p.Pair, cell: p2p.Cell) -> Judged:
        if not (cell.seconds or cell.error):
            return Verdict.SKIP, f"no peer access: {self._machine.wiring.peer_access(pair).reason}"
        lacks_access = series.is_large and not series.peer and not self._machine.can_reach(pair)
        is_staged_by_design = lacks_access and bool(self._machine.wiring.why_refused(pair))
        is_judged = series.is_judged or is_staged_by_design or (series.peer and not series.network)
        known = verdict_without_bandwidth(cell, self._machine.users(*pair), is_judged=is_judged)
        return known or (Verdict.PASS, "")

    def _report(self) -> report.Report:
        if self._read_errors is not None:
            self._machine = self._read_errors(self._machine)
        machine = self._machine
        others = [(copy.label, cell) for copy, cell in self._host_cells]
        others += [(str(copy).replace("_", " "), cell) for copy, cell in self._patterns.items()]
        others += [(str(copy), cell) for copy, cell in self._managed.items()]
        places = list(map(machine.wiring.place, range(len(machine.gpus))))
        findings = copy_findings(
            self._matrices, machine.gpus, self._wrong_with_host, others, machine.wiring.path, places
        )
        findings += managed_findings(self._request, self._managed, machine, self._matrices)
        patterns = [pattern_row(machine, self._request, *pattern, self._matrices) for pattern in self._patterns.items()]
        together = bidirectional_patterns(self._request, self._patterns, len(machine.gpus))
        paths = conclude(machine, self._matrices, together)
        facts = machine.facts(self._measured_rows(), patterns)
        findings += checks.copy_findings(facts)
        findings += impossible(pairs=[row for row in self._rows if row.verdict == Verdict.ERROR])
        findings += paths.findings
        findings = fold(findings, machine.nodes, checks.fact_findings(facts))
        measured = [Verdict.PASS] if machine.gpus else [Verdict.SKIP]
        verdict = worst_verdict([*measured, *(finding.severity for finding in findings)])
        matrices = {_title(matrix.series): self._name_pairs(matrix.gb_s) for matrix in self._matrices}
        sections: dict[str, report.Section] = {
            "matrices": report.Matrix(matrices),
            "ratios": report.Matrix(self._name_pairs(_ratios(self._matrices))),
            **report.Table.group_by_section({report.PatternRow: patterns}),
            **paths.sections,
            **report.Table.group_by_section(
                {TreeRow: lambda: chain.from_iterable(map(tree_rows, machine.nodes[:_MOST_TREES]))}
            ),
        }
        return report.Report(
            verdict=verdict, complete=True, findings=findings, sections=sections, main=report.PairRow.section
        )

    def _measured_rows(self) -> list[report.PairRow]:
        """Return all rows. Pairs that only their times show to be host-staged are marked as host-staged."""
        machine = self._machine
        staged = {tuple(map(machine.label, pair)) for pair in staged_pairs(self._matrices, machine.wiring.outruns_host)}
        return [
            replace(row, host_staged=True) if row.peer == "on" and (row.source, row.destination) in staged else row
            for row in self._rows
        ]

    def _name_pairs(self, figures: Mapping[p2p.Pair, float]) -> dict[str, dict[str, float]]:
        named: dict[str, dict[str, float]] = {}
        for (source, destination), figure in figures.items():
            named.setdefault(self._machine.gpus[source].device, {})[self._machine.gpus[destination].device] = figure
        return named


def _needs_repeat(row: report.PairRow, cell: p2p.Cell) -> bool:
    """True if a copy must be measured again before its row raises an alarm."""
    return row.verdict in _ALARMS and not cell.error and not cell.wrong and not (row.host_staged and row.peer == "on")


def _add_reason(row: report.PairRow) -> report.PairRow:
    """Add the reason for the verdict to the row's note."""
    if row.verdict == Verdict.SKIP and not row.note:
        return replace(row, note="nothing to compare with")
    if not is_slow_copy(row) and row.verdict != Verdict.INCONCLUSIVE:
        return row
    words = (row.note, describe_slowness(row)) if is_with_host(row) else (describe_slowness(row), row.note)
    return replace(row, note="; ".join(filter(None, words)))


def _title(series: p2p.Series) -> str:
    size = "latency" if series.size_bytes == p2p.LATENCY_BYTES else format_size(series.size_bytes)
    return f"{series.name} {size}"


def _ratios(matrices: Sequence[CopyMatrix]) -> dict[p2p.Pair, float]:
    off = {matrix.series.size_bytes: matrix.gb_s for matrix in matrices if not matrix.series.peer}
    on = {
        matrix.series.size_bytes: matrix.gb_s
        for matrix in matrices
        if matrix.series == p2p.Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=matrix.series.size_bytes)
    }
    size_bytes = max(set(on) & set(off), default=None)
    if size_bytes is None:
        return {}
    return {pair: gb_s / off[size_bytes][pair] for pair, gb_s in on[size_bytes].items() if pair in off[size_bytes]}
