"""What links of GPUs have carried."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that the NVLinks of a GPU, all together, and its PCIe link have carried; None where nothing counts them.

    Counters of PCIe start again from 0 at 2^32.
    """

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """What the links of GPUs have carried."""

    def read(self, gpu: int) -> LinkBytes:
        """What the GPU at that position has counted until now."""
        ...
