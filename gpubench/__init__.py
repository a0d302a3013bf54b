"""What the links between GPUs should deliver, what they deliver, and why not.

`from gpubench import check, topo, p2p, allreduce, run`: each runs a command and returns what it found.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubench.jobs.library import RunResult as RunResult
    from gpubench.jobs.library import allreduce as allreduce
    from gpubench.jobs.library import check as check
    from gpubench.jobs.library import p2p as p2p
    from gpubench.jobs.library import run as run
    from gpubench.jobs.library import topo as topo

__version__ = "0.1.0"

_OF_LIBRARY = ("RunResult", "allreduce", "check", "p2p", "run", "topo")


def __getattr__(name: str) -> Any:
    """What is for programs is imported when it is asked for: the command line needs none of it."""
    if name in _OF_LIBRARY:
        from importlib import import_module

        return getattr(import_module("gpubench.jobs.library"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
