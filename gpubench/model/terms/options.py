"""Declare command-line options as dataclass fields, with their help text and the function that parses their values.

A plan is the dataclass with all options of a command. It passes unchanged from the command line to the ranks. This
module does not depend on the library that parses the command line.
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
"""Group headings in the help of every command, in this order."""

_OPTION, _GROUP = "option", "group"
_SECONDS_A_DAY = 86400
_MOST_DIGITS = 6  # Of a number of ranks


class Option(NamedTuple):
    """A command-line option or positional argument, declared by a field of a plan.

    - `names`: the names of the option, separated by spaces
    - `group`: the heading in the help
    - `typed`, `default`: type and default of the value from the command line
    - `read`: converts the value from the command line to the value of the field
    - `completed_as`: the option, without dashes, whose values complete this one in the shell
    - `settings`: more arguments for the library that parses the command line
    - `field`: name of the field, set by `options_of`
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
        """The main name: '--iters' for '--iters -n', '--check' for '--check/--no-check', 'BASE' for an argument."""
        return str(self.metavar) if self.is_argument else self.names.split(" ")[0].split("/")[0]

    @property
    def name_when_off(self) -> str:
        """The name that turns a flag off: '--no-check' for '--check/--no-check'."""
        return self.names.split(" ")[0].split("/")[-1]

    def is_asked(self, values: Mapping[str, Any]) -> bool:
        """True if the user set the option to a value other than its default."""
        return values.get(self.field) not in (self.default, None, [], ())


class OptionGroup(Protocol):
    """A dataclass of options that are parsed together. `help_group` is their heading in --help."""

    help_group: ClassVar[str]

    def parse(self, command: str) -> Any:
        """Return the value for the plan's field. Raises UsageError if the options contradict each other."""
        ...


def read_from(group: type[OptionGroup], **default: Any) -> Any:
    """Declare a field whose value is computed from the options in `group`."""
    return field(metadata={_GROUP: group}, **default)


def _group_of(declared: "Field[Any]") -> Any:
    """Return the option group that determines a field, or None.

    The group is declared by `read_from`, or it is the field's own type.
    """
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
    """Return the fields of a plan. Fields that it inherits from a base class come last."""
    shared = {declared.name for base in kind.__mro__[1:] if is_dataclass(base) for declared in fields(base)}
    return sorted(fields(kind), key=lambda declared: declared.name in shared)


def options_of(kind: Any) -> Iterator[Option]:
    """Yield the options of a plan and of its option groups."""
    for declared in _ordered_fields(kind):
        if option := _option_of(declared, kind):
            yield option
        elif group := _group_of(declared):
            yield from options_of(group)


