"""What a library says of itself."""

from typing import Protocol


class LibraryLog(Protocol):
    """What the library that runs collectives says in this process while it is asked to."""

    @property
    def no_log(self) -> str:
        """Why nothing is heard; empty while something may be."""
        ...

    @property
    def no_tuning(self) -> str:
        """Why it does not say which algorithm it takes; empty where it does."""
        ...

    def appeared(self) -> bool:
        """Whether anything can be heard, once the library has been called; where not, `no_log` says why."""
        ...

    def lines(self) -> list[bytes]:
        """The whole lines since the last call."""
        ...

    def switch_off(self) -> None:
        """Have it be as it would be without us."""
        ...
