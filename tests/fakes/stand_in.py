"""Replace functions and classes of gpubench in this process, for programs that run gpubench on fake hardware."""

import sys
from importlib import import_module


def stand_in(path: str, fake: object) -> None:
    """Replace `module.name` in its module and in all loaded modules that imported it."""
    module, _, name = path.rpartition(".")
    real = getattr(import_module(module), name)
    for variables in [vars(loaded) for key, loaded in sys.modules.items() if key.startswith("gpubench.")]:
        variables.update({own: fake for own, value in variables.items() if value is real})
