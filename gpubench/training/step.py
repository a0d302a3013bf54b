"""Simulates one training step with gradient buckets, sharding and pipelines, and divides its time by cause.

Gradients fill buckets in the order in which they become ready, which is the order of the backward pass. Each gradient
goes into one bucket. A bucket is closed once it reaches its maximum size (PyTorch 2.11,
torch/csrc/distributed/c10d/reducer.cpp; "DDP", Li et al. 2020, arXiv 2006.15704, section 4.2).

- **DDP**: the all-reduce of bucket *i* starts once its gradients are ready and bucket *i* - 1 has ended. Each gradient
  is copied into its bucket and back (`gradient_as_bucket_view=False`, PyTorch's default).
- **ZeRO-1**: one reduce-scatter per bucket, and after all of them an all-gather of the parameters. This moves
  2Ψe(n-1)/n bytes per rank, like DDP (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.1).
- **ZeRO-2**: like FSDP, but parameters that were gathered for the forward pass stay for the backward pass (PyTorch's
  SHARD_GRAD_OP). It moves as many bytes as ZeRO-1. FSDP in a pipeline is the same, because parameters stay for all
  microbatches.
- **HSDP**: FSDP within groups. After each reduce-scatter, an all-reduce between groups combines the shards.

In the forward pass of FSDP, the all-gather of block *i* may start once the parameters of block *i* - 2 have been copied
out of their buffer. The block computes after its own copy. In the backward pass, the all-gather of the previous block
is issued when a block starts, before the reduce-scatter of this block. Both use one communicator, in the order of
issue. The gradients of a block are copied together once the reduce-scatter of the next block has ended (PyTorch 2.11,
torch/distributed/fsdp/_fully_shard). Two gathers and one scatter move 3Ψe(n-1)/n bytes per rank (Rajbhandari et al.
2020, arXiv 1910.02054, section 7.2).

**Pipelines.** One microbatch is simulated for each kind of stage, and the step time follows in closed form. Let t be
the seconds per microbatch on the slowest of p stages, with m microbatches and v stages per GPU. 1F1B takes Σt to fill
and drain the pipeline, and t for every further microbatch. Interleaving fills and drains v times faster, so the bubble
is (p - 1)/(v·m) of the ideal time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

A send of b·s·h·e bytes (see program.py) takes c seconds. In 1F1B, stage *s* has p - s microbatches in flight, and each
of them travels to the last stage and back. A microbatch therefore takes at least the sum of t from stage *s* on plus
2c(p - 1 - s), divided by p - s. With interleaving, sends overlap with the computation of another chunk. FSDP's gathers
and the reductions of gradients count once per step, on the stage where they exceed the idle time most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from gpubench.training.events import GpuTimes, StreamTask, simulate
from gpubench.training.program import BlockWriter, ComputeTimes, StepJob, StepProgram
from gpubench.training.workload import Operation, ParameterTensor, Sharding, layers_by_stage


def fill_buckets(sizes: Sequence[float], cap_bytes: float) -> list[list[int]]:
    """Assign gradients to buckets, and return the numbers of the gradients in each bucket.

    `sizes` has the size of each gradient in bytes, in the order in which gradients become ready.
    """
    found: list[list[int]] = []
    free = 0.0
    for number, size_bytes in enumerate(sizes):
        if free <= 0:
            found.append([])
            free = cap_bytes
        found[-1].append(number)
        free -= size_bytes
    return found


_DDP_SOURCE = "gradient all-reduce"
_SCATTER_SOURCE = "gradient reduce-scatter"
_GATHER_SOURCE = "parameter all-gather"


class _Bucket(Struct):
    size_bytes: float
    tensors: int
    missing: int
    task: tuple[int, ...] = ()


class GradientReducer(Struct):
    """Reduces the gradients of a GPU in buckets as they become ready.

    If `experts` is true, it handles the gradients of experts, which fewer ranks share. Otherwise it handles all others.
    """

    program: StepProgram
    experts: bool
    buckets: list[_Bucket] = field(default_factory=list)
    _of_tensor: dict[str, _Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = self.program.job
        if job.gradient_group(experts=self.experts).ranks == 1:
            return
        tensors = [each for operation in reversed(job.operations) for each in self._own(operation)]
        sizes = [job.tensor_bytes(tensor) * job.gradient_share for tensor in tensors]
        for numbers in fill_buckets(sizes, job.bucket_bytes):
            bucket = _Bucket(sum(sizes[number] for number in numbers), len(numbers), len(numbers))
            self.buckets.append(bucket)
            self._of_tensor |= {tensors[number].name: bucket for number in numbers}

    def _own(self, operation: Operation) -> list[ParameterTensor]:
        """Return the parameters of an operation that this reducer handles, in backward order."""
        return [tensor for tensor in reversed(operation.tensors) if tensor.expert == self.experts]

    def ready(self, operation: Operation) -> None:
        """Copy the gradients of an operation into their buckets, and reduce each bucket that is complete."""
        job = self.program.job
        for tensor in self._own(operation):
            bucket = self._of_tensor[tensor.name]
            self.program.copy(job.tensor_bytes(tensor) * job.gradient_share)
            bucket.missing -= 1
            if bucket.missing:
                continue
            if job.layout.sharding is Sharding.DDP:
                bucket.task = self._communicate("allreduce", bucket.size_bytes, _DDP_SOURCE)
            else:
                bucket.task = self._communicate("reducescatter", bucket.size_bytes, _SCATTER_SOURCE)

    def finish(self) -> None:
        """End the backward pass: with DDP, copy gradients back from the buckets. Otherwise, gather the updated
        parameters.
        """
        job = self.program.job
        if job.layout.sharding is Sharding.DDP:
            for bucket in self.buckets:
                self.program.copy(bucket.size_bytes, bucket.task, kernels=bucket.tensors)
            return
        self.program.compute(0.0, [task for bucket in self.buckets for task in bucket.task])
        parameters = [bucket.size_bytes / job.gradient_share for bucket in self.buckets]
        gathered = [self._communicate("allgather", parameter, _GATHER_SOURCE) for parameter in parameters]
        self.program.compute(0.0, [task for each in gathered for task in each])

    def _communicate(self, collective: str, size_bytes: float, source: str) -> tuple[int, ...]:
        group = self.program.job.gradient_group(experts=self.experts)
        return self.program.communicate(collective, group, size_bytes, source=source, after=self.program.behind)


class _ShardedStep:
    def __init__(self, program: StepProgram) -> None:
        self._program, job = program, program.job
        self._writer = BlockWriter(program)
        self._first, self._last = job.ends
        # In a pipeline, gathered parameters stay in memory until the last microbatch.
        self._stays = job.layout.pipeline > 1
        self._again = job.layout.sharding is Sharding.FSDP and not self._stays
        # The root module has the parameters outside of blocks. They stay in memory from the forward to the backward
        # pass.
        self._root = job.bytes_of([*self._first, *self._last])
        self._blocks = [job.bytes_of(job.model.operations(block)) for block in range(job.blocks)]
        self._scattered: tuple[int, ...] = ()

    def write(self, microbatches: int) -> None:
        for number in range(microbatches):
            self._microbatch(
                gathers=not self._stays or number == 0, scatters=not self._stays or number == microbatches - 1
            )

    def _microbatch(self, *, gathers: bool, scatters: bool) -> None:
        program, writer, blocks = self._program, self._writer, range(len(self._blocks))
        copied: list[int] = []
        if gathers:
            program.copy(self._root, self._gather(self._root, ()))
        writer.ends(self._first, backward=False)
        for block in blocks:
            if gathers:
                copied.append(program.copy(self._blocks[block], self._gather(self._blocks[block], copied[-2:-1])))
            writer.forward(block)
        writer.ends(self._last, backward=False)
        writer.ends(self._last, backward=True)
        gathered = self._gather(self._blocks[-1], program.behind) if self._again else ()
        for block in reversed(blocks):
            if self._again:
                program.copy(self._blocks[block], gathered)
                gathered = self._gather(self._blocks[block - 1], program.behind) if block else ()
            writer.backward(block)
            if scatters:
                self._scatter(self._blocks[block])
        writer.ends(self._first, backward=True)
        if scatters:
            self._scatter(self._root)
            program.compute(0.0, self._scattered)

    def _gather(self, size_bytes: int, after: Sequence[int]) -> tuple[int, ...]:
        group = self._program.job.gradient_group()
        return self._program.communicate("allgather", group, size_bytes, source=_GATHER_SOURCE, after=after)

    def _scatter(self, parameter_bytes: int) -> None:
        program, job = self._program, self._program.job
        size_bytes = parameter_bytes * job.gradient_share
        if not size_bytes:
            return
        program.copy(size_bytes, self._scattered)
        group = job.gradient_group()
        self._scattered = program.communicate(
            "reducescatter", group, size_bytes, source=_SCATTER_SOURCE, after=program.behind
        )
        if job.layout.replicas > 1:
            group = job.group(job.layout.replicas, job.layout.tensor * job.layout.shard_ranks)
            shard = size_bytes / job.layout.shard_ranks
            self._scattered = program.communicate(
                "allreduce",
                group,
                shard,
                source=_DDP_SOURCE,
                after=self._scattered or program.behind,
                stream="replicas",
            )


def _write_replicated_step(program: StepProgram, microbatches: int) -> None:
    """Add the tasks of a step in which every rank has all parameters of its stage.

    Gradients are reduced after the last microbatch.
    """
    job, writer = program.job, BlockWriter(program)
    first, last = job.ends
    reducers = [each for experts in (False, True) if (each := GradientReducer(program, experts)).buckets]

    def reduce(operation: Operation) -> None:
        for reducer in reducers:
            reducer.ready(operation)

    for microbatch in range(microbatches):
        writer.ends(first, backward=False)
        for block in range(job.blocks):
            writer.forward(block)
        writer.ends(last, backward=False)
        ready = reduce if microbatch == microbatches - 1 and reducers else None
        writer.ends(last, backward=True, ready=ready)
        for block in reversed(range(job.blocks)):
            writer.backward(block, ready)
        writer.ends(first, backward=True, ready=ready)
    for reducer in reducers:
        reducer.finish()


def step_tasks(job: StepJob, microbatches: int) -> list[StreamTask]:
    """Return the tasks of one GPU for `microbatches` microbatches.

    In a pipeline, these are the tasks of one stage that never waits for other stages.
    """
    program = StepProgram(job)
    if job.layout.sharding.gathers_parameters and job.layout.gradient_ranks > 1:
        _ShardedStep(program).write(microbatches)
    else:
        _write_replicated_step(program, microbatches)
    return program.tasks


class CommunicationSum(Struct, frozen=True):
    """The sum of one GPU's communication in a step, for one source and collective. Times are without other work on
    the GPU.
    """

    operations: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0


Communications = Mapping[tuple[str, str], CommunicationSum]
"""Sums of communication by source and collective."""


class StepPrediction(Struct, frozen=True, kw_only=True):
    """A predicted step. Its time is between `least` and `most` seconds, because its inputs are noisy.

    - `times` are the times of one GPU. In a pipeline, it is a GPU of the busiest stage.
    - `host` is the time by which the host extends the step, because it launches work too slowly.
    """

    job: StepJob
    times: GpuTimes
    communications: Communications
    host: float = 0.0
    least: float = 0.0
    most: float = 0.0

    @property
    def seconds(self) -> float:
        """The total time of the step in seconds."""
        return self.times.total + self.host

    @property
    def exposed(self) -> float:
        """The time in seconds for which computation waits for communication."""
        return sum(self.times.exposed.values())

    @property
    def communication_seconds(self) -> float:
        """The total time of all communication in the step on this GPU in seconds, as if nothing else ran."""
        return sum(communication.seconds for communication in self.communications.values())


def predict(job: StepJob, *, with_range: bool = True) -> StepPrediction:
    """Predict a step. If `with_range` is true, simulate it twice more, with all times at the ends of their
    confidence intervals.
    """
    whole = _finished(job)
    if not with_range:
        return whole
    bounds = [whole.seconds]
    for shift in (-1.0, 1.0):
        compute = job.compute.scaled(1 + shift * job.compute.spread)
        bounds.append(_finished(replace(job, times=replace(job.times, shift=shift), compute=compute)).seconds)
    return replace(whole, least=min(bounds), most=max(bounds))


def _finished(job: StepJob) -> StepPrediction:
    found = _pipelined(job) if job.layout.pipeline > 1 else _predict_stage(job, job.settings.microbatches)
    times = replace(found.times, compute=found.times.compute + found.job.optimizer_seconds)
    seconds = max(times.total, job.host_seconds)
    return replace(found, job=job, times=times, host=seconds - times.total, least=seconds, most=seconds)


def _predict_stage(job: StepJob, count: int) -> StepPrediction:
    """Predict the time of `count` microbatches on one GPU that never waits for other stages.

    Only two microbatches and a limited number of blocks are simulated. Each further microbatch takes as long as the
    second one.
    """
    blocks = layers_by_stage(job.model.layers, job.layout)[job.stage]
    if blocks <= job.most_blocks:
        return _predict_blocks(job, count)
    few = job.most_blocks // 2
    return _further(
        _predict_blocks(replace(job, most_blocks=few), count), _predict_blocks(job, count), blocks / few - 2
    )


def _predict_blocks(job: StepJob, count: int) -> StepPrediction:
    if count <= 2:
        return _once(job, count)
    return _further(_once(job, 1), _once(job, 2), count - 2)


def _further(one: StepPrediction, two: StepPrediction, rounds: float) -> StepPrediction:
    """Extrapolate from two predictions, such as steps of one and two microbatches, by adding their difference
    `rounds` times.
    """

    def more(first: float, second: float) -> float:
        return second + rounds * (second - first)

    before, after = one.times, two.times
    none = CommunicationSum()
    return replace(
        two,
        times=GpuTimes(
            compute=more(before.compute, after.compute),
            slowed=more(before.slowed, after.slowed),
            bubble=more(before.bubble, after.bubble),
            exposed={
                each: more(before.exposed.get(each, 0.0), after.exposed.get(each, 0.0))
                for each in {**before.exposed, **after.exposed}
            },
        ),
        communications={
            key: CommunicationSum(*map(more, astuple(one.communications.get(key, none)), astuple(each)))
            for key, each in two.communications.items()
        },
    )


def _once(job: StepJob, microbatches: int) -> StepPrediction:
    tasks = step_tasks(job, microbatches)
    found: dict[tuple[str, str], list[StreamTask]] = defaultdict(list)
    for task in tasks:
        if not task.computes:
            found[task.source, task.collective].append(task)
    sums = {
        key: CommunicationSum(len(own), sum(each.size_bytes for each in own), sum(each.seconds for each in own))
        for key, own in found.items()
    }
    return StepPrediction(job=job, times=simulate(tasks), communications=sums)


_SEND_SOURCE = "pipeline send"


def _pipelined(job: StepJob) -> StepPrediction:
    stages, count = job.layout.pipeline, job.settings.microbatches
    layers = layers_by_stage(job.model.layers, job.layout)
    kinds = [(number, stage == 0, stage == stages - 1) for stage, number in enumerate(layers)]
    different = {kind: replace(job, stage=stage) for stage, kind in reversed([*enumerate(kinds)])}
    known = {kind: (_predict_stage(own, 1), _predict_stage(own, 2)) for kind, own in different.items()}
    found = [known[kind] for kind in kinds]
    usual = [two.seconds - one.seconds for one, two in found]
    send = job.send_seconds
    filled, period = rhythm(usual, send, job.layout.stages_per_gpu, count)
    # A stage is idle before its first microbatch arrives and after its last one has left. It gathers parameters and
    # reduces gradients in this time.
    idle = min(usual) / job.layout.stages_per_gpu
    once = max(
        one.seconds - each - stage * idle for stage, ((one, _), each) in enumerate(zip(found, usual, strict=True))
    )
    busiest = max(range(stages), key=lambda stage: (usual[stage], -stage))
    own = _further(*found[busiest], count - 2)
    more = max(0.0, filled + period * (count - 1) + max(0.0, once) - own.seconds)
    if send <= 0:
        return replace(own, times=replace(own.times, bubble=own.times.bubble + more))
    waits = min(more, 2 * send * (stages - 1) + max(0.0, period - max(usual)) * (count - 1))
    exposed = {**own.times.exposed, _SEND_SOURCE: waits}
    sends = 2.0 * count * job.layout.stages_per_gpu
    sent = CommunicationSum(sends, sends * job.send_bytes, sends * send)
    return replace(
        own,
        times=replace(own.times, bubble=own.times.bubble + more - waits, exposed=exposed),
        communications={**own.communications, (_SEND_SOURCE, "sendrecv"): sent},
    )


def rhythm(usual: Sequence[float], send: float, chunks: int, count: int) -> tuple[float, float]:
    """Return the time of the first microbatch in a pipeline, and of each further microbatch, in seconds."""
    slowest = max(usual)
    filled = slowest + (sum(usual) - slowest) / chunks + 2 * send * (len(usual) - 1)
    if chunks > 1 or count == 1:
        return filled, slowest
    # When the microbatches of a stage wait for earlier ones to return, a round takes as long as all microbatches in
    # flight.
    behind, waits = 0.0, 0.0
    for under_way, each in enumerate(reversed(usual), 1):
        behind += each
        period = (behind + 2 * send * (under_way - 1)) / under_way
        waits = max(waits, (period - slowest) * (count - under_way))
    return filled, slowest + waits / (count - 1)


def fit_computation(job: StepJob, seconds: float) -> ComputeTimes | None:
    """Find the computation time that explains a measured step, by Newton's method.

    Return None if communication alone takes longer than the step.
    """
    scale, compute = 1.0, replace(job.compute, spread=0.0)
    for _ in range(_MOST_ROUNDS):
        moved = compute.scaled(scale)
        found = predict(replace(job, compute=moved), with_range=False)
        if abs(found.seconds / seconds - 1) < _CLOSE:
            return moved
        scale = max(scale / 10, scale + (seconds - found.seconds) / (found.times.compute / scale))
    return None


_MOST_ROUNDS = 20
_CLOSE = 1e-4
