"""Frozen dataclasses as plain data and back: the contents of recordings and of messages between ranks."""

import dataclasses
import math
import sys
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from gpubench.errors import UsageError

T = TypeVar("T")


class Within(NamedTuple):
    """Bounds of a number, `Annotated[int, Within(1)]`: data with a smaller or a larger one are refused."""

    least: float
    most: float = math.inf

    def __str__(self) -> str:
        return f"{self.least:g} or more" if self.most == math.inf else f"{self.least:g} to {self.most:g}"


Count = Annotated[int, Within(0, 2**63)]
Bytes = Annotated[int, Within(1, 2**60)]
Seconds = Annotated[float, Within(0, 1e9)]
Rate = Annotated[float, Within(0, 1e9)]  # GB/s
MeasuredSeconds = Annotated[float, Within(1e-12, 1e9)]
"""Of an operation or a copy: none takes no time."""

_LONGEST_SHOWN = 80  # Characters of a value in a message
_SCALARS = frozenset((str, int, float, bool, type(None)))


def to_plain(value: Any) -> Any:
    """A dataclass as dicts and lists, without fields that hold their default."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, (tuple, list)):  # first, as a round of a scan has a hundred thousand of them
        return [held if type(held) in _SCALARS else to_plain(held) for held in value]
    if issubclass(kind, Struct) or dataclasses.is_dataclass(kind):
        return {
            name: to_plain(held)
            for name, default in _defaults(kind)
            if (held := getattr(value, name)) != default or default is NODEFAULT
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(held) for key, held in value.items()}
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """The inverse of `to_plain`; what is missing takes its default. Raises UsageError that names `where`."""
    result: T = _read(kind, plain, where or kind.__name__)
    return result


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    if issubclass(kind, Struct):
        return tuple(
            (field.name, field.default if field.default_factory is NODEFAULT else field.default_factory())
            for field in structs.fields(kind)
        )
    return tuple(
        (field.name, NODEFAULT if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(kind)
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    if any(get_origin(each) is not None and "Annotated" in repr(each) for each in hints.values()):
        bare = get_type_hints(kind)
        return {name: hint if _is_bounded(hint) else bare[name] for name, hint in hints.items()}
    return hints


def _is_bounded(hint: Any) -> bool:
    return any(isinstance(arg, Within) or _is_bounded(arg) for arg in get_args(hint))


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _read(kind: Any, plain: Any, where: str) -> Any:
    if type(plain) is kind and kind in _SCALARS:
        return plain
    origin, arguments = _parts(kind)
    if origin is Annotated:
        return _within(arguments[1], _read(arguments[0], plain, where), where)
    return _read_other(kind, plain, where)


def _read_other(kind: Any, plain: Any, where: str) -> Any:
    origin, arguments = _parts(kind)
    if origin in (Union, types.UnionType):
        if plain is None and type(None) in arguments:
            return None
        return _read(next(argument for argument in arguments if argument is not type(None)), plain, where)
    if kind is Any:
        return plain
    if origin in (tuple, Sequence):
        _expect(list, plain, where)
        return tuple(_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(plain))
    if origin is not None and issubclass(origin, Mapping):
        _expect(dict, plain, where)
        return {key: _read(arguments[1], each, f"{where}.{key}") for key, each in plain.items()}
    if isinstance(kind, type) and (issubclass(kind, Struct) or dataclasses.is_dataclass(kind)):
        return _read_dataclass(kind, plain, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(plain)
        except ValueError:
            words = ", ".join(str(each.value) for each in kind)
            raise UsageError(f"{where} is {_shown(plain)}", expected=f"one of {words}") from None
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return _read_whole_number(plain, where)
    _expect(kind, plain, where)
    return plain


def _within(bounds: Within, value: float, where: str) -> float:
    if not bounds.least <= value <= bounds.most:
        raise UsageError(f"{where} is {value:g}", expected=str(bounds))
    return value


def _read_whole_number(plain: int, where: str) -> float:
    try:
        return float(plain)
    except OverflowError:
        raise UsageError(
            f"{where} is a number beyond {sys.float_info.max:.1e}", expected="a value of type float"
        ) from None


def _read_dataclass(kind: Any, plain: Any, where: str) -> Any:
    _expect(dict, plain, where)
    plain = kind.fields_of(plain) if hasattr(kind, "fields_of") else plain
    hints, (names, required) = _hints(kind), field_names(kind)
    if not plain.keys() <= names:
        unknown = next(name for name in plain if name not in names)
        raise UsageError(
            f"{where} has an unknown field {unknown!r}",
            expected=", ".join(name for name, _ in _defaults(kind)),
            reason="it was written by a newer gpubench, or by hand",
        )
    if not plain.keys() >= required:
        name = next(name for name, _ in _defaults(kind) if name in required and name not in plain)
        raise UsageError(f"{where} has no field {name!r}", expected=f"{name}, which every {kind.__name__} has")
    as_is = types_as_is(kind)
    return kind(
        **{
            name: held if type(held) in as_is[name] else _read(hints[name], held, f"{where}.{name}")
            for name, held in plain.items()
        }
    )


@cache
def field_names(kind: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The fields of a dataclass, and those without a default."""
    defaults = _defaults(kind)
    return frozenset(name for name, _ in defaults), frozenset(name for name, each in defaults if each is NODEFAULT)


@cache
def types_as_is(kind: Any) -> Mapping[str, frozenset[type]]:
    """The types of plain values, by field, that are taken as they are."""
    found = {}
    for name, hint in _hints(kind).items():
        origin, arguments = _parts(hint)
        kinds = arguments if origin in (Union, types.UnionType) else (hint,)
        # Of a union the first kind that is none of None counts.
        first = [each for each in kinds if each is not type(None)][:1]
        found[name] = frozenset(each for each in (*first, type(None)) if each in kinds) & _SCALARS
    return found


def is_nested_deeper(plain: Any, most: int) -> bool:
    """True for lists and objects nested more than `most` deep: level by level, so that any depth can be told."""
    level, depth = [plain] if isinstance(plain, (dict, list)) else [], 0
    while level and depth <= most:
        depth += 1
        level = [
            held
            for each in level
            for held in (each.values() if isinstance(each, dict) else each)
            if isinstance(held, (dict, list))
        ]
    return depth > most


def _expect(kind: type, plain: Any, where: str) -> None:
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        raise UsageError(f"{where} is {_shown(plain)}", expected=f"a value of type {kind.__name__}")


def _shown(plain: Any) -> str:
    if isinstance(plain, (dict, list)) and plain:
        return f"{'an object' if isinstance(plain, dict) else 'a list'} of {len(plain)}"
    text = repr(plain)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
