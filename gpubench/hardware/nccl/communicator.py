"""Communicators that are made with a configuration, and buffers that are registered with them.

CuPy's `NcclCommunicator` takes no `ncclConfig_t`; this has the part of its methods that a backend uses.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

from gpubench import errors
from gpubench.hardware.nccl.backend import (
    INITIALISE,
    CFunctions,
    CommunicatorConfig,
    NcclBackend,
    UniqueId,
    capped,
    new_unique_id,
    with_policy,
)
from gpubench.model.terms.operation import nccl_version
from gpubench.model.terms.settings import CTA_POLICY, MAX_CTAS, REGISTER, CtaPolicy, NcclSetting, Registration
from gpubench.ports.backend import CollectiveCalls
from gpubench.ports.group import Group

_SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC in nccl.h."""

_POLICIES = {CtaPolicy.DEFAULT: 0, CtaPolicy.EFFICIENCY: 1, CtaPolicy.ZERO: 2}
"""NCCL_CTA_POLICY_* in nccl.h."""

_FIRST_WITH: Mapping[tuple[str, str], tuple[int, str]] = {
    (REGISTER, Registration.USER): (21900, "ncclCommRegister"),
    (REGISTER, Registration.SYMMETRIC): (22700, "ncclCommWindowRegister"),
    (CTA_POLICY, CtaPolicy.DEFAULT): (22700, "CTA policy"),
    (CTA_POLICY, CtaPolicy.EFFICIENCY): (22700, "NCCL_CTA_POLICY_EFFICIENCY"),
    (CTA_POLICY, CtaPolicy.ZERO): (22800, "NCCL_CTA_POLICY_ZERO"),
}
_FIRST_WITH_CAPS = 21700
"""NCCL_VERSION_CODE of the first release that has a call (nccl.h.in of v2.17.1-1, v2.19.3-1, v2.27.3-1, v2.28.3-1)."""


class CheckedLibrary(CFunctions, Protocol):
    """A library of C functions by name, whose refusals are raised as CuPy raises them."""

    nccl: Any

    def has(self, name: str) -> bool:
        """True where this version has a function of that C name."""


class ConfiguredCommunicator:
    """A communicator of a group; every rank of it makes one. Raises CuPy's NcclError where NCCL refuses."""

    def __init__(self, library: CheckedLibrary, group: Group, config: CommunicatorConfig) -> None:
        self._library, self._rank, self._size = library, group.rank, group.size
        unique_id = group.broadcast(new_unique_id(library) if group.rank == 0 else None)
        handle = ctypes.c_void_p()
        begin = library.function(INITIALISE, ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p)
        own = UniqueId.from_buffer_copy(unique_id)
        self._check(begin(ctypes.addressof(handle), self._size, own, self._rank, ctypes.addressof(config)))
        self.comm: int = handle.value or 0
        self._state = ctypes.c_int()
        self._ask = library.function("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.c_void_p)
        self._registered: list[tuple[str, int]] = []

    def register(self, how: Registration, address: int, size_bytes: int) -> bool:
        """Register memory, together with the other ranks; False where NCCL gives no handle for it."""
        handle = ctypes.c_void_p()
        types: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        arguments: list[Any] = [self.comm, address, size_bytes, ctypes.addressof(handle)]
        name, undo = "ncclCommRegister", "ncclCommDeregister"
        if how is Registration.SYMMETRIC:
            name, undo = "ncclCommWindowRegister", "ncclCommWindowDeregister"
            types.append(ctypes.c_int)
            arguments.append(_SYMMETRIC)
        self._check(self._library.function(name, *types)(*arguments))
        if handle.value:
            self._registered.append((undo, handle.value))
        return bool(handle.value)

    def rank_id(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def check_async_error(self) -> None:
        """Raise where NCCL has noticed an error meanwhile."""
        self._check(self._ask(self.comm, ctypes.addressof(self._state)) or self._state.value)

    def abort(self) -> None:
        """Give it up, whatever is under way."""
        self._end("ncclCommAbort")

    def destroy(self) -> None:
        """End it together with the other ranks, and what was registered with it."""
        while self._registered and self.comm:
            undo, handle = self._registered.pop()
            self._library.function(undo, ctypes.c_void_p, ctypes.c_void_p)(self.comm, handle)
        self._end("ncclCommDestroy")

    def _end(self, function: str) -> None:
        if self.comm:
            handle, self.comm = self.comm, 0
            self._library.function(function, ctypes.c_void_p)(handle)

    def _check(self, status: int) -> None:
        if status:
            self._library.nccl.check_status(status)


def takes_caps(library: CheckedLibrary) -> bool:
    """True where a cap can be asked for when a communicator is made."""
    return library.has(INITIALISE)


def config_of(requests: Mapping[str, str]) -> CommunicatorConfig:
    """The configuration of a communicator of which that is asked."""
    most = int(requests[MAX_CTAS]) if MAX_CTAS in requests else None
    if CTA_POLICY in requests:
        return with_policy(_POLICIES[CtaPolicy(requests[CTA_POLICY])], most)
    return capped(most)


def open_requested(
    backend: NcclBackend, library: CheckedLibrary, group: Group, requests: Mapping[str, str]
) -> tuple[CollectiveCalls, Registration]:
    """The collectives of a communicator of which that is asked, and how all its buffers are registered with it.

    Raises CuPy's NcclError where NCCL refuses.
    """
    communicator = ConfiguredCommunicator(library, group, config_of(requests))
    calls = backend.adopt(communicator)
    asked = Registration(requests.get(REGISTER, Registration.NONE))
    if asked is Registration.NONE:
        return calls, asked
    try:
        done = [communicator.register(asked, *each) for each in backend.allocations]
    except Exception:
        backend.drop(calls)
        raise
    return calls, asked if all(done) else Registration.NONE


def check_requests(settings: tuple[NcclSetting, ...], version_code: int) -> None:
    """Raise UsageError for a request that this NCCL has no call for, with the first version that has it."""
    for request in dict.fromkeys(each for setting in settings for each in setting.requests.items()):
        default = (_FIRST_WITH_CAPS, "cap on CTAs") if request[0] == MAX_CTAS else (0, "")
        first, what = _FIRST_WITH.get(request, default)
        if version_code < first:
            option, needed = f"--{request[0]} {request[1]}", nccl_version(first).removesuffix(".0")
            raise errors.nccl_lacks(option, nccl_version(version_code), what, needed)
