"""Simulates one training step with gradient buckets, sharding and pipelines, and accounts for its time.

Gradients fill buckets in the order in which they become ready, which is that of the backward pass. Each gradient goes
into one bucket, and a bucket is closed once it reaches its cap (PyTorch 2.11, torch/csrc/distributed/c10d/reducer.cpp;
"DDP", Li et al. 2020, arXiv 2006.15704, section 4.2).

- **DDP**: bucket *i* starts an all-reduce once its gradients are ready and bucket *i* - 1 has ended. Each gradient is
  copied into its bucket and back (`gradient_as_bucket_view=False`, PyTorch's default).
- **ZeRO-1**: a reduce-scatter per bucket, and after all of them an all-gather of the parameters: 2Ψe(n-1)/n bytes per
  rank, like DDP (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.1).
- **ZeRO-2**: like FSDP, but parameters gathered for the forward pass stay for the backward pass (PyTorch's
  SHARD_GRAD_OP), with the same bytes. FSDP in a pipeline is alike, because they stay for all microbatches.
- **HSDP**: FSDP within groups, and an all-reduce of each shard between groups after its reduce-scatter.

In the forward pass the all-gather of block *i* may start once the parameters of block *i* - 2 have been copied out of
their buffer, and the block computes after its own copy. In the backward pass the all-gather of the previous block is
issued when a block starts, before that block's reduce-scatter. Both use one communicator, in the order of issue. A
block's gradients are copied together once the reduce-scatter of the next block has ended (PyTorch 2.11,
torch/distributed/fsdp/_fully_shard). Two gathers and one scatter move 3Ψe(n-1)/n bytes per rank (Rajbhandari et al.
2020, arXiv 1910.02054, section 7.2).

**Pipelines.** One microbatch of each kind of stage is simulated, and the step follows in closed form. With t seconds
per microbatch on the slowest of p stages, m microbatches and v stages per GPU, 1F1B takes Σt to fill and drain, and t
for every further microbatch. Interleaving makes filling and draining v times shorter: the bubble is (p - 1)/(v·m) of
the ideal time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). A send of b·s·h·e bytes takes c. In 1F1B, stage
*s* has p - s microbatches in flight, each of which travels to the last stage and back: a microbatch takes at least the
sum of t from *s* on plus 2c(p - 1 - s), divided by p - s. With interleaving, sends overlap with the computation of
another chunk. Gathers of FSDP and reductions of gradients count once per step, on the stage where they exceed the idle
time most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from gpubench.training.events import GpuTimes, StreamTask, simulate
from gpubench.training.program import BlockWriter, ComputeTimes, StepJob, StepProgram
from gpubench.training.workload import Operation, ParameterTensor, Sharding, layers_by_stage


def fill_buckets(sizes: Sequence[float], cap_bytes: float) -> list[list[int]]:
    """Return the numbers of the gradients in each bucket. `sizes` are bytes, in the order in which gradients are
    ready.
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
    """Reduces a device's gradients in buckets as they become ready.

    `experts` selects the gradients of experts, which fewer ranks share, or all others.
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
        """Return an operation's own parameters in backward order."""
        return [tensor for tensor in reversed(operation.tensors) if tensor.expert == self.experts]

    def ready(self, operation: Operation) -> None:
        """Copy an operation's gradients, and reduce the buckets that are full."""
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
        """After the backward pass, copy gradients back from the buckets, or gather parameters again."""
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
        # In a pipeline, gathered parameters stay until the last microbatch.
        self._stays = job.layout.pipeline > 1
        self._again = job.layout.sharding is Sharding.FSDP and not self._stays
        # The root module owns the parameters outside the blocks, and keeps them from the forward to the backward pass.
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
    """Every rank has all parameters of its part. Gradients are reduced after the last microbatch."""
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
    """Return the tasks of one GPU for some microbatches. In a pipeline, return those of one stage without waiting."""
    program = StepProgram(job)
    if job.layout.sharding.gathers_parameters and job.layout.gradient_ranks > 1:
        _ShardedStep(program).write(microbatches)
    else:
        _write_replicated_step(program, microbatches)
    return program.tasks


class CommunicationSum(Struct, frozen=True):
    """Total communication of one GPU in a step for one purpose by one collective, each operation alone."""

    operations: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0


Communications = Mapping[tuple[str, str], CommunicationSum]
"""Communication by source and collective."""


class StepPrediction(Struct, frozen=True, kw_only=True):
    """A predicted step and its seconds, between `least` and `most` because of the noise of its inputs.

    `times` are those of one GPU, in a pipeline of the busiest stage. `host` is the additional time because the host
    issues work too slowly: steps cannot follow each other faster than the host issues them.
    """

    job: StepJob
    times: GpuTimes
    communications: Communications
    host: float = 0.0
    least: float = 0.0
    most: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.times.total + self.host

    @property
    def exposed(self) -> float:
        """Seconds without computation because of communication."""
        return sum(self.times.exposed.values())

    @property
    def communication_seconds(self) -> float:
        """Seconds of all communication of the step on this GPU, each alone."""
        return sum(communication.seconds for communication in self.communications.values())


def predict(job: StepJob, *, with_range: bool = True) -> StepPrediction:
    """Simulate a step, and for the range again with all noise up and down."""
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
    """Predict `count` microbatches on one GPU without waiting. Every further one takes as long as the second."""
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
    """Extrapolate a step from the difference between one and two microbatches."""

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
    # A stage is idle until the first microbatch arrives and after the last one left. Meanwhile it gathers and reduces.
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
    """Return the seconds of a pipeline's first microbatch, and of each further one."""
    slowest = max(usual)
    filled = slowest + (sum(usual) - slowest) / chunks + 2 * send * (len(usual) - 1)
    if chunks > 1 or count == 1:
        return filled, slowest
    # Once a stage's microbatches wait for earlier ones to return, each round takes as long as all in flight.
    behind, waits = 0.0, 0.0
    for under_way, each in enumerate(reversed(usual), 1):
        behind += each
        period = (behind + 2 * send * (under_way - 1)) / under_way
        waits = max(waits, (period - slowest) * (count - under_way))
    return filled, slowest + waits / (count - 1)


def fit_computation(job: StepJob, seconds: float) -> ComputeTimes | None:
    """Find the computation that explains a measured step, by Newton's method. None if communication alone takes
    longer.
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
