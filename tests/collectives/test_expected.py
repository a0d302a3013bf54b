"""What is expected of a collective: by a profile's points for its GPUs and its NCCL, or by its limit."""

from dataclasses import replace
from typing import Any

import pytest

from gpubench.collectives.expected import from_limit, from_profile
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.model.results.speed import LEAST_KNOWN, MEASURED, MODELLED, OF_ANOTHER_NCCL, Tolerance
from gpubench.profiles.files import load
from tests.fakes.measured_rows import row

ALLREDUCE = collective_named("allreduce")


@pytest.mark.parametrize(
    ("profile", "nccl", "ranks", "time_us", "tolerance"),
    [
        ("hgx-h200-4", "2.28.9", 4, 17.71, MEASURED),
        ("hgx-h200-4", "2.28.3", 4, 17.71, MEASURED),
        ("hgx-h200-4", "2.27.7", 4, 17.71, OF_ANOTHER_NCCL),
        ("hgx-h200-4", None, 4, 17.71, OF_ANOTHER_NCCL),
        ("hgx-h200-4", "2.28.9", 2, 17.71 / 1.5, MODELLED),
        ("hgx-h200-2", "2.28.9", 2, 13.74, MEASURED),
        ("hgx-h100-8", "2.28.9", 8, 21.2, MODELLED),
    ],
)
def test_a_profile_s_points_are_as_sure_as_they_are_near(
    profile: str, nccl: str | None, ranks: int, time_us: float, tolerance: Tolerance
) -> None:
    found = from_profile(load(profile), ALLREDUCE, row(2**20, 1.0, 1.0, ranks=ranks), nccl=nccl)
    assert found is not None
    assert found.time_us == pytest.approx(time_us, rel=0.02)
    assert found.tolerance is tolerance
    assert found.source == f"profile {profile}" + (", by a model" if tolerance is MODELLED else "")


@pytest.mark.parametrize(
    ("profile", "changes"),
    [
        ("hgx-h200-4", {"nodes": 2, "ranks": 8}),
        ("hgx-h200-4", {"ranks": 1}),
        ("generic-nvlink", {"ranks": 8}),
        ("hgx-h200-1", {"ranks": 2}),
    ],
)
def test_a_profile_knows_nothing_of_other_machines(profile: str, changes: dict[str, Any]) -> None:
    assert from_profile(load(profile), ALLREDUCE, row(2**20, 1.0, 1.0, **changes), nccl="2.28.9") is None


def test_reductions_in_switches_are_expected_of_rows_that_say_so() -> None:
    size, profile = 2**33, load("hgx-h200-8")
    ring, nvls, unknown = (
        from_profile(profile, ALLREDUCE, row(size, 1.0, 1.0, algorithm=name), nccl="2.27.7")
        for name in ("ring", "NVLS", None)
    )
    assert ring is not None
    assert nvls is not None
    assert nvls.time_us < 0.8 * ring.time_us
    assert unknown == ring


def test_every_collective_of_a_measured_machine_has_its_own_points() -> None:
    for profile in ("hgx-h200-2", "hgx-h200-4"):
        ranks = load(profile).match.visible
        for name in SUMMARIES:
            found = from_profile(
                load(profile), collective_named(name), row(2**28, 1.0, 1.0, ranks=ranks), nccl="2.28.9"
            )
            assert found is not None
            assert found.tolerance is MEASURED, name


@pytest.mark.parametrize(
    ("name", "ranks", "size", "time_us"),
    [
        # Measured on healthy machines with links of 450 GB/s, the slowest beside their limit.
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
    found = from_limit(collective_named(name), measured)
    assert found is not None
    assert found.tolerance is LEAST_KNOWN
    assert found.verdict(measured) == "PASS"


@pytest.mark.parametrize(("busbw", "verdict"), [(25.0, "FAIL"), (71.0, "FAIL"), (340.0, "PASS")])
def test_an_all_reduce_far_below_its_limit_is_slow_on_any_machine(busbw: float, verdict: str) -> None:
    time_us = 2**28 * 1.5 / busbw / 1e3
    measured = replace(row(2**28, time_us, busbw, ranks=4), limit_gb_s=450.0)
    found = from_limit(ALLREDUCE, measured)
    assert found is not None
    assert found.verdict(measured) == verdict
    assert from_limit(ALLREDUCE, replace(measured, limit_gb_s=None)) is None
    assert from_limit(ALLREDUCE, replace(measured, ranks=1)) is None
