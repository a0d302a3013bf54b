"""Measures computation in PyTorch on one GPU: the time of a model's blocks, and the time of the host to launch them."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.backends.torch.distributed import first_line, import_fully_shard, import_torch
from gpubench.errors import CouldNotMeasureError
from gpubench.training.workload import BlockKind, Sharding, TransformerModel

_BLOCKS = 2
_BLOCK_SETTLE_SECONDS = 1.5
_SETTLING_STEPS = 8
_BLOCK_SAMPLES = 25
"""Number of steps that are launched without pauses. With a pause after every step, the GPU stays cool and runs at
clocks that it cannot sustain in training. On an H200, 16 blocks took 72.8 ms with pauses, and 82 ms in
consecutive steps.
"""


class BlockSeconds(Struct, frozen=True, kw_only=True):
    """Measured times of one block in seconds, with a description. `forward` and `backward` have one value per
    sample.

    `host` has the time of the host to launch both passes, in seconds: without data parallelism (None), with DDP and
    with FSDP. If it is empty, `described` has the reason.
    """

    forward: list[float]
    backward: list[float]
    described: str
    host: Mapping[Sharding | None, float]


def time_blocks(model: TransformerModel) -> BlockSeconds:
    """Time the blocks of a model. Raises CouldNotMeasureError if PyTorch has no GPU or runs out of GPU memory."""
    torch = import_torch()
    if not torch.cuda.is_available():
        raise CouldNotMeasureError(
            f"PyTorch {torch.__version__} finds no GPU", expected="a PyTorch built for CUDA", next_step="--tflops N"
        )
    described = f"{_BLOCKS} blocks by PyTorch {torch.__version__} on {torch.cuda.get_device_name()}"
    try:
        kept = _timed(torch, model)
    except torch.cuda.OutOfMemoryError as error:
        raise CouldNotMeasureError(
            f"{_BLOCKS} blocks do not fit in GPU memory: {first_line(error)}",
            next_step=f"--batch {max(1, model.batch // 2)}",
        ) from None
    try:
        host = time_host(torch, model)
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
        host, described = {}, f"{described}. The host's time to issue it is unknown: {first_line(error)}"
    return BlockSeconds(
        forward=[each[0] for each in kept], backward=[each[1] for each in kept], described=described, host=host
    )


def _timed(torch: Any, model: TransformerModel) -> list[tuple[float, float]]:
    """Return samples of forward and backward time per block in seconds. The two shortest and two longest samples
    are dropped.
    """
    step = _make_step(torch, model, _BLOCKS, lambda stack: stack)
    until = perf_counter() + _BLOCK_SETTLE_SECONDS
    while perf_counter() < until:
        for _ in range(_SETTLING_STEPS):
            step()
        torch.cuda.synchronize()
    steps = [step() for _ in range(_BLOCK_SAMPLES)]
    torch.cuda.synchronize()
    samples = [
        (one.elapsed_time(two) / 1e3 / _BLOCKS, two.elapsed_time(end) / 1e3 / _BLOCKS) for one, two, end in steps
    ]
    return sorted(samples, key=sum)[2:-2]


def _make_step(torch: Any, model: TransformerModel, blocks: int, wrap: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    """Return a function that runs the forward and backward pass of some blocks, and returns the CUDA events before,
    between and after them.
    """
    dtype = getattr(torch, str(model.data_type))
    with torch.device("cuda"):
        stack = wrap(torch.nn.Sequential(*(_block_module(torch, model) for _ in range(blocks))).to(dtype))
        data = torch.randn(model.batch, model.sequence, model.hidden, dtype=dtype).requires_grad_()
        gradient = torch.randn_like(data)
    parameters = list(stack.parameters())

    def step() -> list[Any]:
        for parameter in parameters:
            parameter.grad = None
        data.grad = None
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = stack(data)
        marks[1].record()
        out.backward(gradient)
        marks[2].record()
        return marks

    return step


def _block_module(torch: Any, model: TransformerModel) -> Any:
    """Return a module with one block of the model: attention, and an MLP as wide as all experts that a token uses."""
    nn, functional = torch.nn, torch.nn.functional
    hidden, inner, keys, bias = model.hidden, model.query_width, model.key_value_width, model.biases
    width = model.width * max(1, model.experts_per_token)

    class TimedBlock(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.attends = model.kind is BlockKind.TRANSFORMER
            if self.attends:
                self.norm1, self.norm2 = nn.LayerNorm(hidden, bias=bias), nn.LayerNorm(hidden, bias=bias)
                self.into = nn.Linear(hidden, inner + 2 * keys, bias=bias)
                self.out = nn.Linear(inner, hidden, bias=bias)
            self.up = nn.Linear(hidden, width * (2 if model.gated else 1), bias=bias)
            self.down = nn.Linear(width, hidden, bias=bias)

        def forward(self, data: Any) -> Any:
            if self.attends:
                data = data + self.attention(self.norm1(data))
            found = self.up(self.norm2(data) if self.attends else data)
            if model.gated:
                gate, found = found.chunk(2, dim=-1)
                return data + self.down(functional.silu(gate) * found)
            return data + self.down(functional.gelu(found, approximate="tanh"))

        def attention(self, data: Any) -> Any:
            batch, sequence, _ = data.shape
            parts = self.into(data).split([inner, keys, keys], dim=-1)
            query, key, value = (part.view(batch, sequence, -1, inner // model.heads).transpose(1, 2) for part in parts)
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=keys != inner)
            return self.out(found.transpose(1, 2).reshape(batch, sequence, -1))

    return TimedBlock()


def relative_interval(samples: list[float]) -> float:
    """Return half the 95 % confidence interval of the mean, relative to the mean."""
    if len(samples) < 2:
        return 0.0
    half: float = 1.96 * statistics.stdev(samples) / len(samples) ** 0.5 / statistics.mean(samples)
    return half


_HOST_BLOCKS = 8
_HEAD_WIDTH = 8
_TOKENS = 16
_WARM_STEPS = 5
_STEPS = 4
_HOST_SAMPLES = 5
# Smaller than any gradient, so that each gradient has its own bucket, like the large gradients in training
_ONE_TENSOR_MB = 0.001


def time_host(torch: Any, model: TransformerModel) -> dict[Sharding | None, float]:
    """Return the time of the host to launch forward and backward pass, in seconds per block.

    The times are for blocks without data parallelism (None), with DDP and with FSDP. Raises PyTorch's errors.
    """
    distributed, replicated = torch.distributed, torch.nn.parallel.DistributedDataParallel
    if distributed.is_initialized():
        raise RuntimeError("this process already has a process group")

    def shard(stack: Any) -> Any:
        fully_shard = import_fully_shard()
        for block in stack:
            fully_shard(block)
        return fully_shard(stack)

    try:
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=device)
        return {
            None: _seconds(torch, model, lambda stack: stack),
            Sharding.DDP: _seconds(torch, model, partial(replicated, bucket_cap_mb=_ONE_TENSOR_MB)),
            Sharding.FSDP: _seconds(torch, model, shard),
        }
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _seconds(torch: Any, model: TransformerModel, wrap: Callable[[Any], Any]) -> float:
    hidden = _HEAD_WIDTH * model.heads
    tiny = replace(model, hidden=hidden, head_size=_HEAD_WIDTH, intermediate=hidden, sequence=_TOKENS, batch=1)
    step = _make_step(torch, tiny, _HOST_BLOCKS, wrap)
    for _ in range(_WARM_STEPS):
        step()
    samples = []
    for _ in range(_HOST_SAMPLES):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        samples.append((perf_counter() - begun) / _STEPS / _HOST_BLOCKS)
    return median(samples)
