"""Predict a training step: computation, layouts by their time, and what each fault costs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from gpubench.errors import UsageError
from gpubench.jobs.curves import CurveFinder, FoundResults, measured_now, read_all
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.jobs.planned_machine import NAME, PlannedMachine, TrainingPlan, fault_cases, machine_of
from gpubench.measure.plan.compute import OPTIMIZER_TRAFFIC, ComputeTimes, times_at, times_of_sheet
from gpubench.measure.plan.events import USUAL_CONTENTION, ContentionTable
from gpubench.measure.plan.program import CollectiveTimesFound, StepJob, StepSettings
from gpubench.measure.plan.report import (
    NO_FAULT,
    CandidateLayout,
    FaultCase,
    FaultCost,
    PlanOutcome,
    RankedLayout,
    candidates_of,
    fault_costs,
    microbatches_of,
    plan_report,
    rank,
)
from gpubench.measure.plan.report import SECTIONS as SECTIONS
from gpubench.measure.plan.step import compute_of_step
from gpubench.model.results.plan import CurveOrigin
from gpubench.model.terms.units import format_memory, parse_size
from gpubench.model.workload import (
    OPTIMIZER_BYTES,
    ParallelLayout,
    Recompute,
    TransformerModel,
    check_layout,
    layouts_for,
    parse_layout,
)

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata


_MILLISECONDS = 1e3


def measured_compute(model: TransformerModel, copy_gb_s: float | None) -> ComputeTimes:
    """Forward and backward of a microbatch of the whole model, timed here.

    Raises CouldNotMeasureError: there is no PyTorch with a GPU, or its memory is too small.
    """
    from gpubench.hardware.compute import spread_of, time_blocks

    blocks = time_blocks(model)
    layers = model.layers + model.head_flops() / sum(each.flops for each in model.operations(0))
    return ComputeTimes(
        forward_seconds=mean(blocks.forward) * layers,
        backward_seconds=mean(blocks.backward) * layers,
        source=blocks.described + (", the head by their speed" if model.vocabulary else ""),
        host_seconds=blocks.host,
        spread=max(spread_of(blocks.forward), spread_of(blocks.backward)),
        copy_gb_s=copy_gb_s,
    )


def _compute_times(plan: TrainingPlan, machine: PlannedMachine) -> ComputeTimes:
    """Forward and backward of one microbatch on one GPU. Raises UsageError: nothing is known of the GPU."""
    sheet = times_of_sheet(plan.model, machine.gpu)
    copy_gb_s = None if sheet is None else sheet.copy_gb_s
    if plan.measure:
        if not machine.is_here:
            raise UsageError(
                "--measure without a GPU to measure on",
                expected="a GPU here: simulated machines and stored results have none",
                next_step="--step 412ms of a run of your own, or leave --measure out",
            )
        return measured_compute(plan.model, copy_gb_s)
    if plan.tflops is not None or (sheet is None and plan.measured_text):
        source = f"--tflops {plan.tflops or 0:g}"
        return times_at(plan.model, plan.tflops or _ANY_TFLOPS, source=source, origin="given", copy_gb_s=copy_gb_s)
    if sheet is None:
        raise UsageError(
            f"how fast {machine.gpu} computes is not known",
            expected="one measured number: --step or --tokens-per-second of a run, --tflops, or --measure on the GPU",
            next_step="--tflops 400",
        )
    return sheet


_ANY_TFLOPS = 300.0
"""A speed to begin with where a measured step says which it is."""


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
        outcome = _outcome(plan, machine, found, notes, presenter.waiting)
        presenter.begin(_metadata(plan, arguments, machine, outcome, notes), ())
        presenter.end(plan_report(outcome, machine.origin))
    return presenter.exit_code


def _outcome(
    plan: TrainingPlan,
    machine: PlannedMachine,
    found: FoundResults,
    notes: list[str],
    announce: Callable[[str, float], None],
) -> PlanOutcome:
    if plan.measure and machine.is_here:
        announce("measuring computation on a GPU", _SECONDS_TO_COMPUTE)
    measures = measured_now(plan.timeout_s, announce) if machine.is_here and machine.nodes == 1 else None
    finder = CurveFinder(machine, found.files, measures)
    times = CollectiveTimesFound(finder.curve)
    job, layouts = job_of(plan, machine, times, found)
    ranked = _ranked(plan, machine, job, layouts, notes)
    staged = finder.staged or any(row.host_staged for file in found.files for row in file.rows)
    cases = fault_cases(machine, plan.faults, plan.faults_from, notes, with_usual=not staged)
    outcome = PlanOutcome(
        ranked=ranked,
        faults=fault_costs(ranked[0].prediction, cases),
        times=times,
        gpu_memory_bytes=plan.gpu_memory_bytes or machine.memory_bytes,
    )
    outcome = replace(outcome, as_expected=_as_expected(machine, outcome))
    notes += [*_notes(machine, found, outcome), *dict.fromkeys(finder.notes)]
    return outcome


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
        settings=StepSettings(
            bucket_bytes=None if plan.bucket_mb is None else round(plan.bucket_mb * _MEGABYTE),
            imbalance=plan.imbalance,
            optimizer_bytes=OPTIMIZER_TRAFFIC if plan.with_optimizer else 0,
        ),
        gpus_per_node=machine.gpus_per_node,
    )
    return _calibrated(plan, job, gpus) if plan.measured_text else job, layouts


def _calibrated(plan: TrainingPlan, job: StepJob, gpus: int) -> StepJob:
    measured_on = plan.measured_on or gpus
    layout = parse_layout(plan.layouts[0], measured_on)
    check_layout(plan.model, layout)
    target = parse_layout(plan.layouts[0], gpus)
    count = microbatches_of(target, plan.microbatches, _sequences(plan, gpus), plan.model.batch)
    if count is None:
        raise _not_divided(plan, gpus)
    seconds = plan.step_seconds or 0.0
    if plan.tokens_per_second is not None:
        seconds = layout.data * count * plan.model.tokens / plan.tokens_per_second
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


def _sequences(plan: TrainingPlan, gpus: int) -> int:
    return plan.global_batch or plan.model.batch * gpus


def _ranked(
    plan: TrainingPlan, machine: PlannedMachine, job: StepJob, layouts: Sequence[ParallelLayout], notes: list[str]
) -> list[RankedLayout]:
    gpus = job.layout.gpus
    memory = plan.gpu_memory_bytes or machine.memory_bytes
    unknown: list[str] = []
    candidates = candidates_of(
        plan.model,
        layouts or layouts_for(plan.model, gpus, machine.gpus_per_node),
        sequences=_sequences(plan, gpus),
        optimizer_bytes=OPTIMIZER_BYTES if plan.with_optimizer else 0,
        microbatches=plan.microbatches,
        gpu_memory_bytes=memory,
    )
    if not candidates:
        raise _not_divided(plan, gpus)
    # Activations are estimated, and jobs that free them earlier are common: what was asked for is refused only where
    # weights, gradients and optimizer alone do not fit.
    needs = [each.need.states if layouts else each.need.total for each in candidates]
    if memory is not None and min(needs) > memory:
        raise _does_not_fit(plan, machine, min(candidates, key=lambda each: each.need.total), gpus, memory)
    ranked = rank(job, candidates, None if layouts else unknown)
    if unknown:
        notes.append(f"{len(unknown)} layouts are left out: {unknown[0]}")
    first = ranked[0].candidate
    if first.fits is False:
        need = format_memory(first.need.total)
        notes.append(f"{first.layout} needs about {need} a GPU, more than there is: it may not run")
    return ranked


def _not_divided(plan: TrainingPlan, gpus: int) -> UsageError:
    return UsageError(
        f"{_sequences(plan, gpus)} sequences a step do not divide by {plan.model.batch} a microbatch on {gpus} GPUs",
        expected="a multiple of the data-parallel ranks × --batch, and with vN of the stages",
        next_step=f"--global-batch {plan.model.batch * gpus}",
    )


def _does_not_fit(
    plan: TrainingPlan, machine: PlannedMachine, least: CandidateLayout, gpus: int, memory: int
) -> UsageError:
    """No layout fits; `least` is the one that needs least."""
    optimizer_bytes = OPTIMIZER_BYTES if plan.with_optimizer else 0
    own = plan.model.parameters * (2 * plan.model.data_type.size_bytes + optimizer_bytes)
    return UsageError(
        f"{plan.model.name} does not fit {gpus} × {machine.gpu}: '{least.layout}' needs "
        f"{format_memory(least.need.total)} of {format_memory(memory)} a GPU",
        expected=f"weights, gradients, optimizer and activations within {format_memory(memory)}",
        reason=f"{plan.model.parameters / 1e9:.3g} B parameters take {format_memory(own)} in all"
        + (" with Adam" if plan.with_optimizer else ""),
        next_step=_what_fits(plan.model, machine.gpus_per_node, gpus, memory, optimizer_bytes)
        or f"a smaller --batch or --sequence: {format_memory(least.need.activations)} are activations",
    )


_MOST_DOUBLINGS = 15


def _what_fits(model: TransformerModel, per_node: int, gpus: int, memory: int, optimizer_bytes: int) -> str:
    """Options of the fewest nodes, of so many GPUs or more, on which a layout fits; empty where none does."""
    least = max(gpus, model.parameters * (2 * model.data_type.size_bytes + optimizer_bytes) // memory)
    for nodes in (1 << power for power in range(_MOST_DOUBLINGS) if per_node << power >= least):
        layouts = layouts_for(model, nodes * per_node, per_node)
        for again in dict.fromkeys((model.recompute, Recompute.FULL)):
            candidates = candidates_of(
                replace(model, recompute=again),
                layouts,
                sequences=model.batch * nodes * per_node,
                optimizer_bytes=optimizer_bytes,
            )
            found = min(candidates, key=lambda each: each.need.total)
            if found.need.total <= memory:
                more = [f"--nodes {nodes}"] if found.layout.gpus > gpus else []
                more += ["--recompute full"] if again is not model.recompute else []
                need = f"{format_memory(found.need.total)} on each of {found.layout.gpus} GPUs"
                return " ".join([*more, f"--layout '{found.layout}', which needs {need}"])
    return ""


def _as_expected(machine: PlannedMachine, outcome: PlanOutcome) -> FaultCost | None:
    """The step with the collectives that the profile expects; None where it has these, or they are not known."""
    if machine.profile is None or all(each.origin == CurveOrigin.EXPECTED for each in outcome.times.curves.values()):
        return None
    expected = CollectiveTimesFound(CurveFinder(machine).curve)
    case = FaultCase(
        text=NO_FAULT,
        what="the fabric as its profile expects it",
        source=machine.profile.name,
        how=f"collectives as profile {machine.profile.name} expects them",
        seconds=lambda collective, group, size, _seconds: expected.seconds(collective, group, size),
    )
    try:
        return fault_costs(outcome.best, [case])[0]
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
    origins = dict.fromkeys(f"{curve.origin}: {curve.source}" for curve in outcome.times.curves.values())
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
