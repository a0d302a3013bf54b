"""Convert records to plain dicts and lists and back, for recordings, result files and messages between ranks."""

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import NODEFAULT, Meta, structs

from gpubench.errors import UsageError

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**60)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]  # GB/s
MeasuredSeconds = Annotated[float, Meta(ge=1e-12, le=1e9)]  # No operation or copy finishes in zero time.

_LONGEST_SHOWN = 80  # Maximum number of characters of a value in an error message
_SCALARS = frozenset((str, int, float, bool, type(None)))


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record that is read from files. Parsing fails on unknown fields."""


def to_plain(value: Any) -> Any:
    """Convert a record to dicts and lists. Fields that have their default value are left out."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    # Checked first, because one round of a scan contains 100,000 tuples and lists.
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else to_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return {
            name: to_plain(held)
            for name, default in _defaults(kind)
            if (held := getattr(value, name)) != default or default is NODEFAULT
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(held) for key, held in value.items()}
    return value.value if isinstance(value, Enum) else value


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (field.name, field.default if field.default_factory is NODEFAULT else field.default_factory())
        for field in structs.fields(kind)
    )


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """Convert the result of `to_plain` back to a record of type `kind`.

    Raises UsageError with the path of the invalid value. The path starts with `where`, or with the name of the type.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        raise _refusal(plain, message, path.strip("`").removeprefix("$"), where or kind.__name__) from None


def _refusal(plain: Any, message: str, path: str, where: str) -> UsageError:
    """Convert a validation message and path from msgspec to a UsageError that shows the invalid value."""
    what, _, field = message.partition(" field ")
    if what == "Object contains unknown":
        reason = "it was written by a newer gpubench, or edited by hand"
        return UsageError(f"{where}{path} has an unknown field {field.strip('`')!r}", reason=reason)
    if what == "Object missing required":
        return UsageError(f"{where}{path} has no field {field.strip('`')!r}")
    expected, _, found = message.removeprefix("Expected ").partition(", got ")
    shown = found or "out of range"
    if "[...]" not in path:  # msgspec writes [...] instead of the key of a mapping.
        value = plain
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[name or int(index)]
        text = repr(value)
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    return UsageError(f"{where}{path} is {shown}", expected=expected if message.startswith("Expected ") else "")


def is_nested_deeper(plain: Any, most: int) -> bool:
    """Return whether lists and objects are nested more than `most` levels deep, without recursion."""
    level, depth = [plain] if isinstance(plain, (dict, list)) else [], 0
    while level and depth <= most:
        depth += 1
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
    return depth > most
