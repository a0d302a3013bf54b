"""The progress of a rank, as the code that runs on it reports it."""

from typing import Protocol

from gpubench.model.terms.hang import Phase


class Progress(Protocol):
    """Progress reports of a rank for a watchdog in another process; no call takes longer than 1 µs."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin another phase, with a label for messages, of so many operations where that is known."""

    def completed(self, operations: int = 1) -> None:
        """Report so many more completed operations of this phase."""


class Unwatched:
    """Progress that is not reported: of tests, scripts, a single process."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Nothing."""

    def completed(self, operations: int = 1) -> None:
        """Nothing."""


UNWATCHED: Progress = Unwatched()
