"""What one GPU computes: times that were given or measured, and what GPUs of a kind reach of their data sheets.

Dense Tensor Core TFLOP/s (without sparsity) in 16 and in 8 bits, and GB/s of memory, by the model's name, from NVIDIA's
data sheets: H100 and H200 (2024), A100 (2021), V100 (2020), B200 and GB200 (HGX and NVL72, 2024), GB300 (2025), L40S
(2023), L4 and A10, and the architecture papers of Ada and Blackwell for GeForce (16-bit with 32-bit accumulation).
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.workload import Sharding, TransformerModel
from gpubench.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """What one GPU needs for one microbatch of the whole model, nothing communicated.

    `spread` is the half-width of a 95 % interval, as a part. `copy_gb_s` is what a copy within the GPU's memory reads
    and writes; None: copies into buckets are left out. `origin` is measured, given or expected. `host_seconds` is what
    the host takes to issue a block's forward and backward pass, by how gradients are shared out, None without that;
    empty: not known.
    """

    forward_seconds: float
    backward_seconds: float
    source: str
    origin: str = "measured"
    spread: float = 0.0
    copy_gb_s: float | None = None
    host_seconds: Mapping[Sharding | None, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> "ComputeTimes":
        """The same, with passes that take so many times as long."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
        )


COPY_SHARE = 0.875
"""Of the data sheet's memory bandwidth: a copy of 512 MiB reads and writes 4,204 of 4,800 GB/s on an H200."""

SMALLEST_COPY_SECONDS = 2.5e-6
"""What a copy takes beside its bytes: 48 copies of 1.61 GB in all, there and back, take 1.66 ms on an H200, of which
1.53 are their bytes at the speed of large copies."""

OPTIMIZER_TRAFFIC = 30
"""Bytes that Adam reads and writes a parameter in mixed precision: gradient 2, weights, momentum and variance in
float32 4 each, there and back, and the new 16-bit weight 2; a norm of gradients reads them once more."""

BACKWARD_OVER_FORWARD = 2.4
"""Two matrix products for each of the forward pass, and more of all else: GPT blocks with hidden size 2048 take 24.1 ms
forward and 57.4 ms backward on an H200."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """TFLOP/s in 16 and in 8 bits and GB/s of a data sheet, and what training reaches of them, at least and at most.

    8 bits of 0: the GPU has none. Attention and the product with the vocabulary compute in 16, and products in 8 bits
    reach the same share of theirs, beside the casts of what they multiply.
    """

    tflops: float
    memory_gb_s: float
    tflops_fp8: float = 0.0
    reached: tuple[float, float] = (0.48, 0.8)
    reached_attention: tuple[float, float] = (0.16, 0.5)


_HOPPER, _AMPERE = ((0.48, 0.66), (0.16, 0.5)), ((0.6, 0.83), (0.26, 0.6))
"""Shares of products and of attention in the runs of benchmarks/plan_published.toml that were at hand. As a whole, with
what lies between products, models of 1 to 13 B without recomputation reach 39 to 46 % (H100) and 57 to 64 % (A100) of
the data sheet for 2,048 tokens a sequence. Blackwell is taken for alike."""

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


def rates_of(name: str) -> DataSheet | None:
    """The rates of a GPU by NVML's name of its model; None where no data sheet is known.

    Whole words: an L40 is no L4. A laptop's GPU has the name of a larger one.
    """
    words = f" {name.removeprefix('NVIDIA ').replace('-', ' ')} "
    if "Laptop" in words:
        return None
    return next((rates for model, rates in _SHEETS.items() if f" {model.replace('-', ' ')} " in words), None)


_TERA = 1e12


def times_at(model: TransformerModel, tflops: float, **values: Any) -> ComputeTimes:
    """The times of a model at this speed; `values` are the other fields."""
    forward = 3 / (1 + BACKWARD_OVER_FORWARD) * model.forward_flops() / (tflops * _TERA)
    return ComputeTimes(forward_seconds=forward, backward_seconds=BACKWARD_OVER_FORWARD * forward, **values)


def times_of_sheet(model: TransformerModel, gpu: str) -> ComputeTimes | None:
    """The times at the shares of its data sheet that training reaches on such a GPU, as a range; None: no data sheet.

    Raises UsageError for 8 bits on a GPU that has none.
    """
    sheet = rates_of(gpu)
    if sheet is None:
        return None
    if model.fp8 and not sheet.tflops_fp8:
        raise UsageError(f"--fp8 on {gpu}", expected="a GPU that computes in 8 bits", next_step="leave --fp8 out")
    copy_gb_s = sheet.memory_gb_s * COPY_SHARE
    tflops = sheet.tflops_fp8 if model.fp8 else sheet.tflops
    # Products and attention twice as much backward, and half of the scores again.
    attention = model.batch * model.layers * sum(each.flops for each in model.operations(0) if each.needs_attention)
    top = model.head_flops() * model.batch
    products = 3 * ((model.forward_flops() - attention - top) / tflops + top / sheet.tflops)
    between = model.layers * (1 + BACKWARD_OVER_FORWARD) * _elementwise_seconds(model, copy_gb_s)
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
"""Reads and writes of elements in the forward pass of a block outside its products: of activations two norms 2 each and
two residual sums 3 each, of the MLP's width an activation function 2."""

UNFUSED, UNFUSED_FP8 = (3.0, 2.0), (3.0, 1.0)
"""So many times as much lies between products. With three, products of published models of 1 to 13 B reach alike shares
on A100 and on H100; frameworks that fuse kernels do better, above all those that compute in 8 bits."""


def _elementwise_seconds(model: TransformerModel, copy_gb_s: float) -> float:
    """What the forward pass of a block takes outside its products, of a microbatch, where every kernel is fused."""
    elements = model.tokens * (BESIDE_MLP_ACCESSES * model.hidden + MLP_ACCESSES * model.width)
    return elements * model.data_type.size_bytes / (copy_gb_s * 1e9)


_CAST_BYTES = 4
"""A 16-bit element that is multiplied in 8 bits is read, and written twice: as it is, and transposed for the gradient
of the weights. Weights are cast once a step, and left out."""


def _cast_seconds(model: TransformerModel, copy_gb_s: float) -> float:
    """What a block takes to cast the inputs of its products forward, and the gradients of their outputs backward."""
    products = [each for each in model.operations(0) if each.inputs]
    elements = sum(each.flops * (1 / each.inputs + 1 / each.outputs) / 2 for each in products) * model.batch
    return _CAST_BYTES * elements / (copy_gb_s * 1e9)
