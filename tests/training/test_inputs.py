"""What a prediction follows from: buckets, curves, contention, data sheets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.profiles import all_profiles
from gpubench.training.events import ContentionTable, MeasuredContention
from gpubench.training.program import (
    CollectiveTimesFound,
    CommunicatorRanks,
    CurvePoint,
    build_curve,
    estimate_times,
    find_data_sheet,
)
from gpubench.training.step import fill_buckets
from gpubench.training.workload import TransformerModel
from tests.training.jobs import LinearFabric

MEGABYTE = 2**20


def sizes_of(sizes: list[int], cap: int) -> list[int]:
    return [sum(sizes[each] for each in bucket) for bucket in fill_buckets(sizes, cap)]


def test_a_bucket_is_closed_once_it_holds_its_cap() -> None:
    assert sizes_of([10, 10, 10, 10], 20) == [20, 20]
    assert sizes_of([10, 15, 10, 15], 20) == [25, 25]
    assert sizes_of([5, 5], 100) == [10]


def test_a_parameter_is_never_split() -> None:
    assert sizes_of([1000, 1, 1], 10) == [1000, 2]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 2000))
def test_every_gradient_is_in_one_bucket_in_order(sizes: list[int], cap: int) -> None:
    buckets = fill_buckets(sizes, cap)
    assert [number for each in buckets for number in each] == list(range(len(sizes)))
    assert all(each >= cap for each in sizes_of(sizes, cap)[:-1])


POINTS = [CurvePoint(2**10, 10e-6, 0.05), CurvePoint(2**20, 40e-6, 0.01), CurvePoint(2**30, 4e-3, 0.002)]


def test_times_between_points_are_interpolated_by_logarithms() -> None:
    curve = build_curve(POINTS)
    assert curve.seconds(2**20) == 40e-6
    assert curve.seconds(2**15) == pytest.approx(20e-6)
    assert curve.seconds(2**25) == pytest.approx(0.4e-3)


def test_beyond_its_points_a_curve_keeps_latency_and_bandwidth() -> None:
    curve = build_curve(POINTS)
    assert curve.seconds(8) == 10e-6
    assert curve.seconds(2**32) == pytest.approx(16e-3)
    assert curve.seconds(0) == 0


def test_of_several_runs_the_middle_one_counts_and_their_distance_is_noise() -> None:
    points = [CurvePoint(1024, each * 1e-6, 0.01) for each in (10, 11, 14)]
    curve = build_curve(points)
    assert curve.seconds(1024) == pytest.approx(11e-6)
    assert curve.spread(1024) == pytest.approx(2 / 11)


@given(st.floats(1, 2**34), st.floats(1, 2**34))
def test_a_larger_size_takes_no_less(one: float, other: float) -> None:
    curve = build_curve(POINTS)
    small, large = sorted((one, other))
    assert curve.seconds(small) <= curve.seconds(large) * (1 + 1e-12)


def test_noise_and_faults_move_times() -> None:
    times = CollectiveTimesFound(LinearFabric(100.0, spread=0.1).curve)
    group = CommunicatorRanks(4)
    usual = times.seconds("allreduce", group, 2**30)
    assert replace(times, shift=1.0).seconds("allreduce", group, 2**30) == pytest.approx(1.1 * usual)
    assert replace(times, shift=-1.0).seconds("allreduce", group, 2**30) == pytest.approx(0.9 * usual)
    doubled = replace(times, fault=lambda _name, _group, _size, seconds: 2.0 * seconds)
    assert doubled.seconds("allreduce", group, 2**30) == pytest.approx(2 * usual)
    assert times.seconds("allreduce", CommunicatorRanks(1), 2**30) == 0


def test_groups_that_share_nics_take_as_long_as_all_their_bytes() -> None:
    times = CollectiveTimesFound(LinearFabric(100.0).curve)
    alone = times.seconds("allreduce", CommunicatorRanks(4, nodes=4), 2**20)
    assert times.seconds("allreduce", CommunicatorRanks(4, nodes=4, sharing=8), 2**20) == pytest.approx(8 * alone)


def test_sizes_beyond_a_curve_are_told() -> None:
    times = CollectiveTimesFound(LinearFabric(100.0).curve)
    times.seconds("allreduce", CommunicatorRanks(4), 8)
    times.seconds("allgather", CommunicatorRanks(4), 2**20)
    assert times.beyond() == ["allreduce of 8 B, with known times from 256 to 8G"]


def row(size: int, kappa_m: float, sharing: float | None = None, name: str = "allreduce") -> MeasuredContention:
    return MeasuredContention(
        collective=name,
        size_bytes=size,
        partner="gemm",
        compute_slowdown=1.1,
        communication_slowdown=kappa_m,
        alone_seconds=1e-4,
        sharing_slowdown=sharing,
    )


def test_what_was_not_told_apart_is_waiting() -> None:
    found = row(MEGABYTE, 3.0).contention
    assert found.communication == 1.0
    assert found.wait_seconds == pytest.approx(2e-4)


def test_the_same_computation_is_lost_to_one_operation() -> None:
    """(κ_c - 1) of all the time in flight, κ_m × alone, falls to the time that it runs."""
    found = row(MEGABYTE, 3.0, sharing=0.5).contention
    assert found.communication == pytest.approx(1.5)
    assert found.wait_seconds == pytest.approx(1.5e-4)
    assert (found.compute - 1) * found.communication * 1e-4 == pytest.approx(0.1 * 3.0 * 1e-4)


def test_contention_lies_between_that_of_two_sizes() -> None:
    table = ContentionTable([row(MEGABYTE, 1.0), row(4 * MEGABYTE, 3.0)])
    assert table.of("allreduce", 2 * MEGABYTE).wait_seconds == pytest.approx(1e-4)
    assert table.of("allreduce", 1).wait_seconds == 0
    assert table.of("allreduce", 2**40).wait_seconds == pytest.approx(2e-4)
    assert table.of("broadcast", 2**40).wait_seconds == pytest.approx(2e-4)


def test_without_a_measurement_nothing_slows_anything() -> None:
    assert ContentionTable().of("allreduce", 2**20).compute == 1.0


def test_data_sheets_are_known_of_the_gpus_of_most_profiles() -> None:
    assert find_data_sheet("NVIDIA H200") is not None
    assert find_data_sheet("NVIDIA A100-SXM4-80GB") != find_data_sheet("NVIDIA A10")
    assert find_data_sheet("Radeon") is None
    near = ("NVIDIA L40", "NVIDIA A10G", "NVIDIA GH200 480GB", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU")
    assert [name for name in near if find_data_sheet(name) is not None] == []
    named = [each.gpu.name for each in all_profiles() if each.gpu.name and each.match.generic is None]
    unknown = {name for name in named if find_data_sheet(name) is None}
    assert unknown == {
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        *("AMD Instinct MI300X", "AMD Instinct MI325X", "AMD Instinct MI355X"),
        *("NVIDIA GB10", "NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H800"),
    }


def test_the_wider_a_product_the_less_its_casts_to_8_bits_cost() -> None:
    """Casts grow with the width, products with its square; 8 bits are never twice as fast, as attention has 16."""
    gains = []
    for hidden in (2048, 4096, 8192, 16384):
        model = TransformerModel(name="m", layers=4, hidden=hidden, heads=16, sequence=2048, vocabulary=32000)
        found = [estimate_times(each, "NVIDIA H100 80GB HBM3") for each in (model, replace(model, fp8=True))]
        (slow, _), (slow_fp8, _) = (
            [each.forward_seconds * (1 + shift * each.spread) for shift in (1, -1)] for each in found if each
        )
        gains.append(slow / slow_fp8)
    assert gains == sorted(gains)
    assert 1 < gains[0] < gains[-1] - 0.3 < 1.7


def test_beside_a_longer_collective_computation_loses_as_much() -> None:
    """64 MiB beside GEMMs on 2 H200s: 255 µs alone cost them 271 µs, and through host memory 2,396 µs cost them 298."""
    row = MeasuredContention(
        collective="allreduce",
        size_bytes=64 * MEGABYTE,
        partner="gemm",
        compute_slowdown=1.18,
        communication_slowdown=6.85,
        alone_seconds=255e-6,
        sharing_slowdown=0.06,
    )
    usual = ContentionTable([row]).of("allreduce", 64 * MEGABYTE)
    assert usual.lasting(200e-6) == usual.lasting(255e-6) == usual
    stretched = usual.lasting(2550e-6)
    assert (stretched.compute - 1) * 2550e-6 == pytest.approx((usual.compute - 1) * 255e-6)
    assert (stretched.communication, stretched.wait_seconds) == (usual.communication, usual.wait_seconds)
    beyond = ContentionTable([row]).of("allreduce", 256 * MEGABYTE)
    assert beyond.alone_seconds == pytest.approx(4 * 255e-6), (
        "four times the bytes take four times as long by themselves"
    )
