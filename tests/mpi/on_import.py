"""Put a stand-in where a module has a name of its own once that module is loaded: nothing else is loaded for it."""

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
        """Be asked for every module that is loaded from now on; none of those with stand-ins may be there yet."""
        assert not self._names.keys() & sys.modules.keys()
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
