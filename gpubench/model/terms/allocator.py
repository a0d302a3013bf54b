"""The allocator of a collective's buffers."""

from enum import StrEnum


class Allocator(StrEnum):
    """The library that allocates the buffers: CUDA, as frameworks do, or NCCL, as nccl-tests does.

    In CUDA graphs NCCL registers its own allocations and copies directly from and to them; elsewhere they are alike.
    """

    CUDA = "cuda"
    NCCL = "nccl"
