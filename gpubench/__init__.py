"""Find out why your GPUs talk slowly.

`import gpubench`: each command is a function that returns what it found, as docs/library.md shows. The functions and
their arguments stand with types in `__init__.pyi`.
"""

__version__ = "0.1.0"

_OF_LIBRARY = ("RunResult", "load", "run")


def __getattr__(name: str) -> object:
    """What is for programs is imported when it is asked for: the command line needs none of it."""
    from importlib import import_module

    commands = [each.name for each in import_module("gpubench.cli.process").COMMANDS if each.writes_reports]
    if name == "__all__":
        return ["__version__", *_OF_LIBRARY, *commands]
    if name in commands or name in _OF_LIBRARY:
        library = import_module("gpubench.jobs.library")
        found = library.function_of(name) if name in commands else getattr(library, name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
