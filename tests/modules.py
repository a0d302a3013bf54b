"""All modules of the package."""

import importlib
import pkgutil

import gpubench


def load_all_modules(first: float = 0.0) -> None:
    """Import every module of gpubench; none of them imports MPI, CuPy, NumPy or NVML before it is used.

    Begins with the one at that part of them all.
    """
    names = [each.name for each in pkgutil.walk_packages(gpubench.__path__, "gpubench.")]
    begin = int(first * len(names))
    for name in names[begin:] + names[:begin]:
        if not name.endswith("__main__"):
            importlib.import_module(name)
