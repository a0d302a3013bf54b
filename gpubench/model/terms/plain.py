"""Frozen dataclasses as plain data and back: the contents of recordings and of messages between ranks."""

import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gpubench.errors import UsageError

T = TypeVar("T")

_LONGEST_SHOWN = 80  # Characters of a value in a message
_SCALARS = frozenset((str, int, float, bool, type(None)))


def to_plain(value: Any) -> Any:
    """A dataclass as dicts and lists, without fields that hold their default."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if is_dataclass(kind):
        return {
            name: to_plain(held)
            for name, default in _defaults(kind)
            if (held := getattr(value, name)) != default or default is MISSING
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(held) for key, held in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(held) for held in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: type[T], plain: Any, where: str = "") -> T:
    """The inverse of `to_plain`; what is missing takes its default. Raises UsageError that names `where`."""
    result: T = _read(kind, plain, where or kind.__name__)
    return result


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (each.name, each.default if each.default_factory is MISSING else each.default_factory())
        for each in fields(kind)
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _read(kind: Any, plain: Any, where: str) -> Any:
    return plain if type(plain) is kind and kind in _SCALARS else _read_other(kind, plain, where)


def _read_other(kind: Any, plain: Any, where: str) -> Any:
    origin, arguments = _parts(kind)
    if origin in (Union, types.UnionType):
        if plain is None and type(None) in arguments:
            return None
        return _read(next(each for each in arguments if each is not type(None)), plain, where)
    if kind is Any:
        return plain
    if origin in (tuple, Sequence):
        _expect(list, plain, where)
        return tuple(_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(plain))
    if origin is not None and issubclass(origin, Mapping):
        _expect(dict, plain, where)
        return {key: _read(arguments[1], each, f"{where}.{key}") for key, each in plain.items()}
    if is_dataclass(kind):
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


def _read_whole_number(plain: int, where: str) -> float:
    try:
        return float(plain)
    except OverflowError:
        raise UsageError(
            f"{where} is a number beyond {sys.float_info.max:.1e}", expected="a value of type float"
        ) from None


def _read_dataclass(kind: Any, plain: Any, where: str) -> Any:
    _expect(dict, plain, where)
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
    return frozenset(name for name, _ in defaults), frozenset(name for name, each in defaults if each is MISSING)


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


def _expect(kind: type, plain: Any, where: str) -> None:
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        raise UsageError(f"{where} is {_shown(plain)}", expected=f"a value of type {kind.__name__}")


def _shown(plain: Any) -> str:
    if isinstance(plain, (dict, list)) and plain:
        return f"{'an object' if isinstance(plain, dict) else 'a list'} of {len(plain)}"
    text = repr(plain)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
