"""Predict a training step: find curves, compute times and contention, and rank layouts."""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.hardware.compute import spread_of, time_blocks, time_host
from gpubench.hardware.torch import distributed as torch
from gpubench.jobs.compare import FoundResults, read_all
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.jobs.planned_machine import NAME, PlannedMachine, TrainingPlan, fault_cases, machine_of
from gpubench.measure.plan.compute import (
    BACKWARD_OVER_FORWARD,
    OPTIMIZER_TRAFFIC,
    SMALLEST_COPY_SECONDS,
    ComputeTimes,
    of_products,
    times_at,
    times_of_sheet,
)
from gpubench.measure.plan.events import USUAL_CONTENTION, ContentionTable
from gpubench.measure.plan.program import (
    CollectiveCurve,
    CollectiveTimesFound,
    CommunicatorRanks,
    CurvePoint,
    StepJob,
    StepSettings,
    curve_of,
)
from gpubench.measure.plan.report import SECTIONS as SECTIONS
from gpubench.measure.plan.report import (
    CandidateLayout,
    PlanOutcome,
    RankedLayout,
    candidates_of,
    fault_costs,
    first_fit,
    microbatches_of,
    plan_report,
    rank,
)
from gpubench.measure.plan.step import StepPrediction, compute_of_step, predict
from gpubench.model.profiles.fault import Fault
from gpubench.model.results.plan import CurveOrigin
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.operation import ROW_BACKENDS
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_memory, parse_size
from gpubench.model.terms.verdict import Origin
from gpubench.model.workload import (
    OPTIMIZER_BYTES,
    ParallelLayout,
    Recompute,
    TransformerModel,
    check_layout,
    layouts_for,
    parse_layout,
)
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.hardware.compute import ProductTimer
    from gpubench.model.results.report import Metadata

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
            # Pairs of GPUs side by side have a NIC each, as far as there are NICs.
            pairs = max(1.0, group.sharing / max(1, len(profile.nic))) if collective == "sendrecv" else 1.0
            points = [
                CurvePoint(size, pairs * seconds)
                for size, seconds in _above_latency(
                    lambda size: max(times.seconds(collective, size, row=0, ranks_per_node=local))
                )
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


_MOST_LATENCY_S = 1e-3
_USUAL_LATENCY_S = 50e-6


def _above_latency(seconds_of: Callable[[int], float]) -> list[tuple[int, float]]:
    """Seconds by size; where the smallest size that a profile knows is large, its time is no latency of smaller ones.

    Then they take what they have of its bytes, beyond 50 µs.
    """
    known = seconds_of(SIZES[0])
    if known < _MOST_LATENCY_S:
        return [(size, seconds_of(size)) for size in SIZES]
    smallest = SIZES[0]
    while seconds_of(2 * smallest) <= known * 1.01:
        smallest *= 2
    return [
        (size, _USUAL_LATENCY_S + known * size / smallest if size < smallest else seconds_of(size)) for size in SIZES
    ]


def _is_usual(row: CollectiveRow) -> bool:
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
        from gpubench.jobs.library import run_command
        from gpubench.readers.registry import read_results

        announce(f"measuring {collective} among {ranks} ranks", _SECONDS_TO_MEASURE)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curve.json"
            sizes = f"{SIZES[0]}:{SIZES[-1]}:4"
            run_command([collective, "--np", str(ranks), "--sizes", sizes, "--output", str(path), "--quiet"], timeout_s)
            return [row for row in read_results(path).rows if _is_usual(row)] if path.exists() else []

    return measure


def measured_compute(model: TransformerModel, copy_gb_s: float | None) -> ComputeTimes:
    """Forward and backward of a microbatch of the whole model.

    Raises CouldNotMeasureError: there is neither PyTorch nor CuPy with a GPU.
    """
    if torch.is_installed():
        try:
            return _by_torch(model, copy_gb_s)
        except CouldNotMeasureError as error:
            why = f"; PyTorch was not used: {error.seen}"
    else:
        why = ""
    timer = _product_timer()
    speed = 2 * timer.copy_bytes / median(timer.copy()) / 1e9
    found = of_products(model, timer.product, speed, SMALLEST_COPY_SECONDS)
    return ComputeTimes(
        forward_seconds=found.forward_seconds,
        backward_seconds=found.backward_seconds,
        source=found.source + why,
        spread=found.spread,
        copy_gb_s=speed,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


def _by_torch(model: TransformerModel, copy_gb_s: float | None) -> ComputeTimes:
    blocks = time_blocks(model)
    forward, backward = mean(blocks.forward), mean(blocks.backward)
    head = model.ends()[1]
    flops = sum(each.flops for each in model.operations(0))
    top = head.flops / flops if head is not None else 0.0
    try:
        host, unknown = time_host(model), ""
    except CouldNotMeasureError as error:
        host, unknown = {}, f"; what the host takes to issue it is not known: {error.seen}"
    return ComputeTimes(
        forward_seconds=forward * (model.layers + top),
        backward_seconds=backward * (model.layers + top),
        source=blocks.described + (", the head by their speed" if head is not None else "") + unknown,
        host_seconds=host,
        spread=max(spread_of(blocks.forward), spread_of(blocks.backward)),
        copy_gb_s=copy_gb_s,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


def _product_timer() -> "ProductTimer":
    import socket

    from gpubench.hardware.compute import ProductTimer
    from gpubench.hardware.cuda import open_device
    from gpubench.jobs.rank import usable_driver

    return ProductTimer(open_device(0, 1, socket.gethostname(), usable_driver("plan --measure")))


_MILLISECONDS = 1e3


def _compute_times(plan: TrainingPlan, machine: PlannedMachine) -> ComputeTimes:
    """Forward and backward of one microbatch on one GPU. Raises UsageError: nothing is known of the GPU."""
    sheet = times_of_sheet(plan.model, machine.gpu)
    copy_gb_s = None if sheet is None else sheet.copy_gb_s
    if plan.forward_ms is not None or plan.backward_ms is not None:
        return _with_other_pass(plan, copy_gb_s)
    if plan.measure:
        if not machine.is_here:
            raise UsageError(
                "--measure without a GPU to measure on",
                expected="a GPU here: simulated machines and stored results have none",
                next_step="--step 412ms of a run of your own, or leave --measure out",
            )
        return measured_compute(plan.model, copy_gb_s)
    if plan.tflops is not None or (sheet is None and plan.measured_text):
        return times_at(
            plan.model,
            plan.tflops or _ANY_TFLOPS,
            source=f"--tflops {plan.tflops or 0:g}",
            origin="given",
            copy_gb_s=copy_gb_s,
            copy_least_seconds=SMALLEST_COPY_SECONDS,
        )
    if sheet is None:
        raise UsageError(
            f"how fast {machine.gpu} computes is not known",
            expected="one measured number: --step or --tokens-per-second of a run, --tflops, or --measure on the GPU",
            next_step="--tflops 400",
        )
    return sheet


_ANY_TFLOPS = 300.0
"""A speed to begin with where a measured step says which it is."""


def _with_other_pass(plan: TrainingPlan, copy_gb_s: float | None) -> ComputeTimes:
    backward_ms, forward_ms = plan.backward_ms, plan.forward_ms
    if backward_ms is None:
        backward_ms = BACKWARD_OVER_FORWARD * (forward_ms or 0.0)
    if forward_ms is None:
        forward_ms = backward_ms / BACKWARD_OVER_FORWARD
    said = [f"--forward-ms {plan.forward_ms:g}"] if plan.forward_ms is not None else []
    said += [f"--backward-ms {plan.backward_ms:g}"] if plan.backward_ms is not None else []
    both = "" if len(said) == 2 else ", backward twice the forward pass"
    return ComputeTimes(
        forward_seconds=forward_ms / _MILLISECONDS,
        backward_seconds=backward_ms / _MILLISECONDS,
        source=" ".join(said) + both,
        origin="given",
        copy_gb_s=copy_gb_s,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


_MEGABYTE = 2**20
_SECONDS_TO_COMPUTE = 10.0
"""What --measure takes, the import of PyTorch included; an estimate for whoever waits."""


def run(plan: TrainingPlan, arguments: Sequence[str]) -> int:
    """Predict and present; the exit code.

    Raises GpubenchError: something that the prediction follows from is not known, or an output cannot be written.
    """
    with presenting(plan.presentation) as presenter:
        found = read_all(plan.results, plan.overlap)
        machine = machine_of(plan, found.files, found.contention_gpus)
        notes = list(plan.notes)
        outcome, curves = _outcome(plan, machine, found, notes, presenter.waiting)
        metadata = _metadata(plan, arguments, machine, outcome, [*notes, *dict.fromkeys(curves.notes)])
        presenter.begin(metadata, ())
        presenter.end(plan_report(outcome, machine.origin))
    return presenter.exit_code


def _outcome(
    plan: TrainingPlan,
    machine: PlannedMachine,
    found: FoundResults,
    notes: list[str],
    announce: Callable[[str, float], None],
) -> tuple[PlanOutcome, FoundCurves]:
    if plan.measure and machine.is_here:
        announce("measuring computation on a GPU", _SECONDS_TO_COMPUTE)
    measures = measured_now(plan.timeout_s, announce) if machine.is_here and machine.nodes == 1 else None
    curves = FoundCurves(machine, found.files, measures)
    times = CollectiveTimesFound(curves)
    job, layouts = job_of(plan, machine, times, found)
    ranked = _ranked(plan, machine, job, layouts, notes)
    best = ranked[0].prediction
    staged = curves.staged or any(row.host_staged for file in found.files for row in file.rows)
    cases = fault_cases(machine, plan.faults, plan.faults_from, notes, with_usual=not staged)
    outcome = PlanOutcome(
        ranked=ranked,
        faults=fault_costs(best, cases),
        times=times,
        as_expected=_step_as_expected(machine, curves, best),
        profile="" if machine.profile is None else machine.profile.name,
    )
    notes += _notes(machine, found, outcome)
    return outcome, curves


def job_of(
    plan: TrainingPlan, machine: PlannedMachine, times: CollectiveTimesFound, found: FoundResults
) -> tuple[StepJob, list[ParallelLayout]]:
    """What the steps of all layouts follow from, with its computation, and the layouts that were asked for.

    Raises UsageError where they do not fit the model or the GPUs, or computation is not known.
    """
    gpus = _gpus(plan, machine)
    layouts = [parse_layout(text, gpus) for text in plan.layouts]
    for layout in layouts:
        check_layout(plan.model, layout)
    own = [each for each in found.contention if each.ctas is None]
    job = StepJob(
        model=plan.model,
        layout=ParallelLayout(data=gpus),
        compute=_compute_times(plan, machine),
        times=times,
        contention=ContentionTable(own, found.contention_source, USUAL_CONTENTION),
        settings=_settings(plan),
        gpus_per_node=machine.gpus_per_node,
    )
    return _calibrated(plan, job, gpus) if plan.measured_text else job, layouts


def _calibrated(plan: TrainingPlan, job: StepJob, gpus: int) -> StepJob:
    measured_on = plan.measured_on or gpus
    layout = parse_layout(plan.layouts[0], measured_on)
    check_layout(plan.model, layout)
    target = parse_layout(plan.layouts[0], gpus)
    sequences = plan.sequences or plan.model.batch * gpus
    count = microbatches_of(target, plan.microbatches, sequences, plan.model.batch)
    if count is None:
        raise _not_divided(sequences, plan, gpus)
    seconds = plan.step_seconds or 0.0
    if plan.measured_tokens is not None:
        seconds = layout.data * count * plan.model.tokens / plan.measured_tokens
    own = replace(job, layout=layout, settings=replace(job.settings, microbatches=count))
    compute = compute_of_step(own, seconds)
    if compute is None:
        raise UsageError(
            f"a step of {layout} in {seconds * _MILLISECONDS:,.0f} ms on {measured_on} GPUs",
            expected="a step that is longer than its communication",
            reason="the step is of another layout, batch or number of GPUs, or the fabric is faster than its profile",
            next_step="--measured-on GPUS, or --tflops N",
        )
    tflops = 3 * plan.model.forward_flops() / (compute.forward_seconds + compute.backward_seconds) / 1e12
    source = f"{plan.measured_text} on {measured_on} GPUs, of which {tflops:.0f} TFLOP/s a GPU follow while it computes"
    return replace(job, compute=replace(compute, source=source, origin="given"))


def _gpus(plan: TrainingPlan, machine: PlannedMachine) -> int:
    if plan.gpus is not None and plan.gpus > machine.gpus:
        raise UsageError(
            f"--gpus {plan.gpus} of a machine with {machine.gpus}",
            expected=f"at most {machine.gpus}",
            next_step=f"--nodes {-(-plan.gpus // machine.gpus_per_node)}",
        )
    return plan.gpus or machine.gpus


def _settings(plan: TrainingPlan) -> StepSettings:
    first = None if plan.first_bucket_mb is None else round(plan.first_bucket_mb * _MEGABYTE)
    return StepSettings(
        bucket_bytes=None if plan.bucket_mb is None else round(plan.bucket_mb * _MEGABYTE),
        first_bucket_bytes=first,
        imbalance=plan.imbalance,
        optimizer_bytes=OPTIMIZER_TRAFFIC if plan.with_optimizer else 0,
    )


def _ranked(
    plan: TrainingPlan, machine: PlannedMachine, job: StepJob, layouts: Sequence[ParallelLayout], notes: list[str]
) -> list[RankedLayout]:
    gpus = job.layout.gpus
    sequences = plan.sequences or plan.model.batch * gpus
    memory = plan.gpu_memory_bytes or machine.memory_bytes
    unknown: list[str] = []
    candidates = candidates_of(
        plan.model,
        layouts or layouts_for(plan.model, gpus, machine.gpus_per_node),
        sequences=sequences,
        microbatches=plan.microbatches,
        optimizer_bytes=OPTIMIZER_BYTES if plan.with_optimizer else 0,
    )
    if not candidates:
        raise _not_divided(sequences, plan, gpus)
    # Activations are estimated, and jobs that free them earlier are common: what was asked for is refused only where
    # weights, gradients and optimizer alone do not fit.
    needs = [each.need.states if layouts else each.need.total for each in candidates]
    if memory is not None and min(needs) > memory:
        raise _does_not_fit(plan, machine, candidates, gpus, memory)
    ranked = rank(job, candidates, gpu_memory_bytes=memory, unknown=None if layouts else unknown)
    if unknown:
        notes.append(f"{len(unknown)} layouts are left out: {unknown[0]}")
    if ranked[0].fits is False:
        need = format_memory(ranked[0].need.total)
        notes.append(f"{ranked[0].layout} needs about {need} a GPU, more than there is: it may not run")
    return ranked


def _not_divided(sequences: int, plan: TrainingPlan, gpus: int) -> UsageError:
    return UsageError(
        f"{sequences} sequences a step do not divide by {plan.model.batch} a microbatch on {gpus} GPUs",
        expected="a multiple of the data-parallel ranks × --batch, and with vN of the stages",
        next_step=f"--global-batch {plan.model.batch * gpus}",
    )


def _does_not_fit(
    plan: TrainingPlan, machine: PlannedMachine, asked: Sequence[CandidateLayout], gpus: int, memory: int
) -> UsageError:
    """No layout fits: the one that needs least, and what would fit."""
    least = min(asked, key=lambda each: each.need.total)
    optimizer_bytes = OPTIMIZER_BYTES if plan.with_optimizer else 0
    would = f"a smaller --batch or --sequence: {format_memory(least.need.activations)} are activations"
    again = replace(plan.model, recompute=Recompute.FULL)
    for model, nodes in ((model, 1 << power) for power in range(_MOST_DOUBLINGS) for model in (plan.model, again)):
        if nodes * machine.gpus_per_node < gpus:
            continue
        fitting = first_fit(model, nodes * machine.gpus_per_node, machine.gpus_per_node, memory, optimizer_bytes)
        if fitting is not None:
            more = [f"--nodes {nodes}"] if fitting.layout.gpus > gpus else []
            more += ["--recompute full"] if model is again and plan.model.recompute is not Recompute.FULL else []
            more += [f"--layout '{fitting.layout}'"]
            need = format_memory(fitting.need.total)
            would = f"{' '.join(more)}, which needs {need} on each of {fitting.layout.gpus} GPUs"
            break
    own = plan.model.parameters * (2 * plan.model.data_type.size_bytes + optimizer_bytes)
    return UsageError(
        f"{plan.model.name} does not fit {gpus} × {machine.gpu}: '{least.layout}' needs "
        f"{format_memory(least.need.total)} of {format_memory(memory)} a GPU",
        expected=f"weights, gradients, optimizer and activations within {format_memory(memory)}",
        reason=f"{plan.model.parameters / 1e9:.3g} B parameters take {format_memory(own)} in all"
        + (" with Adam" if plan.with_optimizer else ""),
        next_step=would,
    )


_MOST_DOUBLINGS = 15


def _step_as_expected(machine: PlannedMachine, curves: FoundCurves, best: StepPrediction) -> StepPrediction | None:
    if machine.profile is None or all(curve.origin == CurveOrigin.EXPECTED for curve in curves.found.values()):
        return None
    try:
        expected = CollectiveTimesFound(FoundCurves(machine, ()))
        return predict(replace(best.job, times=expected), with_range=False)
    except UsageError:
        return None


def _notes(machine: PlannedMachine, found: FoundResults, outcome: PlanOutcome) -> list[str]:
    best = outcome.best
    notes = [f"computation: {best.job.compute.source}"]
    if found.contention:
        notes.append(f"contention measured by gpubench overlap: {found.contention_source}")
    else:
        notes.append(
            "contention between compute and communication was not measured: as on two H200s, computation loses 0.34 s "
            "for each second of a collective beside it. Try: gpubench overlap --output overlap.json, then add "
            "--overlap overlap.json"
        )
    origins = dict.fromkeys(
        f"{times.origin}: {times.source}" for times in (outcome.times.curve(*key) for key in outcome.times.used)
    )
    notes += [f"collectives {each}" for each in origins]
    notes.append("times between measured sizes are interpolated by the logarithms of both")
    notes += [f"beyond the sizes that are known: {each}" for each in outcome.times.beyond()]
    if found.unusable:
        notes.append(f"{found.unusable} rows of overlap left out: wrong data, or no slow-down of computation")
    if found.passed_over:
        notes.append(f"no results, passed over: {', '.join(found.passed_over[:4])}")
    if best.job.compute.copy_gb_s is None:
        notes.append(f"copies of gradients and the optimizer are left out: the memory of {machine.gpu} is not known")
    layout = best.job.layout
    domain = machine.gpus_per_node * (machine.profile.domain.nodes if machine.profile and machine.profile.domain else 1)
    if layout.tensor > domain:
        notes.append(f"tp{layout.tensor} crosses nodes, whose NVLink joins {domain} GPUs: it is priced over the NICs")
    if best.shown_microbatches < best.job.settings.microbatches:
        notes.append(f"the timeline shows {best.shown_microbatches} microbatches")
    return notes


def _metadata(
    plan: TrainingPlan, arguments: Sequence[str], machine: PlannedMachine, outcome: PlanOutcome, notes: Sequence[str]
) -> "Metadata":
    model, compute = plan.model, outcome.best.job.compute
    options: dict[str, Any] = {
        "model": model.name,
        "parameters": model.parameters,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "sequence": model.sequence,
        "batch": model.batch,
        "vocabulary": model.vocabulary,
        "experts": model.experts,
        "data_type": str(model.data_type),
        "gpus": outcome.best.job.layout.gpus,
        "gpu": machine.gpu,
        "nodes": machine.nodes,
        "forward_ms": compute.forward_seconds * 1e3,
        "backward_ms": compute.backward_seconds * 1e3,
        "compute_origin": compute.origin,
        "host_ms_a_block": {
            str(sharding or "alone"): seconds * 1e3 for sharding, seconds in compute.host_seconds.items()
        },
        "contention_assumed": outcome.best.job.contention.is_assumed,
        "recompute": str(model.recompute),
        "fp8": model.fp8,
        "optimizer_in_memory": plan.with_optimizer,
        "notes": list(notes),
    }
    profile = machine.profile
    return metadata_of(
        arguments,
        NAME,
        origin=machine.origin,
        hosts=list(machine.hosts),
        options=options,
        profile=None if profile is None else {"name": profile.name, "sha256": profile.sha256},
        source=f"--simulate {plan.simulate}" if plan.simulate else ", ".join(map(str, plan.results)) or None,
    )


def parse_memory(text: str) -> int:
    """'80G': bytes of a GPU's memory; UsageError without a unit."""
    if text.strip().isdigit():
        raise UsageError(f"--gpu-memory {text}: no unit", expected="80G, 141G", next_step=f"--gpu-memory {text}G")
    found = parse_size(text)
    if not found:
        raise UsageError(f"--gpu-memory {text}: no memory", expected="80G, 141G")
    return found


_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)", re.ASCII)


def parse_step(text: str) -> float:
    """'412ms', '5.1s': seconds of a step; UsageError without a unit."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise UsageError(f"--step {text}: no time of a step", expected="412ms, 5.1s", next_step="--step 412ms")
    return float(match["number"]) / (_MILLISECONDS if match["unit"] == "ms" else 1.0)
