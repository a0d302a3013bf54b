"""Entry point of the `gpubench` command and of `python -m gpubench`, for users and for ranks that mpirun launched.

Ctrl-C may arrive while modules are imported, so its handler is installed before other imports.
"""

import os
import sys

# Type checkers treat this like typing.TYPE_CHECKING. Importing typing would take longer than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from gpubench.model.facts.environment import LaunchedRank
else:
    import _signal as signal  # The C module behind `signal`, which imports faster because it defines no enums

_INTERRUPTED = 130
_QUOTED = " *?[]{}()<>|&;$`\"'\\!#~"
# Same as CHANNEL_VARIABLE in model.facts.environment. If it is set, the parent process reports for this rank.
_CHANNEL = "GPUBENCH_CHANNEL"


def run(launch: "LaunchedRank | None") -> int:
    """Run as a rank that gpubench launched, or parse the command line. A launched rank has its plan already and
    needs no typer.
    """
    if os.environ.get(_CHANNEL) and launch is not None:
        from gpubench.cli.process import run_launched

        return run_launched(launch)
    from gpubench.cli.app import run_command_line

    return run_command_line(launch)


def _interruption() -> str:
    again = " ".join("'" + each.replace("'", "'\\''") + "'" if {*each} & {*_QUOTED} else each for each in sys.argv[1:])
    return f"gpubench: interrupted before the first result. Try: gpubench {again}".rstrip() + "\n"


def _end_at_once(_number: int, _frame: object) -> None:
    if _CHANNEL not in os.environ:
        os.write(2, _interruption().encode(errors="replace"))
    os._exit(_INTERRUPTED)


def main() -> None:
    """Run gpubench and exit with its exit code. From the first import on, Ctrl-C prints one line instead of a
    traceback.
    """
    # False if SIGINT is ignored, as in a background job started with `&`
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _end_at_once)
    from gpubench.cli.process import run_and_exit

    if _CHANNEL not in os.environ:
        import gpubench.cli.app  # noqa: F401 - half of the import time, under the handler for Ctrl-C
    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_and_exit(run)
    except (KeyboardInterrupt, SystemExit) as ended:
        if is_usual:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # The exit code is decided, so Ctrl-C no longer changes it
        if isinstance(ended, SystemExit):
            raise
        sys.stderr.write(_interruption())
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
