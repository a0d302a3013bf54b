import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.units import format_memory, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("1K", 1024),
        ("1k", 1024),
        ("1KiB", 1024),
        ("1KB", 1024),
        ("1.5M", 3 * 2**19),
        (".5G", 2**29),
        ("4G", 2**32),
        ("2T", 2**41),
        (" 16B ", 16),
    ],
)
def test_sizes_are_1024_based(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1X", "-1", "1e6", "1,5K", "١K", "1 K", "0x10", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(UsageError, match=r"102\.4 bytes"):
        parse_size("0.1K")


@given(st.integers(min_value=0, max_value=2**60))
def test_format_size_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.text(max_size=12))
def test_parse_size_never_breaks(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) >= 0


def test_memory_is_rounded_for_a_sentence() -> None:
    assert format_memory(512) == "512 B"
    assert format_memory(150_000_000_000) == "139.7 GiB"
