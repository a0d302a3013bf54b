"""How workers of a ring agree, and exchange bytes."""

import pytest

from gpubench.backends.scan_worker import Ring, exchange
from tests.ranks.scan.rings import everywhere


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_hear_the_first_one(size: int) -> None:
    assert everywhere(size, lambda ring: ring.broadcast(b"first" if ring.place == 0 else bytes(5))) == [b"first"] * size


@pytest.mark.parametrize("size", [2, 5])
def test_the_slowest_says_how_often(size: int) -> None:
    assert everywhere(size, lambda ring: ring.repeats(0.09 if ring.place == size - 1 else 0.001, 0.0)) == [3] * size
    assert everywhere(size, lambda ring: ring.repeats(0.0009, 0.02)) == [1111] * size, "50 times around"


@pytest.mark.parametrize("size", [2, 4])
def test_nobody_passes_before_all_have_come(size: int) -> None:
    come: list[int] = []

    def meet(ring: Ring) -> int:
        come.append(ring.place)
        ring.meet()
        return len(come)

    assert everywhere(size, meet) == [size] * size


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_pass_all_of_a_ring_at_once(size: int) -> None:
    found = everywhere(size, exchange)
    assert min(found) > 0
    assert max(found) < 2 * min(found), "all take the time of the slowest"


def test_who_leaves_is_noticed() -> None:
    def meet(ring: Ring) -> bool:
        try:
            if ring.place != 2:
                ring.meet()
        except OSError:
            return True
        finally:
            ring.before.close()
            ring.after.close()
        return False

    assert everywhere(3, meet) == [True, True, False]
