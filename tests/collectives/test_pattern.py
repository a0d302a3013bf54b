"""Test data: exact results compared with NumPy, and sensitivity to faults."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.model.terms.operation import Block, DataPattern, DataType, NumberKind, ReduceOp, buffer_seed

Array = npt.NDArray[Any]

FUNCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.AVG: np.add,
}


def decode(bits: Array, dtype: DataType) -> Array:
    if dtype is DataType.BFLOAT16:
        return (bits.astype("uint32") << 16).view("float32")
    return bits.view(dtype.value)


@given(
    st.sampled_from(DataType),
    st.sampled_from([op for op in ReduceOp if op is not ReduceOp.AVG]),
    st.integers(1, 40),
    st.integers(0, 2**40),
    st.randoms(use_true_random=False),
)
def test_reductions_are_exact_in_any_order(
    dtype: DataType, op: ReduceOp, ranks: int, start: int, shuffler: "object"
) -> None:
    pattern = ArrayPattern(np, DataPattern(dtype, op, ranks))
    stretch = Stretch(start, 64, (1, 2))
    contributions = [decode(pattern.sent(rank, stretch), dtype) for rank in range(ranks)]
    shuffler.shuffle(contributions)  # type: ignore[attr-defined]
    total = contributions[0].copy()
    for each in contributions[1:]:
        # Round each step to the type, as a ring does.
        total = FUNCTIONS[op](total, each)
        if dtype is DataType.BFLOAT16:
            total = ((total.view("uint32") >> 16).astype("uint32") << 16).view("float32")
    assert np.array_equal(total, decode(pattern.reduced(stretch), dtype))


@pytest.mark.parametrize("dtype", DataType)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13, 100])
def test_averages_are_exact_or_within_two_ulp(dtype: DataType, ranks: int) -> None:
    """NCCL scales before it adds, an MPI sum after. Both must pass, but an error of three ulp must not."""
    pattern = ArrayPattern(np, DataPattern(dtype, ReduceOp.AVG, ranks))
    stretch = Stretch(3, 500, (5,))
    sent = [decode(pattern.sent(rank, stretch), dtype) for rank in range(ranks)]
    if dtype.kind is not NumberKind.FLOAT:
        total = sum(each.astype("int64") for each in sent)
        assert np.array_equal(np.asarray(total) // ranks, decode(pattern.reduced(stretch), dtype).astype("int64"))
        return
    if dtype is DataType.BFLOAT16:
        after = sum(sent[1:], sent[0]) / np.float32(ranks)
        candidates = [((after.view("uint32") + 0x8000) >> 16).astype("uint16")]
    else:
        scale = np.asarray(1 / ranks, dtype.value)
        before = sum((each * scale for each in sent[1:]), sent[0] * scale)
        after = (sum(sent[1:], sent[0]) / np.asarray(ranks, dtype.value)).astype(dtype.value)
        storage = STORAGE[dtype.size_bytes]
        candidates = [before.astype(dtype.value).view(storage), after.view(storage)]
    expected = pattern.reduced(stretch)
    for candidate in candidates:
        assert pattern.wrong(candidate, expected) == 0
    assert pattern.wrong(expected + 3, expected) == 500


@pytest.mark.parametrize("dtype", DataType)
def test_moved_data_differ_by_rank_index_buffer_and_row(dtype: DataType) -> None:
    pattern = ArrayPattern(np, DataPattern(dtype, None, 4))

    def data(rank: int, start: int, row: int, slot: int) -> Array:
        sent: Array = pattern.sent(rank, Stretch(start, 4096, (buffer_seed(row, slot),)))
        return sent

    base = data(0, 0, 0, 0)
    chance = 4096 / 2 ** (8 * dtype.size_bytes)
    for other in (data(1, 0, 0, 0), data(0, 4096, 0, 0), data(0, 1, 0, 0), data(0, 0, 1, 0), data(0, 0, 0, 1)):
        assert np.count_nonzero(other == base) <= 4 * chance + 2


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("ranks", [2, 3, 8, 40])
def test_a_missing_contribution_shows(op: ReduceOp, ranks: int) -> None:
    """Without one rank's data, many of the elements that it contributes to change."""
    pattern = ArrayPattern(np, DataPattern(DataType.FLOAT64, op, ranks))
    stretch = Stretch(0, 4000, (11,))
    sent = [decode(pattern.sent(rank, stretch), DataType.FLOAT64) for rank in range(ranks)]
    whole = decode(pattern.reduced(stretch), DataType.FLOAT64)
    for missing in range(ranks):
        rest = [each for rank, each in enumerate(sent) if rank != missing]
        total = rest[0]
        for each in rest[1:]:
            total = FUNCTIONS[op](total, each)
        if op is ReduceOp.AVG:
            total = total / ranks
        assert np.count_nonzero(total != whole) > 4000 / ranks / 20


def test_a_stretch_is_the_same_wherever_it_is_cut() -> None:
    for op in (None, *ReduceOp):
        pattern = ArrayPattern(np, DataPattern(DataType.INT32, op, 5))
        whole = pattern.sent(2, Stretch(0, 300, (1, 2)))
        parts = [pattern.sent(2, Stretch(start, 100, (1, 2))) for start in (0, 100, 200)]
        assert np.array_equal(whole, np.concatenate(parts, axis=1))


def test_seeds_are_32_bit_and_distinct() -> None:
    seeds = [each for row in range(200) for each in Block(row, 20, 1, 0, 1).seeds()]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= each < 2**32 for each in seeds)
