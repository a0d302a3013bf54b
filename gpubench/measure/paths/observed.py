"""What is observed of paths: bytes that links carried, links while the job is idle, and NCCL's log."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep
from typing import NamedTuple

from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates
from gpubench.model.paths.p2p import MOVED_SHARE, Carried
from gpubench.model.paths.transport import Edge, LoggedChannels, RankSelection, Transport, Tuning
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.gpu_use import GpuUsers, NoUsers
from gpubench.ports.library_log import LibraryLog
from gpubench.ports.link_counters import LinkBytes, LinkCounters
from gpubench.readers.nccl_log.lines import INFO, parse_channel, parse_connection, parse_tuning, ring_pairs, tree_pairs

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


WINDOW_SECONDS = 0.02
"""Long enough for counters that tick slowly; no PCIe link of today gets around NVML's counter in that time."""

_MOST_SETTLING_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1
"""NVML's utilization is that of the last sixth of a second to the last second: what this job did is in it for a while,
and what others do stays.
"""


class IdleWindow:
    """Looks at GPUs while this job leaves them alone; whoever calls it sees to that."""

    def __init__(
        self,
        counters: LinkCounters,
        users: GpuUsers | None = None,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[float], object] = sleep,
    ) -> None:
        self._counters, self._users = counters, users or NoUsers()
        self._clock, self._wait = clock, wait

    def look(self, gpus: Sequence[int]) -> tuple[IdleGpu, ...]:
        """These GPUs now: it takes 20 ms, and up to 2 s where one of them computes."""
        before = [(self._clock(), self._counters.read(gpu)) for gpu in gpus]
        self._wait(WINDOW_SECONDS)
        rates = []
        for gpu, (since, counted) in zip(gpus, before, strict=True):
            after = self._counters.read(gpu)
            rates.append(_rates(counted, after, self._clock() - since))
        uses = self._settled(gpus)
        return tuple(IdleGpu(rates=rate, use=use) for rate, use in zip(rates, uses, strict=True))

    def _settled(self, gpus: Sequence[int]) -> Sequence[GpuUse]:
        """The use of GPUs, once what this job did there is forgotten."""
        *_, last = self._looks(gpus)
        return last

    def _looks(self, gpus: Sequence[int]) -> Iterator[Sequence[GpuUse]]:
        start = self._clock()
        while True:
            uses = [self._users.read(gpu) for gpu in gpus]
            yield uses
            if not any(use.is_busy for use in uses) or self._clock() - start >= _MOST_SETTLING_SECONDS:
                return
            self._wait(_SECONDS_BETWEEN_LOOKS)


def _rates(before: LinkBytes, after: LinkBytes, seconds: float) -> LinkRates:
    return LinkRates(
        nvlink_sent=_rate(before.nvlink_sent, after.nvlink_sent, seconds),
        nvlink_received=_rate(before.nvlink_received, after.nvlink_received, seconds),
        pcie_sent=_rate(before.pcie_sent, after.pcie_sent, seconds, PCIE_COUNTS_TO),
        pcie_received=_rate(before.pcie_received, after.pcie_received, seconds, PCIE_COUNTS_TO),
    )


def _rate(before: int | None, after: int | None, seconds: float, counts_to: int | None = None) -> float | None:
    if before is None or after is None or seconds <= 0:
        return None
    moved = after - before if counts_to is None else (after - before) % counts_to
    return moved / seconds / BYTES_PER_GB


class NcclLogListener:
    """Reads the log of this rank while NCCL writes it."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._channel_bits: dict[tuple[int, int, Transport, bool, bool], int] = {}
        self._ring: set[tuple[int, int]] = set()
        self._tree: set[tuple[int, int]] = set()
        self._is_readable = log.is_readable()

    def listen(self) -> Tuning | None:
        """Read what is new; return the last algorithm that is named in it."""
        tuning = None
        for line in self._log.lines() if self._is_readable else ():
            message = line.partition(INFO)[2]
            self._add_channel(message)
            self._ring.update(ring_pairs(line))
            self._tree.update(tree_pairs(line))
            tuning = parse_tuning(message) or tuning
        return tuning

    def selection(self) -> RankSelection:
        """All that was read."""
        edges = (
            Edge(src, dst, LoggedChannels(transport, bits, peer_to_peer, received))
            for (src, dst, transport, peer_to_peer, received), bits in self._channel_bits.items()
        )
        return RankSelection(
            no_log=self._log.no_log, edges=tuple(edges), ring=frozenset(self._ring), tree=frozenset(self._tree)
        )

    def _add_channel(self, message: bytes) -> None:
        head, _, text = message.partition(b" : ")
        place = parse_channel(head)
        found = None if place is None else parse_connection(text)
        if place is not None and found is not None:
            channel, connection = place
            key = found.src, found.dst, found.transport, connection == 1, found.received
            self._channel_bits[key] = self._channel_bits.get(key, 0) | 1 << channel
