"""Measure collectives beside the forward and backward pass of two blocks of a model, and beside GEMMs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.models import MEGA
from benchmarks.training.timing import Rank, step_of

_MODELS = ("gpt-0.8B", "mlp-0.8B")
_COLLECTIVES = ("allreduce", "allgather", "reducescatter")
_GEMM = 8192


def contention(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure all sizes of all-reduce, and one of the other collectives."""
    if not rank.cuda or name not in _MODELS:
        return
    partners = {f"{name} blocks": step_of(rank.model(model, 2), rank.input(model))}
    if name == _MODELS[0]:
        square = torch.randn(_GEMM, _GEMM, device=rank.device, dtype=torch.bfloat16)
        out = torch.empty_like(square)
        partners[f"gemm {_GEMM}"] = lambda: torch.matmul(square, square, out=out)
    sizes = (4, 16, 64, 256) if name == _MODELS[0] else (64,)
    for partner, work in partners.items():
        for collective in _COLLECTIVES:
            for size in sizes if collective == "allreduce" else (64,):
                _beside(rank, partner, work, collective, size * MEGA)


def _beside(rank: Rank, partner: str, work: Callable[[], Any], collective: str, size: int) -> None:
    """Time both alone, then together: the timed one begins later and ends earlier than the other."""
    other = torch.cuda.Stream()
    launch = _collective(rank, collective, size)
    comm_alone = _agreed(rank, rank.average(launch, 10, other))
    work_alone = _agreed(rank, rank.average(work, 6))
    with _running(rank, launch, other, max(4, int(14 * work_alone / comm_alone))):
        work_both = _agreed(rank, rank.average(work, 6))
    with _running(rank, work, torch.cuda.current_stream(), max(6, int(80 * comm_alone / work_alone))):
        comm_both = _agreed(rank, rank.average(launch, 10, other))
    rank.found["contention"].append(
        {
            "partner": partner,
            "collective": collective,
            "size_bytes": size,
            "communication_alone_us": comm_alone * 1e3,
            "compute_alone_us": work_alone * 1e3,
            "compute_slowdown": work_both / work_alone,
            "communication_slowdown": comm_both / comm_alone,
        }
    )


@contextmanager
def _running(rank: Rank, launch: Callable[[], Any], stream: Any, count: int) -> Iterator[None]:
    """Keep launches running on a stream while the body is timed."""
    dist.barrier()
    rank.wait()
    with torch.cuda.stream(stream):
        for _ in range(count):
            launch()
    yield
    rank.wait()


def _agreed(rank: Rank, value: float) -> float:
    """Return the largest value of all ranks, because they must issue the same collectives."""
    all_values = torch.tensor([value], device=rank.device)
    dist.all_reduce(all_values, op=dist.ReduceOp.MAX)
    return float(all_values.item())


def _collective(rank: Rank, name: str, size: int) -> Callable[[], Any]:
    whole = torch.zeros(size // 2, device=rank.device, dtype=torch.bfloat16)
    part = whole[: whole.numel() // rank.ranks].clone()
    calls = {
        "allreduce": lambda: dist.all_reduce(whole),
        "allgather": lambda: dist.all_gather_into_tensor(whole, part),
        "reducescatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    return calls[name]
