"""Describes the cluster to plan for, and finds the times of its collectives.

Times come from stored results, from a measurement now, or from the profile.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.profiles.fault import Fault
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import CollectiveRow, make_record
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.operation import ROW_BACKENDS
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.model.terms.verdict import Origin
from gpubench.readers.registry import read_results
from gpubench.readers.results.gpubench_json import read_stored
from gpubench.training import program
from gpubench.training.events import MeasuredContention
from gpubench.training.options import TrainingPlan

if TYPE_CHECKING:
    from gpubench.model.profiles.profile import Profile


_UNKNOWN = "unknown GPU"


class PlannedMachine(Struct, frozen=True, kw_only=True):
    """The nodes to plan for, with GPUs of one model.

    - `profile` is None if no profile matches the machine.
    - `is_here` is true if its GPUs are in this host, so that they can be measured.
    - `origin` is simulated if the machine is taken from a profile.
    """

    gpu: str
    gpus_per_node: int
    nodes: int
    profile: "Profile | None"
    hosts: tuple[str, ...]
    origin: Origin
    memory_bytes: int | None
    is_here: bool = False

    @property
    def gpus(self) -> int:
        """The total number of GPUs in all nodes."""
        return self.gpus_per_node * self.nodes

    def collectives(
        self, group: program.CommunicatorRanks, faults: Sequence[Fault] = ()
    ) -> Callable[[str, int], float]:
        """Return a function that maps a collective and its size in bytes to its time in seconds on a group of
        ranks.

        The time is the one that the profile expects with these faults.
        """
        from gpubench.simulated.machine import SimulatedMachine
        from gpubench.simulated.times import CollectiveTimes

        assert self.profile is not None
        times = CollectiveTimes(SimulatedMachine(self.profile, group.nodes), faults, noise=0.0, whole_nodes=True)
        local = min(group.on_a_node, times.gpus)
        return lambda collective, size: max(times.seconds(collective, size, row=0, ranks_per_node=local))


def choose_machine(plan: TrainingPlan, files: Sequence[ResultFile], beside: Sequence[str] = ()) -> PlannedMachine:
    """Return the cluster to plan for. `beside` has the GPU models in results of `gpubench overlap`.

    Raises:
        UsageError: the profile does not exist, or the results are from several clusters or from a different one.
        CouldNotMeasureError: there is no GPU, result or profile to plan for.
    """
    models = list(dict.fromkeys(name for file in files for name in file.circumstances.gpus))
    if len(models) > 1:
        raise UsageError(
            f"results of several machines: {', '.join(models)}",
            expected="results of one kind of GPU",
            next_step="name the files of one machine: --results a.json --results b.json",
        )
    machine = _machine_from_profile(plan.simulate, plan.nodes) if plan.simulate is not None else _gpus_here(plan)
    if machine is None and files:
        machine = _machine_from_results(plan, files, models)
    if machine is None and plan.profile is not None:
        machine = _machine_from_profile(plan.profile, plan.nodes)
    if machine is None:
        raise CouldNotMeasureError(
            "this machine has no GPU to plan for",
            expected="a GPU, stored results (--results), or a machine by its profile (--simulate)",
            next_step="--simulate hgx-h200-8, or another profile from gpubench profiles list",
        )
    others = [name for name in (*models, *beside) if name != machine.gpu]
    if others and machine.gpu != _UNKNOWN and not plan.other_machine:
        raise UsageError(
            f"the results are from {others[0]}, but the planned machine has {machine.gpu}",
            expected="curves that were measured on the planned machine",
            reason="the folder has results that were copied from another machine",
            next_step="measure here (without --results), or use --other-machine",
        )
    return machine


def _machine_from_profile(name: str, nodes: int | None) -> PlannedMachine:
    from gpubench.simulated.machine import parse_machine

    parsed = parse_machine(name)
    profile = parsed.profile
    if not profile.match.visible or not profile.gpu.name:
        raise UsageError(
            f"--simulate {name} has no GPUs", expected="a machine with GPUs", next_step="gpubench profiles list"
        )
    if nodes is not None and parsed.nodes > 1 and nodes != parsed.nodes:
        raise UsageError(f"--simulate {name} and --nodes {nodes} differ", expected="one of them")
    count = nodes or parsed.nodes
    return PlannedMachine(
        gpu=profile.gpu.name,
        gpus_per_node=profile.match.visible,
        nodes=count,
        profile=profile,
        hosts=tuple(f"node{number}" for number in range(count)),
        origin=Origin.SIMULATED,
        memory_bytes=profile.gpu.memory_bytes,
    )


def _gpus_here(plan: TrainingPlan) -> PlannedMachine | None:
    from gpubench.jobs.sources import Here
    from gpubench.profiles import match_node

    node = Here(plan.timeout_s).machines().nodes[0]
    names = [gpu.name for gpu in node.gpus if gpu.name]
    if not names:
        return None
    matched = match_node(node, os.environ, plan.profile)
    memory = min((gpu.memory_bytes for gpu in node.gpus if gpu.memory_bytes), default=None)
    return PlannedMachine(
        gpu=names[0],
        gpus_per_node=len(node.gpus),
        nodes=plan.nodes or 1,
        profile=_own_kind(None if matched is None else matched.profile, plan),
        hosts=(node.snapshot.host,),
        origin=Origin.MEASURED if not plan.nodes or plan.nodes == 1 else Origin.SIMULATED,
        memory_bytes=memory,
        is_here=True,
    )


def _own_kind(profile: "Profile | None", plan: TrainingPlan) -> "Profile | None":
    """Return None for the generic profile that fits any machine, unless the user named it."""
    is_example = profile is not None and profile.match.generic is not None and plan.profile is None
    return None if is_example else profile


def _machine_from_results(plan: TrainingPlan, files: Sequence[ResultFile], models: Sequence[str]) -> PlannedMachine:
    from gpubench.profiles import find_gpu_profile

    rows = [row for file in files for row in file.rows]
    if not rows:
        raise UsageError(
            f"{files[0].name} has no rows for a collective",
            expected="results of gpubench allreduce, allgather, reducescatter, ...",
            next_step="gpubench allreduce --output results/",
        )
    largest = max(rows, key=lambda row: row.ranks)
    per_node = largest.ranks // largest.nodes
    known = find_gpu_profile(models, per_node, None, os.environ, plan.profile) if models or plan.profile else None
    profile = _own_kind(known, plan)
    simulated = any(row.origin == Origin.SIMULATED for row in rows)
    return PlannedMachine(
        gpu=models[0] if models else profile.gpu.name if profile else _UNKNOWN,
        gpus_per_node=per_node,
        nodes=plan.nodes or largest.nodes,
        profile=profile,
        hosts=tuple(dict.fromkeys(host for file in files for host in file.circumstances.hosts)) or ("unknown",),
        origin=Origin.SIMULATED if simulated else Origin.RECORDED,
        memory_bytes=profile.gpu.memory_bytes if profile else None,
    )


_SUFFIXES = (".json", ".jsonl", ".csv", ".txt")
_MOST_FILES = 2000
_POSITIVE = (
    *("size_bytes", "partner_count", "partner_alone_us", "communication_alone_us"),
    *("compute_slowdown", "communication_slowdown"),
)


class FoundResults(Struct, frozen=True, kw_only=True):
    """Results of collectives, and measured contention between computation and communication.

    - `contention_gpus` has the GPU models on which the contention was measured.
    - `unusable` is the number of invalid contention rows.
    - `passed_over` has the names of files in a folder that are not results.
    """

    files: Sequence[ResultFile] = ()
    contention: Sequence[MeasuredContention] = ()
    contention_source: str = ""
    contention_gpus: Sequence[str] = ()
    unusable: int = 0
    passed_over: Sequence[str] = ()


def read_all(results: Sequence[Path], overlap: Sequence[Path]) -> FoundResults:
    """Read all results. A file that is named directly must be a result. Other files in a folder are skipped.

    Raises UsageError if a named file cannot be read, or if a folder has no results.
    """
    files: list[ResultFile] = []
    passed_over: list[str] = []
    for path in results:
        before = len(files)
        for each in _paths(path):
            try:
                file = read_results(each)
            except UsageError:
                if each == path:
                    raise
                passed_over.append(each.name)
                continue
            files += [file] if file.rows else []
        if len(files) == before:
            raise UsageError(
                f"{path} has no results for a collective",
                expected="output of gpubench allreduce --output, or of nccl-tests",
                next_step=f"gpubench allreduce --output {path}/",
            )
    stored = [_overlap_rows(path) for path in overlap]
    rows = [row for own, _ in stored for row in own]
    contention = [found for row in rows if (found := _contention(row)) is not None]
    simulated = ", simulated" if any(row.origin == Origin.SIMULATED for row in rows) else ""
    return FoundResults(
        files=files,
        contention=contention,
        contention_gpus=list(dict.fromkeys(name for _, gpus in stored for name in gpus)),
        unusable=len(rows) - len(contention),
        contention_source=", ".join(path.name for path in overlap) + simulated,
        passed_over=passed_over,
    )


def _paths(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES and not each.name.startswith("."))
    if len(found) > _MOST_FILES:
        raise UsageError(f"{path} has {len(found)} files", expected=f"at most {_MOST_FILES}")
    yield from found


def _overlap_rows(path: Path) -> tuple[list[OverlapRow], list[str]]:
    """Return the overlap rows in a file and their GPU models. Raises UsageError if the file is unreadable, empty or
    invalid.
    """
    stored = read_stored(path)
    rows = [row for row in stored.rows if isinstance(row, OverlapRow)]
    if not rows:
        raise UsageError(
            f"{path} has no overlap rows",
            expected="a result of gpubench overlap, .json or .jsonl",
            reason="it is from another command, or its run ended before the first row",
            next_step=f"gpubench overlap --output {path.name}",
        )
    for number, row in enumerate(rows):
        for name in _POSITIVE:
            value = getattr(row, name)
            if value is not None and value <= 0:
                raise UsageError(
                    f"{path}: overlap[{number}].{name} is {value}",
                    expected="a number above 0",
                    reason="edited by hand",
                    next_step="the same command again, with --output",
                )
    return rows, [rank.gpu for rank in stored.metadata.ranks if rank.gpu]


def _contention(row: OverlapRow) -> MeasuredContention | None:
    """Return the contention that a row measured. Return None for wrong data, or if computation lost nearly all of
    its time.
    """
    if row.compute_slowdown is None or row.wrong:
        return None
    return make_record(
        MeasuredContention,
        row,
        alone_seconds=row.communication_alone_us / MICROSECONDS_PER_SECOND,
        kernel_seconds=row.partner_alone_us / row.partner_count / MICROSECONDS_PER_SECOND,
    )


SIZES = tuple(2**power for power in range(10, 33, 2))
"""Sizes to measure or to read from a profile: 1 KiB to 4 GiB, each four times the previous one."""

_SECONDS_TO_MEASURE = 15.0
"""Estimated time to measure one collective at all sizes."""

_TRAINED_WITH = ("nccl", "torch:nccl", "rccl", "torch:rccl", "torch:xccl", "simulated")
_PREFERRED = (*_TRAINED_WITH, *(name for name in ROW_BACKENDS if name not in _TRAINED_WITH))
"""Backends in order of preference, NCCL first. A curve never mixes rows of different backends."""

Measured = Callable[[str, int], Sequence[CollectiveRow]]
"""Measures a collective on this machine. The arguments are the collective's name and the number of ranks."""


