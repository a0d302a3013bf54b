"""The log of the library that runs collectives."""

from typing import Protocol


class LibraryLog(Protocol):
    """The lines that the library that runs collectives logs in this process while it is asked to."""

    @property
    def no_log(self) -> str:
        """The reason why no line can be read; empty while one may come."""

    @property
    def no_tuning(self) -> str:
        """The reason for which its lines name no algorithm; empty where they do."""

    def is_readable(self) -> bool:
        """True where lines can be read, once the library has been called; `no_log` has the reason where not."""

    def lines(self) -> list[bytes]:
        """The whole lines since the last call."""

    def switch_off(self) -> None:
        """End the reading: the library logs as the user set it."""
