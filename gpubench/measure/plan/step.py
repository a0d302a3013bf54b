"""One training step, simulated: gradients in buckets; replicated, sharded or pipelined; and where its time went.

Gradients fill buckets in the order in which they are ready, which is that of the backward pass; each goes into one
bucket whole, and a bucket is closed as soon as it holds its cap or more. The first bucket is 1 MiB where nobody gave a
cap, else it has the cap of all others (PyTorch 2.11, torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/reducer.cpp; "DDP", Li et al. 2020, arXiv 2006.15704, section 4.2).

- **DDP**: bucket *i* begins when its gradients are ready and bucket *i* - 1 has ended, an all-reduce of the bucket.
  Each gradient is copied into its bucket and back (`gradient_as_bucket_view=False`, PyTorch's default).
- **ZeRO-1 and 2**: a reduce-scatter a bucket, and behind all of them an all-gather of the parameters: 2Ψe(n-1)/n bytes
  a rank, as DDP (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.1).

In the forward pass the all-gather of block *i* may begin once the parameters of block *i* - 2 have been copied out of
their buffer, and the block computes behind its own copy. In the backward pass the all-gather of the block before is
issued as a block begins, in front of that block's reduce-scatter where it is prefetched, behind it where it is not;
both go through one communicator, in the order of issue. A block's gradients are copied together once the
reduce-scatter of the block behind it has ended (PyTorch 2.11, torch/distributed/fsdp/_fully_shard). Gathered twice
and scattered once: 3Ψe(n-1)/n bytes a rank (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2).

A stage begins with as many forward passes as there are stages behind it, then takes turns, and ends with backward
passes; the bubble is (p - 1)/(v·m) of the ideal time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Between
stages b·s·h·e bytes are sent a microbatch, each way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpubench.measure.plan.events import DeviceTimes, StepTimeline, StreamTask, simulate
from gpubench.measure.plan.program import GRADIENTS, TENSOR, BlockWriter, StepJob, StepProgram
from gpubench.model.workload import Operation, ParameterTensor, Sharding

DEFAULT_CAP_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together: the numbers of their tensors in the order of the backward pass."""

    tensors: tuple[int, ...]
    size_bytes: int


def fill_buckets(
    sizes: Sequence[int], cap_bytes: int = DEFAULT_CAP_BYTES, first_bytes: int | None = None
) -> tuple[GradientBucket, ...]:
    """The buckets of gradients with these sizes, in the order in which they are ready."""
    found: list[GradientBucket] = []
    held: list[int] = []
    size = 0
    limit = cap_bytes if first_bytes is None else min(first_bytes, cap_bytes)
    for number, each in enumerate(sizes):
        held.append(number)
        size += each
        if size >= limit:
            found.append(GradientBucket(tuple(held), size))
            held, size, limit = [], 0, cap_bytes
    if held:
        found.append(GradientBucket(tuple(held), size))
    return tuple(found)


_DDP_SOURCE = "gradient all-reduce"
_SCATTER_SOURCE = "gradient reduce-scatter"
_GATHER_SOURCE = "parameter all-gather"