class CurveFinder(Struct):
    """Finds the curve of a collective. Stored results come first, then a measurement, then the profile.

    - `measure_now` is None if nothing can be measured here.
    - `notes` collects notes for the user.
    - `staged` becomes true if a collective went through host memory.
    """

    machine: PlannedMachine
    found: FoundResults = FoundResults()
    measure_now: Measured | None = None
    notes: list[str] = field(default_factory=list)
    staged: bool = False

    def curve(self, collective: str, group: program.CommunicatorRanks) -> program.CollectiveCurve:
        """Return the curve of a collective for a group of ranks.

        Raises:
            UsageError: neither the results nor a profile have it.
            CouldNotMeasureError: the measurement failed.
        """
        stored = self._stored(collective, group)
        if stored is not None:
            return stored
        if self.measure_now is not None and group.nodes == 1 and group.ranks <= self.machine.gpus_per_node:
            rows = self.measure_now(collective, group.ranks)
            if rows:
                self.notes.append(f"{collective} among {group.ranks} ranks was measured in this run")
                self._note_staged(collective, rows)
                return program.build_curve(_points(rows), source="measured in this run")
        return self._expected(collective, group)

    def _stored(self, collective: str, group: program.CommunicatorRanks) -> program.CollectiveCurve | None:
        found = self._select_backend(
            collective,
            [
                (row, file)
                for file in self.found.files
                for row in file.rows
                if row.collective == collective and _is_usual(row) and row.nodes == group.nodes and row.ranks > 1
            ],
        )
        if not found:
            return None
        ranks = min({row.ranks for row, _ in found}, key=lambda count: (abs(count - group.ranks), -count))
        rows = [row for row, _ in found if row.ranks == ranks]
        self._note_staged(collective, rows)
        if ranks != group.ranks:
            self.notes.append(f"{collective} among {group}: scaled from {ranks} ranks by the bytes that rings transfer")
        factor = collective_named(collective).busbw_factor
        return program.build_curve(
            _points(rows, factor(group.ranks) / factor(ranks)),
            origin=program.SIMULATED if any(row.origin == Origin.SIMULATED for row in rows) else program.MEASURED,
            source=", ".join(dict.fromkeys(file.name for row, file in found if row.ranks == ranks)),
        )

    def _note_staged(self, collective: str, rows: Sequence[CollectiveRow]) -> None:
        if any(row.host_staged for row in rows):
            self.staged = True
            self.notes.append(f"{collective} went through host memory. gpubench p2p shows which pair, and why")

    def _select_backend(
        self, collective: str, found: Sequence[tuple[CollectiveRow, ResultFile]]
    ) -> Sequence[tuple[CollectiveRow, ResultFile]]:
        """Return the valid rows of the backend that training most likely uses, or an empty list if there are no
        valid rows.
        """
        right = [(row, file) for row, file in found if not row.wrong]
        if len(right) < len(found):
            self.notes.append(f"rows of {collective} with wrong data are left out")
        backends = sorted({row.backend for row, _ in right}, key=_PREFERRED.index)
        if len(backends) > 1:
            self.notes.append(f"{collective} was measured with {backends[0]}. Left out: {', '.join(backends[1:])}")
        elif backends and backends[0] not in _TRAINED_WITH:
            self.notes.append(f"{collective} was measured with {backends[0]}, which is unusual for training on GPUs")
        return [(row, file) for row, file in right if row.backend == backends[0]]

    def _expected(self, collective: str, group: program.CommunicatorRanks) -> program.CollectiveCurve:
        profile = self.machine.profile
        if collective not in SUMMARIES or profile is None:
            raise self._unknown(collective, group, "no profile matches this machine")
        try:
            seconds = _extend_below_smallest(partial(self.machine.collectives(group), collective))
        except (CouldNotMeasureError, UsageError) as error:
            raise self._unknown(collective, group, error.seen) from None
        # Each pair of GPUs sends through a NIC of its own, until there are more pairs than NICs.
        pairs = max(1.0, group.sharing / max(1, len(profile.nic))) if collective == "sendrecv" else 1.0
        source = f"profile {profile.name}" + (", between nodes by a model of NICs" if group.nodes > 1 else "")
        return program.build_curve(
            [program.CurvePoint(size, pairs * each) for size, each in seconds], program.EXPECTED, source
        )

    def _unknown(self, collective: str, group: program.CommunicatorRanks, why: str) -> UsageError:
        known = ", ".join(
            dict.fromkeys(f"{row.collective} of {row.ranks}" for file in self.found.files for row in file.rows)
        )
        return UsageError(
            f"there is no time for {collective} among {group}: {why}",
            expected="results of every collective that the layout uses" + (f". Known: {known}" if known else ""),
            reason="the results are from other collectives",
            next_step=f"gpubench {collective} --output results/, or a --layout that does not use it",
        )


