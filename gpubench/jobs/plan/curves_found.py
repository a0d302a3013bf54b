"""Where the times of a collective come from: stored results, a measurement now, or what a profile expects."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.measure.plan.curves import CollectiveCurve, CommunicatorRanks, CurvePoint, curve_of
from gpubench.model.facts.backends import ROW_BACKENDS
from gpubench.model.profiles.fault import Fault
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.plan import CurveOrigin
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.sampling import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND

SIZES = tuple(2**power for power in range(10, 33, 2))
"""The sizes that a profile is asked for, and that are measured now: 1 KiB to 4 GiB by 4."""

_SECONDS_TO_MEASURE = 15.0
"""Of a collective, in these sizes; an estimate for whoever waits."""

_TRAINED_WITH = ("nccl", "torch:nccl", "rccl", "torch:rccl", "torch:xccl", "simulated")
_PREFERRED = (*_TRAINED_WITH, *(name for name in ROW_BACKENDS if name not in _TRAINED_WITH))
"""Backends of rows, that of NCCL first: times of several are of several libraries, and never one curve."""

Measured = Callable[[str, int], Sequence[CollectiveRow]]
"""Measures a collective among so many ranks here."""


@dataclass(slots=True)
class FoundCurves:
    """Finds curves: stored rows of that number of ranks, or scaled from another one; a measurement; the profile.

    `measure_now` of None: nothing can be measured here. `notes` gathers what a reader should know; `staged` are the
    collectives that went through host memory.
    """

    machine: PlannedMachine
    files: Sequence[ResultFile]
    measure_now: Measured | None = None
    faults: tuple[Fault, ...] = ()
    notes: list[str] = field(default_factory=list)
    found: dict[tuple[str, CommunicatorRanks], CollectiveCurve] = field(default_factory=dict)
    staged: list[str] = field(default_factory=list)

    def curve(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        """The curve of a collective among the ranks of a group.

        Raises:
            UsageError: neither results nor a profile know it.
            CouldNotMeasureError: it was measured now, and could not be.
        """
        key = (collective, group)
        if key not in self.found:
            self.found[key] = self._find(collective, group)
        return self.found[key]

    def _find(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        stored = self._stored(collective, group)
        if stored is not None:
            return stored
        if self.measure_now is not None and group.nodes == 1 and group.ranks <= self.machine.gpus_per_node:
            rows = self.measure_now(collective, group.ranks)
            if rows:
                self.notes.append(f"{collective} among {group.ranks} ranks was measured now")
                self._note_staged(collective, rows)
                return curve_of(collective, group.ranks, _points(rows), source="measured now")
        return self._expected(collective, group)

    def _stored(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve | None:
        usual = [
            (row, file)
            for file in self.files
            for row in file.rows
            if row.collective == collective and _is_usual(row) and row.nodes == group.nodes and row.ranks > 1
        ]
        if not usual:
            return None
        found = self._of_one_backend(collective, [(row, file) for row, file in usual if not row.wrong])
        if len(found) < len(usual) and any(row.wrong for row, _ in usual):
            self.notes.append(f"rows of {collective} with wrong data are left out")
        if not found:
            return None
        ranks = min({row.ranks for row, _ in found}, key=lambda count: (abs(count - group.ranks), -count))
        taken = [(row, file) for row, file in found if row.ranks == ranks]
        record = collective_named(collective)
        scale = record.busbw_factor(group.ranks) / record.busbw_factor(ranks)
        points = [
            CurvePoint(each.size_bytes, each.seconds * scale, each.spread)
            for each in _points([row for row, _ in taken])
        ]
        simulated = any(row.origin == Origin.SIMULATED for row, _ in taken)
        self._note_staged(collective, [row for row, _ in taken])
        note = "" if ranks == group.ranks else f"scaled from {ranks} ranks by the bytes of rings"
        if note:
            self.notes.append(f"{collective} among {group}: {note}")
        return curve_of(
            collective,
            group.ranks,
            points,
            origin=CurveOrigin.SIMULATED if simulated else CurveOrigin.MEASURED,
            source=", ".join(dict.fromkeys(file.name for _, file in taken)),
            note=note,
        )

    def _note_staged(self, collective: str, rows: Sequence[CollectiveRow]) -> None:
        if any(row.host_staged for row in rows):
            self.staged.append(collective)
            self.notes.append(f"{collective} went through host memory: gpubench p2p says which pair, and why")

    def _of_one_backend(
        self, collective: str, found: Sequence[tuple[CollectiveRow, ResultFile]]
    ) -> Sequence[tuple[CollectiveRow, ResultFile]]:
        """Rows of the backend that trains where there are several, and measured rows rather than simulated ones."""
        backends = sorted({row.backend for row, _ in found}, key=_PREFERRED.index)
        if not backends:
            return []
        taken = backends[0]
        if len(backends) > 1:
            self.notes.append(f"{collective} is that of {taken}; left out: {', '.join(backends[1:])}")
        elif taken not in _TRAINED_WITH:
            self.notes.append(f"{collective} is that of {taken}, which is not what GPUs usually train with")
        return [(row, file) for row, file in found if row.backend == taken]

    def _expected(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        from gpubench.hardware.simulated.machine import SimulatedMachine
        from gpubench.hardware.simulated.times import CollectiveTimes

        profile = self.machine.profile
        if collective not in SUMMARIES or profile is None:
            raise self._unknown(collective, group, "no profile knows this machine")
        per_node = max(1, group.ranks // group.nodes)
        simulated = SimulatedMachine(profile, group.nodes)
        try:
            times = CollectiveTimes(simulated, self.faults, noise=0.0, whole_nodes=True)
            local = min(per_node, times.gpus)
            points = [
                CurvePoint(size, max(times.seconds(collective, size, row=0, ranks_per_node=local))) for size in SIZES
            ]
        except CouldNotMeasureError as error:
            raise self._unknown(collective, group, error.seen) from None
        except UsageError as error:
            if self.faults:
                raise
            raise self._unknown(collective, group, error.seen) from None
        return curve_of(
            collective,
            group.ranks,
            points,
            origin=CurveOrigin.EXPECTED,
            source=f"profile {profile.name}",
            note="" if group.nodes == 1 else "between nodes by a model of NICs",
        )

    def _unknown(self, collective: str, group: CommunicatorRanks, why: str) -> UsageError:
        known = ", ".join(dict.fromkeys(f"{row.collective} of {row.ranks}" for file in self.files for row in file.rows))
        return UsageError(
            f"nothing is known of {collective} among {group}: {why}",
            expected="results of every collective that the layout uses" + (f"; there are {known}" if known else ""),
            reason="the results are of other collectives",
            next_step=f"gpubench {collective} --output results/, or --layout with one that does without it",
        )


def _is_usual(row: CollectiveRow) -> bool:
    """Rows of the whole job as NCCL ran them by itself, in a plain loop."""
    return (
        row.group is None and row.mode == Mode.THROUGHPUT and not row.graph and row.setting is None and row.time_us > 0
    )


def _points(rows: Sequence[CollectiveRow]) -> list[CurvePoint]:
    return [
        CurvePoint(row.size_bytes, row.time_us / MICROSECONDS_PER_SECOND, (row.ci95_percent or 0.0) / 100)
        for row in rows
        if row.size_bytes > 0
    ]


def measured_now(timeout_s: float, announce: Callable[[str, float], None]) -> Measured:
    """Measures by gpubench's own command in a process of its own.

    `announce` is told what begins and about how many seconds it takes.
    """

    def measure(collective: str, ranks: int) -> Sequence[CollectiveRow]:
        from gpubench.jobs.plan.child import run_command
        from gpubench.readers.results.registry import read_results

        announce(f"measuring {collective} among {ranks} ranks", _SECONDS_TO_MEASURE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curve.json"
            sizes = f"{SIZES[0]}:{SIZES[-1]}:4"
            run_command([collective, "--np", str(ranks), "--sizes", sizes, "--output", str(path), "--quiet"], timeout_s)
            return [row for row in read_results(path).rows if _is_usual(row)] if path.exists() else []

    return measure
