"""Lines of JSON that recordings are made of, each read into a dataclass."""

import json
import math
from typing import Any, NoReturn, TypeVar

from gpubench.errors import UsageError
from gpubench.model.terms.plain import from_plain, to_plain
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
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: no JSON ({error})",
            expected=f"{kind.__name__} as JSON, as --record wrote it",
            reason="the file was cut off, or edited by hand",
        ) from None
    check_text(plain, where)
    return from_plain(kind, plain, where)


def load_json(text: str) -> Any:
    """The value of a JSON text, without the NaN and infinity that Python would accept.

    Raises ValueError where it is no JSON, or holds such a number, and RecursionError where it is nested too deeply.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=finite)


def finite(text: str) -> float:
    """A number; ValueError for NaN, infinity, and what is no number."""
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word}, which is no number")
