"""The buckets in which PyTorch's DistributedDataParallel reduces gradients.

Gradients fill buckets in the order in which they are ready, which is that of the backward pass; each goes into one
bucket whole, and a bucket is closed as soon as it holds its cap or more. The first bucket is 1 MiB where nobody gave a
cap, else it has the cap of all others (PyTorch 2.11, torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/reducer.cpp; "DDP", Li et al. 2020, arXiv 2006.15704, section 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_CAP_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that are reduced together: the numbers of their tensors in the order of the backward pass."""

    tensors: tuple[int, ...]
    size_bytes: int


def fill_buckets(
    sizes: Sequence[int], cap_bytes: int = DEFAULT_CAP_BYTES, first_bytes: int | None = None
) -> tuple[GradientBucket, ...]:
    """The buckets of gradients with these sizes, in the order in which they are ready."""
    found: list[GradientBucket] = []
    held: list[int] = []
    size = 0
    limit = cap_bytes if first_bytes is None else min(first_bytes, cap_bytes)
    for number, each in enumerate(sizes):
        held.append(number)
        size += each
        if size >= limit:
            found.append(GradientBucket(tuple(held), size))
            held, size, limit = [], 0, cap_bytes
    if held:
        found.append(GradientBucket(tuple(held), size))
    return tuple(found)
