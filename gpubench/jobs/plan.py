"""Predict a training step: find curves, compute times and contention, and rank layouts."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.hardware.compute import spread_of, time_blocks, time_host
from gpubench.hardware.torch import distributed as torch
from gpubench.jobs.compare import FoundResults, read_all
from gpubench.jobs.machines import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.jobs.planned_machine import NAME, PlannedMachine, TrainingPlan, fault_cases, machine_of
from gpubench.measure.plan.events import ContentionTable, MeasuredContention
from gpubench.measure.plan.program import (
    BACKWARD_OVER_FORWARD,
    COPY_SHARE,
    REACHED_SHARE,
    SMALLEST_COPY_SECONDS,
    CollectiveCurve,
    CollectiveTimesFound,
    CommunicatorRanks,
    ComputeTimes,
    CurvePoint,
    StepJob,
    StepSettings,
    curve_of,
    of_products,
    rates_of,
)
from gpubench.measure.plan.report import SECTIONS as SECTIONS
from gpubench.measure.plan.report import (
    Advice,
    PlanOutcome,
    RankedLayout,
    advise,
    fault_costs,
    first_fit,
    plan_report,
    rank,
)
from gpubench.measure.plan.step import StepPrediction, predict
from gpubench.model.facts.backends import ROW_BACKENDS
from gpubench.model.profiles.fault import Fault
from gpubench.model.results.plan import CurveOrigin
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_memory, parse_size
from gpubench.model.terms.verdict import Origin
from gpubench.model.workload import (
    OPTIMIZER_BYTES,
    ParallelLayout,
    TransformerModel,
    check_layout,
    layouts_for,
    parse_layout,
)

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


_TERA = 1e12
_MILLISECONDS = 1e3


def compute_times(plan: TrainingPlan, machine: PlannedMachine) -> ComputeTimes:
    """Forward and backward of one microbatch on one GPU.

    Raises:
        UsageError: nothing is known of the GPU, or --measure has no GPU to measure on.
        CouldNotMeasureError: the measurement failed.
    """
    rates = rates_of(machine.gpu)
    copy_gb_s = None if rates is None else rates.memory_gb_s * COPY_SHARE
    if plan.forward_ms is not None or plan.backward_ms is not None:
        return _given(plan, copy_gb_s)
    if plan.measure:
        if not machine.is_here:
            raise UsageError(
                "--measure without a GPU to measure on",
                expected="a GPU here: simulated machines and stored results have none",
                next_step="--backward-ms MS, or leave --measure out",
            )

        return measured_compute(plan.model, copy_gb_s)
    tflops, share = plan.tflops, 1.0
    if tflops is None:
        if rates is None:
            raise UsageError(
                f"how fast {machine.gpu} computes is not known",
                expected="--backward-ms MS of one microbatch on one GPU, --tflops N, or --measure on the GPU",
                next_step="--tflops 400",
            )
        tflops, share = rates.tflops, REACHED_SHARE
    forward = plan.model.forward_flops() / (tflops * share * _TERA)
    source = (
        f"--tflops {tflops:g}"
        if plan.tflops is not None
        else f"{share:.0%} of the data sheet's {tflops:g} TFLOP/s of {machine.gpu}: expected, not measured"
    )
    return ComputeTimes(
        forward_seconds=forward,
        backward_seconds=BACKWARD_OVER_FORWARD * forward,
        source=source,
        origin="given" if plan.tflops is not None else "expected",
        copy_gb_s=copy_gb_s,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


def _given(plan: TrainingPlan, copy_gb_s: float | None) -> ComputeTimes:
    """What one pass is not said to take follows from the other."""
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
    gpus = _gpus(plan, machine)
    if plan.measure and machine.is_here:
        announce("measuring computation on a GPU", _SECONDS_TO_COMPUTE)
    compute = compute_times(plan, machine)
    measures = measured_now(plan.timeout_s, announce) if machine.is_here and machine.nodes == 1 else None
    curves = FoundCurves(machine, found.files, measures)
    times = CollectiveTimesFound(curves)
    job = StepJob(
        model=plan.model,
        layout=ParallelLayout(data=gpus),
        compute=compute,
        times=times,
        contention=_contention(found, None),
        settings=_settings(plan),
        gpus_per_node=machine.gpus_per_node,
    )
    ranked = _ranked(plan, machine, job, gpus, notes)
    chosen = ranked[0]
    capped = {
        ctas: replace(chosen.prediction.job, contention=_contention(found, ctas), times=_capped(times, found, ctas))
        for ctas in sorted({each.ctas for each in found.contention if each.ctas is not None})
    }
    advice = advise(chosen.prediction.job, capped) if plan.bucket_mb is None else _fixed(chosen)
    staged = curves.staged or any(row.host_staged for file in found.files for row in file.rows)
    cases = fault_cases(machine, plan.faults, plan.faults_from, notes, with_usual=not staged)
    outcome = PlanOutcome(
        ranked=ranked,
        chosen=chosen,
        advice=advice,
        faults=fault_costs(advice.best, cases),
        times=times,
        as_expected=_as_expected(machine, curves, advice.best),
        profile="" if machine.profile is None else machine.profile.name,
    )
    notes += _notes(machine, found, outcome)
    return outcome, curves


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
    usual = StepSettings(first_bucket_bytes=first, imbalance=plan.imbalance)
    return usual if plan.bucket_mb is None else replace(usual, bucket_bytes=round(plan.bucket_mb * _MEGABYTE))


def _fixed(chosen: RankedLayout) -> Advice:
    return Advice((), predict(chosen.prediction.job))


def _contention(found: FoundResults, ctas: int | None) -> ContentionTable:
    """Of one cap; of NCCL's own choice where `ctas` is None."""
    own = [each for each in found.contention if each.ctas == ctas]
    return ContentionTable(own, found.contention_source)


