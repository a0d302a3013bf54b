"""The bytes that the links of a rank's GPU carry in operations of a sweep, against those that have to pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpubench.collectives.movement import least_moved
from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import Case
from gpubench.measure.paths.counters import CounterReading, Meter
from gpubench.model.paths.p2p import Carried
from gpubench.ports.link_counters import LinkCounters

COUNTED_BYTES = 64 * 2**20
"""So much has to pass to be counted: other traffic ticks too."""

_MOST_OPERATIONS = 64
"""Sizes of which it takes more to move that much are not counted."""

_GPU = 0
_NOTHING = Carried()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a rank's GPU sent and received in a batch of operations; empty where none had to pass."""

    sent: Carried = _NOTHING
    received: Carried = _NOTHING

    def merged(self, earlier: "Traffic") -> "Traffic":
        """This traffic, with the earlier where it has none: PCIe's counters are too small for the largest batches."""
        ends = ((self.sent, earlier.sent), (self.received, earlier.received))
        return Traffic(*(before if now.nvlink_share is now.pcie_share is None else now for now, before in ends))


class Counting:
    """Reads the counters of this rank's GPU around operations of a sweep."""

    def __init__(self, counters: LinkCounters, request: SweepRequest, rank: int, ranks: int) -> None:
        self._meter, self._request, self._rank, self._ranks = Meter(counters), request, rank, ranks
        self._moved: tuple[int, int] | None = None

    def expected_bytes(self, case: Case) -> tuple[float, float]:
        """Bytes that this rank has to send and to receive, at least, for a byte of the size."""
        sent, received = (blocks * case.layout.count / case.layout.largest for blocks in self._blocks(case))
        return sent, received

    def count(
        self, cases: Sequence[Case], run_once: Callable[[Case], object], barrier: Callable[[], object]
    ) -> Traffic:
        """The traffic of operations that are run to be counted, of every size for which that takes few enough.

        No more of each than it takes: PCIe's counters are soon at their end. Counters are not read around what is
        timed, since a GPU that has waited for that, half a millisecond, is slower for a while.
        """
        found = Traffic()
        for size, case in {case.size_bytes: case for case in cases}.items():
            operations = -(-COUNTED_BYTES // size)
            if operations > _MOST_OPERATIONS:
                continue
            before = self._meter.read(_GPU)
            barrier()
            for _ in range(operations):
                run_once(case)
            found = self._since(before, case, operations).merged(found)
        return found

    def _since(self, before: CounterReading, case: Case, operations: int) -> Traffic:
        bytes_a_block = case.layout.count * case.dtype.size_bytes
        sent, received = (blocks * bytes_a_block * operations for blocks in self._blocks(case))
        return Traffic(
            sent=self._meter.since(before, sent) if sent else _NOTHING,
            received=self._meter.since(before, received, receives=True) if received else _NOTHING,
        )

    def _blocks(self, case: Case) -> tuple[int, int]:
        """The blocks that this rank sends and receives, of the count that NCCL is handed: the same for every size."""
        if self._moved is None:
            layout = case.layout
            moved = least_moved(self._request.collective, layout, self._rank, self._ranks, self._request.root)
            self._moved = moved.sent // layout.count, moved.received // layout.count
        return self._moved
