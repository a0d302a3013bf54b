"""What the links of a rank's GPU carried while operations were timed, against what had to pass through them."""

from dataclasses import dataclass, replace

from gpubench.collectives.movement import least_moved
from gpubench.measure.cases import Case, SweepRequest
from gpubench.measure.p2p_counters import Meter, Reading
from gpubench.model.p2p import Carried
from gpubench.ports import LinkCounters

COUNTED_FROM_BYTES = 64 * 2**20
"""Timed operations of less in all are not counted: other traffic ticks too."""

_GPU = 0
_NOTHING = Carried()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank's GPU sent and received in a batch of timed operations. A count is empty where nothing was due."""

    sent: Carried = _NOTHING
    received: Carried = _NOTHING

    def merged(self, earlier: "Traffic") -> "Traffic":
        """This one, and of the earlier one what only it has: PCIe's counters are too small for the largest batches."""
        return replace(self, sent=_merged(self.sent, earlier.sent), received=_merged(self.received, earlier.received))


def _merged(late: Carried, early: Carried) -> Carried:
    if late.nvlink_share is None and late.pcie_share is None:
        return early
    return late


class Counting:
    """Reads the counters of this rank's GPU around batches of a sweep."""

    def __init__(self, counters: LinkCounters, request: SweepRequest, rank: int, ranks: int) -> None:
        self._meter = Meter(counters)
        self._request = request
        self._rank, self._ranks = rank, ranks
        self._moved: tuple[int, int] | None = None

    def is_worth_it(self, case: Case, operations: int) -> bool:
        """Whether so many operations move enough to be seen: the same on every rank."""
        return case.size_bytes * operations >= COUNTED_FROM_BYTES

    def due(self, case: Case) -> tuple[float, float]:
        """Bytes that this rank has to send and to receive, at least, for a byte of the size."""
        sent, received = (blocks * case.layout.count / case.layout.largest for blocks in self._blocks(case))
        return sent, received

    def before(self) -> Reading:
        """The counters now; half a millisecond."""
        return self._meter.read(_GPU)

    def since(self, before: Reading, case: Case, operations: int) -> Traffic:
        """What was carried since, by so many operations."""
        sent, received = (blocks * self._bytes_a_block(case) * operations for blocks in self._blocks(case))
        return Traffic(
            sent=self._meter.since(before, sent) if sent else _NOTHING,
            received=self._meter.since(before, received, receives=True) if received else _NOTHING,
        )

    def _bytes_a_block(self, case: Case) -> int:
        return case.layout.count * case.dtype.size_bytes

    def _blocks(self, case: Case) -> tuple[int, int]:
        """What is due, in units of the count that NCCL is handed, which is the same for every size."""
        if self._moved is None:
            layout = case.layout
            moved = least_moved(self._request.collective, layout, self._rank, self._ranks, self._request.root)
            self._moved = moved.sent // layout.count, moved.received // layout.count
        return self._moved
