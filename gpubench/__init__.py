"""Find out why your GPUs talk slowly.

Every command is also a function that returns a RunResult, such as `gpubench.allreduce(simulate="hgx-h100-8")`.
`dir(gpubench)` lists the functions, and `help(gpubench.allreduce)` shows the parameters.
docs/how-to/notebook.md has examples.
"""

import sys

__version__ = "0.1.0"

_OF_LIBRARY = ("RunResult", "load", "run")


def _commands() -> list[str]:
    from importlib import import_module

    commands = import_module("gpubench.cli.process").COMMANDS
    return [command.name for command in commands if command.writes_reports and command.name not in _OF_LIBRARY]


def __dir__() -> list[str]:
    """Return the public names, for `dir` and for tab completion."""
    return sorted(("__doc__", "__file__", "__name__", "__version__", *_OF_LIBRARY, *_commands()))


def __getattr__(name: str) -> object:
    """Import the library's functions on first access, since the command line does not need them."""
    from importlib import import_module

    if name == "__all__":
        return ["__version__", *_OF_LIBRARY, *_commands()]
    if name in _OF_LIBRARY:
        found = getattr(import_module("gpubench.jobs.library"), name)
    elif name in _commands():
        found = import_module("gpubench.cli.functions").make_function(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    globals()[name] = found
    return found
