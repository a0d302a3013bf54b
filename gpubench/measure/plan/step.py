"""One training step, simulated: gradients in buckets; replicated, sharded or pipelined; and where its time went.

Gradients fill buckets in the order in which they are ready, which is that of the backward pass; each goes into one
bucket whole, and a bucket is closed as soon as it holds its cap or more. The first bucket is 1 MiB where nobody gave a
cap, else it has the cap of all others (PyTorch 2.11, torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/reducer.cpp; "DDP", Li et al. 2020, arXiv 2006.15704, section 4.2).

- **DDP**: bucket *i* begins when its gradients are ready and bucket *i* - 1 has ended, an all-reduce of the bucket.
  Each gradient is copied into its bucket and back (`gradient_as_bucket_view=False`, PyTorch's default).
- **ZeRO-1**: a reduce-scatter a bucket, and behind all of them an all-gather of the parameters: 2Ψe(n-1)/n bytes a
  rank, as DDP (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.1).
- **ZeRO-2**: as FSDP, but parameters that were gathered for the forward pass stay for the backward pass (PyTorch's
  SHARD_GRAD_OP): the same bytes. So it is with FSDP under a pipeline, where they stay for all microbatches.
- **HSDP**: FSDP within groups, and an all-reduce of each shard among them behind its reduce-scatter.

In the forward pass the all-gather of block *i* may begin once the parameters of block *i* - 2 have been copied out of
their buffer, and the block computes behind its own copy. In the backward pass the all-gather of the block before is
issued as a block begins, in front of that block's reduce-scatter; both go through one communicator, in the order of
issue. A block's gradients are copied together once the
reduce-scatter of the block behind it has ended (PyTorch 2.11, torch/distributed/fsdp/_fully_shard). Gathered twice
and scattered once: 3Ψe(n-1)/n bytes a rank (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2).

**Pipelines.** A microbatch of each kind of stage is simulated, and the step follows in closed form. With a microbatch's
t seconds of the slowest of p stages, m microbatches and v stages a GPU, 1F1B takes Σt to fill and drain and t for every
further microbatch; interleaved, filling and draining are v times shorter: the bubble is (p - 1)/(v·m) of the ideal time
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2). A send of b·s·h·e bytes takes c. Of 1F1B stage *s* has p - s
microbatches under way, each of which goes to the last stage and back: a microbatch takes no less than the sum of t from
*s* on and 2c(p - 1 - s), over p - s; interleaved, sends hide behind the chunk that is computed meanwhile. What FSDP
gathers and gradients that are reduced come to the step once, where they last longest beyond a stage's idle time.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from gpubench.measure.plan.compute import ComputeTimes
from gpubench.measure.plan.events import GpuTimes, StepTimeline, StreamTask, simulate
from gpubench.measure.plan.program import GRADIENTS, BlockWriter, StepJob, StepProgram
from gpubench.model.workload import Operation, ParameterTensor, Sharding, layers_of_stages
from gpubench.records import dataclass


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together: the numbers of their tensors in the order of the backward pass."""

    tensors: tuple[int, ...]
    size_bytes: int


def fill_buckets(sizes: Sequence[int], cap_bytes: int, first_bytes: int | None = None) -> tuple[GradientBucket, ...]:
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


@dataclass(slots=True)
class _Bucket:
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
        job = self.program.job
        sizes = [job.tensor_bytes(each) for each in tensors]
        filled = fill_buckets(sizes, job.bucket_bytes, job.settings.first_bucket_bytes)
        for number, bucket in enumerate(filled):
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
            self.program.copy("into bucket", job.tensor_bytes(tensor))
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


