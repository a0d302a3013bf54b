"""The least data movement of each collective, compared with its definition."""

import pytest

from gpubench.collectives.record import Collective, Movement, exchanges, least_moved
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.terms.operation import DataType

ROOT = 1
BY_NAME = {each.name: each for each in COLLECTIVES}

# In blocks of 1/n of the size, for 4 ranks: what the root and another rank send and receive.
LEAST = {
    "allreduce": (Movement(4, 4), Movement(4, 4)),
    "allgather": (Movement(1, 3), Movement(1, 3)),
    "reducescatter": (Movement(3, 1), Movement(3, 1)),
    "broadcast": (Movement(4, 0), Movement(0, 4)),
    "reduce": (Movement(0, 4), Movement(4, 0)),
    "alltoall": (Movement(3, 3), Movement(3, 3)),
    "gather": (Movement(0, 3), Movement(1, 0)),
    "scatter": (Movement(3, 0), Movement(0, 1)),
    "sendrecv": (Movement(4, 4), Movement(4, 4)),
}


@pytest.mark.parametrize("name", LEAST)
def test_what_has_to_be_moved(name: str) -> None:
    collective = BY_NAME[name]
    layout = collective.layout(4 * 256, DataType.FLOAT32, 4)
    for rank, expected in zip((ROOT, 3), LEAST[name], strict=True):
        moved = least_moved(collective, layout, rank, 4, ROOT)
        assert moved == Movement(expected.sent * 256, expected.received * 256), rank


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_a_rank_alone_moves_nothing(collective: Collective) -> None:
    layout = collective.layout(256, DataType.FLOAT32, 1)
    assert least_moved(collective, layout, 0, 1, 0) == Movement(0, 0)


def test_who_talks_to_whom() -> None:
    assert {name for name in LEAST if BY_NAME[name].point_to_point} == {"alltoall", "gather", "scatter", "sendrecv"}
    pairs = {
        name: set(exchanges(BY_NAME[name], BY_NAME[name].layout(300, DataType.FLOAT32, 3), 3, ROOT))
        for name in ("alltoall", "gather", "scatter", "sendrecv")
    }
    assert pairs["alltoall"] == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    assert pairs["gather"] == {(0, 1), (2, 1)}
    assert pairs["scatter"] == {(1, 0), (1, 2)}
    assert pairs["sendrecv"] == {(0, 1), (1, 2), (2, 0)}
