"""NCCL communicators with configuration options or a deadline, and the registration of buffers."""

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpubench import errors
from gpubench.backends.nccl.library import NcclError, NcclLibrary
from gpubench.model.terms.operation import nccl_version
from gpubench.model.terms.settings import CTA_POLICY, MAX_CTAS, REGISTER, CtaPolicy, NcclSetting, Registration
from gpubench.ports.backend import CollectiveCalls
from gpubench.ports.group import Group

if TYPE_CHECKING:
    from gpubench.backends.nccl.backend import NcclBackend

_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC in nccl.h
_POLICIES = {CtaPolicy.DEFAULT: 0, CtaPolicy.EFFICIENCY: 1, CtaPolicy.ZERO: 2}  # NCCL_CTA_POLICY_* in nccl.h

_FIRST_WITH: Mapping[tuple[str, str], tuple[int, str]] = {
    (REGISTER, Registration.USER): (21900, "ncclCommRegister"),
    (REGISTER, Registration.SYMMETRIC): (22700, "ncclCommWindowRegister"),
    (CTA_POLICY, CtaPolicy.DEFAULT): (22700, "CTA policy"),
    (CTA_POLICY, CtaPolicy.EFFICIENCY): (22700, "NCCL_CTA_POLICY_EFFICIENCY"),
    (CTA_POLICY, CtaPolicy.ZERO): (22800, "NCCL_CTA_POLICY_ZERO"),
}
_FIRST_WITH_CAPS = 21700
"""NCCL_VERSION_CODE of the first release with each function or option.

From nccl.h.in of v2.17.1-1, v2.19.3-1, v2.27.3-1 and v2.28.3-1.
"""

UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclSuccess and ncclInProgress in nccl.h
_SECONDS_BETWEEN_LOOKS = 20e-6


def new_unique_id(library: NcclLibrary) -> bytes:
    """Create the unique ID that all ranks of a communicator share. Raise NcclError."""
    made = library.asked(library.nccl.get_unique_id)  # This object owns the memory that is read below
    return ctypes.string_at(made.ptr, UNIQUE_ID_BYTES)


def _configured(library: NcclLibrary, unique_id: bytes, rank: int, ranks: int, asked: Mapping[str, int]) -> Any:
    """Create a communicator with these fields set in `ncclConfig_t`. Raise NcclError if NCCL refuses."""
    nccl = library.nccl
    config = nccl.Config()
    for name, value in asked.items():
        setattr(config, name, value)
    return library.asked(nccl.comm_init_rank_config, ranks, nccl.UniqueId.from_buffer(unique_id), rank, config)


class GroupCommunicator:
    """The NCCL communicator of a group. All ranks of the group must create it together.

    `asked` has values for fields in `ncclConfig_t`. The constructor raises NcclError if NCCL refuses.
    """

    def __init__(self, library: NcclLibrary, group: Group, asked: Mapping[str, int] | None = None) -> None:
        self._library, self.rank, self.ranks = library, group.rank, group.size
        nccl = library.nccl
        unique_id = group.broadcast(new_unique_id(library) if group.rank == 0 else None)
        if asked:
            self._made: Any = _configured(library, unique_id, self.rank, self.ranks, asked)
        else:
            own = nccl.UniqueId.from_buffer(unique_id)
            self._made = library.asked(nccl.comm_init_rank, self.ranks, own, self.rank)
        self.handle = int(self._made.handle)
        self._ask: Callable[[Any], int] = nccl.comm_get_async_error
        self._registered: list[tuple[Callable[..., object], Any]] = []

    def register(self, how: Registration, address: int, size_bytes: int) -> bool:
        """Register a buffer. All ranks must call this together. Return False if NCCL returns no handle."""
        nccl, asked = self._library.nccl, self._library.asked
        if how is Registration.SYMMETRIC:
            window = asked(nccl.comm_window_register, self._made, address, size_bytes, _SYMMETRIC)
            found, undo = window if window is not None and window.handle else None, nccl.comm_window_deregister
        else:
            found, undo = asked(nccl.comm_register, self._made, address, size_bytes), nccl.comm_deregister
        if found:
            self._registered.append((undo, found))
        return bool(found)

    def transfer(self, address: int, size_bytes: int, peer: int, stream: int, *, sends: bool) -> None:
        """Enqueue `ncclSend` or `ncclRecv`."""
        nccl = self._library.nccl
        call = nccl.send if sends else nccl.recv
        self._library.asked(call, address, size_bytes, nccl.DataType.Uint8, peer, self._made, stream)

    def check_async_error(self) -> None:
        """Raise NcclError if NCCL reports an asynchronous error."""
        made = self._made  # Another thread may abort the communicator meanwhile
        state = _SUCCESS if made is None else self._ask(made)
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(self._library.words(state))

    def trouble(self) -> str:
        """Return NCCL's asynchronous error, or ''."""
        try:
            self.check_async_error()
        except NcclError as error:
            return f"NCCL's asynchronous error: {error}"
        return ""

    def abort(self) -> None:
        """Abort the communicator, even during an operation."""
        self._end(self._library.nccl.comm_abort)

    def destroy(self) -> None:
        """Destroy the communicator and its registrations. All ranks must call this together."""
        while self._registered and self._made is not None:
            undo, found = self._registered.pop()
            with suppress(NcclError):
                self._library.asked(undo, self._made, found)
        self._end(self._library.nccl.comm_destroy)

    def _end(self, function: Callable[[Any], object]) -> None:
        if self._made is not None:
            made, self._made = self._made, None
            self._library.asked(function, made)


