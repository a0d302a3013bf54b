"""Predict a training step: find what it follows from, rank layouts, and show the best one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from gpubench.errors import UsageError
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.jobs.plan.compute_found import compute_times
from gpubench.jobs.plan.curves_found import FoundCurves, measured_now
from gpubench.jobs.plan.fault_cases import fault_cases
from gpubench.jobs.plan.machine import PlannedMachine, machine_of
from gpubench.jobs.plan.plan import NAME, TrainingPlan
from gpubench.jobs.plan.result_files import FoundResults, read_all
from gpubench.measure.plan.advice import Advice, advise
from gpubench.measure.plan.contention import ContentionTable, MeasuredContention
from gpubench.measure.plan.curves import CollectiveTimesFound
from gpubench.measure.plan.faults import fault_costs
from gpubench.measure.plan.program import StepJob, StepSettings
from gpubench.measure.plan.ranking import RankedLayout, first_fit, rank
from gpubench.measure.plan.report import SECTIONS as SECTIONS
from gpubench.measure.plan.report import PlanOutcome, plan_report
from gpubench.measure.plan.step import StepPrediction, predict
from gpubench.model.results.rows.plan import CurveOrigin
from gpubench.model.terms.units import format_memory, parse_size
from gpubench.model.workload.layout import ParallelLayout, check_layout, layouts_for, parse_layout
from gpubench.model.workload.memory import OPTIMIZER_BYTES

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata

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
        if plan.exports:
            from gpubench.jobs.plan.exporting import write_exports

            write_exports(plan, machine, outcome)
        presenter.begin(metadata, ())
        presenter.end(plan_report(outcome))
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
            "contention was not measured and is taken for none, so that steps read short: gpubench overlap --output "
            "overlap.json, then --overlap overlap.json"
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
