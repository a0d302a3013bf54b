"""The computation of one GPU, the tasks of its training step, and the times of its collectives.

Rates are dense Tensor Core TFLOP/s (without sparsity) in 16 and 8 bits, and memory bandwidth in GB/s, by model name.
They are from NVIDIA's data sheets: H100 and H200 (2024), A100 (2021), V100 (2020), B200 and GB200 (HGX and NVL72,
2024), GB300 (2025), L40S (2023), L4 and A10. GeForce rates are from the architecture papers of Ada and Blackwell
(16-bit with 32-bit accumulation).

Times are interpolated linearly between the logarithms of time and size. Below the smallest size the time is constant,
because it is latency. Above the largest size the bandwidth is constant.

The time of a block is divided among its operations by FLOPs. Communication per block and microbatch, with activations
of b·s·h elements of e bytes:

- tensor parallelism: an all-reduce of b·s·h·e bytes after attention and after the MLP, and as many in the backward pass
  (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With sequence parallelism, an all-gather before and a
  reduce-scatter after each, with the same bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2)
- ring attention: n - 1 sends of keys and values during n steps of the attention. In the backward pass their gradients
  are sent too (Liu et al. 2023, arXiv 2310.01889, section 3)
- experts: tokens are sent to their experts and back, tokens·experts_per_token·h·e bytes each way (Lepikhin et al. 2020,
  arXiv 2006.16668, section 3.2). The busiest rank determines the time
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.terms.units import BYTES_PER_GB, format_memory, format_size
from gpubench.training import workload
from gpubench.training.events import ContentionTable, StreamTask


class ComputeTimes(Struct, frozen=True, kw_only=True):
    """The computation time of one microbatch of the whole model on one GPU, in seconds and without communication.

    - `origin` is measured, given or expected.
    - `spread` is half the 95 % confidence interval, relative to the time.
    - `copy_gb_s` is the memory traffic of a copy within GPU memory in GB/s, reads plus writes. If it is None, copies
      into gradient buckets are left out.
    - `host_seconds` is the time of the host to launch forward and backward pass of a block, by sharding (None: no
      sharding). It is empty if unknown.
    """

    forward_seconds: float
    backward_seconds: float
    source: str
    origin: str = "measured"
    spread: float = 0.0
    copy_gb_s: float | None = None
    host_seconds: Mapping[workload.Sharding | None, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> "ComputeTimes":
        """Return these times with both passes multiplied by `factor`."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
        )


COPY_SHARE = 0.875
"""Fraction of the data sheet's memory bandwidth that a copy reaches. On an H200, a copy of 512 MiB reads and writes
4,204 of 4,800 GB/s.
"""

SMALLEST_COPY_SECONDS = 2.5e-6
"""Fixed time of a copy. On an H200, 48 copies with 1.61 GB in total, in both directions, take 1.66 ms. At the
bandwidth of large copies they would take 1.53 ms.
"""

OPTIMIZER_TRAFFIC = 30
"""Bytes per parameter that Adam reads and writes in mixed precision. The gradient is 2 bytes. Weights, momentum and
variance in float32 are 4 bytes each, read and written. The new 16-bit weight is 2 bytes. A gradient norm reads
the gradients once more.
"""

BACKWARD_OVER_FORWARD = 2.4
"""Time of the backward pass relative to the forward pass. It has two matrix products per forward product, and
additional other work. GPT blocks with hidden size 2048 take 24.1 ms forward and 57.4 ms backward on an H200.
"""


class DataSheet(Struct, frozen=True):
    """Rates of a GPU in its data sheet, and the lowest and highest fraction of them that training reaches.

    `tflops_fp8` is 0 if the GPU does not support 8 bits. Attention and the vocabulary projection always use 16 bits.
    Matrix products in 8 bits reach the same fraction of their rate, but their inputs must be cast first.
    """

    tflops: float
    memory_gb_s: float
    tflops_fp8: float = 0.0
    reached: tuple[float, float] = (0.48, 0.8)
    reached_attention: tuple[float, float] = (0.16, 0.5)


_HOPPER, _AMPERE = ((0.48, 0.66), (0.16, 0.5)), ((0.6, 0.83), (0.26, 0.6))
"""Fractions of the data sheet's rate that matrix products and attention reach in the runs of
benchmarks/plan_published.toml. Including the work between products, models of 1 to 13 B without recomputation
reach 39 to 46 % (H100) and 57 to 64 % (A100) at 2,048 tokens per sequence. Blackwell is assumed to be like
Hopper.
"""

