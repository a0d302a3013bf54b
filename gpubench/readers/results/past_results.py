"""The earlier results of a run's command in a folder of dated results, read within bounds of number, size and time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpubench.errors import UsageError
from gpubench.model.results.history import CUT_SHORT, DatedName, ResultHead
from gpubench.model.results.past import LeftOut, PastFigures, PastResult, tallied, why_unfit
from gpubench.model.results.report import Metadata
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.history import Kept, list_results, read_head
from gpubench.readers.results.registry import read_results

MOST_LOOKED_AT = 200
"""Results of a command and host whose beginnings are read."""

MOST_READ = 30
"""Results whose rows are read."""

MOST_BYTES = 32 * 2**20
"""Of one of them: a sweep of a thousand ranks has a few."""

MOST_SECONDS = 3.0
"""After that no further file is opened, and after half of it no further beginning: ranks wait for who reads."""

T = TypeVar("T")


def past_figures(folder: Path, metadata: Metadata) -> PastFigures:
    """What earlier results of a command, on its machine and in its circumstances, let the run with `metadata` expect.

    Raises UsageError where the folder cannot be read; files that cannot be are left out and counted.
    """
    reader = _Reader(list_results(folder), ResultHead.of(metadata.to_record(), "", Verdict.ERROR, complete=False))
    results = list(reader.results(DatedName.host_of(metadata.hosts)))
    shown = str(folder).rstrip("/") + "/"
    return PastFigures.of(results, reader.own, shown, reader.left_out)


def newest_and_spread(newest_first: Sequence[T], most: int) -> list[T]:
    """The newest half of `most`, and as many evenly over all before them, for a slow decline shows over a long time."""
    if len(newest_first) <= most:
        return list(newest_first)
    recent = most - most // 2
    older = newest_first[recent:]
    last, steps = len(older) - 1, max(1, most // 2 - 1)
    return [*newest_first[:recent], *(older[number * last // steps] for number in range(most // 2))]


class _Reader:
    """Reads what fits the run `own`, and keeps why the rest does not."""

    def __init__(self, kept: Kept, own: ResultHead) -> None:
        self._kept, self.own = kept, own
        self._reasons: list[tuple[str, str]] = []
        self._not_opened = 0
        self._began_at = time.monotonic()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The results that were not used, by reason."""
        more = (
            (LeftOut("not opened, for there are many or the disk is slow", "", self._not_opened),)
            if self._not_opened
            else ()
        )
        return (*tallied(self._reasons), *more)

    def results(self, host: str) -> Iterator[PastResult]:
        """The results to be held against, at most `MOST_READ`."""
        of_command = [name for name in self._kept.names if name.command == self.own.command]
        others = [name for name in of_command if name.host != host]
        self._reasons += [("of another machine", f"{name.host}, not {host}") for name in others]
        own = [name for name in of_command if name.host == host]
        fit = [
            found
            for name in self._bounded(own, MOST_LOOKED_AT, MOST_SECONDS / 2)
            if (found := self._fit(name)) is not None
        ]
        for name, head in self._bounded(fit, MOST_READ, MOST_SECONDS):
            yield from self._read(name, head)

    def _bounded(self, newest_first: Sequence[T], most: int, seconds: float) -> Iterator[T]:
        """As many of them, until so many seconds have passed since the folder was opened."""
        chosen = newest_and_spread(newest_first, most)
        self._not_opened += len(newest_first) - len(chosen)
        for number, each in enumerate(chosen):
            if time.monotonic() > self._began_at + seconds:
                self._not_opened += len(chosen) - number
                return
            yield each

    def _fit(self, name: DatedName) -> tuple[DatedName, ResultHead] | None:
        """A name with its head; None of what is no measure, and of the run itself, which is not counted."""
        try:
            head = read_head(self._kept.path(name))
        except UsageError:
            self._reasons.append(self._why_unread(name))
            return None
        unfit = why_unfit(head, self.own)
        if unfit is not None and head.run_id != self.own.run_id:
            self._reasons.append(unfit)
        return (name, head) if unfit is None and head.run_id != self.own.run_id else None

    def _why_unread(self, name: DatedName) -> tuple[str, str]:
        """Why a head could not be read: the file of a run that begins is empty for a moment, this one's own too."""
        path = self._kept.path(name)
        with suppress(OSError):
            if path.is_file() and path.stat().st_size == 0:
                return CUT_SHORT, ""
        return "that cannot be read", str(name)

    def _read(self, name: DatedName, head: ResultHead) -> Iterator[PastResult]:
        path = self._kept.path(name)
        try:
            if path.stat().st_size > MOST_BYTES:
                self._reasons.append((f"larger than {MOST_BYTES // 2**20} MiB", str(name)))
                return
            file = read_results(path)
        except (UsageError, OSError):
            self._reasons.append(("that cannot be read", str(name)))
            return
        yield PastResult(head, file.rows, file.pairs)
