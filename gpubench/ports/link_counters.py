"""Byte counters of the links of GPUs."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that a GPU's NVLinks together and its PCIe link (wraps at 2^32) carried; None where not counted."""

    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None


class LinkCounters(Protocol):
    """Byte counters of the links of GPUs."""

    def read(self, gpu: int) -> LinkBytes:
        """The counters of the GPU at that position."""
