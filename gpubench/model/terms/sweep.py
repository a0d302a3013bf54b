"""The sizes that a sweep visits, and those of them that fit into memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubench.errors import UsageError, advising
from gpubench.model.terms.units import format_memory, format_size, parse_size

if TYPE_CHECKING:
    from fractions import Fraction

MOST_SIZES = 10_000
_FORMS = "1K:4G (×2), 1K:4G:4 (×4), 1M:64M:+1M (steps), or a list: 1K,64K,1M"


@dataclass(frozen=True, slots=True)
class DroppedSize:
    """A size that was asked for and is not measured, with the reason in words."""

    size_bytes: int
    reason: str


def describe_dropped(dropped: Sequence[DroppedSize]) -> list[str]:
    """Dropped sizes by name, a line for each reason: '8G, 16G: ...'."""
    by_reason: dict[str, list[str]] = {}
    for each in dropped:
        by_reason.setdefault(each.reason, []).append(format_size(each.size_bytes))
    return [f"{', '.join(sizes)}: {reason}" for reason, sizes in by_reason.items()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes, in bytes, that `--sizes` names: `FROM:TO`, `FROM:TO:FACTOR`, `FROM:TO:+STEP` or `A,B,C`.

    A range visits FROM and then every further size up to TO, as nccl-tests' -b, -e, -f and -i do; TO itself is visited
    when a step lands on it. A list keeps its order.
    Raises UsageError for no size, a size of zero, a reversed range, a factor of one or less, or more than 10,000 sizes.
    """
    with advising(next_step="--sizes 1K:64M"):
        if not text.strip():
            raise UsageError("--sizes is empty", expected=_FORMS)
        _check_no_dash(text)
        sizes = _parse_list(text) if ":" not in text else _parse_range(text)
        if 0 in sizes:
            raise UsageError(f"--sizes {text} has a size of zero", expected="sizes of at least one byte")
        return sizes


def _check_no_dash(text: str) -> None:
    """Raise UsageError for a range that is written in another way: 1k-4g, 8..1G."""
    for mark in ("..", "-"):
        first, found, rest = text.upper().partition(mark)
        if found and _is_size(first) and _is_size(rest.partition(":")[0]):
            raise UsageError(
                f"--sizes {text}: a range has no {mark}",
                expected=_FORMS,
                next_step=f"--sizes {first.strip()}:{rest.strip()}",
            )


def _is_size(text: str) -> bool:
    try:
        parse_size(text)
    except UsageError:
        return False
    return True


def _parse_list(text: str) -> tuple[int, ...]:
    return tuple(parse_size(part) for part in text.split(","))


def _parse_range(text: str) -> tuple[int, ...]:
    if "," in text:
        raise UsageError(f"--sizes {text} mixes a range and a list", expected=_FORMS)
    first_text, last_text, *step_texts = text.split(":")
    if len(step_texts) > 1:
        raise UsageError(f"--sizes {text} has too many parts", expected=_FORMS)
    first, last = parse_size(first_text), parse_size(last_text)
    if first > last:
        raise UsageError(
            f"--sizes {text} runs backwards: {format_size(first)} is more than {format_size(last)}",
            expected="the smaller size first",
            next_step=f"--sizes {':'.join([last_text, first_text, *step_texts])}",
        )
    if first == 0:
        raise UsageError(f"--sizes {text} starts at zero", expected="sizes of at least one byte")
    sizes: list[int] = []
    for size in _steps(text, first, last, step_texts[0] if step_texts else "2"):
        sizes.append(size)
        if len(sizes) > MOST_SIZES:
            raise UsageError(f"--sizes {text} names more than {MOST_SIZES:,} sizes", expected="a larger step or factor")
    return tuple(sizes)


def _steps(text: str, first: int, last: int, step_text: str) -> Iterator[int]:
    if step_text.startswith("+"):
        step = parse_size(step_text[1:])
        if step == 0:
            raise UsageError(f"--sizes {text} steps by zero", expected="a step of at least one byte: 1M:64M:+1M")
        yield from range(first, last + 1, step)
        return
    factor = _parse_factor(text, step_text)
    size = first
    while size <= last:
        yield size
        size = max(int(size * factor), size + 1)


def _parse_factor(text: str, factor_text: str) -> "Fraction":
    from fractions import Fraction  # 3 ms, of every command that has rows: their metadata tell dropped sizes

    try:
        factor = Fraction(factor_text)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 1:
        raise UsageError(
            f"--sizes {text}: {factor_text!r} is not a factor above one",
            expected="a factor such as 2, or a step with a plus sign: 1M:64M:+1M",
        )
    return factor


def split_by_memory(
    sizes: Sequence[int], buffers: int, free_bytes: int, where: str, held: str = ""
) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
    """The sizes of which `buffers` buffers fit into `free_bytes`, and those that do not, with the reason.

    `where` names the memory of the tightest rank for the reason, e.g. 'rank 3 on n1 (GPU memory)', `held` who else
    holds some of it.
    """
    room = f"{where} can take {format_memory(free_bytes)}" + (f"; others hold its memory: {held}" if held else "")
    fitting = tuple(size for size in sizes if size * buffers <= free_bytes)
    dropped = tuple(
        DroppedSize(size, f"{buffers} buffers of that size do not fit; {room}")
        for size in sizes
        if size * buffers > free_bytes
    )
    return fitting, dropped
