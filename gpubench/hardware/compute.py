"""Computation on one GPU: matrix products by CuPy, a model's blocks by PyTorch, and the host's time to issue them."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.cuda import CudaDevice
from gpubench.hardware.torch.distributed import import_fully_shard, import_torch
from gpubench.model.workload import BlockKind, Sharding, TransformerModel
from gpubench.records import dataclass

_SETTLE_SECONDS = 0.5  # Clocks and power of a GPU that was idle fall to what it can hold within this
_SAMPLES = 7
_SAMPLE_SECONDS = 0.02
_COPY_BYTES = 2**28
_MILLISECONDS = 1e3


class ProductTimer:
    """Times operations of one GPU, each as samples of seconds."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._cupy = device, device.cupy
        self._settled = False

    def product(self, rows: int, inner: int, columns: int) -> list[float]:
        """Of a product of float16 matrices, (rows × inner) by (inner × columns), accumulated in float32."""
        cupy = self._cupy
        first, second = self._matrix(rows, inner), self._matrix(inner, columns)
        out = cupy.empty((rows, columns), dtype=cupy.float16)
        return self._samples(lambda: cupy.matmul(first, second, out=out))

    def copy(self) -> list[float]:
        """Of a copy; `copy_bytes` are read, and as many written."""
        cupy = self._cupy
        source = cupy.zeros(_COPY_BYTES // 4, dtype=cupy.float32)
        target = cupy.empty_like(source)
        return self._samples(lambda: cupy.copyto(target, source))

    @property
    def copy_bytes(self) -> int:
        """Bytes that `copy` reads."""
        return _COPY_BYTES

    def _matrix(self, rows: int, columns: int) -> object:
        """Numbers of both signs: zeros take less power, and so run at higher clocks."""
        cupy = self._cupy
        values = cupy.arange(rows * columns, dtype=cupy.int32) % 13 - 6
        return (values.astype(cupy.float16) / 8).reshape(rows, columns)

    def _samples(self, launch: Callable[[], object]) -> list[float]:
        launch()
        self._device.stream.synchronize()
        count = max(1, round(_SAMPLE_SECONDS / max(1e-6, self._once(launch, 3))))
        if not self._settled:
            until = perf_counter() + _SETTLE_SECONDS
            while perf_counter() < until:
                self._once(launch, count)
            self._settled = True
        return [self._once(launch, count) for _ in range(_SAMPLES)]

    def _once(self, launch: Callable[[], object], count: int) -> float:
        stream, event = self._device.stream, self._cupy.cuda.Event
        first, last = event(), event()
        first.record(stream)
        for _ in range(count):
            launch()
        last.record(stream)
        last.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(first, last)
        return milliseconds / _MILLISECONDS / count


_BLOCKS = 2
_BLOCK_SETTLE_SECONDS = 1.5
_SETTLING_STEPS = 8
_BLOCK_SAMPLES = 25
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
        blocks = torch.nn.Sequential(*(_block_module(torch, model) for _ in range(_BLOCKS))).to(dtype)
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
    kept = sorted(samples, key=sum)[2:-2]
    return BlockSeconds(
        forward=[each[0] for each in kept],
        backward=[each[1] for each in kept],
        described=f"{_BLOCKS} blocks by PyTorch {torch.__version__} on {torch.cuda.get_device_name()}",
    )


def _block_module(torch: Any, model: TransformerModel) -> Any:
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


_HOST_BLOCKS = 8
_HEAD_WIDTH = 8
_TOKENS = 16
_WARM_STEPS = 5
_STEPS = 4
_HOST_SAMPLES = 5
_ONE_TENSOR_MB = 0.001  # A cap that every gradient exceeds, so that each has a bucket of its own, as large ones have


def time_host(model: TransformerModel) -> dict[Sharding | None, float]:
    """Seconds of a block, forward and backward: alone (None), in DDP and FSDP. Raises CouldNotMeasureError."""
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
    hidden = _HEAD_WIDTH * model.heads
    tiny = replace(model, hidden=hidden, intermediate=hidden, sequence=_TOKENS, batch=1)
    dtype = getattr(torch, str(model.data_type))
    with torch.device("cuda"):
        stack = wrap(torch.nn.Sequential(*(_block_module(torch, tiny) for _ in range(_HOST_BLOCKS))).to(dtype))
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
    for _ in range(_HOST_SAMPLES):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        samples.append((perf_counter() - begun) / _STEPS / _HOST_BLOCKS)
    return median(samples)
