"""Forward and backward of blocks of a model on one GPU, by the PyTorch of the user's environment."""

import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.torch.library import import_torch
from gpubench.model.workload.transformer import BlockKind, TransformerModel

_BLOCKS = 2
_SETTLE_SECONDS = 1.5
_SETTLING_STEPS = 8
_SAMPLES = 25
"""Enqueued without a pause between them: with one after every step a GPU is cool enough for clocks that it does not
hold in training. 16 blocks took 72.8 ms so, and 82 in steps that follow each other (H200)."""


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of the forward and the backward pass of one block, in samples, and of what."""

    forward: list[float]
    backward: list[float]
    described: str


def time_blocks(model: TransformerModel) -> BlockSeconds:
    """Time the blocks of a model; CouldNotMeasureError where this PyTorch has no GPU, or its memory is too small."""
    torch = import_torch()
    if not torch.cuda.is_available():
        raise CouldNotMeasureError(
            f"PyTorch {torch.__version__} finds no GPU",
            expected="a PyTorch built for CUDA",
            next_step="--backward-ms MS",
        )
    try:
        return _timed(torch, model)
    except torch.cuda.OutOfMemoryError as error:
        raise CouldNotMeasureError(
            f"{_BLOCKS} blocks do not fit the GPU's memory: {str(error).splitlines()[0]}",
            next_step=f"--batch {max(1, model.batch // 2)}",
        ) from None


def _timed(torch: Any, model: TransformerModel) -> BlockSeconds:
    dtype = getattr(torch, str(model.data_type))
    with torch.device("cuda"):
        blocks = torch.nn.Sequential(*(block_module(torch, model) for _ in range(_BLOCKS))).to(dtype)
        data = torch.randn(model.batch, model.sequence, model.hidden, dtype=dtype).requires_grad_()
        gradient = torch.randn_like(data)
    parameters = list(blocks.parameters())

    def step() -> list[Any]:
        for each in parameters:
            each.grad = None
        data.grad = None
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = blocks(data)
        marks[1].record()
        out.backward(gradient)
        marks[2].record()
        return marks

    until = perf_counter() + _SETTLE_SECONDS
    while perf_counter() < until:
        for _ in range(_SETTLING_STEPS):
            step()
        torch.cuda.synchronize()
    steps = [step() for _ in range(_SAMPLES)]
    torch.cuda.synchronize()
    samples = [
        (one.elapsed_time(two) / 1e3 / _BLOCKS, two.elapsed_time(end) / 1e3 / _BLOCKS) for one, two, end in steps
    ]
    kept = sorted(samples, key=sum)[2:-2]
    return BlockSeconds(
        forward=[each[0] for each in kept],
        backward=[each[1] for each in kept],
        described=f"{_BLOCKS} blocks by PyTorch {torch.__version__} on {torch.cuda.get_device_name()}",
    )


def block_module(torch: Any, model: TransformerModel) -> Any:
    """A block: attention, with shared keys and values where it has them, and an MLP, of experts a token's."""
    nn, functional = torch.nn, torch.nn.functional
    hidden, heads, bias = model.hidden, model.heads, model.biases
    shared = model.key_value_heads or heads
    width = model.width * max(1, model.experts_per_token)

    class TimedBlock(nn.Module):  # type: ignore[misc,name-defined]
        """What one block computes."""

        def __init__(self) -> None:
            super().__init__()
            self.attends = model.kind is BlockKind.TRANSFORMER
            if self.attends:
                self.norm1, self.norm2 = nn.LayerNorm(hidden, bias=bias), nn.LayerNorm(hidden, bias=bias)
                self.into = nn.Linear(hidden, hidden + 2 * model.key_value_width, bias=bias)
                self.out = nn.Linear(hidden, hidden, bias=bias)
            self.up = nn.Linear(hidden, width * (2 if model.gated else 1), bias=bias)
            self.down = nn.Linear(width, hidden, bias=bias)

        def forward(self, data: Any) -> Any:
            if self.attends:
                data = data + self.attention(self.norm1(data))
            inner = self.up(self.norm2(data) if self.attends else data)
            if model.gated:
                gate, inner = inner.chunk(2, dim=-1)
                return data + self.down(functional.silu(gate) * inner)
            return data + self.down(functional.gelu(inner, approximate="tanh"))

        def attention(self, data: Any) -> Any:
            batch, sequence, _ = data.shape
            size = hidden // heads
            parts = self.into(data).split([hidden, shared * size, shared * size], dim=-1)
            query, key, value = (each.view(batch, sequence, -1, size).transpose(1, 2) for each in parts)
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shared != heads
            )
            return self.out(found.transpose(1, 2).reshape(batch, sequence, -1))

    return TimedBlock()


def spread_of(samples: list[float]) -> float:
    """Half of the 95 % interval of a mean, as a part of it."""
    if len(samples) < 2:
        return 0.0
    half: float = 1.96 * statistics.stdev(samples) / len(samples) ** 0.5 / statistics.mean(samples)
    return half
