"""Sizes as people write them.

K, M, G and T are 1024-based as in nccl-tests; bandwidths are GB/s with 1 GB = 1e9 bytes, also as in nccl-tests.
"""

import re
from fractions import Fraction

from gpubench.errors import UsageError

SUFFIX_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTES_PER_GB = 1e9
MICROSECONDS_PER_SECOND = 1e6

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<suffix>[KMGT]?)(?:I?B)?", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of '8', '4K', '1.5M', '1GiB': a number, fractions allowed, and a 1024-based suffix.

    Raises:
        UsageError: the text is no size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise UsageError(
            f"{text!r} is not a size",
            expected="a number of bytes with K, M, G or T behind it (1024-based): 8, 4K, 1.5M, 4G",
        )
    size = Fraction(match["number"]) * SUFFIX_BYTES[match["suffix"]]
    if size.denominator != 1:
        raise UsageError(f"{text!r} is {float(size)} bytes", expected="a whole number of bytes")
    return int(size)


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
