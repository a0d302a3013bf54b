"""Bytes and shares from link counters."""

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
    def __init__(self, *readings: LinkBytes) -> None:
        self._readings = list(readings)

    def read(self, gpu: int) -> LinkBytes:
        assert gpu == 3
        return self._readings.pop(0)


def carried(*readings: LinkBytes, due_bytes: int = MIB, receives: bool = False, seconds: float = 60.0) -> list[Carried]:
    meter = Meter(Ticking(*readings), count(0.0, seconds).__next__)
    return [meter.since(meter.read(3), due_bytes, receives=receives) for _ in range(len(readings) // 2)]


def test_what_is_not_counted_is_not_known() -> None:
    assert carried(LinkBytes(), LinkBytes()) == [Carried()]
    assert carried(LinkBytes(nvlink_sent=0), LinkBytes()) == [Carried()]


@given(st.integers(0, COUNTER - 1), st.integers(MIB, 2**30))
def test_pcie_counters_begin_again(before: int, copied: int) -> None:
    after = (before + copied) % COUNTER
    (found,) = carried(LinkBytes(pcie_sent=before), LinkBytes(pcie_sent=after), due_bytes=copied)
    assert (found.pcie_bytes, found.pcie_share) == (copied, 1.0)


@pytest.mark.parametrize("due_bytes", [4 * 2**30, 2**40])
def test_pcie_counters_say_nothing_of_what_may_have_gone_around_them(due_bytes: int) -> None:
    (found,) = carried(LinkBytes(pcie_sent=0), LinkBytes(pcie_sent=7), due_bytes=due_bytes)
    assert found == Carried()
