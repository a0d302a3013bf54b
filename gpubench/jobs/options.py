"""Declare command-line options as fields of plans: help text, and how typed text becomes a value.

A plan is one dataclass from the command line to the ranks. Nothing here knows the library that reads a command line.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from gpubench.errors import UsageError, invalid_choice
from gpubench.model.terms.operation import DataType

ARGUMENTS, INPUT, MEASURE, JUDGE = "Arguments", "Input", "Measure", "Judge"
NCCL, SIMULATE, OUTPUT = "NCCL", "Simulate and record", "Output"
GROUPS = (ARGUMENTS, INPUT, MEASURE, JUDGE, NCCL, SIMULATE, OUTPUT)
"""Headings of the help of every command, in this order."""

_OPTION, _GROUP = "option", "group"
_SECONDS_A_DAY = 86400


class Option(NamedTuple):
    """The option, or argument, of the command line that a field is; without `names` it has the field's.

    `read` makes the field's value of what was typed: a `typed` value, with `default` where nothing was. `group` is a
    heading of the help, None for that of the dataclass; `settings` are for the library that reads command lines.
    `completed_as` is the option whose values complete this one's.
    """

    help: str
    metavar: str | None
    names: str = ""
    is_common: bool = False
    group: str | None = None
    typed: Any = None
    default: Any = None
    read: Callable[[Any], Any] | None = None
    completed_as: str = ""
    is_argument: bool = False
    settings: Mapping[str, Any] = MappingProxyType({})


def option_of(declared: "Field[Any]") -> Option | None:
    """Return the option that a dataclass field declares, None if it declares none."""
    found: Option | None = declared.metadata.get(_OPTION)
    return found


class OptionGroup(Protocol):
    """A dataclass of options that are parsed together; `help_group` is the heading of --help above them."""

    help_group: ClassVar[str]

    def parse(self, command: str) -> Any:
        """The value of a field that is read from them. Raises UsageError: they do not fit together."""
        ...


def read_from(group: type[OptionGroup], **default: Any) -> Any:
    """Declare a field whose value is computed from the options of `group`."""
    return field(metadata={_GROUP: group}, **default)


def group_of(declared: "Field[Any]") -> Any:
    """Return the option group that a field is read from, or its own type if that is one, else None."""
    own = declared.metadata.get(_GROUP, declared.type)
    return own if hasattr(own, "help_group") else None


Plan = TypeVar("Plan")


def plan_from(kind: type[Plan], typed: Mapping[str, Any], command: str = "") -> Plan:
    """Return the plan with the values typed, by name of field in whatever group it is; others have their defaults.

    A field called `typed` gets all of them. Raises UsageError for a text that is no value of its option.
    """
    values: dict[str, Any] = {}
    for declared in fields(kind):  # type: ignore[arg-type]
        own, group = option_of(declared), group_of(declared)
        if own is not None:
            if declared.name in typed:
                values[declared.name] = _value_of(declared, own, typed[declared.name])
        elif group is not None:
            found = plan_from(group, typed, command)
            values[declared.name] = found if group is declared.type else found.parse(command)
        elif declared.name == "typed":
            values["typed"] = typed
        elif declared.name in typed:
            values[declared.name] = typed[declared.name]
    return kind(**values)


def _value_of(declared: "Field[Any]", own: Option, typed: Any) -> Any:
    if own.read is None:
        return typed
    return declared.default if typed in (None, [], ()) else own.read(typed)


def option(
    metavar: str | None,
    help_text: str,
    *,
    default: Any = None,
    name: str = "",
    common: bool = False,
    group: str | None = None,
    read: Callable[[Any], Any] | None = None,
    several: bool = False,
    without: Any = None,
    completed_as: str = "",
    **settings: Any,
) -> Any:
    """Declare an option as a dataclass field.

    `name` may hold several, with a blank between them: '--verbose -v'. --help shows only `common` ones, --help-all all.
    `read` makes the value of a text, or, of an option that can be given `several` times, of a list of texts; `default`
    is what would be typed for it, and `without` the value where nothing is.
    """
    one: Any = bool | None if metavar is None else str | None if default is None else str
    typed = None if read is None else list[str] | None if several else one
    own = Option(help_text, metavar, name, common, group, typed, default, read, completed_as, settings=settings)
    value = default if read is None else without if default is None else read(default)
    return field(default=value, metadata={_OPTION: own})


def argument(metavar: str, help_text: str, *, read: Callable[[Any], Any] | None = None) -> Any:
    """Declare a positional argument; None if it is left out."""
    typed = None if read is None else str | None
    own = Option(help_text, metavar, typed=typed, read=read, is_argument=True)
    return field(default=None, metadata={_OPTION: own})


def required_argument(metavar: str, help_text: str) -> Any:
    """Declare a required positional argument."""
    return field(metadata={_OPTION: Option(help_text, metavar, default=..., is_argument=True)})


def flag(help_text: str, *, default: bool | None = False, **settings: Any) -> Any:
    """Declare an option without a value; `settings` are those of `option`."""
    return option(None, help_text, default=default, **settings)


def strict_option() -> Any:
    """Declare `--strict`, which means the same in every command."""
    text = "Exit 1 for doubts too (WARN, INCONCLUSIVE, unknown paths), 3 if nothing was judged."
    return flag(text, common=True, group=JUDGE)


def step_timeout(steps: str, *, default: float, least: float = 0.1) -> Any:
    """The field of `--timeout`, which means the same in every command; `steps` are the steps that it limits."""
    text = f"Give up a step that takes longer than S seconds: {steps}."
    return option("S", text, default=default, name="--timeout", min=least, max=_SECONDS_A_DAY, group=MEASURE)


def sharing_ranks(how: str = "Needs NCCL 2.30 or newer") -> Any:
    """The field of `--ranks-per-gpu`; `how` says what NCCL needs to run several ranks on a GPU."""
    text = (
        f"Ranks to launch on each GPU, to try a job on fewer GPUs. {how}. With an MPS server the ranks run at the same "
        "time, otherwise in turns."
    )
    return option("N", text, default=1, min=1, show_default=False, group=MEASURE)


def judging_profile() -> Any:
    """Declare `--profile`: a name or a file, None for the profile that matches."""
    return option(
        "NAME|FILE",
        "Judge by this profile (default: one of your own that matches, otherwise one of gpubench's).",
        completed_as="profile",
        group=JUDGE,
    )


def expected_gpus() -> Any:
    """Declare `--expect-gpus`."""
    return option(
        "N",
        "Fail unless every node has exactly N GPUs (exit code 3 if no node has any).",
        name="--expect-gpus",
        min=1,
        max=1024,
        group=JUDGE,
    )


Choice = TypeVar("Choice", bound=StrEnum)


def one_of(option: str, choices: type[Choice]) -> Callable[[str], Choice]:
    """A `read` for an option that takes one of a few words."""
    return lambda text: parse_choices(option, [text], choices)[0]


def parse_choices(option: str, texts: Iterable[str], choices: type[Choice]) -> tuple[Choice, ...]:
    """Parse comma-separated names into distinct members, in their order. Raises UsageError for other names."""
    names = dict.fromkeys(name.strip() for text in texts for name in text.split(","))
    for name in names:
        if name not in tuple(choices):
            raise unknown_choice(option, name, tuple(choices))
    return tuple(map(choices, names))


def unknown_choice(option: str, name: str, choices: Sequence[str]) -> UsageError:
    """Return the error for an unknown value; its next step is the nearest known value."""
    error = invalid_choice(option, name, choices)
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        error.next_step = f"{option} {nearest[0]}"
    return error


def parse_collective(text: str) -> str:
    """The collective of --collective as gpubench calls it, of its own name or nccl-tests'; UsageError for no name."""
    from gpubench.readers.results.nccl_tests.table import COLLECTIVE_NAMES

    name = text.lower().removesuffix("_perf")
    name = COLLECTIVE_NAMES.get(name, name)
    if name not in COLLECTIVE_NAMES.values():
        raise unknown_choice("--collective", text, tuple(COLLECTIVE_NAMES.values()))
    return name


_FRAMEWORKS_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}


def parse_dtypes(texts: Iterable[str]) -> tuple[DataType, ...]:
    """The types of --dtype, by NCCL's names, nccl-tests' or frameworks': float is float32, bf16 bfloat16."""
    names = [name.strip() for text in texts for name in text.split(",")]
    return parse_choices("--dtype", [_own_name(name) for name in names], DataType)


def _own_name(type_name: str) -> str:
    lower = type_name.lower()
    if lower in tuple(DataType):
        return lower
    from gpubench.readers.results.nccl_tests.table import ELEMENT_TYPES

    name = _FRAMEWORKS_NAMES.get(lower) or ELEMENT_TYPES.get(lower, (type_name, 0))[0]
    return name if name in tuple(DataType) else type_name


def paths(texts: Iterable[str]) -> tuple[Path, ...]:
    """A `read` for files or folders that can be given several times."""
    return tuple(map(Path, texts))
