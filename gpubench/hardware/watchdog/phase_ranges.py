"""Phases and sizes as NVTX ranges, so that a timeline of Nsight Systems reads by itself."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from gpubench.model.terms.hang import Phase

_LIBRARY = "libnvToolsExt.so.1"
"""NVTX 2, of CUDA up to 12; the package `nvtx` brings NVTX 3."""

_DOMAIN = "gpubench"


class Enter(Protocol):
    """As `Progress.enter`."""

    def __call__(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin another phase."""


class Nvtx(NamedTuple):
    """The calls that begin and end a range on this thread; without a tool that records, they take nanoseconds."""

    push: Callable[[str], object]
    pop: Callable[[], object]


def with_ranges(enter: Enter, nvtx: Nvtx | None) -> Enter:
    """An `enter` that also begins the range of the phase and ends the one before; `enter` itself without NVTX."""
    if nvtx is None:
        return enter
    is_open = False

    def enter_range(phase: Phase, label: str = "", operations: int = 0) -> None:
        nonlocal is_open
        if is_open:
            nvtx.pop()
        nvtx.push(f"{phase} {label}".strip())
        is_open = True
        enter(phase, label, operations)

    return enter_range


def find_nvtx() -> Nvtx | None:
    """NVTX by the package `nvtx`, else by the library of an older CUDA; None where neither is installed."""
    with suppress(ImportError):
        import nvtx

        return Nvtx(lambda text: nvtx.push_range(text, domain=_DOMAIN), lambda: nvtx.pop_range(domain=_DOMAIN))
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_LIBRARY)
        push, pop = library.nvtxRangePushA, library.nvtxRangePop
        push.argtypes = (ctypes.c_char_p,)
        return Nvtx(lambda text: push(f"{_DOMAIN}: {text}".encode()), pop)
    return None
