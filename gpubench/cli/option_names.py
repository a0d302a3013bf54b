"""The names of options, as files write them, and the variables of the environment that belong to them."""

from collections.abc import Iterable
from typing import Any

from gpubench.cli.process import PREFIX


def options_of(parameters: Iterable[Any]) -> dict[str, Any]:
    """The options among typer's parameters by name, `expect-gpus`; --help and what typer adds are none."""
    named = ((next((name for name in each.opts if name.startswith("--")), ""), each) for each in parameters)
    return {name.removeprefix("--"): each for name, each in named if name and each.expose_value}


def variable_of(key: str) -> str:
    """The variable of an option: GPUBENCH_EXPECT_GPUS of `expect-gpus`."""
    return PREFIX + key.upper().replace("-", "_")
