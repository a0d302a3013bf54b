"""The launcher's end of the channel to its ranks: JSON lines over a socket of the local host."""

import json
import math
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpubench.hardware.launch.launcher import RankWatch

if TYPE_CHECKING:
    from subprocess import Popen

    from gpubench.model.results.report import Report, Section

Message = dict[str, Any]

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_HANG_UP = 10.0
"""Time for the watchdogs of a job that is gone to report how its ranks ended: on a busy machine they are late."""

_READ_BYTES = 1 << 16


def report_in(message: Message) -> "Report":
    """The report in a message that ends a run, with its sections."""
    from gpubench.model.results.report import Report, Table
    from gpubench.model.terms.plain import from_plain

    kinds = _section_rows()
    sections: dict[str, Section] = {}
    for name, records in message["sections"].items():
        kind = kinds[name]
        rows = [from_plain(kind, record) for record in records]
        sections[name] = Table(kind.columns(), partial(list, rows))
    return replace(Report.from_record(message["report"]), sections=sections)


def _section_rows() -> Mapping[str, Any]:
    """The types of rows by section; of a collective, which is over where they are read."""
    from gpubench.model.results.rank_times import RANK_TIMES_SECTION, RankTimeRow
    from gpubench.model.results.report import ROWS_SECTION, CollectiveRow
    from gpubench.model.results.rows.backends import BACKENDS_SECTION, MPI_SUPPORT_SECTION, BackendRow, MpiTrialRow
    from gpubench.model.results.rows.causes import CAUSES_SECTION, CauseRow
    from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
    from gpubench.model.results.rows.overlap import SHORTEST_STEPS_SECTION, ShortestStepRow
    from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION, RefusedRow, WinnerRow

    return {
        EVIDENCE_SECTION: EvidenceRow,
        FALLBACK_SECTION: FallbackRow,
        CAUSES_SECTION: CauseRow,
        RANK_TIMES_SECTION: RankTimeRow,
        WINNERS_SECTION: WinnerRow,
        ROWS_SECTION: CollectiveRow,
        SHORTEST_STEPS_SECTION: ShortestStepRow,
        REFUSED_SECTION: RefusedRow,
        BACKENDS_SECTION: BackendRow,
        MPI_SUPPORT_SECTION: MpiTrialRow,
    }


class ChannelReceiver:
    """The launcher's end, usable as a context: a socket in a private directory that any rank may connect to."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpubench-")
        self.path = str(Path(self._directory.name) / "ranks")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._ends_at = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        self._directory.cleanup()

    def expect_end(self, seconds: float) -> None:
        """Listen no longer than that from now on, whether the job has ended or not."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    def expect_no_end(self) -> None:
        """Listen for as long as the job runs."""
        self._ends_at = math.inf

    @property
    def is_late(self) -> bool:
        """True where the job has outlived what was expected."""
        return time.monotonic() > self._ends_at

    def messages(self, job: "Popen[bytes]") -> Iterator[Message | str]:
        """Messages and printed lines of the ranks as they arrive, until the job is late, or over and hung up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            if job.stdout is not None:
                selector.register(job.stdout, selectors.EVENT_READ, _Lines())
            listens_until, watch = math.inf, RankWatch(job)
            while True:
                # Once the job is gone, one more look without waiting finds what it had still sent.
                waits = listens_until == math.inf or (_has_lines(selector) and time.monotonic() < listens_until)
                events = selector.select(_SECONDS_BETWEEN_LOOKS if waits else 0)
                # A rank's message about its end comes before mpirun's, which waits for another look.
                of_ranks = [key for key, _ in events if key.fileobj is not job.stdout]
                for key in of_ranks or [key for key, _ in events]:
                    if key.data is None:
                        connection, _ = self._listener.accept()
                        selector.register(connection, selectors.EVENT_READ, _Lines())
                    else:
                        yield from _read(selector, key)
                if events:
                    continue
                if not waits:
                    return
                if self.is_late:
                    listens_until = 0.0
                elif listens_until == math.inf and watch.ended():
                    listens_until = time.monotonic() + _SECONDS_TO_HANG_UP


def _has_lines(selector: selectors.BaseSelector) -> bool:
    """True where a rank, or the watchdog of one, has not hung up."""
    keys = (selector.get_map() or {}).values()
    return any(key.data is not None and isinstance(key.fileobj, socket.socket) for key in keys)


class _Lines:
    """Bytes that arrive in pieces, given out in whole lines."""

    rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> Iterator[Message | str]:
    source: Any = key.fileobj
    lines, from_rank = key.data, isinstance(source, socket.socket)
    data = source.recv(_READ_BYTES) if from_rank else source.read1(_READ_BYTES)
    # What a rank had not finished saying when it died is no message.
    complete = lines.feed(data) if data else [lines.rest] if lines.rest and not from_rank else []
    if not data:
        selector.unregister(source)
        if from_rank:
            source.close()
    for line in complete:
        yield json.loads(line) if from_rank else line.decode(errors="replace")
