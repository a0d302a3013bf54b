"""Dataclasses whose methods are written when one of them is first used: of a start, which imports 300, most never are.

`dataclasses` has Python compile six functions a class, half of what a start takes. Here a class with slots gets its
fields at once, and those functions with its first instance. Whoever uses or inherits it notices no difference.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_WRITTEN = ("__init__", "__repr__", "__eq__", "__hash__")
_WITHOUT_METHODS: dict[type, tuple[type, dict[str, Any]]] = {}
"""What each was made of, with its options."""

_LOCK = RLock()


def _is_special(cls: type) -> bool:
    """Whether a class inherits fields, or has of its own what would be written for it."""
    return any(map(dataclasses.is_dataclass, cls.__mro__)) or not {*_WRITTEN, *_FROZEN}.isdisjoint(vars(cls))


def _with_fields(cls: type, options: dict[str, Any]) -> Any:
    frozen = options.get("frozen", False)
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, **options | {"frozen": False})
    made.__dataclass_params__.frozen = frozen  # read where another dataclass inherits it
    for name, method in {**_FIRST_USE, **(_FROZEN if frozen else {"__hash__": None})}.items():
        setattr(made, name, method)
    _WITHOUT_METHODS[made] = cls, {name: value for name, value in options.items() if name != "slots"}
    return made


def _write_methods(made: type) -> None:
    with _LOCK:
        if made not in _WITHOUT_METHODS:
            return
        cls, options = _WITHOUT_METHODS[made]
        for name, field in vars(made)["__dataclass_fields__"].items():
            setattr(cls, name, field)
        written = vars(dataclasses.dataclass(cls, **options))
        for name in _WRITTEN:
            setattr(made, name, written[name])
        del _WITHOUT_METHODS[made]


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
