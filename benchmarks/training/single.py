"""Models on one GPU, all GPUs at once and nothing communicated."""

import statistics
from typing import Any

import torch

from benchmarks.training.models import MEGA
from benchmarks.training.timing import Rank, Step, step_of


def copy_gb_s(rank: Rank) -> float:
    """Bytes read and written by a copy within the GPU's memory, GB/s of 1e9 bytes."""
    source = torch.zeros(256 * MEGA, device=rank.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / rank.average(lambda: target.copy_(source), 10) / 1e6)


def single(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Steps, forward passes, and the copies that DDP makes."""
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
            "parameters": [[each, list(value.shape)] for each, value in module.named_parameters()],
        }
    )


def again(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Steps once more, behind what communicates: clocks fall while a GPU is busy and warm."""
    whole = rank.timed(step_of(rank.model(model), rank.input(model)))
    own = next(each for each in rank.found["single"] if each["model"] == name)
    own["again_ms"] = statistics.median(whole)


def _copies(module: Any) -> Step:
    """Every gradient into a flat buffer, tensor by tensor, and back: what DDP does beside reducing."""
    own = [torch.zeros_like(parameter) for parameter in module.parameters()]
    flat = torch.zeros(sum(each.numel() for each in own), device=own[0].device, dtype=own[0].dtype)
    sizes = [each.numel() for each in own]
    views = [part.view_as(each) for part, each in zip(flat.split(sizes), own, strict=True)]

    def copies() -> None:
        for view, each in zip(views, own, strict=True):
            view.copy_(each)
        for view, each in zip(views, own, strict=True):
            each.copy_(view)

    return copies
