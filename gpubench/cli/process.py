"""The process around a command: its streams, its exit, and whether there are defaults for its options."""

import contextlib
import os
import sys
import time
from collections.abc import Callable

from gpubench.cli.streams import prepare_streams
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.facts.launched_by import (
    OF_TORCHRUN,
    SECONDS_FOR_THE_FIRST_RANK,
    TORCHRUN,
    LaunchedBy,
    launched_by,
)

PREFIX = "GPUBENCH_"
OWN_FILE = "gpubench.toml"
PROJECT_FILE = "pyproject.toml"
DEFAULTS_FILES = (OWN_FILE, PROJECT_FILE)
"""The first of them that says something of gpubench is read for defaults of options, and no other."""

_OWN_FAULT = "gpubench itself failed, as shown above; this says nothing about the machine"


def exit_with(run: Callable[[LaunchedBy | None], int]) -> None:
    """Run, and exit with its code; under a launcher only the first rank speaks of wrong usage."""
    prepare_streams()
    launch = _own_launch()
    speaks = launch is None or launch.rank == 0 or launch.rank >= launch.size
    with contextlib.ExitStack() as stack:
        if not speaks:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        code = _ended(run, launch)
    if code and not speaks:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    sys.exit(code)


def _ended(run: Callable[[LaunchedBy | None], int], launch: LaunchedBy | None) -> int:
    """The exit code of a run; of one that breaks in a way that nobody foresaw, that of what could not be measured."""
    try:
        return run(launch)
    except Exception:  # noqa: BLE001 - Python's own exit code for it, 1, would read as a judgement
        import traceback

        from gpubench.formats.delivery import tell

        with contextlib.suppress(OSError):
            traceback.print_exc()
        fault = CouldNotMeasureError(_OWN_FAULT)
        tell(fault, sys.stderr)
        return fault.exit_code


def _own_launch() -> LaunchedBy | None:
    """The launcher of this rank; None for a command whose ranks do not meet by what torchrun set.

    Where that command starts none either, this process is one alone: in it, and in what it starts, those variables are
    taken away.
    """
    try:
        launch = launched_by(os.environ)
    except UsageError:  # one of torchrun's variables is no number: a command that starts ranks says so
        launch = LaunchedBy(TORCHRUN, 0, 1)
    if launch is None or launch.launcher != TORCHRUN:
        return launch
    from gpubench.cli.table import COMMANDS, UnderTorchrun

    under = next((each.under_torchrun for each in COMMANDS if each.name in sys.argv[1:2]), UnderTorchrun.REFUSED)
    if under is UnderTorchrun.ALONE:
        for name in OF_TORCHRUN:
            del os.environ[name]
    return launch if under is UnderTorchrun.RANKS else None


def may_have_defaults() -> bool:
    """Whether there is a variable or a file that may hold a default of an option."""
    return any(name.startswith(PREFIX) for name in os.environ) or any(map(os.path.exists, DEFAULTS_FILES))
