"""Lines of NCCL's log that say nothing new when they come again, as most of a log of gigabytes do."""

from collections.abc import Mapping, Sequence

from gpubench.readers.nccl_log.lines import INFO
from gpubench.readers.nccl_log.threads import Thread

_MOST_LINES = 2**16
_TIMES_REPEATED = 4
"""As often as a line has to come in a block, on average, for it to be quicker to look at the different ones."""


class KnownLines(set[bytes]):
    """Whole lines that say nothing new, whichever communicator their thread is at.

    What algorithms run operations with is known beside, of the communicator that the thread is at: `tuning_lines`.
    """

    def __init__(self, threads: Mapping[bytes, Thread]) -> None:
        super().__init__()
        self._threads = threads

    def remember(self, line: bytes) -> None:
        """Remember a line; an empty one is none."""
        if line:
            if len(self) >= _MOST_LINES:
                self.clear()
            self.add(line)

    def hold_all(self, lines: Sequence[bytes]) -> bool:
        """True if lines are few different ones, all of them known, as of operations that come again and again."""
        different = set(lines)
        return len(different) * _TIMES_REPEATED < len(lines) and all(
            line in self or self._is_known_tuning(line) for line in different
        )

    def _is_known_tuning(self, line: bytes) -> bool:
        thread = self._threads.get(line.partition(INFO)[0])
        return thread is not None and line in thread.tuning_lines
