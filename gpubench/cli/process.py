"""The table of commands, and the process that runs one of them: its streams, its launcher and its exit code."""

import codecs
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable

from gpubench.collectives.registry import SUMMARIES
from gpubench.errors import CouldNotMeasureError, UsageError, name_output, no_working_folder
from gpubench.model.facts.environment import (
    PLAN_VARIABLE,
    SECONDS_FOR_THE_FIRST_RANK,
    TORCHRUN,
    TORCHRUN_VARIABLES,
    LaunchedRank,
    detect_launcher,
)
from gpubench.model.terms.commands import AFTER_COLLECTIVES, BEFORE_COLLECTIVES, COLLECTIVE

_HANDLER = "gpubench"
_SPELLED = str.maketrans(
    {"×": "x", "±": "+-", "µ": "u", "→": "->", "…": "...", "✓": "+", "✗": "!", "│": "|", "├": "|", "└": "`"}
    | dict.fromkeys("─━╸╺–", "-")
    | dict.fromkeys("✅❌⚠🟣⏭\ufe0f", "")
)


class _Stdout(io.TextIOWrapper):
    """stdout whose write errors carry the name 'stdout', to distinguish them from errors of output files."""

    def write(self, text: str, /) -> int:
        """Write text. Raises OutputError, for example if the disk is full, and BrokenPipeError if the reader exited."""
        with name_output("stdout"):
            return super().write(text)

    def flush(self) -> None:
        with name_output("stdout"):
            super().flush()


def _prepare_streams() -> None:
    """Reopen closed streams on /dev/null, name stdout in its errors, and replace characters it cannot encode.

    A shell closes a stream with `>&-`. The next opened file would then get its descriptor, and with it the output of
    this process or its children. Python also sets a closed stream to None.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # open returns the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)  # noqa: FBT003
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    codecs.register_error(_HANDLER, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        line_buffering, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        sys.stdout = _Stdout(open(1, "wb", closefd=False), encoding, _HANDLER, line_buffering=line_buffering)  # noqa: SIM115


def showable(text: str) -> str:
    """Replace characters that stdout cannot encode. Help needs this, because typer bypasses the stream's error
    handler.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_SPELLED)
    return text


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    spelled = error.object[error.start : error.end].translate(_SPELLED)
    return spelled.encode("ascii", "replace").decode("ascii"), error.end


PREFIX = "GPUBENCH_"
OWN_FILE = "gpubench.toml"
PROJECT_FILE = "pyproject.toml"
DEFAULTS_FILES = (OWN_FILE, PROJECT_FILE)
"""Files that may set the defaults of options, in this order. Only the first one with gpubench options is read."""

_OWN_FAULT = "gpubench itself failed, as shown above. The machine may be healthy"


def run_and_exit(run: Callable[[LaunchedRank | None], int]) -> None:
    """Run gpubench, and exit with its code. Under a launcher, only the first rank prints, so that errors appear
    once.
    """
    _prepare_streams()
    typed_name = replace_other_name()
    launch = _own_launch()
    speaks = launch is None or launch.rank == 0 or launch.rank >= launch.size
    with contextlib.ExitStack() as stack:
        if not speaks:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        if typed_name == "libraries":
            sys.stderr.write(f"gpubench: {_OLD_LIBRARIES}\n")
        code = _ended(run, launch)
    if code and not speaks:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    sys.exit(code)


def _ended(run: Callable[[LaunchedRank | None], int], launch: LaunchedRank | None) -> int:
    """Return the exit code of a run. Report an unexpected exception as CouldNotMeasureError."""
    try:
        return run(launch)
    except Exception as error:  # noqa: BLE001 - Python's exit code 1 would mean that a check failed
        import traceback

        from gpubench.formats.delivery import tell

        if isinstance(error, FileNotFoundError) and _is_folder_gone():
            gone = no_working_folder()
            tell(gone, sys.stderr)
            return gone.exit_code
        with contextlib.suppress(OSError):
            traceback.print_exc()
        fault = CouldNotMeasureError(_OWN_FAULT)
        tell(fault, sys.stderr)
        return fault.exit_code


def _is_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return True
    return False


_OLD_LIBRARIES = "`libraries` is now `gpubench topo --software`. The next release drops the old name."
_OTHER_NAMES = {"show": ["report"], "libraries": ["topo", "--software"]}


def replace_other_name() -> str:
    """Replace another name of a command in `sys.argv`, for example `all_reduce_perf`. Return the typed name."""
    at = 2 if sys.argv[1:2] == ["help"] else 1
    for name in sys.argv[at : at + 1]:
        collective = re.sub("[-_]", "", name.removesuffix("_perf"))
        sys.argv[at : at + 1] = _OTHER_NAMES.get(name, [collective if collective in SUMMARIES else name])
        return name
    return ""


def _own_launch() -> LaunchedRank | None:
    """Return the launcher of this rank, or None without one.

    Under torchrun, return None unless the ranks of the command use torchrun. A command that ignores torchrun runs
    alone, so its variables are removed from the environment.
    """
    try:
        launch = detect_launcher(os.environ)
    except UsageError:  # A torchrun variable is not a number. Commands with ranks report that later
        launch = LaunchedRank(TORCHRUN, 0, 1)
    if launch is None or launch.launcher != TORCHRUN:
        return launch
    from gpubench.model.terms.commands import UnderTorchrun

    under = next(
        (command.under_torchrun for command in COMMANDS if command.name in sys.argv[1:2]), UnderTorchrun.REFUSED
    )
    if under is UnderTorchrun.ALONE:
        for name in TORCHRUN_VARIABLES:
            del os.environ[name]
    return launch if under is UnderTorchrun.RANKS else None


def run_launched(launch: LaunchedRank) -> int:
    """Run as a rank that gpubench has launched. The parent passes the option values as JSON in PLAN_VARIABLE."""
    import json
    from importlib import import_module

    typed = json.loads(os.environ[PLAN_VARIABLE])
    module = next(command.ranks for command in COMMANDS if command.name == typed["command"])
    code: int = import_module(module).run_launched(typed, launch)
    return code


def may_have_defaults() -> bool:
    """True if there is a variable or a file that may set defaults of options. Neither is read here."""
    return any(name.startswith(PREFIX) for name in os.environ) or any(map(os.path.exists, DEFAULTS_FILES))


COMMANDS = (
    *BEFORE_COLLECTIVES,
    *(COLLECTIVE._replace(name=name, summary=summary) for name, summary in SUMMARIES.items()),
    *AFTER_COLLECTIVES,
)