class CommunicatorError(OSError):
    """NCCL failed to connect ranks or to move data between them."""


class BoundedCommunicator:
    """A communicator whose calls have a deadline. If a call fails, the communicator is aborted.

    Raises:
        TimeoutError: The deadline has passed.
        CommunicatorError: NCCL returned an error.
    """

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: int, ranks: int, deadline: float) -> None:
        self._library, self._nccl, self._made = library, library.nccl, None
        self._made = self._called(_configured, library, unique_id, rank, ranks, {"blocking": 0})
        self._settle(deadline)

    def exchange(
        self, addresses: tuple[int, int], peers: tuple[int, int], size_bytes: int, stream: int, deadline: float
    ) -> None:
        """Enqueue a send and a receive in one NCCL group.

        `addresses` are the send and receive buffers. `peers` are the destination and source ranks.
        """
        self._called(self._exchange, addresses, peers, size_bytes, stream)
        self._settle(deadline)

    def _exchange(self, addresses: tuple[int, int], peers: tuple[int, int], size_bytes: int, stream: int) -> None:
        nccl, asked, (send, receive), (to, source) = self._nccl, self._library.asked, addresses, peers
        asked(nccl.group_start)
        try:
            asked(nccl.send, send, size_bytes, nccl.DataType.Int8, to, self._made, stream)
            asked(nccl.recv, receive, size_bytes, nccl.DataType.Int8, source, self._made, stream)
        finally:
            # If the group stayed open, NCCL would delay all later calls in this process.
            asked(nccl.group_end)

    def all_reduce(self, addresses: tuple[int, int], count: int, stream: int, deadline: float) -> None:
        """Enqueue a sum of `count` 64-bit integers over all ranks, from the first address to the second."""
        kind, op = self._nccl.DataType.Int64, self._nccl.RedOp.Sum
        self._called(self._library.asked, self._nccl.all_reduce, *addresses, count, kind, op, self._made, stream)
        self._settle(deadline)

    def check(self) -> None:
        """Raise CommunicatorError if NCCL reports an asynchronous error."""
        self._settle(float("inf"))

    def close(self, deadline: float) -> None:
        """Finalise and destroy the communicator. All ranks must call this together."""
        self._called(self._library.asked, self._nccl.comm_finalize, self._made)
        self._settle(deadline)
        self._end(self._nccl.comm_destroy)

    def abort(self) -> None:
        """Abort the communicator, even during an operation."""
        self._end(self._nccl.comm_abort)

    def _end(self, function: Callable[[Any], object]) -> None:
        made, self._made = self._made, None
        if made is not None:
            with suppress(NcclError):
                self._library.asked(function, made)

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except NcclError as error:
            self.abort()
            raise CommunicatorError(f"NCCL: {error}") from error

    def _settle(self, deadline: float) -> None:
        while (state := self._nccl.comm_get_async_error(self._made)) == _IN_PROGRESS:
            if time.monotonic() > deadline:
                self.abort()
                raise TimeoutError
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if state != _SUCCESS:
            self.abort()
            raise CommunicatorError(f"NCCL: {self._library.words(state)}")


def takes_caps(library: NcclLibrary) -> bool:
    """Return True if NCCL accepts a limit on CTAs when a communicator is created."""
    return library.has("ncclCommInitRankConfig")


def config_of(requests: Mapping[str, str]) -> dict[str, int]:
    """Convert requests such as --max-ctas to fields in `ncclConfig_t`."""
    caps = {"max_ctas": int(requests[MAX_CTAS])} if MAX_CTAS in requests else {}
    return caps | ({"cta_policy": _POLICIES[CtaPolicy(requests[CTA_POLICY])]} if CTA_POLICY in requests else {})


def open_requested(
    backend: "NcclBackend", library: NcclLibrary, group: Group, requests: Mapping[str, str]
) -> tuple[CollectiveCalls, Registration]:
    """Open a communicator that is configured by `requests`, and register its buffers.

    Returns the collectives and the registration that NCCL accepted.

    Raises:
        NcclError: NCCL refused a call.
    """
    communicator = GroupCommunicator(library, group, config_of(requests))
    calls = backend.adopt(communicator)
    asked = Registration(requests.get(REGISTER, Registration.NONE))
    if asked is Registration.NONE:
        return calls, asked
    try:
        done = [communicator.register(asked, *allocation) for allocation in backend.allocations]
    except Exception:
        backend.drop(calls)
        raise
    return calls, asked if all(done) else Registration.NONE


def check_requests(settings: tuple[NcclSetting, ...], version_code: int) -> None:
    """Raise UsageError if a request needs a newer NCCL. The error names the first version that supports it."""
    for request in dict.fromkeys(item for setting in settings for item in setting.requests.items()):
        default = (_FIRST_WITH_CAPS, "cap on CTAs") if request[0] == MAX_CTAS else (0, "")
        first, what = _FIRST_WITH.get(request, default)
        if version_code < first:
            option, needed = f"--{request[0]} {request[1]}", nccl_version(first).removesuffix(".0")
            raise errors.nccl_lacks(option, nccl_version(version_code), what, needed)
