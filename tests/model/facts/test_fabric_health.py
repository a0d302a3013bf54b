import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.facts.health import decode_health, describe_health

NOT_TOLD = dict.fromkeys(
    (
        "degraded_bandwidth",
        "route_recovery",
        "route_unhealthy",
        "access_timeout_recovery",
        "partition_missing",
        "fabric_manager_disconnected",
        "incorrect_configuration",
    )
)


def test_0xaa_is_healthy() -> None:
    conditions = decode_health(0xAA)
    told = ("degraded_bandwidth", "route_recovery", "route_unhealthy", "access_timeout_recovery")
    assert conditions == NOT_TOLD | dict.fromkeys(told, False)
    assert describe_health(0xAA) == "healthy"


@pytest.mark.parametrize(
    ("mask", "name", "holds"),
    [
        (1 << 0, "degraded_bandwidth", True),
        (2 << 0, "degraded_bandwidth", False),
        (1 << 2, "route_recovery", True),
        (2 << 2, "route_recovery", False),
        (1 << 4, "route_unhealthy", True),
        (2 << 4, "route_unhealthy", False),
        (1 << 6, "access_timeout_recovery", True),
        (2 << 6, "access_timeout_recovery", False),
        (1 << 12, "partition_missing", False),
        (2 << 12, "partition_missing", True),
        (1 << 14, "fabric_manager_disconnected", False),
        (2 << 14, "fabric_manager_disconnected", True),
        (1 << 8, "incorrect_configuration", False),
        (2 << 8, "incorrect_configuration", True),
        (8 << 8, "incorrect_configuration", True),
    ],
)
def test_each_field_is_read_alone(mask: int, name: str, holds: bool) -> None:
    assert decode_health(mask) == NOT_TOLD | {name: holds}
    assert describe_health(mask).startswith(name.replace("_", " ") if holds else "healthy")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2, "incorrect system GUID"),
        (3, "incorrect chassis serial number"),
        (4, "no partition"),
        (5, "insufficient NVLinks"),
        (6, "incompatible GPU firmware"),
        (7, "invalid location"),
        (8, "GPU state invalid"),
    ],
)
def test_a_wrong_configuration_says_which(number: int, text: str) -> None:
    assert describe_health(0xAA | number << 8) == f"incorrect configuration ({text})"


def test_an_unknown_configuration_is_still_wrong() -> None:
    assert describe_health(0xF00) == "incorrect configuration"


@given(st.integers(0, 2**16 - 1))
def test_every_mask_has_words(mask: int) -> None:
    bad = [name for name, holds in decode_health(mask).items() if holds]
    words = describe_health(mask)
    assert (words in ("healthy", "not reported")) is (not bad)
    assert all(name.replace("_", " ") in words for name in bad)