def tensor_bytes(job: StepJob, tensor: ParameterTensor) -> int:
    """Bytes of a GPU's part of a parameter, which are those of its gradient."""
    parts = job.layout.tensor * (job.layout.expert if tensor.expert else 1)
    return -(-tensor.elements // parts) * job.model.data_type.size_bytes


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being filled."""

    size_bytes: int
    missing: int
    tensors: int
    task: int | None = None


@dataclass(slots=True)
class GradientReducer:
    """Reduces gradients by buckets as they come ready; `operations` are all those of this device, forward order.

    `experts` is whether it is for the gradients of experts, which fewer ranks share, or for all others.
    """

    program: StepProgram
    operations: tuple[Operation, ...]
    experts: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _of_tensor: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = [each for operation in reversed(self.operations) for each in reversed(self._own(operation))]
        sizes = [tensor_bytes(self.program.job, each) for each in tensors]
        settings = self.program.job.settings
        for number, bucket in enumerate(fill_buckets(sizes, settings.bucket_bytes, settings.first_bucket_bytes)):
            self._buckets.append(_Bucket(bucket.size_bytes, len(bucket.tensors), len(bucket.tensors)))
            self._of_tensor |= {tensors[each].name: number for each in bucket.tensors}

    @property
    def is_needed(self) -> bool:
        """True where several ranks have these parameters."""
        return bool(self._buckets) and self.program.job.gradient_group(experts=self.experts).ranks > 1

    def ready(self, operation: Operation) -> None:
        """The gradients of an operation are there: copy them, and reduce the buckets that are now full."""
        job = self.program.job
        for tensor in reversed(self._own(operation)):
            bucket = self._buckets[self._of_tensor[tensor.name]]
            self.program.copy("into bucket", tensor_bytes(job, tensor))
            bucket.missing -= 1
            if not bucket.missing:
                self._reduce(bucket)

    def _own(self, operation: Operation) -> list[ParameterTensor]:
        return [each for each in operation.tensors if each.expert == self.experts]

    def _reduce(self, bucket: _Bucket) -> None:
        scatters = self.program.job.layout.sharding is not Sharding.DDP
        bucket.task = self.program.communicate(
            "reducescatter" if scatters else "allreduce",
            self.program.job.gradient_group(experts=self.experts),
            bucket.size_bytes,
            source=_SCATTER_SOURCE if scatters else _DDP_SOURCE,
            stream=GRADIENTS,
            after=() if self.program.last is None else (self.program.last,),
        )

    def finish(self) -> None:
        """Behind the backward pass: gradients back from the buckets, or parameters gathered again."""
        program = self.program
        if program.job.layout.sharding is Sharding.DDP:
            for bucket in self._buckets:
                reduced = () if bucket.task is None else (bucket.task,)
                program.copy("from bucket", bucket.size_bytes, reduced, kernels=bucket.tensors)
            return
        gathered: list[int] = []
        scattered = [each.task for each in self._buckets if each.task is not None]
        program.compute("after gradients", 0.0, scattered)
        for bucket in self._buckets:
            task = program.communicate(
                "allgather",
                program.job.gradient_group(experts=self.experts),
                bucket.size_bytes,
                source=_GATHER_SOURCE,
                stream=GRADIENTS,
                after=() if program.last is None else (program.last,),
            )
            gathered += [] if task is None else [task]
        program.compute("after parameters", 0.0, gathered)


@dataclass(frozen=True, slots=True)
class Handover:
    """Hands the gradients of an operation to all reducers, each of which takes what is its own."""

    reducers: Sequence[GradientReducer]

    def __call__(self, operation: Operation) -> None:
        """They are there."""
        for each in self.reducers:
            each.ready(operation)


_GATHER = "parameter all-gather"
_SCATTER = "gradient reduce-scatter"


def write_sharded_step(program: StepProgram) -> None:
    """The tasks of all microbatches of a step."""
    writer = _ShardedStep(program)
    for _ in range(program.job.settings.microbatches):
        writer.microbatch()


class _ShardedStep:
    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self._job = program.job
        self._writer = BlockWriter(program)
        model = self._job.model
        first, last = model.ends()
        self._first, self._last = first, last
        # The root holds what lies outside the blocks, and keeps it from the forward to the backward pass.
        self._root = _bytes(self._job, tuple(each for each in (first, last) if each is not None))
        self._blocks = [_bytes(self._job, model.operations(block)) for block in range(model.layers)]
        self._scattered: int | None = None

    def microbatch(self) -> None:
        """Forward and backward of one microbatch."""
        program, writer, blocks = self._program, self._writer, range(len(self._blocks))
        copied: list[int] = []
        self._gather(self._root, ())
        writer.end(self._first, backward=False)
        for block in blocks:
            task = self._issue(self._blocks[block], copied[-2:-1])
            copied.append(self._copy_out(self._blocks[block], task))
            writer.forward(block)
        writer.end(self._last, backward=False)
        writer.end(self._last, backward=True)
        gathered: int | None = None
        for block in reversed(blocks):
            if gathered is None:
                gathered = self._issue(self._blocks[block], self._behind())
            self._copy_out(self._blocks[block], gathered)
            gathered = None
            if block and self._job.settings.prefetch:
                gathered = self._issue(self._blocks[block - 1], self._behind())
            writer.backward(block)
            self._scatter(self._blocks[block])
        writer.end(self._first, backward=True)
        self._scatter(self._root)
        program.compute("end", 0.0, () if self._scattered is None else (self._scattered,))

    def _behind(self) -> tuple[int, ...]:
        return () if self._program.last is None else (self._program.last,)

    def _gather(self, size_bytes: int, after: tuple[int, ...]) -> None:
        self._copy_out(size_bytes, self._issue(size_bytes, after))

    def _issue(self, size_bytes: int, after: "tuple[int, ...] | list[int]") -> int | None:
        group = self._job.gradient_group()
        return self._program.communicate(
            "allgather", group, size_bytes, source=_GATHER, stream=GRADIENTS, after=tuple(after)
        )

    def _copy_out(self, size_bytes: int, task: int | None) -> int:
        return self._program.copy("out of buffer", size_bytes, () if task is None else (task,))

    def _scatter(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        self._program.copy("into buffer", size_bytes, () if self._scattered is None else (self._scattered,))
        group = self._job.gradient_group()
        self._scattered = self._program.communicate(
            "reducescatter", group, size_bytes, source=_SCATTER, stream=GRADIENTS, after=self._behind()
        )


def _bytes(job: StepJob, operations: tuple[Operation, ...]) -> int:
    return sum(tensor_bytes(job, tensor) for each in operations for tensor in each.tensors)


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
