"""Forward and backward of a model from times of its matrix products: what a GPU without PyTorch can tell."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, stdev

from gpubench.measure.plan.program import ComputeTimes
from gpubench.model.workload.transformer import TransformerModel

ELEMENTWISE_ACCESSES = 18
"""Reads and writes of an activation's elements in the forward pass of a block outside its products: two norms 2 each,
two residual sums 3 each, an activation function over four times the width 8."""

Samples = Callable[[int, int, int], list[float]]
"""Seconds of a product of (rows × inner) by (inner × columns), in samples."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Seconds, FLOPs and variance of the products of one block."""

    seconds: float = 0.0
    flops: float = 0.0
    variance: float = 0.0


def of_products(model: TransformerModel, samples: Samples, copy_gb_s: float, copy_least_seconds: float) -> ComputeTimes:
    """Each product of a block forward once and backward twice, with the shapes that the gradients have.

    Attention computes as fast as the block's products, and what lies between moves its bytes at the speed of copies.
    """
    forward, backward = _Sums(), _Sums()
    tokens = model.tokens
    for operation in model.operations(0):
        if not operation.inputs:
            continue
        rows = round(operation.flops * model.batch / (2 * operation.inputs * operation.outputs))
        forward = _add(forward, samples(rows, operation.inputs, operation.outputs), operation.flops)
        backward = _add(backward, samples(rows, operation.outputs, operation.inputs), operation.flops)
        backward = _add(backward, samples(operation.inputs, rows, operation.outputs), operation.flops)
    speed = forward.flops * model.batch / forward.seconds
    scores = sum(each.flops for each in model.operations(0) if each.needs_attention) * model.batch / speed
    moved = ELEMENTWISE_ACCESSES * tokens * model.hidden * model.data_type.size_bytes / (copy_gb_s * 1e9)
    head = model.ends()[1]
    top = head.flops * model.batch / speed if head is not None else 0.0
    # A backward pass of attention recomputes the scores: five products where the forward pass has two (FlashAttention).
    whole_forward = model.layers * (forward.seconds + scores + moved) + top
    whole_backward = model.layers * (backward.seconds + 2.5 * scores + 2 * moved) + 2 * top
    noise = 1.96 * (forward.variance + backward.variance) ** 0.5 / (forward.seconds + backward.seconds)
    return ComputeTimes(
        forward_seconds=whole_forward,
        backward_seconds=whole_backward,
        source="float16 products of the model's shapes by CuPy, attention and the rest estimated from them",
        spread=noise,
        copy_gb_s=copy_gb_s,
        copy_least_seconds=copy_least_seconds,
    )


def _add(sums: _Sums, samples: list[float], flops: float) -> _Sums:
    error = stdev(samples) ** 2 / len(samples) if len(samples) > 1 else 0.0
    return _Sums(sums.seconds + mean(samples), sums.flops + flops, sums.variance + error)
