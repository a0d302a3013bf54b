"""Runs `gpubench plan`: times computation, ranks layouts by step time, and predicts the cost of faults."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.runner import presenting
from gpubench.model.terms.units import format_memory
from gpubench.training import program, report, workload
from gpubench.training.cluster import CurveFinder, FoundResults, PlannedMachine, choose_machine, measured_now, read_all
from gpubench.training.events import USUAL_CONTENTION, ContentionTable
from gpubench.training.options import TrainingPlan
from gpubench.training.report import SECTIONS as SECTIONS
from gpubench.training.step import StepPrediction, fit_computation, predict
from gpubench.training.workload_file import USUAL_SEQUENCE, parse_parameters, read_model

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata


_MILLISECONDS = 1e3


def measured_compute(model: workload.TransformerModel, copy_gb_s: float | None) -> program.ComputeTimes:
    """Measure the forward and backward pass of one microbatch, scaled from a few blocks to the whole model.

    Raises CouldNotMeasureError without PyTorch and a GPU, or if the GPU memory is too small.
    """
    from gpubench.training.computation import relative_interval, time_blocks

    blocks = time_blocks(model)
    layers = model.layers + model.head_flops() / sum(operation.flops for operation in model.operations(0))
    return program.ComputeTimes(
        forward_seconds=mean(blocks.forward) * layers,
        backward_seconds=mean(blocks.backward) * layers,
        source=blocks.described + (", the head by their speed" if model.vocabulary else ""),
        host_seconds=blocks.host,
        spread=max(relative_interval(blocks.forward), relative_interval(blocks.backward)),
        copy_gb_s=copy_gb_s,
    )


def _compute_times(
    plan: TrainingPlan, model: workload.TransformerModel, machine: PlannedMachine
) -> program.ComputeTimes:
    """Return the computation time of one microbatch on one GPU. Raises UsageError if the speed of the GPU is not
    known.
    """
    sheet = program.estimate_times(model, machine.gpu)
    copy_gb_s = None if sheet is None else sheet.copy_gb_s
    if plan.measure:
        if not machine.is_here:
            raise UsageError(
                "--measure without a GPU",
                expected="a GPU in this machine, because simulated machines and stored results have none",
                next_step="--step with the time of one of your runs, or leave --measure out",
            )
        return measured_compute(model, copy_gb_s)
    if plan.tflops is not None or (sheet is None and plan.measured_text):
        source = f"--tflops {plan.tflops or 0:g}"
        return program.times_for(model, plan.tflops or _ANY_TFLOPS, source=source, origin="given", copy_gb_s=copy_gb_s)
    if sheet is None:
        raise UsageError(
            f"the compute speed of {machine.gpu} is not known",
            expected="one measured number: --step or --tokens-per-second of a run, --tflops, or --measure on the GPU",
            next_step="--tflops 400",
        )
    return sheet


_ANY_TFLOPS = 300.0
"""Initial speed for the solver, if the speed is derived from a measured step."""


_MEGABYTE = 2**20
_SECONDS_TO_COMPUTE = 10.0
"""Estimated time of --measure, including the import of PyTorch."""


def run(plan: TrainingPlan, arguments: Sequence[str]) -> int:
    """Predict the training step, present the report, and return the exit code.

    Raises GpubenchError if an input is missing or an output cannot be written.
    """
    with presenting(plan.presentation) as presenter:
        found = read_all(plan.results, plan.overlap)
        machine = choose_machine(plan, found.files, found.contention_gpus)
        model, notes = choose_model(plan)
        outcome = _outcome(plan, model, machine, found, notes, presenter.waiting)
        presenter.begin(_metadata(plan, arguments, machine, outcome, notes), ())
        presenter.end(report.plan_report(outcome, machine.origin))
    return presenter.exit_code


def choose_model(plan: TrainingPlan) -> tuple[workload.TransformerModel, list[str]]:
    """Return the model to plan for, and the assumptions about it as sentences. Raises UsageError if it cannot be
    read.
    """
    if plan.model_file is not None:
        model, notes = read_model(plan.model_file, sequence=plan.sequence, batch=plan.batch)
    else:
        count, sequence = parse_parameters(plan.parameters or ""), plan.sequence or USUAL_SEQUENCE
        model = workload.model_with_parameters(count, sequence=sequence, batch=plan.batch or 1)
        shape = f"{model.layers} layers with a hidden size of {model.hidden}, {model.parameters / 1e9:.3g} B parameters"
        notes = [f"--parameters {plan.parameters} is modelled as {shape} without embeddings"]
    return replace(model, recompute=plan.recompute or model.recompute, fp8=plan.fp8 or model.fp8), notes


def _outcome(
    plan: TrainingPlan,
    model: workload.TransformerModel,
    machine: PlannedMachine,
    found: FoundResults,
    notes: list[str],
    announce: Callable[[str, float], None],
) -> report.PlanOutcome:
    from gpubench.training.fault_costs import fault_cases

    if plan.measure and machine.is_here:
        announce("measuring computation on a GPU", _SECONDS_TO_COMPUTE)
    measures = measured_now(plan.timeout_s, announce) if machine.is_here and machine.nodes == 1 else None
    finder = CurveFinder(machine, found, measures)
    job, layouts = build_job(plan, model, finder)
    ranked = _ranked(plan, machine, job, layouts, notes)
    cases = fault_cases(machine, plan.faults, plan.faults_from, notes, with_usual=not finder.staged)
    outcome = report.PlanOutcome(
        ranked=ranked, faults=report.fault_costs(ranked[0], cases), gpu_memory_bytes=machine.memory_bytes
    )
    notes += [*_notes(machine, found, outcome), *dict.fromkeys(finder.notes)]
    return replace(outcome, as_expected=_predict_as_expected(machine, outcome))


def build_job(
    plan: TrainingPlan, model: workload.TransformerModel, finder: CurveFinder
) -> tuple[program.StepJob, list[workload.ParallelLayout]]:
    """Return the inputs of a training step that all layouts share, and the requested layouts.

    Raises UsageError if a layout does not fit the model or the GPUs, or if the speed of computation is not known.
    """
    machine = finder.machine
    gpus = plan.gpus or machine.gpus
    if gpus > machine.gpus:
        raise UsageError(
            f"--gpus {gpus} of a machine with {machine.gpus}",
            expected=f"at most {machine.gpus}",
            next_step=f"--nodes {-(-gpus // machine.gpus_per_node)}",
        )
    layouts = [workload.parse_layout(text, gpus) for text in plan.layouts]
    for layout in layouts:
        workload.check_layout(model, layout)
    own = [each for each in finder.found.contention if each.ctas is None]
    job = program.StepJob(
        model=model,
        layout=workload.ParallelLayout(data=gpus),
        compute=_compute_times(plan, model, machine),
        times=program.CollectiveTimesFound(finder.curve),
        contention=ContentionTable(own, USUAL_CONTENTION),
        settings=program.StepSettings(
            bucket_bytes=None if plan.bucket_mb is None else round(plan.bucket_mb * _MEGABYTE),
            imbalance=plan.imbalance,
            reduces_fp32=plan.reduce_fp32,
            optimizer_bytes=program.OPTIMIZER_TRAFFIC,
        ),
        gpus_per_node=machine.gpus_per_node,
    )
    return _calibrated(plan, job, gpus) if plan.measured_text else job, layouts


def _calibrated(plan: TrainingPlan, job: program.StepJob, gpus: int) -> program.StepJob:
    measured_on = plan.measured_on or gpus
    layout = workload.parse_layout(plan.layouts[0], measured_on)
    workload.check_layout(job.model, layout)
    target = workload.parse_layout(plan.layouts[0], gpus)
    count = count_microbatches(plan, job.model, target)
    seconds = plan.step_seconds or 0.0
    if plan.tokens_per_second is not None:
        seconds = layout.data * count * job.model.tokens / plan.tokens_per_second
    own = replace(job, layout=layout, settings=replace(job.settings, microbatches=count))
    compute = fit_computation(own, seconds)
    if compute is None:
        raise UsageError(
            f"a step of {layout} in {seconds * _MILLISECONDS:,.0f} ms on {measured_on} GPUs",
            expected="a step time above the time of its communication",
            reason="the step had another layout, batch or number of GPUs, or the fabric is faster than its profile",
            next_step="--measured-on GPUS, or --tflops N",
        )
    tflops = 3 * job.model.forward_flops() / (compute.forward_seconds + compute.backward_seconds) / 1e12
    source = f"{plan.measured_text} on {measured_on} GPUs, which means {tflops:.0f} TFLOP/s per GPU during computation"
    return replace(job, compute=replace(compute, source=source, origin="given"))


def count_microbatches(plan: TrainingPlan, model: workload.TransformerModel, layout: workload.ParallelLayout) -> int:
    """Return the number of microbatches per data-parallel rank and step.

    Raises UsageError if the sequences are not divisible into microbatches. An interleaved pipeline needs a multiple of
    its number of stages.
    """
    sequences = plan.global_batch or model.batch * layout.gpus
    count, rest = divmod(sequences, layout.data * model.batch)
    if rest or not count or (layout.stages_per_gpu > 1 and count % layout.pipeline):
        raise UsageError(
            f"{sequences} sequences per step are not a whole number of microbatches for '{layout}' on {layout.gpus} "
            "GPUs",
            expected="a multiple of the data-parallel ranks × --batch, and with vN also of the stages",
            next_step=f"--global-batch {model.batch * layout.gpus}",
        )
    return count


def _ranked(
    plan: TrainingPlan,
    machine: PlannedMachine,
    job: program.StepJob,
    asked: Sequence[workload.ParallelLayout],
    notes: list[str],
) -> list[StepPrediction]:
    """Predict the steps of all layouts that fit into GPU memory, fastest first. Without --layout, try each kind of
    sharding.
    """
    ways = [workload.ParallelLayout(data=job.layout.gpus, sharding=each) for each in workload.Sharding]
    jobs = [
        replace(
            job, layout=each, settings=replace(job.settings, microbatches=count_microbatches(plan, job.model, each))
        )
        for each in asked or {str(way): way for way in ways}.values()
    ]
    memory = machine.memory_bytes
    ranked: list[StepPrediction] = []
    unknown: UsageError | None = None
    for each in jobs:
        was_measured = plan.measured_text and each is jobs[0]
        if memory is not None and each.states_bytes > memory and not was_measured:
            notes.append(f"{each.layout} is left out: its states take {format_memory(each.states_bytes)} per GPU")
            continue
        try:
            ranked.append(predict(each))
        except UsageError as error:
            if asked:
                raise
            unknown = error
            notes.append(f"{each.layout} is left out: {error.seen}")
    if unknown is not None and not ranked:
        raise unknown
    if memory is not None and not ranked:
        raise _does_not_fit(plan, min(jobs, key=lambda each: each.states_bytes), machine, memory)
    return sorted(ranked, key=lambda each: -report.tokens_per_second(each))


def _does_not_fit(plan: TrainingPlan, least: program.StepJob, machine: PlannedMachine, memory: int) -> UsageError:
    """Return the error that no layout fits into GPU memory. `least` is the layout that needs the least memory.

    The error suggests the smallest number of nodes on which FSDP fits.
    """
    model, gpus = least.model, least.layout.gpus
    next_step = "a layout that also splits blocks: --layout 'tp8 sp pp8'"
    for nodes in (1 << power for power in range(_MOST_DOUBLINGS)):
        layout = workload.ParallelLayout(data=nodes * machine.gpus_per_node, sharding=workload.Sharding.FSDP)
        need = workload.states_bytes(model, layout)
        if layout.gpus >= gpus and need <= _FILLED * memory:
            next_step = f"--layout fsdp, which takes {format_memory(need)} on each of {layout.gpus} GPUs"
            if layout.gpus > gpus:
                name = (plan.simulate or "").partition("*")[0]
                next_step = (f"--simulate '{name}*{nodes}' " if name else f"--nodes {nodes} ") + next_step
            break
    return UsageError(
        f"{model.name} does not fit {gpus} × {machine.gpu}: '{least.layout}' takes "
        f"{format_memory(least.states_bytes)} of {format_memory(memory)} per GPU",
        expected=f"weights, gradients and optimizer states within {format_memory(memory)}, with room for activations",
        reason=f"{model.parameters / 1e9:.3g} B parameters take "
        f"{format_memory(workload.states_bytes(model, workload.ParallelLayout()))} in total with Adam",
        next_step=next_step,
    )


_MOST_DOUBLINGS = 15
_FILLED = 0.8
"""Fraction of GPU memory that weights, gradients and optimizer states may fill on a suggested machine. Activations
need the rest.
"""


def _predict_as_expected(machine: PlannedMachine, outcome: report.PlanOutcome) -> report.FaultCost | None:
    """Predict the step time from the profile's expected collective times.

    Return None if the prediction already uses these times, or if they are not known.
    """
    if machine.profile is None or all(
        curve.origin == program.EXPECTED for curve in outcome.best.job.times.curves.values()
    ):
        return None
    expected = program.CollectiveTimesFound(CurveFinder(machine).curve)
    case = report.FaultCase(
        text=report.NO_FAULT,
        what="the fabric as in its profile",
        source=machine.profile.name,
        seconds=lambda collective, group, size, _seconds: expected.seconds(collective, group, size),
    )
    try:
        return report.fault_costs(outcome.best, [case])[0]
    except UsageError:
        return None


def _notes(machine: PlannedMachine, found: FoundResults, outcome: report.PlanOutcome) -> list[str]:
    best = outcome.best
    notes = [f"computation: {best.job.compute.source}"]
    if found.contention:
        notes.append(f"contention measured by gpubench overlap: {found.contention_source}")
    else:
        notes.append(
            "contention between compute and communication was not measured. As on two H200s, computation loses 0.34 "
            "s for each second of a concurrent collective. Try: gpubench overlap --output overlap.json, then add "
            "--overlap overlap.json"
        )
    origins = dict.fromkeys(f"{curve.origin}: {curve.source}" for curve in best.job.times.curves.values())
    notes += [f"collectives {origin}" for origin in origins]
    notes.append("times between measured sizes are interpolated on logarithmic scales")
    notes += [f"outside the known sizes: {each}" for each in best.job.times.beyond()]
    if found.unusable:
        notes.append(f"{found.unusable} rows of overlap left out: wrong data, or no slowdown of computation")
    if found.passed_over:
        notes.append(f"skipped, no results: {', '.join(found.passed_over[:4])}")
    if best.job.compute.copy_gb_s is None:
        notes.append(
            f"copies of gradients and the optimizer are left out, because the memory speed of {machine.gpu} is unknown"
        )
    layout = best.job.layout
    domain = machine.gpus_per_node * (machine.profile.domain.nodes if machine.profile and machine.profile.domain else 1)
    if layout.tensor > domain:
        notes.append(
            f"tp{layout.tensor} crosses nodes, whose NVLink connects {domain} GPUs, so its time is that of the NICs"
        )
    return notes


def _metadata(
    plan: TrainingPlan,
    arguments: Sequence[str],
    machine: PlannedMachine,
    outcome: report.PlanOutcome,
    notes: Sequence[str],
) -> "Metadata":
    model, compute = outcome.best.job.model, outcome.best.job.compute
    options: dict[str, Any] = {
        "model": model.name,
        **{name: getattr(model, name) for name in ("parameters", "layers", "hidden", "heads", "sequence", "batch")},
        **{name: getattr(model, name) for name in ("vocabulary", "experts", "fp8")},
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
        "contention_assumed": not outcome.best.job.contention.measured,
        "recompute": str(model.recompute),
        "notes": list(notes),
    }
    profile = machine.profile
    return build_metadata(
        arguments,
        "plan",
        origin=machine.origin,
        hosts=list(machine.hosts),
        options=options,
        profile=None if profile is None else {"name": profile.name, "sha256": profile.sha256},
        source=f"--simulate {plan.simulate}" if plan.simulate else ", ".join(map(str, plan.results)) or None,
    )
