"""Models on one GPU, on all GPUs at once and without communication."""

import statistics
from typing import Any

import torch

from benchmarks.training.models import MEGA
from benchmarks.training.timing import Rank, Step, step_of


def copy_gb_s(rank: Rank) -> float:
    """Return the bytes that a copy within GPU memory reads and writes, in GB/s of 1e9 bytes."""
    source = torch.zeros(256 * MEGA, device=rank.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / rank.average(lambda: target.copy_(source), 10) / 1e6)


def single(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure steps, forward passes, and the copies that DDP makes."""
    module, data = rank.model(model), rank.input(model)
    step = step_of(module, data)
    rank.settle(step)
    whole = rank.timed(step)
    forward = rank.timed(lambda: module(data))
    rank.found["single"].append(
        {
            "model": name,
            "step_ms": statistics.median(whole),
            "forward_ms": statistics.median(forward),
            "copies_ms": statistics.median(rank.timed(_copies(module))),
            "all_ms": whole,
            "parameters": [[parameter, list(value.shape)] for parameter, value in module.named_parameters()],
        }
    )


def again(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure steps again after the distributed ones: clocks fall while a GPU is busy and warm."""
    whole = rank.timed(step_of(rank.model(model), rank.input(model)))
    own = next(row for row in rank.found["single"] if row["model"] == name)
    own["again_ms"] = statistics.median(whole)


def _copies(module: Any) -> Step:
    """Copy every gradient into a flat buffer and back, as DDP does around its all-reduce."""
    own = [torch.zeros_like(parameter) for parameter in module.parameters()]
    flat = torch.zeros(sum(gradient.numel() for gradient in own), device=own[0].device, dtype=own[0].dtype)
    sizes = [gradient.numel() for gradient in own]
    views = [part.view_as(gradient) for part, gradient in zip(flat.split(sizes), own, strict=True)]

    def copies() -> None:
        for view, gradient in zip(views, own, strict=True):
            view.copy_(gradient)
        for view, gradient in zip(views, own, strict=True):
            gradient.copy_(view)

    return copies
