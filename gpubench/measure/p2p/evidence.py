"""The evidence of each pair's path from a run of copies, of all four kinds, and the verdict on fallback."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances, Together, users_settings
from gpubench.measure.p2p.findings import staged_pairs
from gpubench.measure.p2p.machine import NETWORK, CopyMachine
from gpubench.measure.p2p.matrix import CopyMatrix, bandwidth_gb_s
from gpubench.measure.paths.diagnosis import Explained
from gpubench.measure.paths.report import PathOutcome, report_on
from gpubench.model.facts.idle_gpu import FOREIGN_SHARE
from gpubench.model.paths.evidence import Conclusion, Evidence, PathEvidence, State
from gpubench.model.paths.p2p import (
    ABOVE_HOST,
    JUDGED_FROM_BYTES,
    MOST_SHARE,
    SOMEBODY_ELSE,
    STILL_SHARE,
    Cell,
    Pair,
    Series,
    is_sooner,
)
from gpubench.model.paths.selection import names
from gpubench.model.paths.transport import Transport, is_staged
from gpubench.model.results.fallback import End, KnownPath, fallback_rows
from gpubench.model.terms.copies import Direction, Engine

_REFUSED_HERE = "CUDA refuses it to this process"


def conclude(machine: CopyMachine, matrices: Sequence[CopyMatrix], together: Sequence[Together] = ()) -> PathOutcome:
    """The verdict on the path of every pair that was asked for; `together` explains slow ones."""
    seen = _PairObservations(machine, matrices)
    paths = [seen.path(pair) for pair in dict.fromkeys(pair for matrix in matrices for pair in matrix.cells)]
    explained = Explained(replace(seen.circumstances(paths), together=together))
    rows = fallback_rows(paths, machine.origin, lambda members: explained.first(seen.staged(members)))
    return report_on(paths, rows, machine.origin, explained.rows())


class _PairObservations:
    """The evidence on each pair, from its cells in all matrices."""

    def __init__(self, machine: CopyMachine, matrices: Sequence[CopyMatrix]) -> None:
        self._machine, self._matrices = machine, matrices
        self._staged = staged_pairs(matrices, machine.wiring.outruns_host)
        self._positions = {machine.label(gpu): gpu for gpu in range(len(machine.gpus))}

    def path(self, pair: Pair) -> KnownPath:
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
            ),
            transports=self._transports(pair),
            path_class=wiring.path(pair),
            bandwidth_gb_s=self._bandwidth_gb_s(pair),
            limit_gb_s=wiring.limit(pair).gb_s,
        )

    def staged(self, paths: Sequence[KnownPath]) -> dict[Pair, Sequence[Transport]]:
        """Of some paths those that go through host memory, with what they take."""
        staged = [path for path in paths if path.judgement.conclusion is Conclusion.STAGED]
        return {self._pair(path): path.transports for path in staged}

    def circumstances(self, paths: Sequence[KnownPath]) -> Circumstances:
        """The run to look for conditions in; NCCL's policy and settings mean nothing to copies that CUDA makes."""
        facts, staged = self._machine.processes, self.staged(paths)
        return Circumstances(
            wiring=self._machine.wiring,
            facts=facts,
            settings=users_settings(facts),
            staged=staged,
            copied=dict.fromkeys(staged, _REFUSED_HERE) | self._staged,
            wrong=frozenset(self._pair(path) for path in paths if path.judgement.conclusion is Conclusion.WRONG),
            idle_gpus=self._machine.idle_gpus,
            beyond=self._beyond(),
        )

    def _beyond(self) -> dict[int, float]:
        """By how many times what was copied the NVLinks of a source moved, where that is more than they can."""
        found: dict[int, float] = {}
        for (source, _), cell in ((pair, cell) for each in self._matrices for pair, cell in each.cells.items()):
            share = cell.carried.nvlink_share or 0.0
            if share > max(MOST_SHARE, found.get(source, 0.0)):
                found[source] = share
        return found

    def _pair(self, path: KnownPath) -> Pair:
        return self._positions[path.source.short], self._positions[path.destination.short]

    def _end(self, gpu: int) -> End:
        machine = self._machine
        return End(machine.gpus[gpu].device, machine.label(gpu), machine.host(gpu), machine.gpus[gpu].bus_id)

    def _by_design(self, pair: Pair) -> str:
        """The reason why staging is no fault: on a node only the driver's policy counts, not NCCL's."""
        wiring = self._machine.wiring
        return wiring.refused_by_design(pair) if wiring.together(pair) else wiring.by_design(pair)

    def _selection(self, pair: Pair) -> Evidence:
        """The choice of a path: CUDA logs none, but without peer access there is only host memory; NCCL logs it."""
        if self._machine.scope(pair) != NETWORK:
            on = self._cells(pair, peer=True)
            if on and not any(cell.seconds or cell.error for _, cell in on):
                return Evidence(State.CONTRADICTING, "without peer access, CUDA copies through host memory")
            return Evidence()
        transports = self._transports(pair)
        if not transports:
            return Evidence(seen="what NCCL took between these nodes was not heard")
        staged, seen = is_staged(transports), f"NCCL chose {names(transports)}"
        if staged is None:
            return Evidence(seen=seen)
        return Evidence(State.CONTRADICTING if staged else State.PRESENT, seen)

    def _transports(self, pair: Pair) -> tuple[Transport, ...]:
        return next((cell.transports for _, cell in self._cells(pair, peer=True) if cell.transports), ())

    def _measurement(self, pair: Pair) -> Evidence:
        if pair in self._staged:
            return Evidence(State.CONTRADICTING, self._staged[pair])
        on = self._cells(pair, peer=True)
        broken = next((cell.error for _, cell in on if cell.error), None)
        if broken:
            return Evidence(seen=broken)
        found = self._of_others(pair, on) or self._counted(on) or self._faster(pair)
        return found or Evidence(seen="nothing was measured that would tell")

    def _of_others(self, pair: Pair, on: Sequence[tuple[Series, Cell]]) -> Evidence | None:
        """Evidence where others moved the NVLink counters: of PCIe counters, which others do not make stand still."""
        seen = self._sent_by_others(pair, on)
        if not seen:
            return None
        if any(cell.carried.pcie_share is not None and cell.carried.pcie_share < STILL_SHARE for _, cell in on):
            return Evidence(State.PRESENT, f"PCIe counters stood still while it was copied; {seen}")
        return Evidence(seen=seen)

    def _sent_by_others(self, pair: Pair, on: Sequence[tuple[Series, Cell]]) -> str:
        """What shows that others send over the NVLinks of the source; empty where nothing does."""
        shares = [cell.carried.nvlink_share for _, cell in on if cell.carried.nvlink_share is not None]
        if max(shares, default=0.0) > MOST_SHARE:
            return f"NVLink counters moved by {max(shares):.2g} times our bytes: {SOMEBODY_ELSE}"
        idle, limit_gb_s = self._machine.idle_gpus.get(pair[0]), self._machine.wiring.limit(pair).gb_s
        foreign_gb_s = 0.0 if idle is None else idle.rates.nvlink_sent or 0.0
        if limit_gb_s is None or foreign_gb_s <= FOREIGN_SHARE * limit_gb_s:
            return ""
        return f"{foreign_gb_s:.3g} GB/s left over NVLink while this job was idle: {SOMEBODY_ELSE}"

    def _counted(self, on: Sequence[tuple[Series, Cell]]) -> Evidence | None:
        """The evidence of counters for a path that is not staged."""
        shares = [share for _, cell in on if (share := cell.carried.nvlink_share) is not None and share <= MOST_SHARE]
        if shares:
            return Evidence(State.PRESENT, f"NVLink counters moved by {min(shares):.0%} of what was copied")
        if any(cell.is_staged is False for _, cell in on):
            return Evidence(State.PRESENT, "PCIe counters stood still while it was copied")
        return None

    def _faster(self, pair: Pair) -> Evidence | None:
        """The evidence of times for it: more than host memory carries, or sooner than without peer access."""
        through_host = self._machine.wiring.through_host_gb_s(pair)
        on, off = self._copied(pair, peer=True), dict(self._copied(pair, peer=False))
        best = max((bandwidth_gb_s(series, cell) for series, cell in on), default=None)
        if best is not None and through_host is not None and best > ABOVE_HOST * through_host:
            most = f"the way through host memory carries {through_host:.3g} at most"
            return Evidence(State.PRESENT, f"{best:.3g} GB/s, and {most}")
        for series, cell in on:
            other = off.get(replace(series, peer=False))
            if other is not None and is_sooner(cell, other):
                times = other.typical_seconds / cell.typical_seconds
                return Evidence(State.PRESENT, f"{times:.3g} times as fast as with peer access off")
        return None

    def _correctness(self, pair: Pair) -> Evidence:
        checked = [(each, cell.wrong) for each, cell in self._cells(pair, peer=None) if cell.wrong is not None]
        wrong = next(((each, count) for each, count in checked if count), None)
        if wrong is not None:
            return Evidence(State.CONTRADICTING, f"{wrong[1]} wrong elements arrived, {wrong[0].name}")
        if not checked:
            return Evidence(seen="data were not verified")
        return Evidence(State.PRESENT, "the destination compared what arrived, and it was right")

    def _bandwidth_gb_s(self, pair: Pair) -> float | None:
        """The bandwidth that people compare: of the largest copies that engines wrote, with peer access where it is."""
        for peer in (True, False):
            written = [each for each in self._copied(pair, peer=peer) if each[0].direction is Direction.WRITE]
            if written:
                series, cell = max(written, key=lambda each: each[0].size_bytes)
                if series.size_bytes >= JUDGED_FROM_BYTES:
                    return bandwidth_gb_s(series, cell)
        return None

    def _copied(self, pair: Pair, *, peer: bool) -> list[tuple[Series, Cell]]:
        """The cells that copy engines, or NCCL, copied."""
        cells = self._cells(pair, peer=peer)
        return [(series, cell) for series, cell in cells if series.engine is Engine.CE and cell.seconds]

    def _cells(self, pair: Pair, *, peer: bool | None) -> list[tuple[Series, Cell]]:
        """The cells of this pair alone: copies both ways at once are of the opposite pair too."""
        return [
            (each.series, each.cells[pair])
            for each in self._matrices
            if pair in each.cells
            and each.series.direction is not Direction.BOTH
            and (peer is None or each.series.peer is peer)
        ]
