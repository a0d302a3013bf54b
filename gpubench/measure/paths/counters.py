"""The bytes that the links of a GPU carried during copies, which show the path they took."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from gpubench.model.paths.p2p import MOVED_SHARE, Carried
from gpubench.ports.link_counters import LinkBytes, LinkCounters

_COUNTED_FROM_BYTES = 2**20
"""NVLink counters tick in KiB, and other traffic ticks too."""

PCIE_COUNTS_TO = 2**32
"""NVML's PCIe byte counters start again from 0 there."""

_MOST_PCIE_BYTES = PCIE_COUNTS_TO / 2.5
"""Bytes that may be expected, however long it takes, without going once around the counter: collectives move up to
twice of that, and H200s count 1.09 bytes for each that is sent, 1.08 for each that is received, headers included.
"""

_SURELY_ONCE_SECONDS = PCIE_COUNTS_TO / 128e9
"""Time in which no PCIe link of a GPU gets around the counter: PCIe 6 x16, the fastest, carries 121 GB/s one way."""


class CounterReading(NamedTuple):
    """The counters of a GPU, and the seconds of a clock just before."""

    gpu: int
    seconds: float
    counted: LinkBytes


class Meter:
    """Reads the counters of a GPU around copies."""

    def __init__(self, counters: LinkCounters, clock: Callable[[], float] = perf_counter) -> None:
        self._counters = counters
        self._clock = clock
        self._seen: set[tuple[int, str]] = set()

    def read(self, gpu: int) -> CounterReading:
        """The reading before copies, to be handed to `since` after them."""
        return CounterReading(gpu, self._clock(), self._counters.read(gpu))

    def since(self, reading: CounterReading, expected_bytes: int, *, receives: bool = False) -> Carried:
        """The bytes carried since a reading, from that GPU or to it, of at least so many expected."""
        gpu, since, before = reading
        after = self._counters.read(gpu)
        if receives:
            nvlink = _moved(before.nvlink_received, after.nvlink_received)
            pcie = _moved(before.pcie_received, after.pcie_received)
        else:
            nvlink = _moved(before.nvlink_sent, after.nvlink_sent)
            pcie = _moved(before.pcie_sent, after.pcie_sent)
        if pcie is not None:
            is_once = expected_bytes <= _MOST_PCIE_BYTES or self._clock() - since < _SURELY_ONCE_SECONDS
            pcie = pcie % PCIE_COUNTS_TO if is_once else None
        return Carried(
            nvlink_bytes=nvlink,
            nvlink_share=self._share((gpu, "nvlink"), nvlink, expected_bytes),
            pcie_bytes=pcie,
            pcie_share=self._share((gpu, "pcie"), pcie, expected_bytes),
        )

    def _share(self, counter: tuple[int, str], moved: int | None, expected_bytes: int) -> float | None:
        if moved is None or expected_bytes < _COUNTED_FROM_BYTES:
            return None
        share = moved / expected_bytes
        if share >= MOVED_SHARE:
            self._seen.add(counter)
        return share if counter in self._seen else None


def _moved(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
