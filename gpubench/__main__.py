"""The program `gpubench`, and `python -m gpubench`: the command line, or what mpirun launches, one process a rank.

Ctrl-C may come while modules are imported, so nothing is imported before it is taken care of.
"""

import os
import sys

TYPE_CHECKING = False  # The one of `typing`, whose import takes longer than all else here
if TYPE_CHECKING:
    import signal

    from gpubench.model.facts.environment import LaunchedRank
else:
    import _signal as signal  # what `signal` is made of, without its enumerations

_INTERRUPTED = 130
_QUOTED = " *?[]{}()<>|&;$`\"'\\!#~"
_CHANNEL = "GPUBENCH_CHANNEL"  # As CHANNEL_VARIABLE in `model.facts.environment`: its parent speaks for a rank


def run(launch: "LaunchedRank | None") -> int:
    """Be a rank that gpubench launched, which needs no typer to know its plan, or read the command line."""
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
    """Run, and exit with the code; Ctrl-C is one line from the first import on."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as behind `&`
    if is_usual:
        signal.signal(signal.SIGINT, _end_at_once)
    from gpubench.cli.process import run_and_exit

    if _CHANNEL not in os.environ:
        import gpubench.cli.app  # noqa: F401 - half of all imports
    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_and_exit(run)
    except KeyboardInterrupt:
        if is_usual:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write(_interruption())
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
