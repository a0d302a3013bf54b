"""GPU support of the MPI library of a process."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFacts:
    """The MPI library that is loaded and started. None is unknown, and `unknown` says why, by field.

    `cuda_built` says whether it was built for memory of GPUs, `cuda_aware` whether it takes such memory in this run:
    one that does not copies through the host, or crashes. `pml` and `accelerator` are the components that Open MPI
    chose: `ucx`, `ob1` or `cm` carry the messages, and `null` means that no accelerator is supported.
    """

    version: str | None = None
    cuda_built: bool | None = None
    cuda_aware: bool | None = None
    pml: str | None = None
    accelerator: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
