"""Rates between readings: what is not surely counted is unknown, with the reason, and never 0."""

import json
from typing import Any

import pytest

from gpubench.errors import UsageError
from gpubench.model.facts.traffic import GpuReading, NicReading, NodeReading, compute_rates, sum_rates
from gpubench.model.terms.plain import from_plain, to_plain

GB = 10**9


def gpu(sent: int | None, received: int | None = 0, **more: Any) -> GpuReading:
    return GpuReading(index=0, bus_id="a", nvlink_sent_bytes=sent, nvlink_received_bytes=received, **more)


def node(seconds: float, *gpus: GpuReading, nics: tuple[NicReading, ...] = (), **more: Any) -> NodeReading:
    return NodeReading(host="h", seconds=seconds, gpus=gpus, nics=nics, **more)


def test_bytes_over_seconds_are_a_rate() -> None:
    found = compute_rates(
        node(10, gpu(5 * GB, GB)), node(12, gpu(9 * GB, GB, pcie_sent_gb_s=3.0, pcie_received_gb_s=0.0))
    )
    (one,) = found.gpus
    assert (found.begin, found.end) == (10, 12)
    assert (one.nvlink_sent, one.nvlink_received, one.pcie_sent, one.pcie_received) == (2.0, 0.0, 3.0, 0.0)
    assert one.unknown == {}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (None, 5 * GB, "there is no earlier value"),
        (5 * GB, None, "there is no earlier value"),
        (5 * GB, 4 * GB, "decreased, because it was reset"),
        (5 * GB, 9_000 * GB, "increased by more than the links allow"),
    ],
)
def test_a_counter_that_tells_nothing_is_unknown(before: int | None, after: int | None, reason: str) -> None:
    (one,) = compute_rates(node(0, gpu(before)), node(1, gpu(after))).gpus
    assert one.nvlink_sent is None
    assert reason in one.unknown["nvlink_sent"]
    assert one.nvlink_received == 0.0


def test_a_lost_gpu_is_unknown_in_everything() -> None:
    (one,) = compute_rates(node(0, gpu(1)), node(1, gpu(2, lost="GPU is lost", pcie_sent_gb_s=None))).gpus
    assert set(one.unknown.values()) == {"GPU is lost"}


def test_a_gpu_that_is_lost_while_it_is_read_has_no_rates() -> None:
    (one,) = compute_rates(
        node(0, gpu(1)), node(1, gpu(2, lost="GPU is lost", nvlink_sent_gb_s=4.0, pcie_sent_gb_s=0.1))
    ).gpus
    assert (one.lost, one.nvlink_sent, one.pcie_sent) == ("GPU is lost", None, None)


@pytest.mark.parametrize("rate", [-1.0, 1e9])
def test_a_rate_that_no_link_carries_is_unknown(rate: float) -> None:
    (one,) = compute_rates(node(0, gpu(1)), node(1, gpu(2, nvlink_sent_gb_s=rate, pcie_received_gb_s=rate))).gpus
    assert (one.nvlink_sent, one.pcie_received) == (None, None)
    assert (
        one.unknown["nvlink_sent"]
        == one.unknown["pcie_received"]
        == ("the driver's rate is higher than the links allow")
    )


def nic(sent: int | None, received: int | None = 0, **more: Any) -> NicReading:
    return NicReading(name="mlx5_0", rdma=True, sent_bytes=sent, received_bytes=received, **more)


def test_a_counter_with_a_known_end_may_go_around_once() -> None:
    before, after = nic(2**32 - GB, counts_to=2**32), nic(GB, counts_to=2**32)
    (one,) = compute_rates(node(0, nics=(before,)), node(1, nics=(after,))).nics
    assert one.sent == pytest.approx(2.0)


def test_a_counter_that_went_back_by_too_much_was_reset() -> None:
    (one,) = compute_rates(node(0, nics=(nic(500 * GB),)), node(1, nics=(nic(0),))).nics
    assert one.sent is None
    assert "reset" in one.unknown["sent"]


def test_errors_grow_by_what_two_readings_have() -> None:
    before, after = gpu(0, errors={"a": 5, "b": 1}), gpu(0, errors={"a": 7, "b": 1, "c": 9})
    (one,) = compute_rates(node(0, before), node(1, after)).gpus
    assert one.errors_grown == {"a": 2}
    assert compute_rates(node(0, after), node(1, before)).gpus[0].errors_grown == {}


def test_a_sum_with_something_unknown_is_unknown() -> None:
    assert sum_rates([1.0, 2.0]) == 3.0
    assert sum_rates([1.0, None]) is None
    assert sum_rates([]) == 0.0


READING = to_plain(node(1, gpu(GB), nics=(NicReading(name="mlx5_0", rdma=True, sent_bytes=GB, errors={"symbol": 1}),)))


@pytest.mark.parametrize(
    ("part", "changed", "seen"),
    [
        ((), {"seconds": -1.0}, "line 1.seconds is -1.0"),
        ((), {"seconds": 1e300}, "line 1.seconds is 1e+300"),
        (("gpus", 0), {"index": -1}, "line 1.gpus[0].index is -1"),
        (("gpus", 0), {"nvlink_received_bytes": -1}, "line 1.gpus[0].nvlink_received_bytes is -1"),
        (("gpus", 0), {"pcie_sampled_seconds": -0.5}, "line 1.gpus[0].pcie_sampled_seconds is -0.5"),
        (("gpus", 0), {"utilization_percent": -1}, "line 1.gpus[0].utilization_percent is -1"),
        (("gpus", 0), {"clock_mhz": -1}, "line 1.gpus[0].clock_mhz is -1"),
        (("nics", 0), {"counts_to": 0}, "line 1.nics[0].counts_to is 0"),
        (("nics", 0), {"errors": {"symbol": -1}}, "line 1.nics[0].errors[...] is out of range"),
    ],
)
def test_a_reading_that_no_clock_or_counter_shows_is_refused(
    part: tuple[str | int, ...], changed: dict[str, Any], seen: str
) -> None:
    plain = json.loads(json.dumps(READING))
    place: Any = plain
    for name in part:
        place = place[name]
    place.update(changed)
    with pytest.raises(UsageError) as raised:
        from_plain(NodeReading, plain, "line 1")
    assert raised.value.seen == seen


def test_what_a_driver_says_in_error_is_kept_as_it_said_it() -> None:
    """Its averages may be nonsense: these are unknown in the rates, and a recording of them is read again."""
    said = node(2, gpu(GB, pcie_sent_gb_s=-3.0, pcie_received_gb_s=1e9), nics=(NicReading(name="x", rdma=True),))
    assert from_plain(NodeReading, json.loads(json.dumps(to_plain(said)))) == said
    assert compute_rates(node(1, gpu(0)), said).gpus[0].pcie_sent is None