def _capped(times: CollectiveTimesFound, found: FoundResults, ctas: int) -> CollectiveTimesFound:
    """Times with a cap: those without × what overlap saw of both alone."""
    factors = {
        name: median(
            [
                capped.alone_seconds / own.alone_seconds
                for capped in found.contention
                for own in found.contention
                if _is_pair(capped, own, ctas, name)
            ]
            or [1.0]
        )
        for name in {each.collective for each in found.contention}
    }
    usual = median(factors.values()) if factors else 1.0
    return times.with_fault(lambda name, _group, _size, seconds: seconds * factors.get(name, usual))


def _is_pair(capped: MeasuredContention, own: MeasuredContention, ctas: int, name: str) -> bool:
    same = (capped.collective, capped.size_bytes, capped.partner) == (own.collective, own.size_bytes, own.partner)
    return same and capped.collective == name and capped.ctas == ctas and own.ctas is None and own.alone_seconds > 0


def _ranked(
    plan: TrainingPlan, machine: PlannedMachine, job: StepJob, gpus: int, notes: list[str]
) -> list[RankedLayout]:
    layouts = [parse_layout(text, gpus) for text in plan.layouts]
    for layout in layouts:
        check_layout(plan.model, layout)
    everything = layouts_for(plan.model, gpus, machine.gpus_per_node)
    memory = plan.gpu_memory_bytes or machine.memory_bytes
    sequences = plan.sequences or plan.model.batch * gpus
    unknown: list[str] = []

    def ranking(among: Sequence[ParallelLayout]) -> list[RankedLayout]:
        return rank(
            job,
            among,
            sequences=sequences,
            microbatches=plan.microbatches,
            gpu_memory_bytes=memory,
            optimizer_bytes=OPTIMIZER_BYTES if plan.with_optimizer else 0,
            unknown=None if layouts else unknown,
        )

    ranked = ranking(layouts or everything)
    if not ranked:
        raise UsageError(
            f"{sequences} sequences a step do not divide by {plan.model.batch} a microbatch on {gpus} GPUs",
            expected="a multiple of the data-parallel ranks × --batch",
            next_step=f"--global-batch {plan.model.batch * gpus}",
        )
    if all(each.fits is False for each in ranked):
        raise _does_not_fit(plan, machine, ranked, ranking(everything) if layouts else ranked, gpus)
    if unknown:
        notes.append(f"{len(unknown)} layouts are left out: {unknown[0]}")
    return ranked


