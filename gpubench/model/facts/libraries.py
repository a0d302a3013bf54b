"""The libraries of one environment that move data between GPUs, and who would use which."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIBRARIES_VERSION = 1

NCCL, RCCL, MPI, UCX, NVSHMEM, MSCCLPP = "NCCL", "RCCL", "MPI", "UCX", "NVSHMEM", "MSCCL++"

LOADER = "other programs"
"""Who takes what the dynamic loader finds, with nothing else to go by: nccl-tests, and whatever was linked so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFile:
    """One library. `package` is the wheel that brought it; `version` is its own word, None with the reason in `unread`.

    Several names of one file are one library: `path` is the first that somebody would load it by.
    """

    library: str
    path: str
    package: str | None = None
    version: str | None = None
    unread: str = ""
    cuda: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryUser:
    """Somebody who would load libraries: a package, or what the loader alone serves.

    `purpose` says what it would move data for; `loads` are files by library; `inside` are libraries that are part of
    it, with their versions where it tells; `unread` is why it could not be asked.
    """

    name: str
    version: str | None = None
    path: str | None = None
    purpose: str = ""
    note: str = ""
    loads: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""

    @property
    def label(self) -> str:
        """Its name and version."""
        return " ".join(filter(None, (self.name, self.version)))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModule:
    """A kernel module by which NICs or disks reach GPU memory; `version` where it tells."""

    name: str
    loaded: bool
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrariesFacts:
    """One environment on one host. `python` is the interpreter; `failures` are parts that gave no answer, by name."""

    host: str
    python: str
    files: tuple[LibraryFile, ...] = ()
    users: tuple[LibraryUser, ...] = ()
    modules: tuple[KernelModule, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = LIBRARIES_VERSION
