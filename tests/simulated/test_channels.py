"""Channels over NICs: equal shares, so that the slowest NIC that takes part decides."""

import pytest

from gpubench.simulated.times import node_channels, rings_gb_s

HEALTHY = (50.0,) * 8


def with_one(gb_s: float) -> tuple[float, ...]:
    """Seven healthy NICs, and one of so much."""
    return (*HEALTHY[1:], gb_s)


@pytest.mark.parametrize(
    ("nics", "channels"),
    [
        (HEALTHY, (0, 1, 2, 3, 4, 5, 6, 7)),
        (with_one(25.0), (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6)),
        (with_one(5.0), (0, 1, 2, 3, 4, 5, 6)),
        (with_one(48.0), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((25.0,), (0,)),
        ((), ()),
    ],
)
def test_the_search_takes_the_most_bandwidth_of_equal_channels(
    nics: tuple[float, ...], channels: tuple[int, ...]
) -> None:
    assert node_channels(nics) == channels


@pytest.mark.parametrize(("slow", "together"), [(48.0, 384), (40.0, 320), (25.0, 200), (20.0, 350), (5.0, 350)])
def test_one_slow_nic_slows_all_channels_unless_none_is_bound_to_it(slow: float, together: float) -> None:
    assert rings_gb_s([HEALTHY, with_one(slow)]) == pytest.approx(together)
