"""Dataclasses whose methods come later are what those of the standard library are."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any, ClassVar

import pytest

from gpubench import records

Decorator = Callable[..., Any]


def made_by(decorator: Decorator, **options: bool) -> Any:
    class Point:
        """A class with all that fields may be."""

        x: int
        y: float = 1.5
        rest: list[int] = dataclasses.field(default_factory=list, compare=False, repr=False)
        total: float = dataclasses.field(init=False, default=0.0)
        notes: list[str] = dataclasses.field(init=False, default_factory=list)
        rank: int = dataclasses.field(default=0, hash=False, kw_only=True)
        kind: ClassVar[str] = "a point"

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.x + self.y)

    return decorator(Point, slots=True, **options)


OPTIONS = [{}, {"frozen": True}, {"kw_only": True}, {"frozen": True, "kw_only": True}]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - what is compared
        return type(error)


def message(act: Callable[[], Any]) -> str:
    with pytest.raises(TypeError) as raised:
        act()
    return str(raised.value)


def seen(point: Any) -> dict[str, Any]:
    """What anybody can do with a class that has just been made."""
    one, other = point(x=1), point(x=1, y=1.5, rest=[3])
    return {
        "positional": outcome(lambda: point(1).x),
        "wrong": outcome(lambda: point(z=1)),
        "missing": message(point),
        "rest": (one.rest, point(x=1).rest is not point(x=1).rest, one.notes is point(x=1).notes),
        "ranks": (one == point(x=1, rank=1), outcome(lambda: hash(one) == hash(point(x=1, rank=1)))),
        "repr": repr(one).rpartition(".")[2],
        "equal": (one == other, one == point(x=2), one == 7),
        "hash": outcome(lambda: hash(one) == hash(other)),
        "total": one.total,
        "kind": point.kind,
        "replaced": dataclasses.replace(one, x=4).total,
        "plain": dataclasses.asdict(other),
        "assigned": outcome(lambda: setattr(one, "x", 5)),
        "deleted": outcome(lambda: delattr(other, "y")),
        "unknown": isinstance(outcome(lambda: setattr(one, "z", 5)), type),
        "fields": [(each.name, each.init, each.compare, each.kw_only) for each in dataclasses.fields(point)],
        "slots": point.__slots__,
        "match": point.__match_args__,
        "copied": repr(copy.deepcopy(point(x=9))).rpartition(".")[2],
    }


@options
def test_a_class_is_what_the_standard_library_makes(options: dict[str, bool]) -> None:
    assert seen(made_by(records.dataclass, **options)) == seen(made_by(dataclasses.dataclass, **options))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("names", [(), ("x",)])
def test_a_class_may_have_one_field_or_none(names: tuple[str, ...], frozen: bool) -> None:
    def few(decorator: Decorator) -> Any:
        return decorator(type("Few", (), {"__annotations__": dict.fromkeys(names, int)}), frozen=frozen, slots=True)

    ours, theirs = few(records.dataclass), few(dataclasses.dataclass)
    values = range(len(names))
    assert repr(ours(*values)) == repr(theirs(*values))
    assert ours(*values) == ours(*values) != theirs(*values)
    assert outcome(lambda: hash(ours(*values))) == outcome(lambda: hash(theirs(*values)))


FIRST: dict[str, Callable[[Any], Any]] = {
    "repr": lambda point: repr(point(x=1)).rpartition(".")[2],
    "unequal": lambda point: point(x=1) == point(x=2),
    "hash": lambda point: hash(point(x=1)) == hash(point(x=1)),
    "frozen": lambda point: setattr(point(x=1), "x", 2),
    "signature": lambda point: str(inspect.signature(point)),
}


@pytest.mark.parametrize("act", FIRST.values(), ids=FIRST)
@options
def test_whatever_is_done_first(options: dict[str, bool], act: Callable[[Any], Any]) -> None:
    ours, theirs = made_by(records.dataclass, **options), made_by(dataclasses.dataclass, **options)
    assert outcome(lambda: act(ours)) == outcome(lambda: act(theirs))


@pytest.mark.parametrize("decorator", [records.dataclass, dataclasses.dataclass])
def test_a_class_that_nobody_has_used_can_be_inherited(decorator: Decorator) -> None:
    class Named(made_by(records.dataclass, frozen=True)):  # type: ignore[misc]
        name: str = "n"

    named = decorator(Named, frozen=True, slots=True)
    assert repr(named(x=1, name="m")).endswith("Named(x=1, y=1.5, total=2.5, notes=[], rank=0, name='m')")
    assert named(x=1) == named(x=1) != named(x=1, name="m")


def test_methods_of_its_own_are_kept() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Own:
        x: int

        def __repr__(self) -> str:
            return "own"

    assert repr(Own(3)) == "own"
    assert Own(3) == Own(3)


@records.dataclass(frozen=True, slots=True)
class Kept:
    """What pickle can find again."""

    x: int
    y: tuple[int, ...] = (1,)


def test_it_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)


def test_many_threads_may_be_the_first_to_use_it() -> None:
    point, found = made_by(records.dataclass, frozen=True), list[float]()
    threads = [Thread(target=lambda: found.append(point(x=1).total)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2.5] * 20


def test_of_a_start_most_classes_get_no_methods() -> None:
    """The reason for this module: a run uses a third of the classes that it imports."""
    program = (
        "import sys; from gpubench import records; from gpubench.cli.process import exit_with\n"
        "from gpubench.cli.app import app\n"
        "try: app(['topo', '--simulate', 'hgx-h200-4', '--summary'])\n"
        "except SystemExit: pass\n"
        "print(len(records._WITHOUT_METHODS))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout.split()[-1]) > 100
