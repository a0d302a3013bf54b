"""A backend of collectives on one rank."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.group import Group
from gpubench.ports.launch import Launch, LaunchTimer
from gpubench.ports.memory import BufferSource


class Backend(BufferSource, LaunchTimer, Protocol):
    """Collectives on one rank, the memory that they work on, and a clock around them."""

    @property
    def name(self) -> str:
        """Its word on the command line and in rows."""

    @property
    def calls(self) -> CollectiveCalls:
        """The library's collectives."""

    def libraries(self) -> Mapping[str, str]:
        """Versions and files of the libraries that do the work, by name, for the metadata."""

    def close(self) -> None:
        """Give back memory and communicators."""


class MultiGroupBackend(Backend, Protocol):
    """A backend that opens further communicators beside its own; memory, stream and clock stay."""

    def open(self, group: Group) -> CollectiveCalls:
        """The collectives of a new communicator of these ranks, all of which call this."""

    def drop(self, calls: CollectiveCalls) -> None:
        """Give up a communicator that `open` made, whatever state it is in."""

    def in_order(self, launches: Sequence[Launch]) -> Launch:
        """One operation made of several, each of which begins when the one before it is done."""


@runtime_checkable
class AbortableBackend(Protocol):
    """A backend whose communicators a thread can abort while operations wait in them."""

    def trouble(self) -> str:
        """The library's asynchronous error, empty where it has none."""

    def abort(self) -> None:
        """Abort the communicators, wherever they wait."""
