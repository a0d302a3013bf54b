"""Parse and format sizes, times, bandwidths and lists of names. Escape text from other programs before it is
printed.

The size suffixes K, M, G and T are 1024-based.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from gpubench.errors import GpubenchError, UsageError, add_advice
from gpubench.model.terms.plain import StrictStruct as Struct

SUFFIX_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTES_PER_GB = 1e9
MICROSECONDS_PER_SECOND = 1e6

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<suffix>[KMGT]?)(?:I?B)?", re.ASCII)


def parse_size(text: str) -> int:
    """Parse '8', '4K', '1.5M' or '1GiB' as bytes. Raises UsageError unless the result is a whole number of bytes."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise UsageError(
            f"{text!r} is not a size",
            expected="a number of bytes, optionally with the suffix K, M, G or T (1024-based): 8, 4K, 1.5M, 4G",
        )
    whole, _, decimals = match["number"].partition(".")
    units = int(whole + decimals) * SUFFIX_BYTES[match["suffix"]]
    scale = int("1" + "0" * len(decimals))
    if units % scale:
        raise UsageError(f"{text!r} is {units / scale} bytes", expected="a whole number of bytes")
    return units // scale


def format_size(size_bytes: int) -> str:
    """Return the shortest exact text for a size: 1024 → '1K', 1536 → '1536', 2**30 → '1G'. `parse_size` parses it
    back.
    """
    for suffix in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % SUFFIX_BYTES[suffix] == 0:
            return f"{size_bytes // SUFFIX_BYTES[suffix]}{suffix}"
    return str(size_bytes)


def format_time(microseconds: float) -> str:
    """Format a time with three significant digits and a suitable unit: '46.1 µs', '27 ms', '1.5 s'."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{_format_digits(microseconds / size, 3)} {unit}"
    return f"{_format_digits(microseconds, 3)} µs"


def format_bandwidth(gb_s: float, digits: int = 2) -> str:
    """Format a bandwidth with at least this many significant digits and a suitable unit: '1900 GB/s', '237 GB/s',
    '1.5 GB/s', '12 MB/s', '88 kB/s'.
    """
    for unit, size in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gb_s >= 0.995 * size:
            return f"{_format_digits(gb_s / size, digits)} {unit}"
    return f"{_format_digits(gb_s / 1e-6, digits)} kB/s"


def _format_digits(value: float, digits: int) -> str:
    """Format a number with at least this many significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) - 0.05 else f"{value:.{digits}g}"


def format_memory(size_bytes: int) -> str:
    """Format an amount of memory for messages, with one decimal: '139.8 GiB', '512 B'."""
    for suffix in ("T", "G", "M", "K"):
        if size_bytes >= SUFFIX_BYTES[suffix]:
            return f"{size_bytes / SUFFIX_BYTES[suffix]:.1f} {suffix}iB"
    return f"{size_bytes} B"


_NUMBERED = re.compile(r"(?P<stem>(?:.*\D)?)(?P<number>\d{1,18})", re.ASCII | re.DOTALL)


def compress_names(names: Sequence[str]) -> str:
    """Join names with commas. Names that differ only in consecutive trailing numbers become a range: 'node0-1023,
    login'.
    """
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


