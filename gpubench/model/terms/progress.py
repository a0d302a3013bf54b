"""How far a rank is, as what works on it says."""

from typing import Protocol

from gpubench.model.terms.hang import Phase


class Progress(Protocol):
    """Where a rank says how far it is, for a watchdog in another process to see; no call takes longer than 1 µs."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Something else begins, named for a message, of so many operations where that is known."""
        ...

    def completed(self, operations: int = 1) -> None:
        """So many more operations of this phase have come to their end."""
        ...


class Unwatched:
    """The progress of what nobody watches: tests, scripts, a single process."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Nothing."""

    def completed(self, operations: int = 1) -> None:
        """Nothing."""


UNWATCHED: Progress = Unwatched()
