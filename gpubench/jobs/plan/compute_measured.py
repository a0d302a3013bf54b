"""Computation measured on a GPU of this host: blocks by PyTorch where that is there, else products by CuPy."""

from statistics import mean, median
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.compute.torch_block import spread_of, time_blocks
from gpubench.hardware.compute.torch_host import time_host
from gpubench.hardware.torch import library as torch
from gpubench.measure.plan.gpu_rates import SMALLEST_COPY_SECONDS
from gpubench.measure.plan.products import of_products
from gpubench.measure.plan.program import ComputeTimes
from gpubench.model.workload.transformer import TransformerModel

if TYPE_CHECKING:
    from gpubench.hardware.compute.products import ProductTimer


def measured_compute(model: TransformerModel, copy_gb_s: float | None) -> ComputeTimes:
    """Forward and backward of a microbatch of the whole model.

    Raises CouldNotMeasureError: there is neither PyTorch nor CuPy with a GPU.
    """
    if torch.is_installed():
        try:
            return _by_torch(model, copy_gb_s)
        except CouldNotMeasureError as error:
            why = f"; PyTorch was not used: {error.seen}"
    else:
        why = ""
    timer = _product_timer()
    speed = 2 * timer.copy_bytes / median(timer.copy()) / 1e9
    found = of_products(model, timer.product, speed, SMALLEST_COPY_SECONDS)
    return ComputeTimes(
        forward_seconds=found.forward_seconds,
        backward_seconds=found.backward_seconds,
        source=found.source + why,
        spread=found.spread,
        copy_gb_s=speed,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


def _by_torch(model: TransformerModel, copy_gb_s: float | None) -> ComputeTimes:
    blocks = time_blocks(model)
    forward, backward = mean(blocks.forward), mean(blocks.backward)
    head = model.ends()[1]
    flops = sum(each.flops for each in model.operations(0))
    top = head.flops / flops if head is not None else 0.0
    try:
        host, unknown = time_host(model), ""
    except CouldNotMeasureError as error:
        host, unknown = {}, f"; what the host takes to issue it is not known: {error.seen}"
    return ComputeTimes(
        forward_seconds=forward * (model.layers + top),
        backward_seconds=backward * (model.layers + top),
        source=blocks.described + (", the head by their speed" if head is not None else "") + unknown,
        host_seconds=host,
        spread=max(spread_of(blocks.forward), spread_of(blocks.backward)),
        copy_gb_s=copy_gb_s,
        copy_least_seconds=SMALLEST_COPY_SECONDS,
    )


def _product_timer() -> "ProductTimer":
    import socket

    from gpubench.hardware.compute.products import ProductTimer
    from gpubench.hardware.cuda.device import open_device
    from gpubench.jobs.gpus import usable_driver

    return ProductTimer(open_device(0, 1, socket.gethostname(), usable_driver("plan --measure")))
