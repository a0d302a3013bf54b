"""The libnccl of this process by NVIDIA's bindings (`nccl.bindings.nccl` of nccl4py), and its functions by address.

On one H100 they cost as much as CuPy's own bindings, which its maintainers mean to give up: 5 to 9 ms to import
(CuPy's 1), 5.2 to 7.8 µs to issue an operation of 1 KiB (5.6 to 7.5), with NCCL 2.21.5, 2.27.7 and 2.32.3, and with
PyTorch's own 2.28.9 in its process.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubench import errors
from gpubench.hardware.timing import CallFailedError
from gpubench.model.terms.operation import nccl_version
from gpubench.ports.backend import Launch

_RESET_LOG = "ncclResetDebugInit"


class NcclError(RuntimeError):
    """NCCL refused a call, in its words."""


class NcclLibrary:
    """The libnccl that is loaded, else that is found: `version` '2.28.9', `version_code` 22809, `nccl` the bindings."""

    error: type[Exception] = NcclError

    def __init__(self, asked: str | None = None) -> None:
        if asked is not None:
            # Loaded first and globally, it is the libnccl.so.2 that the bindings find.
            try:
                _load(asked, ctypes.RTLD_GLOBAL).ncclGetVersion  # noqa: B018
            except (OSError, AttributeError) as error:
                raise errors.unreadable_nccl_library(asked, str(error)) from error
        try:
            from nccl.bindings import nccl
        except ImportError as error:
            raise errors.missing_nccl_bindings(str(error)) from error
        self.nccl: Any = nccl
        try:
            self.version_code: int = nccl.get_version()
        except (RuntimeError, OSError) as error:
            raise errors.missing_nccl(str(error).strip().splitlines()[0]) from error
        self.version = nccl_version(self.version_code)
        self.path = str(Path(nccl.get_library_path()).absolute())
        self._native = _load(self.path)
        if asked is not None and Path(asked).resolve() != Path(self.path).resolve():
            raise errors.nccl_library_not_used(asked, self.path)

    def allocate(self, size_bytes: int) -> int:
        """The address of memory that NCCL allocated. Raises UsageError where NCCL has no allocator (before 2.19)."""
        if not self.has("ncclMemAlloc"):
            raise errors.no_nccl_allocator(self.version)
        return int(self.asked(self.nccl.mem_alloc, size_bytes))

    def free(self, address: int) -> None:
        """Give memory back that `allocate` took."""
        self.asked(self.nccl.mem_free, address)

    def asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the bindings returns. Raises NcclError where NCCL refuses."""
        try:
            return function(*arguments)
        except self.nccl.NCCLError as error:
            raise NcclError(str(error)) from error

    def words(self, status: int) -> str:
        """NCCL's words for a `ncclResult_t` that is none of success."""
        return str(self.nccl.NCCLError(status))

    def issue(self, launch: Launch) -> None:
        """Make the calls of a launch. Raises NcclError with NCCL's words for one that failed."""
        try:
            launch()
        except CallFailedError as error:
            raise NcclError(self.words(error.status)) from error

    @property
    def can_reset_log(self) -> bool:
        """True where NCCL can read NCCL_DEBUG and its like again: since 2.24.3."""
        return self.has(_RESET_LOG)

    def reset_log(self) -> None:
        """Have NCCL read those variables again, at its next line at the latest."""
        ctypes.CFUNCTYPE(None)(self.address(_RESET_LOG))()

    def last_error(self) -> str:
        """The text of the last warning of NCCL's in this process, whatever it logs; '' before NCCL 2.13, or of none."""
        return str(self.nccl.get_last_error(self.nccl.Comm(0))).strip() if self.has("ncclGetLastError") else ""

    def has(self, name: str) -> bool:
        """True where this version has a function of that C name."""
        return hasattr(self._native, name)

    def address(self, name: str) -> int:
        """The address of a function by its C name."""
        return ctypes.cast(getattr(self._native, name), ctypes.c_void_p).value or 0


def _load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode)
