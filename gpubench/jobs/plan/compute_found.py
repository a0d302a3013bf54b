"""How long a GPU computes: given by the user, measured here, or from the data sheet of its model."""

from gpubench.errors import UsageError
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.jobs.plan.plan import TrainingPlan
from gpubench.measure.plan.gpu_rates import (
    BACKWARD_OVER_FORWARD,
    COPY_SHARE,
    REACHED_SHARE,
    SMALLEST_COPY_SECONDS,
    rates_of,
)
from gpubench.measure.plan.program import ComputeTimes

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
        from gpubench.jobs.plan.compute_measured import measured_compute

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
