"""What the links of a GPU carried during copies: which way the bytes went."""

from gpubench.model.p2p import MOVED_SHARE, Carried
from gpubench.ports import Counted, LinkCounters

_COUNTED_FROM_BYTES = 2**20
"""NVLink counters tick in KiB, and other traffic ticks too."""

_PCIE_COUNTS_TO = 2**32
"""NVML's PCIe byte counters start again from 0 there."""

_MOST_PCIE_BYTES = int(_PCIE_COUNTS_TO / 1.25)
"""What copies may be without going once around the counter: H200s count 1.09 bytes for each that is sent, 1.08 for each
that is received, headers included.
"""


class Meter:
    """Reads the counters of a GPU around copies."""

    def __init__(self, counters: LinkCounters) -> None:
        self._counters = counters
        self._seen: set[tuple[int, str]] = set()

    def read(self, gpu: int) -> Counted:
        """Before copies; hand it to `since` after them."""
        return self._counters.read(gpu)

    def since(self, before: Counted, gpu: int, due_bytes: int, *, receives: bool = False) -> Carried:
        """What was carried since, from that GPU or to it, of so many bytes that were copied."""
        after = self._counters.read(gpu)
        if receives:
            nvlink = _moved(before.nvlink_received, after.nvlink_received)
            pcie = _around(before.pcie_received, after.pcie_received, due_bytes)
        else:
            nvlink = _moved(before.nvlink_sent, after.nvlink_sent)
            pcie = _around(before.pcie_sent, after.pcie_sent, due_bytes)
        return Carried(
            nvlink_bytes=nvlink,
            nvlink_share=self._share((gpu, "nvlink"), nvlink, due_bytes),
            pcie_bytes=pcie,
            pcie_share=self._share((gpu, "pcie"), pcie, due_bytes),
        )

    def _share(self, counter: tuple[int, str], moved: int | None, due_bytes: int) -> float | None:
        if moved is None or due_bytes < _COUNTED_FROM_BYTES:
            return None
        share = moved / due_bytes
        if share >= MOVED_SHARE:
            self._seen.add(counter)
        return share if counter in self._seen else None


def _moved(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _around(before: int | None, after: int | None, due_bytes: int) -> int | None:
    moved = _moved(before, after)
    return None if moved is None or due_bytes > _MOST_PCIE_BYTES else moved % _PCIE_COUNTS_TO
