"""Byte counters of the links of GPUs."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that the NVLinks of a GPU, all together, and its PCIe link have carried; None where they are not counted.

    Counters of PCIe start again from 0 at 2^32.
    """

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """Byte counters of the links of GPUs."""

    def read(self, gpu: int) -> LinkBytes:
        """The counters of the GPU at that position."""
