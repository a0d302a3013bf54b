"""The computation of one GPU, the tasks of its training step, and the times of its collectives.

Rates are dense Tensor Core TFLOP/s (without sparsity) in 16 and 8 bits, and GB/s of memory, by model name, from
NVIDIA's data sheets: H100 and H200 (2024), A100 (2021), V100 (2020), B200 and GB200 (HGX and NVL72, 2024), GB300
(2025), L40S (2023), L4 and A10. GeForce rates are from the architecture papers of Ada and Blackwell (16-bit with 32-bit
accumulation).

Times are interpolated linearly between logarithms of time and size. Below the smallest size the time is constant,
because it is latency. Above the largest size the bandwidth is constant.

A block's operations share its time by their FLOPs. Communication per block and microbatch, with b·s·h activations of e
bytes:

- tensor parallelism: an all-reduce of b·s·h·e after attention and after the MLP, and as many in the backward pass
  (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With sequence parallelism, an all-gather before and a
  reduce-scatter after each, with the same bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2)
- ring attention: n - 1 sends of keys and values during n parts of the attention, in the backward pass with their
  gradients (Liu et al. 2023, arXiv 2310.01889, section 3)
- experts: tokens are sent to their experts and back, tokens·experts_per_token·h·e each (Lepikhin et al. 2020, arXiv
  2006.16668, section 3.2), limited by the busiest rank
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
    """Seconds that one GPU needs for one microbatch of the whole model, without communication.

    `spread` is half the 95 % confidence interval, relative. `copy_gb_s` is what a copy within GPU memory reads and
    writes. If it is None, copies into buckets are left out. `origin` is measured, given or expected. `host_seconds` is
    the host's time to issue a block's forward and backward pass by kind of sharding (None: without), empty if unknown.
    """

    forward_seconds: float
    backward_seconds: float
    source: str
    origin: str = "measured"
    spread: float = 0.0
    copy_gb_s: float | None = None
    host_seconds: Mapping[workload.Sharding | None, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> "ComputeTimes":
        """Return these times with both passes multiplied by a factor."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
        )


COPY_SHARE = 0.875
"""Share of the data sheet's memory bandwidth: a copy of 512 MiB reads and writes 4,204 of 4,800 GB/s on an H200."""

SMALLEST_COPY_SECONDS = 2.5e-6
"""Fixed time of a copy: on an H200, 48 copies of 1.61 GB in total, in both directions, take 1.66 ms. At the speed
of large copies their bytes would take 1.53.
"""

OPTIMIZER_TRAFFIC = 30
"""Bytes per parameter that Adam reads and writes in mixed precision: gradient 2, weights, momentum and variance in
float32 4 each, read and written, and the new 16-bit weight 2. A norm of gradients reads them once more.
"""

BACKWARD_OVER_FORWARD = 2.4
"""The backward pass has two matrix products per product of the forward pass, and more other work: GPT blocks with
hidden size 2048 take 24.1 ms forward and 57.4 ms backward on an H200.
"""


class DataSheet(Struct, frozen=True):
    """TFLOP/s in 16 and 8 bits and GB/s of a data sheet, with the lowest and highest share that training reaches.

    0 TFLOP/s in 8 bits means not supported. Attention and the product with the vocabulary use 16 bits. Products in 8
    bits reach the same share of their rate, plus the casts of their inputs.
    """

    tflops: float
    memory_gb_s: float
    tflops_fp8: float = 0.0
    reached: tuple[float, float] = (0.48, 0.8)
    reached_attention: tuple[float, float] = (0.16, 0.5)


