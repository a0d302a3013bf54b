"""A library's log that is kept while it is read, for a recording."""

from gpubench.ports.library_log import LibraryLog


class RecordedLog:
    """`ports.LibraryLog` over another one, whose lines it keeps."""

    def __init__(self, log: LibraryLog) -> None:
        self._log = log
        self._kept: list[bytes] = []
        self.is_readable, self.switch_off = log.is_readable, log.switch_off

    @property
    def no_log(self) -> str:
        """As the log has it."""
        return self._log.no_log

    @property
    def no_tuning(self) -> str:
        """As the log has it."""
        return self._log.no_tuning

    def lines(self) -> list[bytes]:
        """The new lines of the log."""
        found = self._log.lines()
        self._kept += found
        return found

    def text(self) -> bytes:
        """All lines so far."""
        return b"".join(line + b"\n" for line in self._kept)