_SHEETS = {
    "GB300": DataSheet(2500, 8000, 5000, *_HOPPER),
    "B300": DataSheet(2250, 8000, 4500, *_HOPPER),
    "GB200": DataSheet(2500, 8000, 5000, *_HOPPER),
    "B200": DataSheet(2250, 8000, 4500, *_HOPPER),
    "H200": DataSheet(989, 4800, 1979, *_HOPPER),
    "H100 NVL": DataSheet(835, 3938, 1671, *_HOPPER),
    "H100 PCIe": DataSheet(756, 2039, 1513, *_HOPPER),
    "H100": DataSheet(989, 3350, 1979, *_HOPPER),
    "A100-SXM4-40GB": DataSheet(312, 1555, 0, *_AMPERE),
    "A100-SXM4-80GB": DataSheet(312, 2039, 0, *_AMPERE),
    "A100": DataSheet(312, 1935, 0, *_AMPERE),
    "V100": DataSheet(125, 900),
    "L40S": DataSheet(362, 864, 733),
    "L4": DataSheet(121, 300, 242),
    "A10": DataSheet(125, 600),
    "RTX 4090": DataSheet(165, 1008, 330),
    "RTX 5090": DataSheet(210, 1792, 419),
}


def find_data_sheet(name: str) -> DataSheet | None:
    """Return the rates of a GPU by its NVML model name, or None if its data sheet is not known.

    Whole words must match, so an L40 does not match L4. Laptop GPUs are skipped, because they have the names of faster
    GPUs.
    """
    words = f" {name.removeprefix('NVIDIA ').replace('-', ' ')} "
    if "Laptop" in words:
        return None
    return next((rates for model, rates in _SHEETS.items() if f" {model.replace('-', ' ')} " in words), None)


_TERA = 1e12


def times_for(model: workload.TransformerModel, tflops: float, **values: Any) -> ComputeTimes:
    """Return the computation time of a model at a speed in TFLOP/s. `values` are the other fields of ComputeTimes."""
    forward = 3 / (1 + BACKWARD_OVER_FORWARD) * model.forward_flops() / (tflops * _TERA)
    return ComputeTimes(forward_seconds=forward, backward_seconds=BACKWARD_OVER_FORWARD * forward, **values)


def estimate_times(model: workload.TransformerModel, gpu: str) -> ComputeTimes | None:
    """Estimate the computation time of a model on a GPU, from the fractions of its data sheet that training
    reaches.

    Return None without a data sheet. Raises UsageError if the model uses 8 bits and the GPU does not support 8 bits.
    """
    sheet = find_data_sheet(gpu)
    if sheet is None:
        return None
    if model.fp8 and not sheet.tflops_fp8:
        raise UsageError(f"--fp8 on {gpu}", expected="a GPU with FP8 matrix products", next_step="leave --fp8 out")
    copy_gb_s = sheet.memory_gb_s * COPY_SHARE
    tflops = sheet.tflops_fp8 if model.fp8 else sheet.tflops
    # The backward pass has twice the products and attention of the forward pass, and computes half of the attention
    # again.
    attention = (
        model.batch
        * model.layers
        * sum(operation.flops for operation in model.operations(0) if operation.needs_attention)
    )
    top = model.head_flops() * model.batch
    products = 3 * ((model.forward_flops() - attention - top) / tflops + top / sheet.tflops)
    # Work outside matrix products per microbatch, if all kernels were fused.
    elements = model.tokens * (BESIDE_MLP_ACCESSES * model.hidden + MLP_ACCESSES * model.width)
    elementwise = elements * model.data_type.size_bytes / (copy_gb_s * 1e9)
    between = model.layers * (1 + BACKWARD_OVER_FORWARD) * elementwise
    casts = model.layers * _cast_seconds(model, copy_gb_s) if model.fp8 else 0.0
    slow, fast = (
        (products / share + 3.5 * attention / (of_attention * sheet.tflops)) / _TERA + unfused * between + casts
        for share, of_attention, unfused in zip(
            sheet.reached, sheet.reached_attention, UNFUSED_FP8 if model.fp8 else UNFUSED, strict=True
        )
    )
    forward = (slow + fast) / 2 / (1 + BACKWARD_OVER_FORWARD)
    return ComputeTimes(
        forward_seconds=forward,
        backward_seconds=BACKWARD_OVER_FORWARD * forward,
        spread=(slow - fast) / (slow + fast),
        source=f"products at {sheet.reached[0]:.0%} to {sheet.reached[1]:.0%} of the {tflops:g} TFLOP/s in the data "
        f"sheet of {gpu}, as in published runs, plus attention and memory (expected, not measured)",
        origin="expected",
        copy_gb_s=copy_gb_s,
    )