_HOPPER, _AMPERE = ((0.48, 0.66), (0.16, 0.5)), ((0.6, 0.83), (0.26, 0.6))
"""Shares of products and of attention in the runs of benchmarks/plan_published.toml. Including the work between
products, models of 1 to 13 B without recomputation reach 39 to 46 % (H100) and 57 to 64 % (A100) of the data
sheet at 2,048 tokens per sequence. Blackwell is assumed to be alike.
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
    """Return the rates of a GPU by NVML's model name, or None without a known data sheet.

    Match whole words, because an L40 is no L4. A laptop's GPU has the name of a larger one.
    """
    words = f" {name.removeprefix('NVIDIA ').replace('-', ' ')} "
    if "Laptop" in words:
        return None
    return next((rates for model, rates in _SHEETS.items() if f" {model.replace('-', ' ')} " in words), None)


_TERA = 1e12


def times_for(model: workload.TransformerModel, tflops: float, **values: Any) -> ComputeTimes:
    """Return the times of a model at this speed. `values` are the other fields."""
    forward = 3 / (1 + BACKWARD_OVER_FORWARD) * model.forward_flops() / (tflops * _TERA)
    return ComputeTimes(forward_seconds=forward, backward_seconds=BACKWARD_OVER_FORWARD * forward, **values)


def estimate_times(model: workload.TransformerModel, gpu: str) -> ComputeTimes | None:
    """Return the range of times for the shares of its data sheet that training reaches on a GPU. None without a
    data sheet.

    Raises UsageError for 8 bits on a GPU that does not support them.
    """
    sheet = find_data_sheet(gpu)
    if sheet is None:
        return None
    if model.fp8 and not sheet.tflops_fp8:
        raise UsageError(f"--fp8 on {gpu}", expected="a GPU that computes in 8 bits", next_step="leave --fp8 out")
    copy_gb_s = sheet.memory_gb_s * COPY_SHARE
    tflops = sheet.tflops_fp8 if model.fp8 else sheet.tflops
    # The backward pass has twice the products and attention, and half of the scores again.
    attention = (
        model.batch
        * model.layers
        * sum(operation.flops for operation in model.operations(0) if operation.needs_attention)
    )
    top = model.head_flops() * model.batch
    products = 3 * ((model.forward_flops() - attention - top) / tflops + top / sheet.tflops)
    # Outside its products, with all kernels fused, per microbatch.
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
        source=f"products at {sheet.reached[0]:.0%} to {sheet.reached[1]:.0%} of the {tflops:g} TFLOP/s of the data "
        f"sheet of {gpu}, as in published runs, with attention and memory beside them: expected, not measured",
        origin="expected",
        copy_gb_s=copy_gb_s,
    )


BESIDE_MLP_ACCESSES, MLP_ACCESSES = 10, 2
"""Reads and writes of elements in a block's forward pass outside its products: two norms with 2 each and two
residual sums with 3 each on activations, and an activation function with 2 on the MLP's width.
"""

UNFUSED, UNFUSED_FP8 = (3.0, 2.0), (3.0, 1.0)
"""Factors for unfused work between products. With 3, products of published models of 1 to 13 B reach similar shares
on A100 and H100. Frameworks with fused kernels are faster, especially in 8 bits.
"""


_CAST_BYTES = 4
"""A 16-bit element for an 8-bit product is read once and written twice: as it is, and transposed for the gradient
of the weights. Weights are cast once per step, and left out.
"""


def _cast_seconds(model: workload.TransformerModel, copy_gb_s: float) -> float:
    """Return the seconds to cast a block's inputs of products forward, and the gradients of their outputs backward."""
    products = [operation for operation in model.operations(0) if operation.inputs]
    elements = sum(product.flops * (1 / product.inputs + 1 / product.outputs) / 2 for product in products) * model.batch
    return _CAST_BYTES * elements / (copy_gb_s * 1e9)


MEASURED, SIMULATED, EXPECTED = "measured", "simulated", "expected"


class CurvePoint(Struct, frozen=True):
    """The time of one size, and half its 95 % confidence interval, relative (0 if unknown)."""

    size_bytes: int
    seconds: float
    spread: float = 0.0