def format_ranges(numbers: Iterable[int]) -> str:
    """Format distinct numbers, in any order, as ascending ranges: 7, 0, 1, 2 → '0-2,7'."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def format_mask(mask: int) -> str:
    """Format the positions of a mask's set bits as ranges: 0b100111 → '0-2,5'."""
    return format_ranges(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def shorten(names: Sequence[str], most: int = 4, count: int | None = None) -> str:
    """Return the first `most` names and the number of remaining names: 'a, b and 3 more'.

    `count` is the total number of names if `names` does not contain all of them.
    """
    more = (len(names) if count is None else count) - min(len(names), most)
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def percent(part: float | None, whole: float | None) -> float | None:
    """Return `part` as a percentage of `whole`. None if either is unknown or `whole` is 0."""
    return None if part is None or not whole else 100 * part / whole


def format_percent(value: float | None, unknown: str = "", digits: int = 0) -> str:
    return unknown if value is None else f"{value:.{digits}f}%"


def format_share(percent: float | None) -> str:
    """Format a percentage without the percent sign: '98', '7.3', or '-' if unknown."""
    if percent is None:
        return "-"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"


def plural(number: int, noun: str) -> str:
    """Return a count and its noun, in the plural unless the count is 1: '1 GPU', '4 GPUs', '1,024 GPUs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Item = TypeVar("Item")
Key = TypeVar("Key")


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key. Keys appear in the order of their first item."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


_RUNNER_COMMAND = re.compile(r"^(?P<indent> *):(?=:)|#(?P<hash>#)(?=[A-Za-z]*\[)")
"""GitHub's runner executes lines that start with '::'. GitHub and Azure execute '##[' and '##vso[' anywhere in a
line.
"""


def printable_line(text: str) -> str:
    """Escape text so that a terminal or a CI runner prints it as one line and executes nothing in it.

    Unprintable characters (colors, line ends, changes of the text direction) become Python escapes, and tabs become
    spaces. A backslash is inserted into runner commands. Escaping the result again changes nothing.
    """
    if text.isprintable() and "::" not in text and "##" not in text:
        return text
    shown = text.replace("\t", " ")
    if not shown.isprintable():
        shown = "".join(map(escaped, shown))
    return _RUNNER_COMMAND.sub(lambda found: "#\\#" if found["hash"] else f"{found['indent']}\\:", shown)


def escaped(character: str) -> str:
    r"""Escape an unprintable character as Python does ('\x1b'). Return printable characters unchanged."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def format_error(error: GpubenchError) -> str:
    """Format an error for printing. Each part of the error becomes one line."""
    return "gpubench: error: " + "\n".join(map(printable_line, error.lines()))


MOST_SIZES = 10_000
_FORMS = "1K:4G (×2), 1K:4G:4 (×4), 1M:64M:+1M (steps), or a list: 1K,64K,1M"


class DroppedSize(Struct, frozen=True):
    """A requested size that gpubench skips, with the reason."""

    size_bytes: int
    reason: str


def describe_dropped(dropped: Sequence[DroppedSize]) -> list[str]:
    """Describe skipped sizes in one line per reason: '8G, 16G: ...'."""
    groups = group_by(dropped, lambda size: size.reason)
    return [f"{', '.join(format_size(size.size_bytes) for size in sizes)}: {why}" for why, sizes in groups.items()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse the value of `--sizes` as bytes: `FROM:TO`, `FROM:TO:FACTOR`, `FROM:TO:+STEP` or `A,B,C`.

    A range goes from FROM up to TO, like -b, -e, -f and -i of nccl-tests. It includes TO only if a step lands on it.
    Sizes in a list keep their order.

    Raises UsageError if there is no size, a size of zero, or more than 10,000 sizes. A range must ascend.
    Its factor must be greater than 1.
    """
    with add_advice(next_step="--sizes 1K:64M"):
        if not text.strip():
            raise UsageError("--sizes is empty", expected=_FORMS)
        for mark in ("..", "-"):
            first, found, rest = text.upper().partition(mark)
            if found and _SIZE.fullmatch(first.strip()) and _SIZE.fullmatch(rest.partition(":")[0].strip()):
                raise UsageError(
                    f"--sizes {text}: a range has no {mark}",
                    expected=_FORMS,
                    next_step=f"--sizes {first.strip()}:{rest.strip()}",
                )
        sizes = tuple(parse_size(part) for part in text.split(",")) if ":" not in text else _parse_range(text)
        if 0 in sizes:
            raise UsageError(f"--sizes {text} has a size of zero", expected="sizes of at least one byte")
        return sizes


def _parse_range(text: str) -> tuple[int, ...]:
    if "," in text:
        raise UsageError(f"--sizes {text} mixes a range and a list", expected=_FORMS)
    first_text, last_text, *step_texts = text.split(":")
    if len(step_texts) > 1:
        raise UsageError(f"--sizes {text} has too many parts", expected=_FORMS)
    first, last = parse_size(first_text), parse_size(last_text)
    if first > last:
        raise UsageError(
            f"--sizes {text} is in the wrong order: {format_size(first)} is more than {format_size(last)}",
            expected="the smaller size first",
            next_step=f"--sizes {':'.join([last_text, first_text, *step_texts])}",
        )
    if first == 0:
        raise UsageError(f"--sizes {text} starts at zero", expected="sizes of at least one byte")
    sizes: list[int] = []
    for size in _steps(text, first, last, step_texts[0] if step_texts else "2"):
        sizes.append(size)
        if len(sizes) > MOST_SIZES:
            raise UsageError(f"--sizes {text} has more than {MOST_SIZES:,} sizes", expected="a larger step or factor")
    return tuple(sizes)


def _steps(text: str, first: int, last: int, step_text: str) -> Iterator[int]:
    if step_text.startswith("+"):
        step = parse_size(step_text[1:])
        if step == 0:
            raise UsageError(f"--sizes {text} has a step of zero", expected="a step of at least one byte: 1M:64M:+1M")
        yield from range(first, last + 1, step)
        return
    from fractions import Fraction  # The import takes 3 ms, and every command that prints rows imports this module.

    try:
        factor = Fraction(step_text)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 1:
        raise UsageError(
            f"--sizes {text}: {step_text!r} is not a factor above one",
            expected="a factor such as 2, or a step with a plus sign: 1M:64M:+1M",
        )
    size = first
    while size <= last:
        yield size
        size = max(int(size * factor), size + 1)


def split_by_memory(
    sizes: Sequence[int], buffers: int, free_bytes: int, where: str, held: str = ""
) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
    """Split sizes into sizes whose `buffers` buffers fit into `free_bytes`, and sizes to skip, with the reason.

    `where` is the rank with the least free memory: 'rank 3 on n1 (GPU memory)'. `held` lists other processes that use
    the same memory.
    """
    room = f"{where} has {format_memory(free_bytes)} free" + (
        f"; other processes use its memory: {held}" if held else ""
    )
    fitting = tuple(size for size in sizes if size * buffers <= free_bytes)
    dropped = tuple(
        DroppedSize(size, f"{buffers} buffers of that size do not fit, because {room}")
        for size in sizes
        if size * buffers > free_bytes
    )
    return fitting, dropped