BESIDE_MLP_ACCESSES, MLP_ACCESSES = 10, 2
"""Memory accesses per element in a block's forward pass outside its matrix products. Activations: two norms with 2
accesses each and two residual sums with 3 each. MLP: an activation function with 2 accesses over its width.
"""

UNFUSED, UNFUSED_FP8 = (3.0, 2.0), (3.0, 1.0)
"""Factors for work between products that is not fused, for the slow and fast end of the range. With 3, products of
published models of 1 to 13 B reach similar fractions of the rate on A100 and H100. Frameworks with fused kernels
are faster, especially in 8 bits.
"""


_CAST_BYTES = 4
"""Bytes per element to cast a 16-bit element to 8 bits. It is read once and written twice: as it is, and transposed
for the gradient of the weights. Weights are cast only once per step, so their casts are left out.
"""


def _cast_seconds(model: workload.TransformerModel, copy_gb_s: float) -> float:
    """Return the time to cast in a block, in seconds: inputs of products in the forward pass, and gradients of
    outputs in the backward pass.
    """
    products = [operation for operation in model.operations(0) if operation.inputs]
    elements = sum(product.flops * (1 / product.inputs + 1 / product.outputs) / 2 for product in products) * model.batch
    return _CAST_BYTES * elements / (copy_gb_s * 1e9)


MEASURED, SIMULATED, EXPECTED = "measured", "simulated", "expected"


class CurvePoint(Struct, frozen=True):
    """The time of a collective at one size. `spread` is half its 95 % confidence interval, relative to the time, or
    0 if unknown.
    """

    size_bytes: int
    seconds: float
    spread: float = 0.0


class CollectiveCurve(Struct, frozen=True):
    """The times of one collective by size, for a fixed number of ranks. `origin` is measured, simulated or expected."""

    points: tuple[CurvePoint, ...]
    origin: str = MEASURED
    source: str = ""

    def seconds(self, size_bytes: float) -> float:
        """Return the time of one operation in seconds, or 0 for zero bytes."""
        if size_bytes <= 0:
            return 0.0
        sizes = [point.size_bytes for point in self.points]
        after = bisect_left(sizes, size_bytes)
        if after == 0:
            return self.points[0].seconds
        if after == len(sizes):
            last = self.points[-1]
            return last.seconds * size_bytes / last.size_bytes
        low, high = self.points[after - 1], self.points[after]
        part = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
        return float(low.seconds * (high.seconds / low.seconds) ** part)

    def spread(self, size_bytes: float) -> float:
        """Return half the 95 % confidence interval at the nearest known size, relative to the time."""
        nearest = min(self.points, key=lambda each: abs(math.log(each.size_bytes / max(size_bytes, 1))))
        return nearest.spread


def build_curve(points: Sequence[CurvePoint], origin: str = MEASURED, source: str = "") -> CollectiveCurve:
    """Return a curve through these points. Several points of one size are merged to their median, with a spread
    that covers all.
    """
    by_size: dict[int, list[CurvePoint]] = {}
    for point in points:
        by_size.setdefault(point.size_bytes, []).append(point)
    return CollectiveCurve(tuple(_merged(by_size[size]) for size in sorted(by_size)), origin, source)


def _merged(points: Sequence[CurvePoint]) -> CurvePoint:
    times = [point.seconds for point in points]
    apart = (max(times) - min(times)) / 2 / median(times)
    return CurvePoint(points[0].size_bytes, median(times), max([apart, *(point.spread for point in points)]))