class _ShardedStep:
    def __init__(self, program: StepProgram) -> None:
        self._program, job = program, program.job
        self._writer = BlockWriter(program)
        self._first, self._last = job.ends
        # Under a pipeline what was gathered stays until the last microbatch.
        self._stays = job.layout.pipeline > 1
        self._again = job.layout.sharding.gathers_again and not self._stays
        # The root holds what lies outside the blocks, and keeps it from the forward to the backward pass.
        self._root = job.bytes_of([each for each in job.ends if each is not None])
        self._blocks = [job.bytes_of(job.model.operations(block)) for block in range(job.blocks)]
        self._scattered: int | None = None

    def write(self, microbatches: int) -> None:
        for number in range(microbatches):
            self._microbatch(
                gathers=not self._stays or number == 0, scatters=not self._stays or number == microbatches - 1
            )

    def _microbatch(self, *, gathers: bool, scatters: bool) -> None:
        program, writer, blocks = self._program, self._writer, range(len(self._blocks))
        copied: list[int] = []
        if gathers:
            self._copy_out(self._root, self._issue(self._root, ()))
        writer.end(self._first, backward=False)
        for block in blocks:
            if gathers:
                task = self._issue(self._blocks[block], copied[-2:-1])
                copied.append(self._copy_out(self._blocks[block], task))
            writer.forward(block)
        writer.end(self._last, backward=False)
        writer.end(self._last, backward=True)
        gathered = self._issue(self._blocks[-1], self._behind()) if self._again else None
        for block in reversed(blocks):
            if self._again:
                self._copy_out(self._blocks[block], gathered)
                gathered = self._issue(self._blocks[block - 1], self._behind()) if block else None
            writer.backward(block)
            if scatters:
                self._scatter(self._blocks[block])
        writer.end(self._first, backward=True)
        if scatters:
            self._scatter(self._root)
            program.compute("end", 0.0, () if self._scattered is None else (self._scattered,))

    def _behind(self) -> tuple[int, ...]:
        return () if self._program.last is None else (self._program.last,)

    def _issue(self, size_bytes: int, after: "tuple[int, ...] | list[int]") -> int | None:
        group = self._program.job.gradient_group()
        return self._program.communicate(
            "allgather", group, size_bytes, source=_GATHER_SOURCE, stream=GRADIENTS, after=tuple(after)
        )

    def _copy_out(self, size_bytes: int, task: int | None) -> int:
        return self._program.copy("out of buffer", size_bytes, () if task is None else (task,))

    def _scatter(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        job = self._program.job
        self._program.copy("into buffer", size_bytes, () if self._scattered is None else (self._scattered,))
        self._scattered = self._program.communicate(
            *("reducescatter", job.gradient_group(), size_bytes),
            source=_SCATTER_SOURCE,
            stream=GRADIENTS,
            after=self._behind(),
        )
        if job.layout.replicas > 1:
            self._scattered = self._program.communicate(
                *("allreduce", job.replica_group(), size_bytes / job.layout.shard_ranks),
                source=_DDP_SOURCE,
                stream="replicas",
                after=self._behind() if self._scattered is None else (self._scattered,),
            )


def _write_replicated_step(program: StepProgram, microbatches: int) -> None:
    """Every rank has all parameters of its part; gradients are brought together behind the last microbatch."""
    job, writer = program.job, BlockWriter(program)
    first, last = job.ends
    reducers = [GradientReducer(program, tuple(job.operations), experts) for experts in (False, True)]
    reducers = [each for each in reducers if each.is_needed]
    for microbatch in range(microbatches):
        writer.end(first, backward=False)
        for block in range(job.blocks):
            writer.forward(block)
        writer.end(last, backward=False)
        ready = Handover(reducers) if microbatch == microbatches - 1 and reducers else None
        writer.end(last, backward=True, ready=ready)
        for block in reversed(range(job.blocks)):
            writer.backward(block, ready)
        writer.end(first, backward=True, ready=ready)
    for each in reducers:
        each.finish()


def step_tasks(job: StepJob, microbatches: int) -> list[StreamTask]:
    """The tasks of one GPU for so many microbatches; of a pipeline those of one stage, which waits for no other."""
    program = StepProgram(job)
    if job.layout.sharding.gathers_parameters and job.layout.gradient_ranks > 1:
        _ShardedStep(program).write(microbatches)
    else:
        _write_replicated_step(program, microbatches)
    return program.tasks


@dataclass(frozen=True, slots=True)
class CommunicationSum:
    """What one GPU communicates in a step for one purpose by one collective, each operation alone."""

    operations: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0


Communications = Mapping[tuple[str, str], CommunicationSum]
"""By source and collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A step: its seconds, between `least` and `most` by the noise of what it follows from, and where they went.

    `times` are those of one GPU, which of a pipeline is on stage `device`, the busiest. The timeline has
    `shown_microbatches` of them, and of a pipeline no other stage. `host` is what the step is longer than they because
    the host has not issued more: steps follow each other no faster than it issues them, and a GPU that is behind does
    not wait for it.
    """

    job: StepJob
    seconds: float
    least: float
    most: float
    times: GpuTimes
    timeline: StepTimeline
    shown_microbatches: int
    communications: Communications
    device: int = 0
    host: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which nothing was computed because of communication."""
        return sum(self.times.exposed.values())

    @property
    def communication_seconds(self) -> float:
        """Seconds of all communication of the step on this GPU, each alone."""
        return sum(each.seconds for each in self.communications.values())


def predict(job: StepJob, *, with_range: bool = True) -> StepPrediction:
    """Simulate a step, and again with all noise up and down for the range."""
    whole = _finished(job)
    bounds = [whole.seconds]
    if with_range:
        for shift in (-1.0, 1.0):
            moved = replace(job, times=job.times.shifted(shift), compute=job.compute.shifted(shift))
            bounds.append(_finished(moved).seconds)
    return replace(whole, least=min(bounds), most=max(bounds))


def _finished(job: StepJob) -> StepPrediction:
    found = _pipelined(job) if job.layout.pipeline > 1 else _of_stage(job, job.settings.microbatches)
    optimizer = replace(job, stage=found.device).optimizer_seconds
    seconds = found.seconds + optimizer
    host = max(0.0, job.host_seconds - seconds)
    times = replace(found.times, compute=found.times.compute + optimizer)
    return replace(found, job=job, seconds=seconds + host, times=times, host=host)


def roughly(job: StepJob) -> StepPrediction:
    """A step of which few blocks are simulated, for a comparison of many: every further one takes as long as these."""
    return _finished(replace(job, most_blocks=_FEW_BLOCKS))


_FEW_BLOCKS = 4


def _of_stage(job: StepJob, count: int) -> StepPrediction:
    """So many microbatches on one GPU without waiting for others: every further one takes as long as the second."""
    blocks = layers_of_stages(job.model.layers, job.layout)[job.stage]
    if blocks <= job.most_blocks:
        return _of_blocks(job, count)
    few = job.most_blocks // 2
    return _further(_of_blocks(replace(job, most_blocks=few), count), _of_blocks(job, count), blocks / few - 2)


def _of_blocks(job: StepJob, count: int) -> StepPrediction:
    one = _once(job, 1)
    if count == 1:
        return one
    two = _once(job, 2)
    return two if count == 2 else _further(one, two, count - 2)


def _further(one: StepPrediction, two: StepPrediction, rounds: float) -> StepPrediction:

    def more(first: float, second: float) -> float:
        return second + rounds * (second - first)

    before, after = one.times, two.times
    sources = {*before.exposed, *after.exposed}
    none = CommunicationSum()
    return replace(
        two,
        seconds=more(one.seconds, two.seconds),
        times=GpuTimes(
            compute=more(before.compute, after.compute),
            slowed=more(before.slowed, after.slowed),
            bubble=more(before.bubble, after.bubble),
            exposed={each: more(before.exposed.get(each, 0.0), after.exposed.get(each, 0.0)) for each in sources},
        ),
        communications={
            key: CommunicationSum(
                more(one.communications.get(key, none).operations, each.operations),
                more(one.communications.get(key, none).size_bytes, each.size_bytes),
                more(one.communications.get(key, none).seconds, each.seconds),
            )
            for key, each in two.communications.items()
        },
    )


def _once(job: StepJob, microbatches: int) -> StepPrediction:
    timeline = simulate(step_tasks(job, microbatches))
    found: dict[tuple[str, str], list[StreamTask]] = defaultdict(list)
    for task in timeline.tasks:
        if not task.computes:
            found[task.source, task.collective].append(task)
    return StepPrediction(
        job=job,
        seconds=timeline.seconds,
        least=timeline.seconds,
        most=timeline.seconds,
        times=timeline.times,
        timeline=timeline,
        shown_microbatches=microbatches,
        communications={
            key: CommunicationSum(
                len(tasks), sum(each.size_bytes for each in tasks), sum(each.seconds for each in tasks)
            )
            for key, tasks in found.items()
        },
    )


_SEND_SOURCE = "pipeline send"


def _pipelined(job: StepJob) -> StepPrediction:
    stages, count = job.layout.pipeline, job.settings.microbatches
    layers = layers_of_stages(job.model.layers, job.layout)
    kinds = [(number, stage == 0, stage == stages - 1) for stage, number in enumerate(layers)]
    if job.most_blocks <= _FEW_BLOCKS:
        kinds = [*kinds[:1] * (stages - 1), kinds[-1]]
    known = {kind: _two(replace(job, stage=stage)) for stage, kind in enumerate(kinds) if kind not in kinds[:stage]}
    found = [known[kind] for kind in kinds]
    usual = [two.seconds - one.seconds for one, two in found]
    send = job.send_seconds
    filled, period = rhythm(usual, send, job.layout.stages_per_gpu, count)
    # A stage is idle while the first microbatch comes and the last one goes on: meanwhile it gathers and reduces.
    idle = min(usual) / job.layout.stages_per_gpu
    once = max(
        one.seconds - each - stage * idle for stage, ((one, _), each) in enumerate(zip(found, usual, strict=True))
    )
    device = max(range(stages), key=lambda stage: (usual[stage], -stage))
    own = _further(*found[device], count - 2)
    seconds = max(own.seconds, filled + period * (count - 1) + max(0.0, once))
    waits = min(seconds - own.seconds, 2 * send * (stages - 1) + max(0.0, period - max(usual)) * (count - 1))
    sends = 2.0 * count * job.layout.stages_per_gpu
    times = replace(own.times, bubble=own.times.bubble + seconds - own.seconds - waits)
    if send > 0:
        times = replace(times, exposed={**times.exposed, _SEND_SOURCE: waits})
        own = replace(
            own,
            communications={
                **own.communications,
                (_SEND_SOURCE, "sendrecv"): CommunicationSum(sends, sends * job.send_bytes, sends * send),
            },
        )
    return replace(own, seconds=seconds, times=times, device=device)


def _two(job: StepJob) -> tuple[StepPrediction, StepPrediction]:
    return _of_stage(job, 1), _of_stage(job, 2)


def rhythm(usual: Sequence[float], send: float, chunks: int, count: int) -> tuple[float, float]:
    """Seconds in which a pipeline takes its first microbatch, and each of the others."""
    slowest = max(usual)
    filled = slowest + (sum(usual) - slowest) / chunks + 2 * send * (len(usual) - 1)
    if chunks > 1 or count == 1:
        return filled, slowest
    # From its first microbatch that waits for another to come back, a stage takes a round of all that are under way.
    behind, waits = 0.0, 0.0
    for under_way, each in enumerate(reversed(usual), 1):
        behind += each
        period = (behind + 2 * send * (under_way - 1)) / under_way
        waits = max(waits, (period - slowest) * (count - under_way))
    return filled, slowest + waits / (count - 1)


def compute_of_step(job: StepJob, seconds: float) -> ComputeTimes | None:
    """The computation with which a step takes so long, by Newton's rule; None where even none at all takes longer."""
    scale, compute = 1.0, replace(job.compute, spread=0.0)
    for _ in range(_MOST_ROUNDS):
        moved = replace(
            compute, forward_seconds=compute.forward_seconds * scale, backward_seconds=compute.backward_seconds * scale
        )
        found = predict(replace(job, compute=moved), with_range=False)
        if abs(found.seconds / seconds - 1) < _CLOSE:
            return moved
        slope = found.times.compute / scale
        scale = max(scale / 10, scale + (seconds - found.seconds) / slope)
    return None


_MOST_ROUNDS = 20
_CLOSE = 1e-4
