"""The modules of `benchmarks.plan_steps`: stacks of GPT blocks and of MLPs, also split by tensor parallelism."""

import argparse
from typing import Any


def stack(model: dict[str, Any], layers: int, group: Any = None) -> Any:  # noqa: C901 - torch is imported within
    """So many blocks one after the other; split over the ranks of a group, if one is given, as Megatron-LM splits them.

    Column-parallel, then row-parallel linear layers; an all-reduce after attention and after the MLP in the forward
    pass, and before each in the backward pass (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    ranks = 1 if group is None else getattr(group, "ranks", None) or dist.get_world_size(group)
    talks = group is not None and not hasattr(group, "ranks")

    class IntoShards(torch.autograd.Function):  # type: ignore[misc]
        """The identity, whose gradients are summed over the ranks."""

        @staticmethod
        def forward(_context: Any, data: Any) -> Any:
            return data.view_as(data)

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            gradient = gradient.contiguous()
            if talks:
                dist.all_reduce(gradient, group=group)
            return gradient

    class FromShards(torch.autograd.Function):  # type: ignore[misc]
        """The sum over the ranks, whose gradient is the identity."""

        @staticmethod
        def forward(_context: Any, data: Any) -> Any:
            if talks:
                dist.all_reduce(data, group=group)
            return data.view_as(data)

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            return gradient

    def split(data: Any) -> Any:
        return data if group is None else IntoShards.apply(data)

    def join(data: Any) -> Any:
        return data if group is None else FromShards.apply(data)

    class Perceptron(nn.Module):  # type: ignore[misc]
        """Two linear layers with GELU between them, four times as wide inside."""

        def __init__(self) -> None:
            super().__init__()
            hidden = model["hidden"]
            self.up = nn.Linear(hidden, 4 * hidden // ranks)
            self.down = nn.Linear(4 * hidden // ranks, hidden)

        def forward(self, data: Any) -> Any:
            return data + join(self.down(functional.gelu(self.up(split(data)), approximate="tanh")))

    class Attention(nn.Module):  # type: ignore[misc]
        """Causal self-attention."""

        def __init__(self) -> None:
            super().__init__()
            hidden = model["hidden"]
            self.heads = model["heads"] // ranks
            self.into = nn.Linear(hidden, 3 * hidden // ranks)
            self.out = nn.Linear(hidden // ranks, hidden)

        def forward(self, data: Any) -> Any:
            batch, sequence, _ = data.shape
            parts = self.into(split(data)).view(batch, sequence, 3, self.heads, -1)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return join(self.out(found.transpose(1, 2).reshape(batch, sequence, -1)))

    class Block(nn.Module):  # type: ignore[misc]
        """A GPT block."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(model["hidden"]), nn.LayerNorm(model["hidden"])
            self.attention, self.perceptron = Attention(), Perceptron()

        def forward(self, data: Any) -> Any:
            data = data + self.attention(self.norm1(data))
            return self.perceptron(self.norm2(data))

    return nn.Sequential(*(Block() if model["kind"] == "gpt" else Perceptron() for _ in range(layers)))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("benchmarks.plan_steps runs them")
