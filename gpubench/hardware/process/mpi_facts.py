"""GPU support of the MPI library that this process has loaded, by ctypes: nothing is loaded for it.

`MPIX_Query_cuda_support` is Open MPI's and MVAPICH's, `MPIX_GPU_query_support` MPICH's. What Open MPI chose stands in
variables that its libraries export. Seen: Open MPI 5 and MPICH 5 without GPUs; neither with them, nor MVAPICH.
"""

import ctypes
import os
from typing import Any

from gpubench.hardware.system_files import printable
from gpubench.model.facts.rank_facts import MpiFacts

_LONGEST_VERSION = 8192
_CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h."""

_FIELDS = ("cuda_built", "cuda_aware", "pml", "accelerator")


class _Component(ctypes.Structure):
    """The beginning of `mca_base_component_t`, the same in Open MPI 2 to 5 (opal/mca/mca.h)."""

    _fields_ = (
        ("version", ctypes.c_int * 3),
        ("project", ctypes.c_char * 16),
        ("project_version", ctypes.c_int * 3),
        ("kind", ctypes.c_char * 32),
        ("kind_version", ctypes.c_int * 3),
        ("name", ctypes.c_char * 64),
    )


def read_mpi(path: str | None) -> MpiFacts:
    """The facts of the library at `path`, which this process has mapped; None where it has none."""
    if path is None:
        return _silent("no MPI library is loaded in this process")
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError as error:
        return _silent(f"the MPI library cannot be asked: {printable(str(error))}")
    return read_library(library)


def read_library(library: Any) -> MpiFacts:
    """The facts of a loaded library, or of what stands in for it."""
    if not _flag(library, "MPI_Initialized") or _flag(library, "MPI_Finalized"):
        return _silent("MPI is not running in this process", version=_version(library))
    unknown: dict[str, str] = {}
    aware = _cuda_aware(library)
    if aware is None:
        unknown["cuda_aware"] = "the library has no function that tells"
    built = cuda_built(library)
    pml = _component(library, "mca_pml_base_selected_component", b"pml")
    accelerator = _component(library, "opal_accelerator_base_selected_component", b"accelerator")
    for name, value in (("cuda_built", built), ("pml", pml), ("accelerator", accelerator)):
        if value is None:
            unknown[name] = "the library exports no variable of Open MPI's that tells"
    return MpiFacts(
        version=_version(library),
        cuda_built=built,
        cuda_aware=aware,
        pml=pml,
        accelerator=accelerator,
        unknown=unknown,
    )


def cuda_built(library: Any) -> bool | None:
    """Whether Open MPI was built for memory of GPUs, by a variable that holds it before MPI is started too."""
    return _boolean(library, "opal_built_with_cuda_support")


def _silent(reason: str, version: str | None = None) -> MpiFacts:
    return MpiFacts(version=version, unknown=dict.fromkeys(_FIELDS, reason))


def _flag(library: Any, function: str) -> bool:
    """MPI_Initialized and MPI_Finalized, which may be called at any time."""
    value = ctypes.c_int(0)
    asked = getattr(library, function, None)
    return asked is not None and asked(ctypes.byref(value)) == 0 and bool(value.value)


def _version(library: Any) -> str | None:
    asked = getattr(library, "MPI_Get_library_version", None)
    if asked is None:
        return None
    text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int(0)
    if asked(text, ctypes.byref(length)):
        return None
    lines = text.value.decode(errors="replace").strip().splitlines()
    return printable(" ".join(lines[0].split(",")[0].split())) if lines else None


def _cuda_aware(library: Any) -> bool | None:
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None:
        return None
    answer = ctypes.c_int(0)
    return None if query(_CUDA, ctypes.byref(answer)) else bool(answer.value)


def _boolean(library: Any, name: str) -> bool | None:
    try:
        return bool(ctypes.c_bool.in_dll(library, name).value)
    except ValueError:
        return None


def _component(library: Any, name: str, kind: bytes) -> str | None:
    """The name of a chosen component, where the variable is what it is expected to be."""
    try:
        component = _Component.in_dll(library, name)
    except ValueError:
        return None
    return printable(component.name.decode(errors="replace")) if component.kind == kind and component.name else None
