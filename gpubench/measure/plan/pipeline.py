"""A step of a pipeline: microbatches pass through stages, one forward, one backward (1F1B), also interleaved.

A stage begins with as many forward passes as there are stages behind it, then takes turns, and ends with backward
passes; the bubble is (p - 1)/(v·m) of the ideal time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Between
stages b·s·h·e bytes are sent a microbatch, each way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpubench.measure.plan.blocks import BlockWriter
from gpubench.measure.plan.events import StreamTask
from gpubench.measure.plan.gradients import GradientReducer, Handover
from gpubench.measure.plan.program import TENSOR, StepJob, StepProgram

if TYPE_CHECKING:
    from gpubench.model.workload.transformer import Operation

_SEND_SOURCE = "pipeline send"


@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """The pass of one microbatch through one stage; `chunk` counts the stages of one GPU."""

    microbatch: int
    chunk: int
    backward: bool


def pass_order(stage: int, stages: int, chunks: int, microbatches: int) -> list[Pass]:
    """The passes of a GPU in the order in which 1F1B, with several chunks the interleaved one, runs them.

    Interleaved, microbatches go in groups of as many as there are stages, a chunk after the other.
    """
    total = microbatches * chunks
    if chunks == 1:
        warm = min(stages - stage - 1, total)
    else:
        warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    forward = [_pass(number, stages, chunks, microbatches, backward=False) for number in range(total)]
    backward = [_pass(number, stages, chunks, microbatches, backward=True) for number in range(total)]
    order = forward[:warm]
    for number in range(total - warm):
        order += [forward[warm + number], backward[number]]
    return order + backward[total - warm :]


def _pass(number: int, stages: int, chunks: int, microbatches: int, *, backward: bool) -> Pass:
    if chunks == 1:
        return Pass(number, 0, backward)
    group, place = divmod(number, stages * chunks)
    size = min(stages, microbatches - group * stages)
    chunk, within = divmod(place, size)
    return Pass(group * stages + within, chunks - 1 - chunk if backward else chunk, backward)


def write_pipeline_step(job: StepJob) -> list[StreamTask]:
    """The tasks of all stages; of an interleaved pipeline the microbatches are a multiple of its stages."""
    return _Pipeline(job).tasks()


class _Pipeline:
    """Writes passes in an order in which whatever they wait for was written before."""

    def __init__(self, job: StepJob) -> None:
        layout = job.layout
        self._job = job
        self._stages, self._chunks = layout.pipeline, layout.stages_per_gpu
        self._microbatches = job.settings.microbatches
        self._program = StepProgram(job)
        self._writer = BlockWriter(self._program)
        self._parts = self._stages * self._chunks
        self._per_part = job.model.layers // self._parts
        self._orders = [
            pass_order(each, self._stages, self._chunks, self._microbatches) for each in range(self._stages)
        ]
        self._sent: dict[tuple[int, Pass], int | None] = {}
        self._sums: dict[tuple[bool, bool, bool], list[StreamTask] | None] = {}
        self._reducers = [list(self._reducers_of(stage)) for stage in range(self._stages)]

    def tasks(self) -> list[StreamTask]:
        """Of all stages."""
        places = [0] * self._stages
        lasts: list[int | None] = [None] * self._stages
        while any(place < len(order) for place, order in zip(places, self._orders, strict=True)):
            moved = False
            for stage in range(self._stages):
                while places[stage] < len(self._orders[stage]) and self._may_begin(
                    stage, self._orders[stage][places[stage]]
                ):
                    self._program.device, self._program.last = stage, lasts[stage]
                    self._write(stage, self._orders[stage][places[stage]])
                    lasts[stage] = self._program.last
                    places[stage] += 1
                    moved = True
            if not moved:
                raise ValueError("stages that wait for each other")
        for stage in range(self._stages):
            self._program.device, self._program.last = stage, lasts[stage]
            for reducer in self._reducers[stage]:
                reducer.finish()
        return self._program.tasks

    def _before(self, stage: int, one: Pass) -> tuple[int, Pass] | None:
        """The pass, with its stage, whose result this one needs."""
        part = one.chunk * self._stages + stage
        if one.backward and part == self._parts - 1:
            return stage, Pass(one.microbatch, one.chunk, backward=False)
        other = part + 1 if one.backward else part - 1
        if other < 0:
            return None
        return other % self._stages, Pass(one.microbatch, other // self._stages, one.backward)

    def _may_begin(self, stage: int, one: Pass) -> bool:
        before = self._before(stage, one)
        return before is None or before in self._sent

    def _write(self, stage: int, one: Pass) -> None:
        program, job = self._program, self._job
        before = self._before(stage, one)
        arrived = None if before is None else self._sent[before]
        program.compute("begin", 0.0, () if arrived is None else (arrived,))
        first = (one.chunk * self._stages + stage) * self._per_part
        is_first, is_last = first == 0, first + self._per_part == job.model.layers
        ready = self._ready(stage, one) if one.backward else None
        summed = self._summed(one, is_first=is_first, is_last=is_last) if ready is None else None
        if summed is None:
            self._passes(self._writer, one, first, ready)
        else:
            self._write_summed(summed, one)
        goes_on = not (is_first if one.backward else is_last)
        self._sent[stage, one] = self._send(one) if goes_on else program.last

    def _passes(self, writer: BlockWriter, one: Pass, first: int, ready: Handover | None) -> None:
        """Every operation of the blocks of a part, the first of which is `first`."""
        embedding, head = self._job.model.ends()
        is_first, is_last = first == 0, first + self._per_part == self._job.model.layers
        blocks = range(first, first + self._per_part)
        if one.backward:
            if is_last:
                writer.end(head, backward=True, ready=ready)
            for block in reversed(blocks):
                writer.backward(block, ready)
            if is_first:
                writer.end(embedding, backward=True, ready=ready)
            return
        if is_first:
            writer.end(embedding, backward=False)
        for block in blocks:
            writer.forward(block)
        if is_last:
            writer.end(head, backward=False)

    def _summed(self, one: Pass, *, is_first: bool, is_last: bool) -> "list[StreamTask] | None":
        """A pass as one computation and one communication of each kind, which takes as long as all its operations.

        None where something is communicated beside computation within it.
        """
        key = (one.backward, is_first, is_last)
        if key not in self._sums:
            scratch = StepProgram(self._job)
            first = 0 if is_first else self._job.model.layers - self._per_part if is_last else self._per_part
            self._passes(BlockWriter(scratch), one, first, None)
            self._sums[key] = _sum_of(scratch.tasks)
        return self._sums[key]

    def _write_summed(self, summed: "list[StreamTask]", one: Pass) -> None:
        program = self._program
        for task in summed:
            if task.computes:
                kernels = max(1, round(task.seconds / task.kernel_seconds)) if task.kernel_seconds else 1
                program.compute("backward" if one.backward else "forward", task.seconds, kernels=kernels)
                continue
            after = () if program.last is None else (program.last,)
            program.tasks.append(replace(task, device=program.device, after=after))
            program.compute(f"after {task.source}", 0.0, (len(program.tasks) - 1,))

    def _send(self, one: Pass) -> int | None:
        """What the next stage waits for: the arrival, or of one rank alone the computation."""
        program, job = self._program, self._job
        size = job.model.activation_bytes / job.layout.context
        if job.layout.sequence_parallel:
            size /= job.layout.tensor
        after = () if program.last is None else (program.last,)
        stream = "backward sends" if one.backward else "forward sends"
        task = program.communicate("sendrecv", job.stage_group(), size, source=_SEND_SOURCE, stream=stream, after=after)
        return program.last if task is None else task

    def _ready(self, stage: int, one: Pass) -> Handover | None:
        is_last = one.microbatch == self._microbatches - 1
        return Handover(self._reducers[stage]) if is_last and self._reducers[stage] else None

    def _reducers_of(self, stage: int) -> Iterator[GradientReducer]:
        embedding, head = self._job.model.ends()
        operations: list[Operation] = [embedding] if stage == 0 and embedding is not None else []
        for chunk in range(self._chunks):
            first = (chunk * self._stages + stage) * self._per_part
            for block in range(first, first + self._per_part):
                operations += self._job.model.operations(block)
        operations += [head] if stage == self._stages - 1 and head is not None else []
        for experts in (False, True):
            reducer = GradientReducer(self._program, tuple(operations), experts)
            if reducer.is_needed:
                yield reducer


def _sum_of(tasks: Sequence[StreamTask]) -> list[StreamTask] | None:
    computed = [each for each in tasks if each.computes and each.seconds > 0]
    talking = [each for each in tasks if not each.computes]
    if any(each.stream != TENSOR for each in talking):
        return None
    seconds = sum(each.seconds for each in computed)
    kernels = sum(each.seconds / each.kernel_seconds for each in computed if each.kernel_seconds)
    found = [StreamTask(name="pass", seconds=seconds, kernel_seconds=seconds / kernels)] if computed else []
    for source, collective in dict.fromkeys((each.source, each.collective) for each in talking):
        own = [each for each in talking if (each.source, each.collective) == (source, collective)]
        found.append(
            replace(
                own[0],
                seconds=sum(each.seconds for each in own),
                size_bytes=sum(each.size_bytes for each in own),
                operations=len(own),
            )
        )
    return found
