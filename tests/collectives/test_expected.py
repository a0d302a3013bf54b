"""The expected time of a collective, from the points of a profile or from a limit."""

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.collectives.expected import time_from_limit, time_from_profile
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.model.profiles.profile import Expected, ExpectedKind, Profile
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import (
    LEAST_KNOWN,
    MEASURED,
    MODELLED,
    MODELLED_SENDS,
    MODELLED_SMALL,
    OF_ANOTHER_NCCL,
    Tolerance,
    judge_row,
)
from gpubench.profiles import load
from tests.fakes.measured_rows import row

ALLREDUCE = collective_named("allreduce")


@pytest.mark.parametrize(
    ("profile", "nccl", "ranks", "time_us", "tolerance"),
    [
        ("hgx-h200-4", "2.28.9", 4, 17.71, MEASURED),
        ("hgx-h200-4", "2.28.3", 4, 17.71, MEASURED),
        ("hgx-h200-4", "2.27.7", 4, 17.71, OF_ANOTHER_NCCL),
        ("hgx-h200-4", None, 4, 17.71, OF_ANOTHER_NCCL),
        ("hgx-h200-4", "2.28.9", 2, 12.88, MODELLED_SMALL),  # 13.74 measured
        ("hgx-h200-2", "2.28.9", 2, 13.74, MEASURED),
        ("hgx-h100-8", "2.28.9", 8, 21.2, MODELLED_SMALL),
    ],
)
def test_a_profile_s_points_are_as_sure_as_they_are_near(
    profile: str, nccl: str | None, ranks: int, time_us: float, tolerance: Tolerance
) -> None:
    found = time_from_profile(load(profile), ALLREDUCE, row(2**20, 1.0, 1.0, ranks=ranks), nccl=nccl)
    assert found is not None
    assert found.time_us == pytest.approx(time_us, rel=0.02)
    assert found.tolerance is tolerance
    assert found.source == f"profile {profile}" + (", by a model" if tolerance is MODELLED_SMALL else "")


@pytest.mark.parametrize(
    ("profile", "changes"),
    [("hgx-h200-4", {"nodes": 2, "ranks": 8}), ("hgx-h200-4", {"ranks": 1}), ("generic-nvlink", {"ranks": 8})],
)
def test_a_profile_knows_nothing_of_other_machines(profile: str, changes: dict[str, Any]) -> None:
    assert time_from_profile(load(profile), ALLREDUCE, row(2**20, 1.0, 1.0, **changes), nccl="2.28.9") is None


def test_reductions_in_switches_are_expected_of_rows_that_say_so() -> None:
    size, profile = 2**33, load("hgx-h200-8")
    ring, nvls, unknown = (
        time_from_profile(profile, ALLREDUCE, row(size, 1.0, 1.0, algorithm=name), nccl="2.27.7")
        for name in ("ring", "NVLS", None)
    )
    assert ring is not None
    assert nvls is not None
    assert nvls.time_us < 0.8 * ring.time_us
    assert unknown is not None
    assert unknown.time_us == nvls.time_us
    assert unknown.most_us(row(size, 1.0, 1.0)) == pytest.approx(ring.most_us(row(size, 1.0, 1.0)))


def _points(name: str, ranks: int) -> list[Expected]:
    curves = load(f"hgx-h200-{ranks}").curve
    return [point for each in curves if each.collective == name for point in each.expected]


WITH_POINTS = [name for name in SUMMARIES if _points(name, 2) and _points(name, 4)]
"""The collectives that were measured on H200s. A new one has no points, and uses those of all-reduce."""


def test_a_collective_is_judged_by_its_own_points_on_a_measured_machine() -> None:
    assert len(WITH_POINTS) >= 9
    for profile in ("hgx-h200-2", "hgx-h200-4"):
        ranks = load(profile).match.visible
        for name in WITH_POINTS:
            found = time_from_profile(
                load(profile), collective_named(name), row(2**28, 1.0, 1.0, ranks=ranks), nccl="2.28.9"
            )
            assert found is not None
            assert found.tolerance is MEASURED, name


@pytest.mark.parametrize(
    ("name", "ranks", "size", "time_us"),
    [
        # Measured on healthy machines with links of 450 GB/s: the slowest ones relative to their limit.
        ("sendrecv", 8, 2**26, 828.0),
        ("sendrecv", 4, 2**26, 427.0),
        ("sendrecv", 4, 2**24, 125.0),
        ("alltoall", 4, 2**22, 26.0),
        ("allgather", 2, 2**22, 28.3),
        ("allgather", 2, 2**26, 159.2),
        ("allreduce", 8, 2**10, 17.0),
        ("allreduce", 2, 2**21, 29.6),
        ("broadcast", 4, 2**10, 9.3),
    ],
)
def test_no_healthy_machine_is_slower_than_the_least_known(name: str, ranks: int, size: int, time_us: float) -> None:
    measured = replace(row(size, time_us, 1.0, ranks=ranks), limit_gb_s=450.0)
    found = time_from_limit(collective_named(name), measured)
    assert found is not None
    assert found.tolerance is LEAST_KNOWN
    assert found.verdict(measured) == "PASS"


@pytest.mark.parametrize(("busbw", "verdict"), [(25.0, "FAIL"), (71.0, "FAIL"), (340.0, "PASS")])
def test_an_all_reduce_far_below_its_limit_is_slow_on_any_machine(busbw: float, verdict: str) -> None:
    time_us = 2**28 * 1.5 / busbw / 1e3
    measured = replace(row(2**28, time_us, busbw, ranks=4), limit_gb_s=450.0)
    found = time_from_limit(ALLREDUCE, measured)
    assert found is not None
    assert found.verdict(measured) == verdict
    assert time_from_limit(ALLREDUCE, replace(measured, limit_gb_s=None)) is None
    assert time_from_limit(ALLREDUCE, replace(measured, ranks=1)) is None


