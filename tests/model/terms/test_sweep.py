import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.units import MOST_SIZES, parse_sizes, split_by_memory


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:64", (8, 16, 32, 64)),
        ("8:100", (8, 16, 32, 64)),
        ("1K:64K:4", (1024, 4096, 16384, 65536)),
        ("8:20:1.5", (8, 12, 18)),
        ("1M:3M:+1M", (2**20, 2 * 2**20, 3 * 2**20)),
        ("1:4:1.1", (1, 2, 3, 4)),
        ("64K,1K,1K", (65536, 1024, 1024)),
        ("4G", (2**32,)),
        ("5:5", (5,)),
    ],
)
def test_ranges_and_lists(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("4G:1K", "is in the wrong order: 4G is more than 1K"),
        ("0", "size of zero"),
        ("0:8", "starts at zero"),
        ("1K,0", "size of zero"),
        ("1K:4K:1", "not a factor above one"),
        ("1K:4K:0.5", "not a factor above one"),
        ("1K:4K:x", "not a factor above one"),
        ("1K:4K:1/0", "not a factor above one"),
        ("1K:4K:+0", "has a step of zero"),
        ("1K:4K:2:2", "too many parts"),
        ("1K:4K,8K", "mixes a range and a list"),
        ("8:4G:+8", "more than 10,000 sizes"),
        ("1K:", "'' is not a size"),
        (",", "'' is not a size"),
    ],
)
def test_what_is_no_sweep_is_refused_by_name(text: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sizes(text)
    assert seen in str(caught.value)


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.integers(2, 16))
def test_a_range_is_a_geometric_walk_that_stays_inside(first: int, last: int, factor: int) -> None:
    text = f"{first}:{last}:{factor}"
    if first > last:
        with pytest.raises(UsageError):
            parse_sizes(text)
        return
    sizes = parse_sizes(text)
    assert sizes[0] == first
    assert all(later == earlier * factor for earlier, later in pairwise(sizes))
    assert sizes[-1] <= last < sizes[-1] * factor


@given(st.text(alphabet="0123456789KMGT:+,.x ", max_size=16))
def test_any_text_gives_sizes_or_one_clear_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert all(size > 0 for size in parse_sizes(text))


@given(st.lists(st.integers(1, 2**40), min_size=1), st.integers(1, 4), st.integers(0, 2**42))
def test_memory_splits_sizes_without_losing_any(sizes: list[int], buffers: int, free: int) -> None:
    fitting, dropped = split_by_memory(sizes, buffers, free, "rank 0")
    assert sorted([*fitting, *(each.size_bytes for each in dropped)]) == sorted(sizes)
    assert all(size * buffers <= free for size in fitting)
    assert all(each.size_bytes * buffers > free for each in dropped)


def test_ranges_end_with_their_last_size_and_the_most_sizes_are_taken() -> None:
    assert parse_sizes("1:4:+1") == (1, 2, 3, 4)
    assert len(parse_sizes(f"1:{MOST_SIZES}:+1")) == MOST_SIZES
    with pytest.raises(UsageError, match="more than 10,000 sizes"):
        parse_sizes(f"1:{MOST_SIZES + 1}:+1")