def _does_not_fit(
    plan: TrainingPlan, machine: PlannedMachine, asked: Sequence[RankedLayout], every: Sequence[RankedLayout], gpus: int
) -> UsageError:
    """No layout fits: the one that needs least, and what would fit."""
    least = min(asked, key=lambda each: each.need.total)
    memory = least.gpu_memory_bytes or 0
    optimizer_bytes = OPTIMIZER_BYTES if plan.with_optimizer else 0
    fitting = next((each for each in every if each.fits), None)
    larger = None if fitting is not None else first_fit(plan.model, machine.gpus_per_node, memory, optimizer_bytes)
    if fitting is not None:
        would = f"--layout '{fitting.layout}', which needs {format_memory(fitting.need.total)}"
    elif larger is not None:
        would = (
            f"--nodes {larger[0]}: '{larger[1]}' on {larger[1].gpus} GPUs needs {format_memory(larger[2].total)} each"
        )
    else:
        would = f"a smaller --batch or --sequence: {format_memory(least.need.activations)} are activations"
    own = plan.model.parameters * (2 * plan.model.data_type.size_bytes + optimizer_bytes)
    return UsageError(
        f"{plan.model.name} does not fit {gpus} × {machine.gpu}: '{least.layout}' needs "
        f"{format_memory(least.need.total)} of {format_memory(memory)} a GPU",
        expected=f"weights, gradients, optimizer and activations within {format_memory(memory)}",
        reason=f"{plan.model.parameters / 1e9:.3g} B parameters take {format_memory(own)} in all"
        + (" with Adam" if plan.with_optimizer else ""),
        next_step=would,
    )


def _as_expected(machine: PlannedMachine, curves: FoundCurves, best: StepPrediction) -> StepPrediction | None:
    """The same step with the collectives that the profile expects; None where the step's own are these."""
    if machine.profile is None or all(curve.origin == CurveOrigin.EXPECTED for curve in curves.found.values()):
        return None
    try:
        expected = CollectiveTimesFound(FoundCurves(machine, ()))
        return predict(replace(best.job, times=expected), with_range=False)
    except UsageError:
        return None


def _notes(machine: PlannedMachine, found: FoundResults, outcome: PlanOutcome) -> list[str]:
    notes = [f"computation: {outcome.advice.best.job.compute.source}"]
    if found.contention:
        notes.append(f"contention measured by gpubench overlap: {found.contention_source}")
    else:
        notes.append(
            "contention between compute and communication was not measured and is ignored, so predicted steps are too "
            "short. Try: gpubench overlap --output overlap.json, then add --overlap overlap.json"
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
    if outcome.advice.best.job.compute.copy_gb_s is None:
        notes.append(f"copies of gradients are left out: the memory of {machine.gpu} is not known")
    if outcome.advice.best.shown_microbatches < outcome.advice.best.job.settings.microbatches:
        notes.append(f"the timeline shows {outcome.advice.best.shown_microbatches} microbatches")
    return notes


def _metadata(
    plan: TrainingPlan, arguments: Sequence[str], machine: PlannedMachine, outcome: PlanOutcome, notes: Sequence[str]
) -> "Metadata":
    model, compute = plan.model, outcome.advice.best.job.compute
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
        "gpus": outcome.chosen.layout.gpus,
        "gpu": machine.gpu,
        "nodes": machine.nodes,
        "forward_ms": compute.forward_seconds * 1e3,
        "backward_ms": compute.backward_seconds * 1e3,
        "compute_origin": compute.origin,
        "host_ms_a_block": {
            str(sharding or "alone"): seconds * 1e3 for sharding, seconds in compute.host_seconds.items()
        },
        "contention_assumed": outcome.advice.best.job.contention.is_assumed,
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
