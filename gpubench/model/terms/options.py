"""Declare command-line options as fields of plans: help text, and how typed text becomes a value.

A plan is one dataclass from the command line to the ranks. Nothing here knows the library that reads a command line.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from gpubench.errors import UsageError, invalid_choice

ARGUMENTS, INPUT, MEASURE, JUDGE = "Arguments", "Input", "Measure", "Judge"
NCCL, SIMULATE, OUTPUT = "NCCL", "Simulate and record", "Output"
GROUPS = (ARGUMENTS, INPUT, MEASURE, JUDGE, NCCL, SIMULATE, OUTPUT)
"""Headings of the help of every command, in this order."""

_OPTION, _GROUP = "option", "group"
_SECONDS_A_DAY = 86400


class Option(NamedTuple):
    """An option or a positional argument that a field of a plan declares.

    The command line gives a value of type `typed`, by default `default`, and `read` makes the field's value of it.
    `names` are separated by blanks. `group` is the heading in the help. `completed_as` is the option whose values
    complete this one. `settings` are for the library that reads command lines. `options_of` fills in `field`, and
    whatever the field or its plan says.
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
    field: str = ""

    @property
    def name(self) -> str:
        """'--iters' of '--iters -n', '--check' of '--check/--no-check', 'BASE' of an argument."""
        return str(self.metavar) if self.is_argument else self.names.split(" ")[0].split("/")[0]

    @property
    def name_when_off(self) -> str:
        """'--no-check' of '--check/--no-check'."""
        return self.names.split(" ")[0].split("/")[-1]

    def is_asked(self, values: Mapping[str, Any]) -> bool:
        """True if the value differs from the option's default."""
        return values.get(self.field) not in (self.default, None, [], ())


class OptionGroup(Protocol):
    """A dataclass of options that are parsed together; `help_group` is the heading of --help above them."""

    help_group: ClassVar[str]

    def parse(self, command: str) -> Any:
        """Return the value of the field. Raises UsageError if the options do not fit together."""
        ...


def read_from(group: type[OptionGroup], **default: Any) -> Any:
    """Declare a field whose value is computed from the options of `group`."""
    return field(metadata={_GROUP: group}, **default)


def _group_of(declared: "Field[Any]") -> Any:
    """Return the option group that a field is read from, or its type if that is one, else None."""
    group = declared.metadata.get(_GROUP, declared.type)
    return group if hasattr(group, "help_group") else None


def _option_of(declared: "Field[Any]", kind: Any) -> Option | None:
    option: Option | None = declared.metadata.get(_OPTION)
    return option and option._replace(
        field=declared.name,
        names=option.names or f"--{declared.name.replace('_', '-')}",
        group=option.group or getattr(kind, "help_group", None),
        typed=option.typed or declared.type,
    )


def _ordered_fields(kind: Any) -> list["Field[Any]"]:
    """Return the fields of a plan, its own first and then those that it shares with other plans."""
    shared = {declared.name for base in kind.__mro__[1:] if is_dataclass(base) for declared in fields(base)}
    return sorted(fields(kind), key=lambda declared: declared.name in shared)


def options_of(kind: Any) -> Iterator[Option]:
    """Yield the options of a plan, including those of nested groups."""
    for declared in _ordered_fields(kind):
        if option := _option_of(declared, kind):
            yield option
        elif group := _group_of(declared):
            yield from options_of(group)


def changed_options(plan: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the options that differ from their defaults: ('--no-check', False).

    A plan's `presentation` has options that never change what is measured. They are left out.
    """
    for declared in _ordered_fields(type(plan)):
        value: Any = getattr(plan, declared.name)
        option = _option_of(declared, plan)
        if option and not option.is_argument and value != declared.default:
            is_off = option.metavar is None and value == (option.read(False) if option.read else False)  # noqa: FBT003
            yield (option.name_when_off if is_off else option.name), value
        elif option is None and declared.name != "presentation" and hasattr(value, "help_group"):
            yield from changed_options(value)


Plan = TypeVar("Plan")


def plan_from(kind: type[Plan], typed: Mapping[str, Any], command: str = "") -> Plan:
    """Make a plan from the typed values, by the name of the field. Other fields have their defaults.

    A field called `typed` gets all of them. Raises UsageError for a text that is no value of its option.
    """
    values: dict[str, Any] = {}
    for declared in _ordered_fields(kind):
        option, group = declared.metadata.get(_OPTION), _group_of(declared)
        if option is None and group is not None:
            found = plan_from(group, typed, command)
            values[declared.name] = found if group is declared.type else found.parse(command)
        elif declared.name == "typed":
            values["typed"] = typed
        elif declared.name in typed:
            value = typed[declared.name]
            if option is not None and option.read is not None:
                value = declared.default if value in (None, [], ()) else option.read(value)
            values[declared.name] = value
    return kind(**values)


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

    `name` may hold several names with a blank between them: '--verbose -v'. --help shows only `common` options,
    --help-all all. `read` makes the value of a text, or of a list of texts if the option can be given `several` times.
    `default` is a text for it. Without a default and a text the value is `without`.
    """
    one: Any = bool | None if metavar is None else str | None if default is None else str
    typed = None if read is None else list[str] | None if several else one
    declared = Option(help_text, metavar, name, common, group, typed, default, read, completed_as, settings=settings)
    value = default if read is None else without if default is None else read(default)
    return field(default=value, metadata={_OPTION: declared})


def argument(metavar: str, help_text: str, *, read: Callable[[Any], Any] | None = None) -> Any:
    """Declare a positional argument; None if it is left out."""
    typed = None if read is None else str | None
    return field(default=None, metadata={_OPTION: Option(help_text, metavar, typed=typed, read=read, is_argument=True)})


def required_argument(metavar: str, help_text: str) -> Any:
    return field(metadata={_OPTION: Option(help_text, metavar, default=..., is_argument=True)})


def flag(help_text: str, *, default: bool | None = False, **settings: Any) -> Any:
    """Declare an option without a value; `settings` are those of `option`."""
    return option(None, help_text, default=default, **settings)


def strict_option() -> Any:
    text = "Exit 1 for doubts too (WARN, INCONCLUSIVE, unknown paths), 3 if nothing was judged."
    return flag(text, common=True, group=JUDGE)


def step_timeout(steps: str, *, default: float, least: float = 0.1) -> Any:
    """Declare `--timeout`, which limits these `steps`."""
    text = f"Give up a step that takes longer than S seconds: {steps}."
    return option("S", text, default=default, name="--timeout", min=least, max=_SECONDS_A_DAY, group=MEASURE)


def sharing_ranks(how: str = "Needs NCCL 2.30 or newer") -> Any:
    """Declare `--ranks-per-gpu`; `how` says what NCCL needs to run several ranks on a GPU."""
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
    """Return a `read` function for an option that takes one of a few words."""
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


def parse_paths(texts: Iterable[str]) -> tuple[Path, ...]:
    """Read files or folders that can be given several times."""
    return tuple(map(Path, texts))
