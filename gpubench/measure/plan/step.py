"""One step of a job: its tasks, simulated, and what its time went to."""

from dataclasses import dataclass, replace

from gpubench.measure.plan.blocks import BlockWriter
from gpubench.measure.plan.events import DeviceTimes, StepTimeline, StreamTask, simulate
from gpubench.measure.plan.gradients import GradientReducer, Handover
from gpubench.measure.plan.pipeline import write_pipeline_step
from gpubench.measure.plan.program import StepJob, StepProgram
from gpubench.measure.plan.sharded import write_sharded_step

_MOST_OPERATIONS = 1500
"""Operations of a step up to which every microbatch is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A step: its seconds, between `least` and `most` by the noise of what it follows from, and where they went.

    `times` are those of `device`, the one that ends last. The timeline has `shown_microbatches` of them. `host` is
    what the step is longer than they because the host has not issued more: steps follow each other no faster than it
    issues them, and a GPU that is behind does not wait for it.
    """

    job: StepJob
    seconds: float
    least: float
    most: float
    times: DeviceTimes
    timeline: StepTimeline
    shown_microbatches: int
    device: int
    host: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which nothing was computed because of communication."""
        return sum(self.times.exposed.values())

    @property
    def communication_seconds(self) -> float:
        """Seconds of all communication of the step on this device, each alone."""
        own = (task for task in self.timeline.tasks if task.device == self.device and not task.computes)
        return sum(each.seconds for each in own) * self.job.settings.microbatches / self.shown_microbatches


def predict(job: StepJob, *, with_range: bool = True) -> StepPrediction:
    """Simulate a step, and again with all noise up and down for the range."""
    whole = _issued(_simulated(job))
    bounds = [whole.seconds]
    if with_range:
        for shift in (-1.0, 1.0):
            moved = replace(job, times=job.times.shifted(shift), compute=job.compute.shifted(shift))
            bounds.append(_issued(_simulated(moved)).seconds)
    return replace(whole, job=job, least=min(bounds), most=max(bounds))


def _issued(prediction: StepPrediction) -> StepPrediction:
    """The prediction, lengthened to what the host takes to issue the step where that is more."""
    host = max(0.0, prediction.job.host_seconds - prediction.seconds)
    return replace(prediction, seconds=prediction.seconds + host, host=host)


def _simulated(job: StepJob) -> StepPrediction:
    """A step; of very many microbatches that of fewer, and the further ones as long as the last of these.

    From twice as many as there are stages on, every further round of a pipeline takes the same time.
    """
    count, stages = job.settings.microbatches, job.layout.pipeline
    few = 2 * max(1, stages)
    operations = sum(1 for _ in job.model.operations(0)) * job.model.layers
    if count <= few or count * operations <= _MOST_OPERATIONS:
        return _once(job, count)
    half, whole = _once(job, few // 2), _once(job, few)
    rounds = (count - few) / (few - few // 2)
    sources = {*half.times.exposed, *whole.times.exposed}
    first, last = half.times, whole.times
    return replace(
        whole,
        seconds=_further(half.seconds, whole.seconds, rounds),
        times=DeviceTimes(
            compute=_further(first.compute, last.compute, rounds),
            slowed=_further(first.slowed, last.slowed, rounds),
            bubble=_further(first.bubble, last.bubble, rounds),
            exposed={
                each: _further(first.exposed.get(each, 0.0), last.exposed.get(each, 0.0), rounds) for each in sources
            },
        ),
        shown_microbatches=few,
    )


def _further(half: float, whole: float, rounds: float) -> float:
    return whole + rounds * (whole - half)


def _once(job: StepJob, microbatches: int) -> StepPrediction:
    own = replace(job, settings=replace(job.settings, microbatches=microbatches))
    timeline = simulate(step_tasks(own))
    device = _last_device(timeline)
    return StepPrediction(
        job=job,
        seconds=timeline.seconds,
        least=timeline.seconds,
        most=timeline.seconds,
        times=timeline.devices[device],
        timeline=timeline,
        device=device,
        shown_microbatches=microbatches,
    )


def _last_device(timeline: StepTimeline) -> int:
    last = max(timeline.spans, key=lambda span: (span.end, -timeline.tasks[span.task].device))
    return timeline.tasks[last.task].device


def step_tasks(job: StepJob) -> list[StreamTask]:
    """The tasks of a step, of all stages where it is a pipeline, else of one GPU: all do the same."""
    if job.layout.pipeline > 1:
        return write_pipeline_step(job)
    program = StepProgram(job)
    if job.layout.sharding.gathers_parameters and job.layout.gradient_ranks > 1:
        write_sharded_step(program)
    else:
        _write_replicated_step(program)
    return program.tasks


def _write_replicated_step(program: StepProgram) -> None:
    """Every rank has all parameters of its part; gradients are brought together behind the last microbatch."""
    model, writer = program.job.model, BlockWriter(program)
    first, last = model.ends()
    whole = [*((first,) if first else ())]
    whole += [each for block in range(model.layers) for each in model.operations(block)]
    whole += [*((last,) if last else ())]
    reducers = [GradientReducer(program, tuple(whole), experts) for experts in (False, True)]
    reducers = [each for each in reducers if each.is_needed]
    for microbatch in range(program.job.settings.microbatches):
        is_last = microbatch == program.job.settings.microbatches - 1
        writer.end(first, backward=False)
        for block in range(model.layers):
            writer.forward(block)
        writer.end(last, backward=False)

        ready = Handover(reducers) if is_last and reducers else None
        writer.end(last, backward=True, ready=ready)
        for block in reversed(range(model.layers)):
            writer.backward(block, ready)
        writer.end(first, backward=True, ready=ready)
    for each in reducers:
        each.finish()
