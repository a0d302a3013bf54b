"""The rows of `gpubench libraries`: what moves data between GPUs, and who would use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.terms.origin import Origin

LIBRARIES_SECTION = "libraries"


class LibraryKind(StrEnum):
    """A file that is loaded, a package of Python that loads such, or a part of the kernel."""

    LIBRARY = "library"
    PACKAGE = "package"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRow(Record):
    """One library, package or kernel module of one environment; also one that was looked for and is not there."""

    node: str  #: host
    library: str  #: NCCL, MPI, UCX, NVSHMEM, MSCCL++, torch, CuPy, mpi4py, dma-buf, nvidia_peermem, ...
    kind: Annotated[str, LibraryKind]  #: a file that is loaded, a package of Python, a part of the kernel
    found: bool | None  #: whether it is there; null: not known
    version: str | None = None  #: by its own word; by its package or file name where `note` says so
    path: str | None = None  #: file, or folder of a package
    package: str | None = None  #: the wheel or environment that brought it
    used_by: Sequence[str] = ()  #: who would load it, and for what; none: nobody who was asked
    cuda: bool | None = None  #: of MPI: built for memory of GPUs, by its own word
    note: str | None = None  #: what else has to be said
    origin: Annotated[str, Origin]  #: measured or recorded
