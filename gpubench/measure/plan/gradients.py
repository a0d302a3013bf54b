"""How gradients are brought together while the backward pass goes on.

- **DDP**: bucket *i* begins when its gradients are ready and bucket *i* - 1 has ended, an all-reduce of the bucket.
  Each gradient is copied into its bucket and back (`gradient_as_bucket_view=False`, PyTorch's default).
- **ZeRO-1 and 2**: a reduce-scatter a bucket, and behind all of them an all-gather of the parameters: 2Ψe(n-1)/n bytes
  a rank, as DDP (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpubench.measure.plan.buckets import fill_buckets
from gpubench.measure.plan.program import GRADIENTS, StepJob, StepProgram
from gpubench.model.workload.layout import Sharding
from gpubench.model.workload.transformer import Operation, ParameterTensor

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