def changed_options(plan: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each option that differs from its default: ('--no-check', False).

    Skip the options in a plan's `presentation`, which never change what is measured.
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
    """Make a plan from the values on the command line, which are keyed by field name. Other fields keep their
    defaults.

    A field called `typed` receives all values. Raises UsageError if a value is invalid.
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

    - `name`: one or more names, separated by spaces: '--verbose -v'
    - `common`: --help shows the option; otherwise only --help-all shows it
    - `read`: converts a text to the field's value, or a list of texts if `several` is true
    - `several`: the option can be repeated
    - `default`: a text for `read`
    - `without`: the field's value if there is neither a default nor a text
    """
    one: Any = bool | None if metavar is None else str | None if default is None else str
    typed = None if read is None else list[str] | None if several else one
    declared = Option(help_text, metavar, name, common, group, typed, default, read, completed_as, settings=settings)
    value = default if read is None else without if default is None else read(default)
    return field(default=value, metadata={_OPTION: declared})


def argument(metavar: str, help_text: str, *, read: Callable[[Any], Any] | None = None) -> Any:
    """Declare an optional positional argument, with None as its default."""
    typed = None if read is None else str | None
    return field(default=None, metadata={_OPTION: Option(help_text, metavar, typed=typed, read=read, is_argument=True)})


def required_argument(metavar: str, help_text: str) -> Any:
    return field(metadata={_OPTION: Option(help_text, metavar, default=..., is_argument=True)})


def flag(help_text: str, *, default: bool | None = False, **settings: Any) -> Any:
    """Declare an option without a value. `settings` are further arguments of `option`."""
    return option(None, help_text, default=default, **settings)


class RequiredPath(StrEnum):
    """The paths that --require-path can require. The first two apply to pairs inside a node, the others between
    nodes.
    """

    NVLINK = "nvlink"
    P2P = "p2p"
    IB = "ib"
    ROCE = "roce"
    EFA = "efa"
    MNNVL = "mnnvl"


REQUIRE_PATH = "--require-path"


def require_path_option(*, common: bool = True) -> Any:
    """Declare --require-path. A pair that took another path fails (exit code 1).

    If no pair failed, but the path of some pair is not proven, the assertion could not be checked (exit code 3). If the
    hardware has no such path, or the run has no pair to which it applies, the option is wrong usage (exit code 2).
    """
    return option(
        "PATH",
        f"Fail if a pair does not take this path: {','.join(RequiredPath)}.",
        name=REQUIRE_PATH,
        read=lambda texts: parse_choices(REQUIRE_PATH, texts, RequiredPath),
        several=True,
        without=(),
        completed_as="require-path",
        common=common,
        group=JUDGE,
    )


def strict_option() -> Any:
    text = "Also exit 1 for doubts (WARN, INCONCLUSIVE, unknown paths), and 3 if nothing was judged."
    return flag(text, common=True, group=JUDGE)


def step_timeout(steps: str, *, default: float, least: float = 0.1) -> Any:
    """Declare `--timeout`, the time limit for one step. `steps` lists these steps in the help."""
    text = f"Give up after S seconds on {steps}."
    return option("S", text, default=default, name="--timeout", min=least, max=_SECONDS_A_DAY, group=MEASURE)


def sharing_ranks(how: str = "Needs NCCL 2.30 or newer") -> Any:
    """Declare `--ranks-per-gpu`. `how` is the help text about what NCCL needs to run several ranks on one GPU."""
    text = (
        f"Ranks to launch on each GPU, to try a job on fewer GPUs. {how}. With an MPS server they run at the same "
        "time, otherwise in turns."
    )
    return option("N", text, default=1, min=1, show_default=False, group=MEASURE)


def rank_counts(help_text: str) -> Any:
    """Declare `--np`: one number of ranks, or several with commas. The field is empty without it."""
    return option("N", help_text, name="--np", read=parse_rank_counts, without=(), common=True)


def parse_rank_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks such as '8' or '1,2,4,8'. Raises UsageError unless they increase."""
    parts = [part.strip() for part in text.split(",")]
    counts = tuple(int(part) for part in parts if part.isdecimal() and len(part) <= _MOST_DIGITS)
    if len(counts) == len(parts) and min(counts) > 0 and list(counts) == sorted(set(counts)):
        return counts
    if len(parts) == 1:
        raise UsageError(f"--np {text}", expected="a whole number of 1 or more", next_step="--np 1")
    raise UsageError(
        f"--np {text}",
        expected="whole numbers of 1 or more, each larger than the one before",
        next_step="--np 1,2,4,8",
    )


def judging_profile() -> Any:
    """Declare `--profile`, a profile's name or file. None selects a matching profile."""
    return option(
        "NAME|FILE",
        "Judge by this profile (default: a matching profile of your own, otherwise one of gpubench's).",
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
    """Return a `read` function for an option that accepts one member of `choices`."""
    return lambda text: parse_choices(option, [text], choices)[0]


def parse_choices(option: str, texts: Iterable[str], choices: type[Choice]) -> tuple[Choice, ...]:
    """Parse comma-separated names into distinct members of `choices`, in their order. Raises UsageError for unknown
    names.
    """
    names = dict.fromkeys(name.strip() for text in texts for name in text.split(","))
    for name in names:
        if name not in tuple(choices):
            raise unknown_choice(option, name, tuple(choices))
    return tuple(map(choices, names))


def unknown_choice(option: str, name: str, choices: Sequence[str]) -> UsageError:
    """Return the error for an unknown value. Its next step suggests the most similar known value."""
    error = invalid_choice(option, name, choices)
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        error.next_step = f"{option} {nearest[0]}"
    return error


def parse_paths(texts: Iterable[str]) -> tuple[Path, ...]:
    """Convert the values of an option for files or folders to paths."""
    return tuple(map(Path, texts))
