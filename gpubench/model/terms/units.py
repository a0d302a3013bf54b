"""Sizes, names and numbers as people write them.

K, M, G and T are 1024-based as in nccl-tests; bandwidths are GB/s with 1 GB = 1e9 bytes, also as in nccl-tests.
"""

import re
from collections.abc import Sequence

from gpubench.errors import UsageError

SUFFIX_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTES_PER_GB = 1e9
MICROSECONDS_PER_SECOND = 1e6

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<suffix>[KMGT]?)(?:I?B)?", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of '8', '4K', '1.5M', '1GiB', by 1024-based suffixes; UsageError for what is no whole number of bytes."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise UsageError(
            f"{text!r} is not a size",
            expected="a number of bytes with K, M, G or T behind it (1024-based): 8, 4K, 1.5M, 4G",
        )
    whole, _, decimals = match["number"].partition(".")
    units = int(whole + decimals) * SUFFIX_BYTES[match["suffix"]]
    scale = int("1" + "0" * len(decimals))
    if units % scale:
        raise UsageError(f"{text!r} is {units / scale} bytes", expected="a whole number of bytes")
    return units // scale


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling: 1024 → '1K', 1536 → '1536', 2**30 → '1G'. `parse_size` reads it back."""
    for suffix in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % SUFFIX_BYTES[suffix] == 0:
            return f"{size_bytes // SUFFIX_BYTES[suffix]}{suffix}"
    return str(size_bytes)


def format_memory(size_bytes: int) -> str:
    """A rounded amount of memory for a sentence: '139.8 GiB', '512 B'."""
    for suffix in ("T", "G", "M", "K"):
        if size_bytes >= SUFFIX_BYTES[suffix]:
            return f"{size_bytes / SUFFIX_BYTES[suffix]:.1f} {suffix}iB"
    return f"{size_bytes} B"


_NUMBERED = re.compile(r"(?P<stem>(?:.*\D)?)(?P<number>\d{1,18})", re.ASCII | re.DOTALL)


def compress_names(names: Sequence[str]) -> str:
    """Host names as a person lists them: consecutive numbers behind the same letters become 'node0-1023'."""
    runs: list[tuple[str, str, str]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        stem, number = (name, "") if match is None else (match["stem"], match["number"])
        before, first, last = runs[-1] if runs else ("", "", "")
        if last and stem == before and number == str(int(last) + 1).zfill(len(last)):
            runs[-1] = stem, first, number
        else:
            runs.append((stem, number, number))
    return ", ".join(stem + (first if first == last else f"{first}-{last}") for stem, first, last in runs)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: '0-3,7'."""
    texts: list[str] = []
    start = previous = None
    for number in (*numbers, None):
        if start is None or previous is None or number != previous + 1:
            if start is not None:
                texts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        previous = number
    return ",".join(texts)


def some_of(names: Sequence[str], most: int = 4, count: int | None = None) -> str:
    """'a, b and 3 more': the first few names and how many are left out, of `count` where not all of them are given."""
    more = (len(names) if count is None else count) - min(len(names), most)
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def percent(part: float | None, whole: float | None) -> float | None:
    """A part of a whole in percent; None where either is unknown, or the whole is 0."""
    return None if part is None or not whole else 100 * part / whole


def format_percent(value: float | None, unknown: str = "", digits: int = 0) -> str:
    """'87%'; `unknown` stands for None."""
    return unknown if value is None else f"{value:.{digits}f}%"


def format_share(percent: float | None) -> str:
    """'98', '7.3': a percentage in a column that says what of; '-' where it is not known."""
    if percent is None:
        return "-"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"


def counted(number: int, what: str) -> str:
    """'1 GPU', '4 GPUs'."""
    return f"{number} {what}{'' if number == 1 else 's'}"
