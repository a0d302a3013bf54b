"""Stacks of GPT blocks and of MLPs, also split over the ranks of tensor parallelism as Megatron-LM splits them.

Column-parallel, then row-parallel linear layers; an all-reduce after attention and after the MLP in the forward pass,
and before each in the backward pass (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """Ranks that share a block, and their group; without a group they do not communicate."""

    count: int = 1
    group: Any = None


def stack(model: dict[str, Any], layers: int, ranks: TensorRanks | None = None) -> Any:
    kind = Block if model["kind"] == "gpt" else Perceptron
    return nn.Sequential(*(kind(model, ranks or TensorRanks()) for _ in range(layers)))


class IntoShards(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose gradients are summed over the ranks."""

    @staticmethod
    def forward(context: Any, data: Any, group: Any) -> Any:
        context.group = group
        return data.view_as(data)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        gradient = gradient.contiguous()
        if context.group is not None:
            dist.all_reduce(gradient, group=context.group)
        return gradient, None


class FromShards(torch.autograd.Function):  # type: ignore[misc]
    """The sum over the ranks, whose gradient is the identity."""

    @staticmethod
    def forward(_context: Any, data: Any, group: Any) -> Any:
        if group is not None:
            dist.all_reduce(data, group=group)
        return data.view_as(data)

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        return gradient, None


class _Shared(nn.Module):  # type: ignore[misc]
    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks

    def split(self, data: Any) -> Any:
        """Pass the input to this rank's share of the weights."""
        return data if self.ranks.count == 1 else IntoShards.apply(data, self.ranks.group)

    def join(self, data: Any) -> Any:
        """Sum the results of all ranks."""
        return data if self.ranks.count == 1 else FromShards.apply(data, self.ranks.group)


class Perceptron(_Shared):
    """Two linear layers with GELU between them; the inner width is four times the outer."""

    def __init__(self, model: dict[str, Any], ranks: TensorRanks) -> None:
        super().__init__(ranks)
        hidden = model["hidden"]
        self.up = nn.Linear(hidden, 4 * hidden // ranks.count)
        self.down = nn.Linear(4 * hidden // ranks.count, hidden)

    def forward(self, data: Any) -> Any:
        return data + self.join(self.down(functional.gelu(self.up(self.split(data)), approximate="tanh")))


class Attention(_Shared):
    """Causal self-attention."""

    def __init__(self, model: dict[str, Any], ranks: TensorRanks) -> None:
        super().__init__(ranks)
        hidden = model["hidden"]
        self.heads = model["heads"] // ranks.count
        self.into = nn.Linear(hidden, 3 * hidden // ranks.count)
        self.out = nn.Linear(hidden // ranks.count, hidden)

    def forward(self, data: Any) -> Any:
        batch, sequence, _ = data.shape
        parts = self.into(self.split(data)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.join(self.out(found.transpose(1, 2).reshape(batch, sequence, -1)))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, model: dict[str, Any], ranks: TensorRanks) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(model["hidden"]), nn.LayerNorm(model["hidden"])
        self.attention, self.perceptron = Attention(model, ranks), Perceptron(model, ranks)

    def forward(self, data: Any) -> Any:
        data = data + self.attention(self.norm1(data))
        return self.perceptron(self.norm2(data))
