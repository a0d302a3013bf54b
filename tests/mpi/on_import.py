"""Put a stand-in where a module has a name of its own, once that module is loaded: nothing else is loaded for it."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class StandIns(MetaPathFinder):
    """Finds modules that have stand-ins: by module and name, which module has the stand-in of what name."""

    def __init__(self, names: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
        self._names = names

    def install(self) -> None:
        """Be asked for every module that is loaded from now on.

        In a process that has loaded them before, each stand-in is also put where other modules have the same thing.
        """
        for module in [sys.modules[name] for name in self._names if name in sys.modules]:
            for name, (source, stand_in) in self._names[module.__name__].items():
                put_everywhere(module, name, getattr(import_module(source), stand_in))
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = self._names.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if names else None
        if spec is None or spec.loader is None or names is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            for name, (source, stand_in) in names.items():
                setattr(module, name, getattr(import_module(source), stand_in))

        loader.exec_module = executed
        return spec


def put_everywhere(module: ModuleType, name: str, stand_in: object) -> None:
    """Put it where the module has that name, and where modules that are loaded have what stood there."""
    real = getattr(module, name)
    for names in _NAMES_OF_MODULES:
        if names.get(name) is real:
            names[name] = stand_in


_NAMES_OF_MODULES = [vars(module) for key, module in sys.modules.items() if key.startswith("gpubench.")]
"""Of all of gpubench in a process that forks: each fork that looked for them wrote to a thousand pages."""
