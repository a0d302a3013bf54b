"""The tasks of one device's step, written down in the order in which a training loop issues them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpubench.measure.plan.contention import ContentionTable
from gpubench.measure.plan.curves import CollectiveTimesFound, CommunicatorRanks
from gpubench.measure.plan.events import NO_CONTENTION, StreamTask
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.model.workload.layout import ParallelLayout, Sharding
from gpubench.model.workload.transformer import TransformerModel

GRADIENTS = "gradients"
TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """What one GPU needs for one microbatch of the whole model, nothing communicated.

    `by_tensor` has forward and backward by tensor-parallel ranks where a rank's share was timed; elsewhere it is the
    whole over the ranks. `spread` is the half-width of a 95 % interval, as a part. `copy_gb_s` is what a copy within
    the GPU's memory reads and writes, `copy_least_seconds` what the smallest takes; None: copies into buckets are left
    out. `origin` is measured, given or expected. `host_seconds` is what the host takes to issue a block's forward and
    backward pass, by how gradients are shared out, None without that; empty: not known.
    """

    forward_seconds: float
    backward_seconds: float
    source: str
    origin: str = "measured"
    spread: float = 0.0
    copy_gb_s: float | None = None
    copy_least_seconds: float = 0.0
    by_tensor: tuple[tuple[int, float, float], ...] = ()
    host_seconds: Mapping[Sharding | None, float] = field(default_factory=dict)

    def shares(self, tensor: int) -> tuple[float, float]:
        """Forward and backward of one rank of so many."""
        for ranks, forward, backward in self.by_tensor:
            if ranks == tensor:
                return forward, backward
        return self.forward_seconds / tensor, self.backward_seconds / tensor

    def shifted(self, shift: float) -> "ComputeTimes":
        """The same with so many half-widths of noise."""
        factor = 1 + shift * self.spread
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
            by_tensor=tuple((ranks, one * factor, two * factor) for ranks, one, two in self.by_tensor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a user can choose of a layout: DDP's bucket cap, whether FSDP prefetches, the microbatches of a step.

    `first_bucket_bytes` of None: the first bucket is as large as the others, as PyTorch has it where a cap is given.
    `imbalance` is the busiest rank's tokens over the average of all, for experts.
    """

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int | None = None
    prefetch: bool = True
    microbatches: int = 1
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """All that a step follows from. `gpus_per_node` says which groups of ranks cross nodes."""

    model: TransformerModel
    layout: ParallelLayout
    compute: ComputeTimes
    times: CollectiveTimesFound
    contention: ContentionTable
    settings: StepSettings
    gpus_per_node: int

    @property
    def host_seconds(self) -> float:
        """What the host of a GPU takes to issue a step; 0 where it is not known.

        Of what splits blocks or shards otherwise it is that of the blocks alone, which is less.
        """
        known = self.compute.host_seconds
        sharding = self.layout.sharding if self.layout.gradient_ranks > 1 else None
        alike = Sharding.FSDP if sharding is not None and sharding.gathers_parameters else sharding
        a_block = known.get(alike, known.get(None, 0.0))
        return a_block * self.model.layers / self.layout.pipeline * self.settings.microbatches

    def tensor_group(self) -> CommunicatorRanks:
        """The ranks of tensor parallelism: neighbours."""
        return self._group(self.layout.tensor, 1)

    def context_group(self) -> CommunicatorRanks:
        """The ranks that share a sequence."""
        return self._group(self.layout.context, self.layout.tensor)

    def gradient_group(self, *, experts: bool = False) -> CommunicatorRanks:
        """The ranks that have the same parameters; of experts fewer have them."""
        split = self.layout.expert if experts else 1
        return self._group(self.layout.gradient_ranks // split, self.layout.tensor * split)

    def expert_group(self) -> CommunicatorRanks:
        """The ranks that share the experts of a block."""
        return self._group(self.layout.expert, self.layout.tensor * self.layout.context)

    def stage_group(self) -> CommunicatorRanks:
        """Two neighbouring stages of the pipeline."""
        stride = self.layout.gpus // self.layout.pipeline
        return self._group(2, stride) if self.layout.pipeline > 1 else CommunicatorRanks(1)

    def _group(self, ranks: int, stride: int) -> CommunicatorRanks:
        """So many ranks, each so many GPUs from the next."""
        if ranks == 1:
            return CommunicatorRanks(1)
        span = (ranks - 1) * stride + 1
        if span <= self.gpus_per_node:
            return CommunicatorRanks(ranks)
        on_a_node = max(1, self.gpus_per_node // stride)
        nodes = max(2, -(-ranks // on_a_node))
        return CommunicatorRanks(ranks, nodes, max(1, self.gpus_per_node // max(1, ranks // nodes)))


@dataclass(slots=True)
class StepProgram:
    """Tasks of a device, which computes in the order of issue."""

    job: StepJob
    device: int = 0
    tasks: list[StreamTask] = field(default_factory=list)
    last: int | None = None

    def compute(self, name: str, seconds: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """Computation by so many kernels, behind what was computed before and behind these tasks."""
        own = StreamTask(
            name=name, seconds=seconds, device=self.device, after=tuple(after), kernel_seconds=seconds / kernels
        )
        self.tasks.append(own)
        self.last = len(self.tasks) - 1
        return self.last

    def communicate(
        self,
        collective: str,
        group: CommunicatorRanks,
        size_bytes: float,
        *,
        source: str,
        stream: str,
        after: Sequence[int] = (),
    ) -> int | None:
        """A collective behind these tasks; None where there is nothing to do."""
        seconds = self.job.times.seconds(collective, group, size_bytes)
        if seconds <= 0:
            return None
        self.tasks.append(
            StreamTask(
                name=f"{source} {collective}",
                seconds=seconds,
                stream=stream,
                device=self.device,
                after=tuple(after),
                source=source,
                collective=collective,
                size_bytes=size_bytes,
                contention=NO_CONTENTION
                if stream == TENSOR
                else self.job.contention.of(collective, size_bytes).lasting(seconds),
            )
        )
        return len(self.tasks) - 1

    def synchronous(self, collective: str, group: CommunicatorRanks, size_bytes: float, source: str) -> None:
        """A collective that waits for all computation before it, and that all computation after it waits for."""
        before = () if self.last is None else (self.last,)
        task = self.communicate(collective, group, size_bytes, source=source, stream=TENSOR, after=before)
        if task is not None:
            self.compute(f"after {source}", 0.0, (task,))

    def copy(self, name: str, size_bytes: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """A copy within the GPU's memory by so many kernels; it reads and writes every byte."""
        compute = self.job.compute
        if compute.copy_gb_s is None:
            return self.compute(name, 0.0, after)
        seconds = 2 * size_bytes / (compute.copy_gb_s * BYTES_PER_GB) + kernels * compute.copy_least_seconds
        return self.compute(name, seconds, after, kernels=kernels)
