"""Dataclasses whose methods are written when one of them is first used: of a start, which imports 300, most never are.

`dataclasses` has Python compile six functions a class, one by one: half of what a start takes. Here a class with slots
gets its fields at once, and three functions, compiled together, with its first instance. Whoever uses or inherits it
notices no difference, except that a class may inherit its `__repr__`; no field may be an InitVar.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from reprlib import recursive_repr
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import Field
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """As `dataclasses.dataclass`."""
        if cls is None:
            return partial(dataclass, **options)
        if options.get("slots") and options.keys() <= _KNOWN and not _is_special(cls):
            return _with_fields(cls, options)
        return dataclasses.dataclass(cls, **options)


_KNOWN = {"slots", "frozen", "kw_only"}
_WRITTEN = ("__init__", "__eq__", "__hash__")
_WITHOUT_METHODS: set[type] = set()
_LOCK = RLock()


def _is_special(cls: type) -> bool:
    """Whether a class inherits fields, or has of its own what would be written for it."""
    own = {*_WRITTEN, *_FROZEN}
    return any(map(dataclasses.is_dataclass, cls.__mro__)) or not own.isdisjoint(vars(cls))


def _with_fields(cls: type, options: dict[str, Any]) -> Any:
    frozen = options.get("frozen", False)
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, **options | {"frozen": False})
    made.__dataclass_params__.frozen = frozen  # read where another dataclass inherits it
    if made.__repr__ is object.__repr__:
        made.__repr__ = _repr
    for name, method in {**_FIRST_USE, **(_FROZEN if frozen else {"__hash__": None})}.items():
        setattr(made, name, method)
    _WITHOUT_METHODS.add(made)
    return made


def _write_methods(made: Any) -> None:
    with _LOCK:
        if made not in _WITHOUT_METHODS:
            return
        fields, frozen = dataclasses.fields(made), made.__dataclass_params__.frozen
        names: dict[str, Any] = {"__OF_FACTORY": _OF_FACTORY}
        lines = [*_init(made, fields, names), *_eq_and_hash(fields)]
        exec("\n".join(lines), names)
        annotations = {each.name: each.type for each in fields if each.init} | {"return": None}
        names["__init__"].__annotations__ = annotations
        for name in _WRITTEN if frozen else _WRITTEN[:-1]:
            names[name].__qualname__ = f"{made.__qualname__}.{name}"
            setattr(made, name, names[name])
        _WITHOUT_METHODS.remove(made)


class _OfFactory:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


_OF_FACTORY = _OfFactory()


def _init(made: Any, fields: Sequence["Field[Any]"], names: dict[str, Any]) -> Iterator[str]:
    """Where assignments are refused, the descriptors of slots set them, in half the time of `object.__setattr__`."""
    frozen = made.__dataclass_params__.frozen
    by_place, by_name, lines = list[str](), list[str](), list[str]()
    for each in fields:
        name, given, default = each.name, each.name, ""
        if each.default is not dataclasses.MISSING:
            names[f"__default_{name}"] = each.default
            default = given = f"__default_{name}"
        elif each.default_factory is not dataclasses.MISSING:
            names[f"__make_{name}"] = each.default_factory
            default, given = "__OF_FACTORY", f"__make_{name}()"
        if each.init:
            (by_name if each.kw_only else by_place).append(f"{name}={default}" if default else name)
            given = f"{given} if {name} is __OF_FACTORY else {name}" if default == "__OF_FACTORY" else name
        if each.init or default:
            names[f"__set_{name}"] = getattr(made, name).__set__
            lines.append(f" __set_{name}(self, {given})" if frozen else f" self.{name} = {given}")
    yield f"def __init__({', '.join(['self', *by_place, *(['*'] if by_name else []), *by_name])}):"
    yield from lines or [" pass"]
    if hasattr(made, "__post_init__"):
        yield " self.__post_init__()"


def _eq_and_hash(fields: Sequence["Field[Any]"]) -> Iterator[str]:
    def values(record: str, of: Iterable["Field[Any]"]) -> str:
        return f"({''.join(f'{record}.{each.name},' for each in of)})"

    compared = [each for each in fields if each.compare]
    hashed = [each for each in fields if (each.compare if each.hash is None else each.hash)]
    yield "def __eq__(self, other):"
    yield " if other.__class__ is not self.__class__: return NotImplemented"
    yield f" return {values('self', compared)} == {values('other', compared)}"
    yield f"def __hash__(self): return hash({values('self', hashed)})"


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _first_use(name: str) -> Callable[..., Any]:
    def method(self: object, *arguments: Any, **named: Any) -> Any:
        for each in type(self).__mro__:
            _write_methods(each)
        return getattr(self, name)(*arguments, **named)

    return method


class _SignatureOfInit:
    """Has `inspect.signature` find the methods written, and not the signature of what stands in for `__init__`."""

    def __get__(self, instance: object, owner: type) -> Any:
        for each in owner.__mro__:
            _write_methods(each)
        raise AttributeError("__signature__")


def _refuse(self: object, name: str, *_value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r} of {type(self).__name__}")


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


_FIRST_USE = {**{name: _first_use(name) for name in _WRITTEN}, "__signature__": _SignatureOfInit()}
_FROZEN: dict[str, Any] = {
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__getstate__": _get_state,
    "__setstate__": _set_state,
}