class CollectiveCurve(Struct, frozen=True):
    """The times of one collective by size for a number of ranks. `origin` is measured, simulated or expected."""

    points: tuple[CurvePoint, ...]
    origin: str = MEASURED
    source: str = ""

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of one operation of this size, 0 for no bytes."""
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
        """Return half the 95 % confidence interval of the nearest size, relative."""
        nearest = min(self.points, key=lambda each: abs(math.log(each.size_bytes / max(size_bytes, 1))))
        return nearest.spread


def build_curve(points: Sequence[CurvePoint], origin: str = MEASURED, source: str = "") -> CollectiveCurve:
    """Return a curve through these points. For several points of a size, use their median and the spread of all."""
    by_size: dict[int, list[CurvePoint]] = {}
    for point in points:
        by_size.setdefault(point.size_bytes, []).append(point)
    return CollectiveCurve(tuple(_merged(by_size[size]) for size in sorted(by_size)), origin, source)


def _merged(points: Sequence[CurvePoint]) -> CurvePoint:
    times = [point.seconds for point in points]
    apart = (max(times) - min(times)) / 2 / median(times)
    return CurvePoint(points[0].size_bytes, median(times), max([apart, *(point.spread for point in points)]))


class CommunicatorRanks(Struct, frozen=True):
    """The ranks of a collective: how many, on how many nodes, and how many such groups share each node.

    Groups that share a node share its NICs. Within a node, the switch serves each GPU separately.
    """

    ranks: int
    nodes: int = 1
    sharing: int = 1

    @property
    def on_a_node(self) -> int:
        """Ranks per node."""
        return max(1, self.ranks // self.nodes)

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


CurveSource = Callable[[str, CommunicatorRanks], CollectiveCurve]
"""Finds the curve of a collective among ranks. Raises GpubenchError if there is none."""

FaultSeconds = Callable[[str, CommunicatorRanks, float, float], float]
"""Returns the seconds with a fault from collective, group, size and the seconds without."""


class CollectiveTimesFound(Struct, dict=True):
    """Times of collectives from a source of curves, cached.

    `shift` moves every time by half-widths of its confidence interval: -1 and 1 give the range of a prediction. `fault`
    changes times.
    """

    source: CurveSource
    shift: float = 0.0
    fault: FaultSeconds | None = None
    curves: dict[tuple[str, CommunicatorRanks], CollectiveCurve] = field(default_factory=dict)

    @cached_property
    def _seconds(self) -> dict[tuple[str, CommunicatorRanks, float], float]:
        """Cache: a step uses few times, but each of them once per layer. `replace` starts a new one."""
        return {}

    def seconds(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        """Return the seconds of one operation, 0 for a single rank. Raises like the source."""
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
        # A send uses one NIC, and each parallel pair has its own. Rings take bandwidth from other rings.
        shares = group.nodes > 1 and collective != "sendrecv"
        effective = size_bytes * (group.sharing if shares else 1)
        seconds = curve.seconds(effective) * max(0.0, 1 + self.shift * curve.spread(effective))
        return seconds if self.fault is None else self.fault(collective, group, size_bytes, seconds)

    def beyond(self) -> list[str]:
        """Describe the curves that were used beyond their points."""
        found = []
        for (name, group), curve in sorted(self.curves.items(), key=lambda each: (each[0][0], each[0][1].ranks)):
            asked = [size for collective, ranks, size in self._seconds if (collective, ranks) == (name, group)]
            least, most = curve.points[0].size_bytes, curve.points[-1].size_bytes
            ends = dict.fromkeys((min(asked, default=least), max(asked, default=most)))
            sizes = [format_memory(int(size)) for size in ends if not least <= size <= most]
            if sizes:
                found.append(f"{name} of {' and '.join(sizes)}, known from {format_size(least)} to {format_size(most)}")
        return found


GRADIENTS = "gradients"
TENSOR = "tensor"


class StepSettings(Struct, frozen=True, kw_only=True):
    """Options of a step: the cap of gradient buckets, and the number of microbatches.

    `bucket_bytes` None means 25 MiB in DDP, as in PyTorch, and in ZeRO-1 the gradients of 40 M parameters, or of a
    million per rank if that is more, as in Megatron-LM. `imbalance` is the busiest rank's tokens over the average, for
    experts. `optimizer_bytes` is what the optimizer reads and writes per parameter, 0 without one. With `reduces_fp32`,
    gradients are reduced in 32 bits, whatever the type of the parameters.
    """

    bucket_bytes: int | None = None
    microbatches: int = 1
    imbalance: float = 1.0
    optimizer_bytes: int = 0
    reduces_fp32: bool = False


MOST_BLOCKS = 24
"""Simulated blocks per stage. Each further block takes as long as the last half of these."""


class StepJob(Struct, frozen=True, kw_only=True):
    """All inputs of a step. `gpus_per_node` decides which groups of ranks cross nodes.

    `stage` is the pipeline stage whose tasks are simulated, `most_blocks` the maximum of its blocks.
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
        """The number of simulated layers of the stage."""
        own = workload.layers_by_stage(self.model.layers, self.layout)[self.stage]
        return min(own, self.most_blocks)

    @property
    def ends(self) -> tuple[tuple[workload.Operation, ...], tuple[workload.Operation, ...]]:
        """Embedding and head, each empty if the stage does not have it."""
        first, last = self.model.ends()
        return first if self.stage == 0 else (), last if self.stage == self.layout.pipeline - 1 else ()

    @property
    def operations(self) -> list[workload.Operation]:
        """All operations of the stage in forward order."""
        first, last = self.ends
        blocks = [operation for block in range(self.blocks) for operation in self.model.operations(block)]
        return [*first, *blocks, *last]

    def bytes_of(self, operations: Sequence[workload.Operation]) -> int:
        """Return the bytes of a GPU's share of these operations' parameters."""
        return sum(self.tensor_bytes(tensor) for operation in operations for tensor in operation.tensors)

    def tensor_bytes(self, tensor: workload.ParameterTensor) -> int:
        """Return the bytes of a GPU's share of a parameter."""
        parts = self.layout.tensor * (self.layout.expert if tensor.expert else 1)
        return -(-tensor.elements // parts) * self.model.data_type.size_bytes

    @property
    def gradient_share(self) -> float:
        """Bytes of a reduced gradient over bytes of its parameter."""
        return 4 / self.model.data_type.size_bytes if self.settings.reduces_fp32 else 1.0

    @property
    def bucket_bytes(self) -> float:
        """The cap of a gradient bucket in bytes."""
        usual: float = 25 * 2**20
        if self.layout.sharding is not workload.Sharding.DDP:
            parameters = max(40_000_000, 1_000_000 * self.layout.gradient_ranks)
            usual = parameters * self.model.data_type.size_bytes * self.gradient_share
        return self.settings.bucket_bytes or usual

    @property
    def optimizer_seconds(self) -> float:
        """The optimizer's seconds after a step: it reads and writes the states of a rank's parameters."""
        if not self.settings.optimizer_bytes or self.compute.copy_gb_s is None:
            return 0.0
        shared = self.layout.shard_ranks if self.layout.sharding is not workload.Sharding.DDP else 1
        whole = replace(self, most_blocks=self.model.layers)
        parameters = self.bytes_of(whole.operations) / self.model.data_type.size_bytes / shared
        return parameters * self.settings.optimizer_bytes / (self.compute.copy_gb_s * BYTES_PER_GB)

    @property
    def host_seconds(self) -> float:
        """The host's seconds to issue a step, 0 if unknown.

        Other layouts than DDP and FSDP use the time of the blocks alone, which is less.
        """
        known = self.compute.host_seconds
        sharding = self.layout.sharding if self.layout.gradient_ranks > 1 else None
        alike = workload.Sharding.FSDP if sharding is not None and sharding.gathers_parameters else sharding
        a_block = known.get(alike, known.get(None, 0.0))
        return a_block * self.model.layers / self.layout.pipeline * self.settings.microbatches

    def gradient_group(self, *, experts: bool = False) -> CommunicatorRanks:
        """Return the ranks that share or shard the same parameters. Fewer ranks share those of experts."""
        split = self.layout.expert if experts else 1
        return self.group(self.layout.shard_ranks // split, self.layout.tensor * split)

    @property
    def send_bytes(self) -> float:
        """Bytes that one pipeline stage sends to the next per microbatch."""
        split = self.layout.context * (self.layout.tensor if self.layout.sequence_parallel else 1)
        return self.model.activation_bytes / split

    @property
    def send_seconds(self) -> float:
        """Seconds of one such send."""
        stages = self.group(2, self.layout.gpus // self.layout.pipeline)
        return self.times.seconds("sendrecv", stages, self.send_bytes)

    @property
    def states_bytes(self) -> int:
        """Bytes of a GPU for weights, gradients and optimizer states."""
        return workload.states_bytes(
            self.model, self.layout, workload.OPTIMIZER_BYTES if self.settings.optimizer_bytes else 0
        )

    def group(self, ranks: int, stride: int) -> CommunicatorRanks:
        """Return a group of ranks that are `stride` GPUs apart."""
        if ranks == 1:
            return CommunicatorRanks(1)
        span = (ranks - 1) * stride + 1
        if span <= self.gpus_per_node:
            return CommunicatorRanks(ranks)
        on_a_node = max(1, self.gpus_per_node // stride)
        nodes = max(2, -(-ranks // on_a_node))
        return CommunicatorRanks(ranks, nodes, max(1, self.gpus_per_node // max(1, ranks // nodes)))


class StepProgram(Struct):
    """The tasks of a GPU. It computes in the order of issue."""

    job: StepJob
    tasks: list[StreamTask] = field(default_factory=list)
    last: int | None = None

    def compute(self, seconds: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """Add a computation of some kernels after all earlier computation and these tasks, and return its number."""
        self.tasks.append(StreamTask(seconds=seconds, after=tuple(after), kernel_seconds=seconds / kernels))
        self.last = len(self.tasks) - 1
        return self.last

    @property
    def behind(self) -> tuple[int, ...]:
        """The tasks to wait for in order to wait for all computation so far."""
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
        """Add a collective after these tasks and return its number, or nothing if there is nothing to do."""
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
        """Add a collective that waits for all earlier computation, and that all later computation waits for."""
        task = self.communicate(collective, group, size_bytes, source=source, stream=TENSOR, after=self.behind)
        if task:
            self.compute(0.0, task)

    def copy(self, size_bytes: float, after: Sequence[int] = (), *, kernels: int = 1) -> int:
        """Add a copy within GPU memory by some kernels, which reads and writes every byte."""
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
"""Called with an operation after its backward pass is issued, when its gradients are ready."""


class BlockWriter:
    """Adds the passes of blocks to a program."""

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
        """Add the backward pass of a block, last operation first. `ready` is None if nothing waits for its
        gradients.
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
        """Return the seconds of one pass. Selective recomputation repeats attention in the backward pass."""
        if not backward:
            return operation.flops * self._forward_seconds
        is_again = operation.needs_attention and self._program.job.model.recompute is workload.Recompute.SELECTIVE
        return operation.flops * (self._backward_seconds + is_again * self._forward_seconds)

    def _compute_whole(self, block: int, *, backward: bool) -> None:
        """Add a block without communication as one task with all its kernels."""
        operations = [operation for operation in self._program.job.model.operations(block) if operation.flops]
        seconds = sum(self._seconds(operation, backward=backward) for operation in operations)
        self._program.compute(seconds, kernels=len(operations) * (2 if backward else 1))

    def ends(self, operations: Sequence[workload.Operation], *, backward: bool, ready: Ready | None = None) -> None:
        """Add embedding or head, if the model has them."""
        for operation in operations:
            self._compute(operation, backward=backward)
            if ready is not None:
                ready(operation)

    def _compute(self, operation: workload.Operation, *, backward: bool) -> None:
        seconds = self._seconds(operation, backward=backward)
        if operation.needs_attention and self._program.job.layout.context > 1:
            self._attend_in_a_ring(seconds, backward=backward)
        elif seconds > 0:
            # The backward pass has one product for the gradient of the input, and one for that of the weights.
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
        """Add the tensor-parallel collective on activations, or `collective` with sequence parallelism."""
        if self._program.job.layout.sequence_parallel:
            self._program.synchronous(collective, self._tensor, self._activations, _SEQUENCE_SOURCE)
        elif reduces:
            self._program.synchronous("allreduce", self._tensor, self._activations, _TENSOR_SOURCE)

    def _exchange_tokens(self) -> None:
        job = self._program.job
        size = self._activations * job.model.experts_per_token * job.settings.imbalance / job.layout.tensor
        self._program.synchronous("alltoall", self._expert, size, _EXPERT_SOURCE)

    def _attend_in_a_ring(self, seconds: float, *, backward: bool) -> None:
        """Send keys and values, in the backward pass with their gradients, while this part of the attention
        computes.
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
