"""How long the host takes to issue a block's forward and backward pass, by the PyTorch of the user's environment.

Blocks so small that a GPU is done with every kernel before the next is issued: what they take is the host's time, which
does not depend on their size. One rank, so that nothing is communicated: what DDP and FSDP do beside it is done.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.compute.torch_block import block_module
from gpubench.hardware.torch.library import import_fully_shard, import_torch
from gpubench.model.workload.layout import Sharding
from gpubench.model.workload.transformer import TransformerModel

_BLOCKS = 8
_HEAD_WIDTH = 8
_TOKENS = 16
_WARM_STEPS = 5
_STEPS = 4
_SAMPLES = 5
_ONE_TENSOR_MB = 0.001
"""A cap that every gradient exceeds, so that each has a bucket of its own, as large ones have."""


def time_host(model: TransformerModel) -> dict[Sharding | None, float]:
    """Seconds of a block, forward and backward: without parallelism (None), in DDP and in FSDP.

    Raises CouldNotMeasureError: this PyTorch has no GPU, no NCCL, or cannot do one of them.
    """
    torch = import_torch()
    if not torch.cuda.is_available():
        raise CouldNotMeasureError(f"PyTorch {torch.__version__} finds no GPU", expected="a PyTorch built for CUDA")
    distributed = torch.distributed
    if distributed.is_initialized():
        raise CouldNotMeasureError("this process already has a process group", expected="a process of its own")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=device)
        return {
            None: _seconds(torch, model, lambda stack: stack),
            Sharding.DDP: _seconds(torch, model, lambda stack: _replicated(torch, stack)),
            Sharding.FSDP: _seconds(torch, model, _sharded),
        }
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise CouldNotMeasureError(
            f"PyTorch {torch.__version__} issues no step of one rank: {str(error).splitlines()[0]}",
            expected="a PyTorch with DistributedDataParallel and fully_shard over NCCL (2.6 or later)",
        ) from None
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _replicated(torch: Any, stack: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(stack, bucket_cap_mb=_ONE_TENSOR_MB)


def _sharded(stack: Any) -> Any:
    fully_shard = import_fully_shard()
    for block in stack:
        fully_shard(block)
    return fully_shard(stack)


def _seconds(torch: Any, model: TransformerModel, wrap: Callable[[Any], Any]) -> float:
    """The middle of some samples."""
    hidden = _HEAD_WIDTH * model.heads
    tiny = replace(model, hidden=hidden, intermediate=hidden, sequence=_TOKENS, batch=1)
    dtype = getattr(torch, str(model.data_type))
    with torch.device("cuda"):
        stack = wrap(torch.nn.Sequential(*(block_module(torch, tiny) for _ in range(_BLOCKS))).to(dtype))
        data = torch.randn(1, _TOKENS, hidden, dtype=dtype).requires_grad_()
        gradient = torch.randn_like(data)
    parameters = list(stack.parameters())

    def step() -> None:
        for each in parameters:
            each.grad = None
        data.grad = None
        stack(data).backward(gradient)

    for _ in range(_WARM_STEPS):
        step()
    samples = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        samples.append((perf_counter() - begun) / _STEPS / _BLOCKS)
    return median(samples)