class CommunicatorRanks(Struct, frozen=True):
    """The ranks of a collective, as their number and the number of nodes. `sharing` is how many such groups share
    each node.

    Groups that share a node also share its NICs. Within a node, the NVLink switch serves each GPU separately.
    """

    ranks: int
    nodes: int = 1
    sharing: int = 1

    @property
    def on_a_node(self) -> int:
        """The number of ranks per node."""
        return max(1, self.ranks // self.nodes)

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


CurveSource = Callable[[str, CommunicatorRanks], CollectiveCurve]
"""Finds the curve of a collective for a group of ranks. Raises GpubenchError if there is none."""

FaultSeconds = Callable[[str, CommunicatorRanks, float, float], float]
"""Returns the time with a fault in seconds. The arguments are the collective, the group, the size and the time
without the fault.
"""


class CollectiveTimesFound(Struct, dict=True):
    """Times of collectives, read from a source of curves and cached.

    - `shift` adds a multiple of half the confidence interval to every time. -1 and 1 give the range of a prediction.
    - `fault` computes each time under a fault.
    """

    source: CurveSource
    shift: float = 0.0
    fault: FaultSeconds | None = None
    curves: dict[tuple[str, CommunicatorRanks], CollectiveCurve] = field(default_factory=dict)

    @cached_property
    def _seconds(self) -> dict[tuple[str, CommunicatorRanks, float], float]:
        """A cache, because a step has few different operations but uses each once per layer. `replace` starts with
        an empty cache.
        """
        return {}

    def seconds(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        """Return the time of one operation in seconds, or 0 for a single rank or zero bytes. Raises the same errors
        as the source.
        """
        if group.ranks == 1 or size_bytes <= 0:
            return 0.0
        asked = collective, group, size_bytes
        if asked not in self._seconds:
            self._seconds[asked] = self._found(collective, group, size_bytes)
        return self._seconds[asked]

    def _found(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        if (collective, group) not in self.curves:
            self.curves[collective, group] = self.source(collective, group)
        curve = self.curves[collective, group]
        # A send uses one NIC, and parallel pairs use different NICs. Parallel rings share the bandwidth of all NICs.
        shares = group.nodes > 1 and collective != "sendrecv"
        effective = size_bytes * (group.sharing if shares else 1)
        seconds = curve.seconds(effective) * max(0.0, 1 + self.shift * curve.spread(effective))
        return seconds if self.fault is None else self.fault(collective, group, size_bytes, seconds)

    def beyond(self) -> list[str]:
        """Describe each curve that was used for sizes outside its known range."""
        found = []
        for (name, group), curve in sorted(self.curves.items(), key=lambda each: (each[0][0], each[0][1].ranks)):
            asked = [size for collective, ranks, size in self._seconds if (collective, ranks) == (name, group)]
            least, most = curve.points[0].size_bytes, curve.points[-1].size_bytes
            ends = dict.fromkeys((min(asked, default=least), max(asked, default=most)))
            sizes = [format_memory(int(size)) for size in ends if not least <= size <= most]
            if sizes:
                found.append(
                    f"{name} of {' and '.join(sizes)}, with known times from {format_size(least)} to "
                    f"{format_size(most)}"
                )
        return found


GRADIENTS = "gradients"
TENSOR = "tensor"


class StepSettings(Struct, frozen=True, kw_only=True):
    """Options of a training step.

    - `bucket_bytes` limits the size of gradient buckets. The default in DDP is 25 MiB, as in PyTorch. The default in
      ZeRO-1 is the gradients of 40 M parameters, or of a million per rank if that is more, as in Megatron-LM.
    - `imbalance` is the number of tokens on the busiest expert rank, divided by the average.
    - `optimizer_bytes` is what the optimizer reads and writes per parameter, or 0 without an optimizer.
    - `reduces_fp32` is true if gradients are reduced in 32 bits, independent of the data type of the parameters.
    """

    bucket_bytes: int | None = None
    microbatches: int = 1
    imbalance: float = 1.0
    optimizer_bytes: int = 0
    reduces_fp32: bool = False


MOST_BLOCKS = 24
"""Maximum number of blocks to simulate per stage. In a larger stage, the time per additional block is extrapolated
from the second half.
"""


class StepJob(Struct, frozen=True, kw_only=True):
    """All inputs of a training step. `gpus_per_node` determines which groups of ranks span several nodes.

    `stage` is the pipeline stage to simulate, and `most_blocks` is the maximum number of blocks to simulate.
    """

    model: workload.TransformerModel
    layout: workload.ParallelLayout
    compute: ComputeTimes
    times: CollectiveTimesFound
    contention: ContentionTable
    settings: StepSettings
    gpus_per_node: int
    stage: int = 0
    most_blocks: int = MOST_BLOCKS

    @property
    def blocks(self) -> int:
        """The number of blocks to simulate in this stage."""
        own = workload.layers_by_stage(self.model.layers, self.layout)[self.stage]
        return min(own, self.most_blocks)

    @property
    def ends(self) -> tuple[tuple[workload.Operation, ...], tuple[workload.Operation, ...]]:
        """The operations of embedding and head. Each is empty if this stage does not have it."""
        first, last = self.model.ends()
        return first if self.stage == 0 else (), last if self.stage == self.layout.pipeline - 1 else ()

    @property
    def operations(self) -> list[workload.Operation]:
        """All operations of the stage, in the order of the forward pass."""
        first, last = self.ends
        blocks = [operation for block in range(self.blocks) for operation in self.model.operations(block)]
        return [*first, *blocks, *last]

    def bytes_of(self, operations: Sequence[workload.Operation]) -> int:
        """Return the size of these operations' parameters on one GPU, in bytes."""
        return sum(self.tensor_bytes(tensor) for operation in operations for tensor in operation.tensors)

    def tensor_bytes(self, tensor: workload.ParameterTensor) -> int:
        """Return the size of a parameter on one GPU, in bytes."""
        parts = self.layout.tensor * (self.layout.expert if tensor.expert else 1)
        return -(-tensor.elements // parts) * self.model.data_type.size_bytes

    @property
    def gradient_share(self) -> float:
        """The size of a gradient when it is reduced, relative to the size of its parameter."""
        return 4 / self.model.data_type.size_bytes if self.settings.reduces_fp32 else 1.0

    @property
    def bucket_bytes(self) -> float:
        """The maximum size of a gradient bucket in bytes."""
        usual: float = 25 * 2**20
        if self.layout.sharding is not workload.Sharding.DDP:
            parameters = max(40_000_000, 1_000_000 * self.layout.gradient_ranks)
            usual = parameters * self.model.data_type.size_bytes * self.gradient_share
        return self.settings.bucket_bytes or usual

    @property
    def optimizer_seconds(self) -> float:
        """The time of the optimizer in seconds, which reads and writes the states of all parameters of a rank."""
        if not self.settings.optimizer_bytes or self.compute.copy_gb_s is None:
            return 0.0
        shared = self.layout.shard_ranks if self.layout.sharding is not workload.Sharding.DDP else 1
        whole = replace(self, most_blocks=self.model.layers)
        parameters = self.bytes_of(whole.operations) / self.model.data_type.size_bytes / shared
        return parameters * self.settings.optimizer_bytes / (self.compute.copy_gb_s * BYTES_PER_GB)

    @property
    def host_seconds(self) -> float:
        """The time of the host to launch a step in seconds, or 0 if unknown.

        Layouts other than DDP and FSDP use the time of blocks without data parallelism, which is an underestimate.
        """
        known = self.compute.host_seconds
        sharding = self.layout.sharding if self.layout.gradient_ranks > 1 else None
        alike = workload.Sharding.FSDP if sharding is not None and sharding.gathers_parameters else sharding
        a_block = known.get(alike, known.get(None, 0.0))
        return a_block * self.model.layers / self.layout.pipeline * self.settings.microbatches

    def gradient_group(self, *, experts: bool = False) -> CommunicatorRanks:
        """Return the ranks that replicate or shard the same parameters. The parameters of an expert are on fewer
        ranks.
        """
        split = self.layout.expert if experts else 1
        return self.group(self.layout.shard_ranks // split, self.layout.tensor * split)

    @property
    def send_bytes(self) -> float:
        """The number of bytes that a pipeline stage sends to the next one per microbatch."""
        split = self.layout.context * (self.layout.tensor if self.layout.sequence_parallel else 1)
        return self.model.activation_bytes / split

    @property
    def send_seconds(self) -> float:
        """The time that a pipeline stage takes to send one microbatch to the next stage, in seconds."""
        stages = self.group(2, self.layout.gpus // self.layout.pipeline)
        return self.times.seconds("sendrecv", stages, self.send_bytes)

    @property
    def states_bytes(self) -> int:
        """The memory for weights, gradients and optimizer states on one GPU, in bytes."""
        return workload.states_bytes(
            self.model, self.layout, workload.OPTIMIZER_BYTES if self.settings.optimizer_bytes else 0
        )

    def group(self, ranks: int, stride: int) -> CommunicatorRanks:
        """Return a group of `ranks` ranks whose GPU numbers are `stride` apart."""
        if ranks == 1:
            return CommunicatorRanks(1)
        span = (ranks - 1) * stride + 1
        if span <= self.gpus_per_node:
            return CommunicatorRanks(ranks)
        on_a_node = max(1, self.gpus_per_node // stride)
        nodes = max(2, -(-ranks // on_a_node))
        return CommunicatorRanks(ranks, nodes, max(1, self.gpus_per_node // max(1, ranks // nodes)))


class StepProgram(Struct):
    """The tasks of one GPU. Computation runs in the order in which it is added."""

    job: StepJob
    tasks: list[StreamTask] = field(default_factory=list)
    last: int | None = None

    def compute(self, seconds: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """Add a computation of `kernels` kernels, and return its task number.

        It runs after all earlier computation and after the tasks `after`.
        """
        self.tasks.append(StreamTask(seconds=seconds, after=tuple(after), kernel_seconds=seconds / kernels))
        self.last = len(self.tasks) - 1
        return self.last

    @property
    def behind(self) -> tuple[int, ...]:
        """The task to depend on in order to wait for all computation that was added so far."""
        return () if self.last is None else (self.last,)

    def communicate(
        self,
        collective: str,
        group: CommunicatorRanks,
        size_bytes: float,
        *,
        source: str,
        after: Sequence[int],
        stream: str = GRADIENTS,
    ) -> tuple[int, ...]:
        """Add a collective that runs after the tasks `after`. Return its task number, or nothing if the collective
        takes no time.
        """
        seconds = self.job.times.seconds(collective, group, size_bytes)
        if seconds <= 0:
            return ()
        self.tasks.append(
            StreamTask(
                seconds=seconds,
                stream=stream,
                after=tuple(after),
                source=source,
                collective=collective,
                size_bytes=size_bytes,
                contention=self.job.contention.of(collective, size_bytes).lasting(seconds),
            )
        )
        return (len(self.tasks) - 1,)

    def synchronous(self, collective: str, group: CommunicatorRanks, size_bytes: float, source: str) -> None:
        """Add a collective that waits for all earlier computation. All later computation waits for it."""
        task = self.communicate(collective, group, size_bytes, source=source, stream=TENSOR, after=self.behind)
        if task:
            self.compute(0.0, task)

    def copy(self, size_bytes: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """Add a copy within GPU memory by `kernels` kernels. It reads and writes every byte once."""
        compute = self.job.compute
        if compute.copy_gb_s is None:
            return self.compute(0.0, after)
        seconds = 2 * size_bytes / (compute.copy_gb_s * BYTES_PER_GB) + kernels * SMALLEST_COPY_SECONDS
        return self.compute(seconds, after, kernels=kernels)


CONTEXT = "context"

_TENSOR_SOURCE = "tensor parallel"
_SEQUENCE_SOURCE = "sequence parallel"
_EXPERT_SOURCE = "experts"

Ready = Callable[[workload.Operation], None]
"""Called with an operation when its backward pass was added, because its gradients are then ready."""


class BlockWriter:
    """Adds the forward and backward passes of blocks to a program."""

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        job, layout = program.job, program.job.layout
        flops = job.model.forward_flops() / job.model.batch * layout.tensor * layout.context
        self._forward_seconds = job.compute.forward_seconds / flops
        self._backward_seconds = job.compute.backward_seconds / flops
        self._activations = job.model.activation_bytes / layout.context
        self._is_whole = max(layout.tensor, layout.context, layout.expert) == 1
        self._tensor, self._context = job.group(layout.tensor, 1), job.group(layout.context, layout.tensor)
        self._expert = job.group(layout.expert, layout.tensor * layout.context)

    def forward(self, block: int) -> None:
        if self._is_whole:
            self._compute_whole(block, backward=False)
            return
        for operation in self._program.job.model.operations(block):
            self._enter(operation.name)
            self._compute(operation, backward=False)
            self._leave(operation.name)

    def backward(self, block: int, ready: Ready | None = None) -> None:
        """Add the backward pass of a block, in reverse order of operations. `ready` is None if no task waits for
        its gradients.
        """
        if self._program.job.model.recompute is workload.Recompute.FULL:
            self.forward(block)
        if self._is_whole and ready is None:
            self._compute_whole(block, backward=True)
            return
        for operation in reversed(self._program.job.model.operations(block)):
            self._leave(operation.name, backward=True)
            self._compute(operation, backward=True)
            if ready is not None:
                ready(operation)
            self._enter(operation.name, backward=True)

    def _seconds(self, operation: workload.Operation, *, backward: bool) -> float:
        """Return the time of one pass in seconds. Selective recomputation repeats attention in the backward pass."""
        if not backward:
            return operation.flops * self._forward_seconds
        is_again = operation.needs_attention and self._program.job.model.recompute is workload.Recompute.SELECTIVE
        return operation.flops * (self._backward_seconds + is_again * self._forward_seconds)

    def _compute_whole(self, block: int, *, backward: bool) -> None:
        """Add a block without communication as a single task, with the number of its kernels."""
        operations = [operation for operation in self._program.job.model.operations(block) if operation.flops]
        seconds = sum(self._seconds(operation, backward=backward) for operation in operations)
        self._program.compute(seconds, kernels=len(operations) * (2 if backward else 1))

    def ends(self, operations: Sequence[workload.Operation], *, backward: bool, ready: Ready | None = None) -> None:
        """Add the embedding or the head."""
        for operation in operations:
            self._compute(operation, backward=backward)
            if ready is not None:
                ready(operation)

    def _compute(self, operation: workload.Operation, *, backward: bool) -> None:
        seconds = self._seconds(operation, backward=backward)
        if operation.needs_attention and self._program.job.layout.context > 1:
            self._attend_in_a_ring(seconds, backward=backward)
        elif seconds > 0:
            # The backward pass has two products: one for the gradient of the input, and one for the gradient of the
            # weights.
            self._program.compute(seconds, kernels=2 if backward else 1)

    def _enter(self, name: str, *, backward: bool = False) -> None:
        """Add the communication before an operation in the forward pass, or after it in the backward pass."""
        part = name.rpartition(".")[2]
        if name.endswith(("attention.in", "mlp.up", "router")):
            self._join("reducescatter" if backward else "allgather", reduces=backward)
        if part == "up" and "experts" in name:
            self._exchange_tokens()

    def _leave(self, name: str, *, backward: bool = False) -> None:
        """Add the communication after an operation in the forward pass, or before it in the backward pass."""
        part = name.rpartition(".")[2]
        if part == "down" and "experts" in name:
            self._exchange_tokens()
        if name.endswith(("attention.out", "mlp.down", "experts.down")):
            self._join("allgather" if backward else "reducescatter", reduces=not backward)

    def _join(self, collective: str, *, reduces: bool) -> None:
        """Add the collective on activations: `collective` with sequence parallelism, otherwise an all-reduce if
        `reduces` is true.
        """
        if self._program.job.layout.sequence_parallel:
            self._program.synchronous(collective, self._tensor, self._activations, _SEQUENCE_SOURCE)
        elif reduces:
            self._program.synchronous("allreduce", self._tensor, self._activations, _TENSOR_SOURCE)

    def _exchange_tokens(self) -> None:
        job = self._program.job
        size = self._activations * job.model.experts_per_token * job.settings.imbalance / job.layout.tensor
        self._program.synchronous("alltoall", self._expert, size, _EXPERT_SOURCE)

    def _attend_in_a_ring(self, seconds: float, *, backward: bool) -> None:
        """Send keys and values to the next rank while a part of the attention is computed.

        In the backward pass, their gradients are sent too.
        """
        job, program = self._program.job, self._program
        model, ranks = job.model, job.layout.context
        keys = model.tokens / ranks * model.key_value_width * (model.data_type.size_bytes / job.layout.tensor)
        arrived: tuple[int, ...] = ()
        for part in range(ranks):
            before, arrived = (*arrived, *program.behind), ()
            if part < ranks - 1:
                size = 2 * keys * (2 if backward else 1)
                arrived = program.communicate(
                    "sendrecv", self._context, size, source="ring attention", after=before, stream=CONTEXT
                )
            program.compute(seconds / ranks, before)
