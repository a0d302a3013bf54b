"""Find out why your GPUs talk slowly.

`import gpubench`: each command is a function that returns what it found, as docs/library.md shows. The functions and
their arguments stand with types in `__init__.pyi`.
"""

from typing import Any

__version__ = "0.1.0"

_COMMANDS = (
    *("topo", "p2p", "libraries", "check", "scan", "watch", "explain", "compare", "report"),
    *("allreduce", "allgather", "reducescatter", "broadcast", "reduce", "alltoall", "gather", "scatter", "sendrecv"),
    *("overlap", "plan"),
)
_OF_LIBRARY = ("RunResult", "load", "run")
__all__ = ["__version__", *_OF_LIBRARY, *_COMMANDS]


def __getattr__(name: str) -> Any:
    """What is for programs is imported when it is asked for: the command line needs none of it."""
    if name in _COMMANDS or name in _OF_LIBRARY:
        from importlib import import_module

        library = import_module("gpubench.jobs.library")
        found = library.function_of(name) if name in _COMMANDS else getattr(library, name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