_MOST_LATENCY_S = 1e-3
_USUAL_LATENCY_S = 50e-6


def _extend_below_smallest(seconds_of: Callable[[int], float]) -> list[tuple[int, float]]:
    """Return size and time in seconds for all sizes. Times below the profile's smallest size are estimated.

    If the smallest size takes more than 1 ms, its time is mostly bandwidth. Smaller sizes then take 50 µs of latency
    plus a time in proportion to their bytes.
    """
    known, smallest = seconds_of(SIZES[0]), SIZES[0]
    while known > _MOST_LATENCY_S and seconds_of(2 * smallest) <= known * 1.01:
        smallest *= 2
    return [
        (size, _USUAL_LATENCY_S + known * size / smallest if size < smallest else seconds_of(size)) for size in SIZES
    ]


def _is_usual(row: CollectiveRow) -> bool:
    return (
        row.group is None and row.mode == Mode.THROUGHPUT and not row.graph and row.setting is None and row.time_us > 0
    )


def _points(rows: Sequence[CollectiveRow], scale: float = 1.0) -> list[program.CurvePoint]:
    return [
        program.CurvePoint(
            row.size_bytes, scale * row.time_us / MICROSECONDS_PER_SECOND, (row.ci95_percent or 0.0) / 100
        )
        for row in rows
        if row.size_bytes > 0
    ]


def measured_now(timeout_s: float, announce: Callable[[str, float], None]) -> Measured:
    """Return a function that measures a collective by running its gpubench command in a child process.

    Before each command, `announce` is called with a description and the estimated time in seconds.
    """

    def measure(collective: str, ranks: int) -> Sequence[CollectiveRow]:
        from gpubench.jobs.library import run_command

        announce(f"measuring {collective} among {ranks} ranks", _SECONDS_TO_MEASURE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curve.json"
            sizes = f"{SIZES[0]}:{SIZES[-1]}:4"
            run_command([collective, "--np", str(ranks), "--sizes", sizes, "--output", str(path), "--quiet"], timeout_s)
            return [row for row in read_results(path).rows if _is_usual(row)] if path.exists() else []

    return measure