def _row(name: str, ranks: int, point: Expected) -> CollectiveRow:
    return row(point.size_bytes or 0, point.value, 1.0, collective=name, ranks=ranks)


@pytest.mark.parametrize("name", WITH_POINTS)
@pytest.mark.parametrize(("known", "ranks"), [(4, 2), (2, 4)])
def test_what_another_number_of_gpus_took_is_within_the_model(known: int, ranks: int, name: str) -> None:
    for point in _points(name, ranks):
        measured = _row(name, ranks, point)
        found = time_from_profile(load(f"hgx-h200-{known}"), collective_named(name), measured, nccl="2.28.9")
        assert found is not None
        assert found.tolerance in (MODELLED, MODELLED_SMALL, MODELLED_SENDS)
        assert found.verdict(measured) == "PASS", (point.size_bytes, point.value, found.time_us)


@pytest.mark.parametrize("name", WITH_POINTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_healthy_time_is_slow_beside_two_derived_points(ranks: int, name: str) -> None:
    """Like profiles of machines that were never measured: a latency, and the bandwidth of the largest size."""
    points = _points(name, ranks)
    derived = tuple(replace(each, kind=ExpectedKind.DERIVED) for each in (points[0], points[-1]))
    profile = replace(load(f"hgx-h200-{ranks}"), curve=(), expected=derived)
    for point in points:
        measured = _row(name, ranks, point)
        found = time_from_profile(profile, collective_named(name), measured, nccl="2.28.9")
        assert found is not None
        assert found.verdict(measured) == "PASS", (point.size_bytes, point.value, found.time_us)


def test_host_memory_by_design_is_not_held_against_the_links() -> None:
    measured = replace(row(2**28, 1e5, 4.0, ranks=4), limit_gb_s=31.5)
    assert time_from_limit(ALLREDUCE, replace(measured, host_staged=True)) is None
    assert time_from_limit(ALLREDUCE, replace(measured, host_staged=False)) is not None


def _thinned(name: str, ranks: int, gap: int) -> Profile:
    """Return the measured profile with points at least `gap` times apart."""
    points = _points(name, ranks)
    kept: list[Expected] = []
    for each in points:
        if not kept or each is points[-1] or (each.size_bytes or 0) >= gap * (kept[-1].size_bytes or 1):
            kept.append(each)
    return replace(load(f"hgx-h200-{ranks}"), curve=(), expected=tuple(kept))


@pytest.mark.parametrize(("gap", "ranks", "name"), [*product([4, 8, 16, 64, 256], [2, 4], WITH_POINTS)])
def test_no_healthy_time_between_measured_points_is_slow(gap: int, ranks: int, name: str) -> None:
    profile = _thinned(name, ranks, gap)
    for point in _points(name, ranks):
        measured = _row(name, ranks, point)
        found = time_from_profile(profile, collective_named(name), measured, nccl="2.28.9")
        assert found is not None
        assert found.verdict(measured) == "PASS", (point.size_bytes, point.value, found)


def test_between_measured_sizes_a_row_may_take_what_the_next_may() -> None:
    def tolerance(profile: str, size_bytes: int, ranks: int) -> Tolerance:
        measured = row(size_bytes, 1.0, 1.0, ranks=ranks)
        found = time_from_profile(load(profile), collective_named("allgather"), measured, nccl="2.28.9")
        assert found is not None
        return found.tolerance

    assert tolerance("hgx-h200-4", 2**26, 4) is MEASURED
    between = tolerance("hgx-h200-4", 3 * 2**25, 4)
    assert between.fail == pytest.approx(1.25 * 347.3 / ((189.2 + 347.3) / 2) - 1)
    assert between.warn is None
    assert [tolerance("hgx-h200-8", size, 8) for size in (2**10, 2**20, 2**33)] == [MEASURED] * 3
    assert tolerance("hgx-h200-8", 2**22, 8) is MODELLED_SMALL


@pytest.mark.parametrize(
    ("profile", "ranks", "size", "faster", "doubt"),
    [
        # Tables with multiples of the times that the profile expects.
        ("hgx-b200-8", 4, 2**33, 1.4, ""),
        ("hgx-b200-8", 4, 2**33, 2.6, "2.6 times what profile hgx-b200-8 expects"),
        ("hgx-h200-4", 4, 2**28, 1.6, "1.6 times what profile hgx-h200-4 expects"),
        ("l40s-8", 8, 2**28, 2.0, "2.0 times what profile l40s-8 expects"),
        # Small sizes differ by some microseconds.
        ("hgx-h200-4", 4, 2**10, 1.9, ""),
        ("hgx-b200-8", 8, 2**14, 1.9, ""),
    ],
)
def test_a_speed_far_above_what_is_expected_is_not_judged(
    profile: str, ranks: int, size: int, faster: float, doubt: str
) -> None:
    healthy = time_from_profile(load(profile), ALLREDUCE, row(size, 1.0, 1.0, ranks=ranks), nccl=None)
    assert healthy is not None
    shown = judge_row(row(size, healthy.time_us / faster, 1.0, ranks=ranks), healthy)
    assert (shown.note or "") == doubt
    assert (shown.expected_us is None) == bool(doubt)


def test_a_small_measured_size_says_nothing_of_sizes_far_below_it() -> None:
    """The profile of eight B200s was measured from 8 GiB on. On a healthy machine 1 MiB took 51 µs."""
    published = row(2**20, 51.0, 36.0)
    found = time_from_profile(load("hgx-b200-8"), ALLREDUCE, published, nccl="2.27.7")
    assert found is not None
    assert found.tolerance is MODELLED_SMALL
    assert found.verdict(published) == "PASS"
