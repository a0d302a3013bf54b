"""What counters say of copies: counted from before, around their end, and only where they are known to count."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.measure.paths import Meter
from gpubench.model.paths.p2p import Carried
from gpubench.ports.copies import LinkBytes

MIB = 2**20
COUNTER = 2**32


class Ticking:
    """Counters that tell one reading after another."""

    def __init__(self, *readings: LinkBytes) -> None:
        self._readings = list(readings)

    def read(self, gpu: int) -> LinkBytes:
        assert gpu == 3
        return self._readings.pop(0)


def carried(*readings: LinkBytes, due_bytes: int = MIB, receives: bool = False, seconds: float = 60.0) -> list[Carried]:
    """What was carried between each two readings, which lie so many seconds apart."""
    meter = Meter(Ticking(*readings), count(0.0, seconds).__next__)
    return [meter.since(meter.read(3), due_bytes, receives=receives) for _ in range(len(readings) // 2)]


def test_each_side_has_counters_of_its_own() -> None:
    readings = LinkBytes(1, 2, 3, 4), LinkBytes(1 + MIB, 2 + 3 * MIB, 3 + 5 * MIB, 4 + 7 * MIB)
    assert carried(*readings) == [Carried(MIB, 1.0, 5 * MIB, 5.0)]
    assert carried(*readings, receives=True) == [Carried(3 * MIB, 3.0, 7 * MIB, 7.0)]


def test_what_is_not_counted_is_not_known() -> None:
    assert carried(LinkBytes(), LinkBytes()) == [Carried()]
    assert carried(LinkBytes(nvlink_sent=0), LinkBytes()) == [Carried()]


def test_a_zero_counts_only_once_the_counter_has_moved() -> None:
    still, moved = LinkBytes(0, 0, 0, 0), LinkBytes(MIB, 0, 0, 0)
    first, second, third = carried(still, still, still, moved, moved, moved)
    assert (first.nvlink_share, second.nvlink_share, third.nvlink_share) == (None, 1.0, 0.0)
    assert (third.nvlink_bytes, third.pcie_share) == (0, None)


def test_small_copies_drown_in_other_traffic() -> None:
    (found,) = carried(LinkBytes(0, 0, 0, 0), LinkBytes(4096, 0, 9, 0), due_bytes=4096)
    assert found == Carried(nvlink_bytes=4096, pcie_bytes=9)


@given(st.integers(0, COUNTER - 1), st.integers(MIB, 2**30))
def test_pcie_counters_begin_again(before: int, copied: int) -> None:
    after = (before + copied) % COUNTER
    (found,) = carried(LinkBytes(pcie_sent=before), LinkBytes(pcie_sent=after), due_bytes=copied)
    assert (found.pcie_bytes, found.pcie_share) == (copied, 1.0)


@pytest.mark.parametrize("due_bytes", [4 * 2**30, 2**40])
def test_pcie_counters_say_nothing_of_what_may_have_gone_around_them(due_bytes: int) -> None:
    (found,) = carried(LinkBytes(pcie_sent=0), LinkBytes(pcie_sent=7), due_bytes=due_bytes)
    assert found == Carried()


def test_pcie_counters_cannot_go_around_in_a_moment() -> None:
    before, after = LinkBytes(pcie_sent=COUNTER - 1), LinkBytes(pcie_sent=6)
    (found,) = carried(before, after, due_bytes=2**40, seconds=0.02)
    assert (found.pcie_bytes, found.pcie_share) == (7, None)
