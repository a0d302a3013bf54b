"""The nine collectives compared with a table of nccl-tests' definitions."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.terms.operation import DataType, Layout, algbw_gb_s

BY_NAME = {each.name: each for each in COLLECTIVES}

# name: (sent share of n, received share of n, in-place step of send and receive in blocks)
BLOCKED = {
    "allgather": (1, "n", 1, 0),
    "gather": (1, "n", 1, 0),
    "reducescatter": ("n", 1, 0, 1),
    "scatter": ("n", 1, 0, 1),
    "alltoall": ("n", "n", 0, 0),
}
WHOLE = ("allreduce", "broadcast", "reduce", "sendrecv")

FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1,
    "reduce": lambda _: 1,
    "alltoall": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "sendrecv": lambda _: 1,
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1024])
def test_busbw_factors(ranks: int) -> None:
    for name, factor in FACTORS.items():
        assert BY_NAME[name].busbw_factor(ranks) == pytest.approx(factor(ranks)), name


@given(st.sampled_from(sorted(BLOCKED)), st.integers(0, 2**34), st.sampled_from(DataType), st.integers(1, 300))
def test_blocks_are_rounded_down_to_sixteen_bytes(name: str, size: int, dtype: DataType, ranks: int) -> None:
    layout = BY_NAME[name].layout(size // dtype.size_bytes, dtype, ranks)
    block_bytes = layout.count * dtype.size_bytes
    assert block_bytes % 16 == 0
    assert block_bytes * ranks <= size < (block_bytes + 16) * ranks + dtype.size_bytes
    send, receive, send_step, receive_step = BLOCKED[name]
    count = layout.count
    share = {1: count, "n": count * ranks}
    assert layout == Layout(count, share[send], share[receive], send_step * count, receive_step * count)
    assert layout.largest == count * ranks


@given(st.sampled_from(WHOLE), st.integers(0, 2**34), st.sampled_from(DataType), st.integers(1, 300))
def test_whole_buffers_are_not_rounded_beyond_an_element(name: str, size: int, dtype: DataType, ranks: int) -> None:
    elements = size // dtype.size_bytes
    assert BY_NAME[name].layout(elements, dtype, ranks) == Layout(elements, elements, elements)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_expected_data_fill_the_receive_buffer_once(collective: Collective, ranks: int) -> None:
    layout = collective.layout(1000, DataType.FLOAT32, ranks)
    for rank in range(ranks):
        segments = collective.expected(layout, rank, ranks, 0)
        covered = sorted((segment.offset, segment.offset + segment.count) for segment in segments)
        if rank and collective.name in ("reduce", "gather"):
            assert not covered
            continue
        assert [0, *(end for _, end in covered)] == [*(start for start, _ in covered), layout.receive]
        assert all(segment.start + segment.count <= layout.send for segment in segments)
        assert all((segment.source is None) == collective.reduces for segment in segments)


def test_bandwidth_is_in_decimal_gigabytes() -> None:
    assert algbw_gb_s(10**9, 0.5) == 2.0
