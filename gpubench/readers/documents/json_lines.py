"""Lines of JSON that recordings are made of, each read into a dataclass."""

import json
import math
from typing import Any, NoReturn, TypeVar

from gpubench.errors import UsageError
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.readers.documents import limits
from gpubench.readers.documents.characters import check_text

T = TypeVar("T")


def json_line(value: object) -> str:
    """A dataclass as one line; `read_json_line` reads it."""
    return json.dumps(to_plain(value), allow_nan=False) + "\n"


def read_json_line(kind: type[T], line: str, where: str) -> T:
    """The dataclass in a line; `where` names file and line.

    Raises UsageError where it is no JSON, holds what is no number or no character, or is of another kind.
    """
    try:
        plain = load_json(line)
    except ValueError as error:
        raise UsageError(
            f"{where}: no JSON ({error})",
            expected=f"{kind.__name__} as JSON, as --record wrote it",
            reason="the file was cut off, or edited by hand",
        ) from None
    check_text(plain, where)
    return from_plain(kind, plain, where)


def load_json(text: str) -> Any:
    """The value of a JSON text, without the NaN and infinity that Python would accept.

    Raises ValueError where it is no JSON, holds such a number or one of too many digits, is nested too deeply, or would
    take too much memory.
    """
    if (size_bytes := _bytes_in_memory(text)) > limits.MOST_JSON_BYTES:
        most = limits.MOST_JSON_BYTES // 2**20
        raise ValueError(
            f"some {size_bytes // 2**20} MiB of values in memory, and {most} MiB are the most that is read"
        )
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=finite, parse_int=whole)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return value


def _bytes_in_memory(text: str) -> int:
    """At least what its values take in CPython: a dictionary of one name, an empty list, a number in a list."""
    return text.count("{") * 232 + text.count("[") * 64 + text.count(",") * 36


def _check_depth(value: Any) -> None:
    """Raise ValueError for lists and dictionaries inside each other that no later code could walk through."""
    level, depth = [value] if isinstance(value, (dict, list)) else [], 0
    while level:
        depth += 1
        if depth > limits.MOST_DEPTH:
            raise _too_deep()
        level = [
            held
            for each in level
            for held in (each.values() if isinstance(each, dict) else each)
            if isinstance(held, (dict, list))
        ]


def _too_deep() -> ValueError:
    return ValueError(f"lists nested more than {limits.MOST_DEPTH} deep")


def whole(text: str) -> int:
    """A whole number; ValueError for one of too many digits, and for what is none."""
    if len(text) > limits.MOST_DIGITS + text.startswith("-"):
        raise ValueError(f"a number of {len(text)} digits, and {limits.MOST_DIGITS} are the most that is read")
    return int(text)


def finite(text: str) -> float:
    """A number; ValueError for NaN, infinity, and what is no number."""
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word}, which is no number")
