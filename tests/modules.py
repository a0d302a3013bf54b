"""All modules of the package."""

import importlib
import pkgutil

import gpubench


def load_all_modules() -> None:
    """Import every module of gpubench; none of them imports MPI, CuPy, NumPy or NVML before it is used."""
    for module in pkgutil.walk_packages(gpubench.__path__, "gpubench."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
