import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.units import (
    compress_names,
    format_memory,
    format_percent,
    format_ranges,
    format_size,
    parse_size,
    percent,
    plural,
    shorten,
)


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


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["node0"], "node0"),
        (["node0", "node1", "node2"], "node0-2"),
        (["node9", "node10"], "node9-10"),
        (["node08", "node09", "node10"], "node08-10"),
        (["node099", "node100"], "node099-100"),
        (["node9", "node010"], "node9, node010"),
        (["node01", "node2"], "node01, node2"),
        (["node0", "node2", "node3"], "node0, node2-3"),
        (["node2", "node1"], "node2, node1"),
        (["node1", "node1"], "node1, node1"),
        (["a1", "b2"], "a1, b2"),
        (["login", "node1", "node2"], "login, node1-2"),
        (["login", "admin"], "login, admin"),
        (["gpu", "gpu0"], "gpu, gpu0"),
        (["ip-10-0-0-8", "ip-10-0-0-9"], "ip-10-0-0-8-9"),
        (["7", "8"], "7-8"),
        ([f"gpu{number:04d}" for number in range(1024)], "gpu0000-1023"),
        (["9" * 5000, "9" * 5000], f"{'9' * 5000}, {'9' * 5000}"),
    ],
)
def test_names_are_listed_as_a_person_would(names: list[str], text: str) -> None:
    assert compress_names(names) == text


def expanded(text: str) -> list[str]:
    names: list[str] = []
    for part in filter(None, text.split(", ")):
        match = re.fullmatch(r"([a-z]*)(\d+)-(\d+)", part)
        if match is None:
            names.append(part)
            continue
        stem, first, last = match.groups()
        names += [f"{stem}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return names


@given(st.lists(st.from_regex(r"[ab]?(0{0,2}[0-3]|9|10|99|100|011)?", fullmatch=True).filter(bool), max_size=8))
def test_listed_names_are_all_there_in_their_order(names: list[str]) -> None:
    assert expanded(compress_names(names)) == names


@given(st.integers(0, 120), st.integers(1, 30), st.integers(1, 4))
def test_consecutive_names_are_one_range(first: int, count: int, digits: int) -> None:
    names = [f"n{number:0{digits}d}" for number in range(first, first + count)]
    assert ", " not in compress_names(names)
    assert expanded(compress_names(names)) == names


def test_a_long_name_is_read_at_once() -> None:
    """Tried at every digit of it, a name of 100,000 digits took half a minute."""
    before = time.process_time()
    assert compress_names([f"{'1' * 100_000}a"] * 2) != ""
    assert time.process_time() - before < 5


@pytest.mark.parametrize(
    ("names", "most", "count", "text"),
    [
        ([], 4, None, ""),
        (["a", "b"], 2, None, "a, b"),
        (["a", "b", "c"], 2, None, "a, b and 1 more"),
        (["a", "b"], 4, 9, "a, b and 7 more"),
        (["a", "b", "c"], 2, 9, "a, b and 7 more"),
    ],
)
def test_of_many_names_the_first_few_are_told(names: list[str], most: int, count: int | None, text: str) -> None:
    assert shorten(names, most, count) == text


def test_percent_of_what_is_unknown_is_unknown() -> None:
    assert percent(1, 4) == 25
    assert percent(0, 4) == 0
    assert percent(None, 4) is None
    assert percent(1, None) is None
    assert percent(1, 0) is None
    assert [format_percent(86.6), format_percent(None), format_percent(None, "?"), format_percent(1.25, "?", 1)] == [
        "87%",
        "",
        "?",
        "1.2%",
    ]


def test_amounts_and_counts_in_words() -> None:
    assert [format_memory(size) for size in (512, 1023, 1024, 1536, 2**20)] == [
        "512 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
    ]
    assert [plural(number, "GPU") for number in (0, 1, 4)] == ["0 GPUs", "1 GPU", "4 GPUs"]
    assert [format_ranges(numbers) for numbers in ([], [5], [0, 1, 2, 3, 7], [1, 3])] == ["", "5", "0-3,7", "1,3"]
    assert shorten(list("abcde")) == "a, b, c, d and 1 more"
