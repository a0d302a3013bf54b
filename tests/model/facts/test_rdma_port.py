import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.facts.snapshot import RDMA_MTUS, roce_mtu_bytes


@pytest.mark.parametrize(
    ("interface", "expected"),
    [(1500, 1024), (4191, 2048), (4192, 4096), (4200, 4096), (9000, 4096), (352, 256), (351, None), (0, None)],
)
def test_roce_leaves_room_for_its_headers(interface: int, expected: int | None) -> None:
    assert roce_mtu_bytes(interface) == expected


@given(st.integers(-(2**31), 2**31))
def test_an_mtu_is_one_that_rdma_knows(interface: int) -> None:
    assert roce_mtu_bytes(interface) in {*RDMA_MTUS, None}
