"""The channel from ranks and watchdogs to the gpubench process that launched them: JSON messages over a Unix socket."""

import json
import math
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from gpubench.machine.host import read_text

if TYPE_CHECKING:
    from subprocess import Popen

    from gpubench.errors import GpubenchError
    from gpubench.model.results.report import CollectiveRow, Metadata, Report
    from gpubench.model.terms.ranks import LostRank

Message = dict[str, Any]

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_HANG_UP = 10.0  # Watchdogs on a busy machine may still report this long after their job has ended
_SECONDS_FOR_A_MESSAGE = 60  # A rank that is stopped in the middle of a message must not block the launcher forever
_READ_BYTES = 1 << 16
_LONGEST_FOLDER = 107 - len("/gpubench-12345678/ranks")  # A Unix socket path has at most 107 bytes: unix(7)


class RankWatch:
    """Detect a launcher that outlives its ranks, as Open MPI 5's prterun can after a failed MPI_Init."""

    def __init__(self, job: subprocess.Popen[bytes], seconds_to_follow: float = 5.0) -> None:
        self._job = job
        self._seconds_to_follow = seconds_to_follow
        self._alone_since: float | None = None
        self._had_ranks = False

    def ended(self) -> bool:
        """True if the launcher has exited, or has had no ranks for `seconds_to_follow` after it had some."""
        if self._job.poll() is not None:
            return True
        lists = (read_text(path) or "" for path in Path(f"/proc/{self._job.pid}/task").glob("*/children"))
        stats = (read_text(Path(f"/proc/{child}/stat")) for children in lists for child in children.split())
        if any(stat is not None and stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats):
            self._had_ranks, self._alone_since = True, None
        elif self._had_ranks and self._alone_since is None:
            self._alone_since = time.monotonic()
        return self._alone_since is not None and time.monotonic() - self._alone_since > self._seconds_to_follow


def read_report(message: Message) -> "Report":
    """Read the report and its sections from the last message of a run."""
    from gpubench.model.results.report import Report, Table
    from gpubench.model.results.result_file import TABLES
    from gpubench.model.terms.plain import from_plain

    kinds: dict[str, Any] = {name: TABLES[name] for name in message["sections"]}
    rows = {kind: [from_plain(kind, row) for row in message["sections"][name]] for name, kind in kinds.items()}
    return replace(Report.from_record(message["report"]), sections=Table.group_by_section(rows))


class ChannelReceiver:
    """The launcher's side of the channel: a Unix socket in a private directory, which other users cannot open. Use
    it as a context manager.
    """

    def __init__(self) -> None:
        is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
        self._directory = tempfile.TemporaryDirectory(prefix="gpubench-", dir="/tmp" if is_long else None)
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
        """Stop listening after `seconds`, even if the job is still running."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    def expect_no_end(self) -> None:
        """Listen until the job ends, without a time limit."""
        self._ends_at = math.inf

    @property
    def is_late(self) -> bool:
        """True if the time set by `expect_end` has passed."""
        return time.monotonic() > self._ends_at

    def messages(self, job: "Popen[bytes]") -> Iterator[Message | str]:
        """Yield the ranks' messages, and the lines that they print, as they arrive.

        Stop when the job is late, or when it has ended and all ranks have closed their connections.
        """
        stdout: Any = job.stdout
        printed, rest = (None if stdout is None else stdout.fileno()), b""
        ranks: set[Connection] = set()
        listens_until, watch = math.inf, RankWatch(job)
        while True:
            # After the job has ended, poll once more without waiting, because unread messages may be left.
            waits = listens_until == math.inf or (ranks and time.monotonic() < listens_until)
            sources = [self._listener, *ranks, *([] if printed is None else [printed])]
            ready = wait(sources, _SECONDS_BETWEEN_LOOKS if waits else 0)
            # Read from ranks before stdout, so that a rank's own error comes before mpirun's lines about it.
            for source in [source for source in ready if source != printed] or ready:
                if isinstance(source, Connection):
                    try:
                        yield json.loads(source.recv_bytes())
                    except (EOFError, OSError):  # the rank closed it, perhaps in the middle of a message
                        source.close()
                        ranks.remove(source)
                elif source == printed:
                    data = stdout.read1(_READ_BYTES)
                    printed = printed if data else None
                    *lines, rest = (rest + (data or b"\n" * bool(rest))).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
                else:
                    ranks.add(self._accept())
            if ready:
                continue
            if not waits:
                return
            if self.is_late:
                listens_until = 0.0
            elif listens_until == math.inf and watch.ended():
                listens_until = time.monotonic() + _SECONDS_TO_HANG_UP

    def _accept(self) -> Connection:
        line, _ = self._listener.accept()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _SECONDS_FOR_A_MESSAGE, 0))
        return Connection(line.detach())


def connect(path: str) -> Connection:
    """Connect to the launcher's socket. The launcher listens until the last connection is closed."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    return Connection(line.detach())


def remove_if_abandoned(path: str) -> None:
    """Remove the socket's directory if its launcher was killed and no process listens on the socket any more."""
    try:
        connect(path).close()
    except ConnectionRefusedError:
        import shutil

        shutil.rmtree(Path(path).parent, ignore_errors=True)
    except OSError:
        pass  # the launcher has ended and removed its directory


class ChannelSender:
    """The side of the channel that a rank or watchdog writes to. A live rank first sends a hello."""

    def __init__(self, connection: str | Connection, *, alive: bool = True) -> None:
        self._connection = connect(connection) if isinstance(connection, str) else connection
        if alive:
            self._send({"kind": "hello"})

    def begin(self, metadata: "Metadata") -> None:
        """Send the run's metadata before its first row."""
        self._send({"kind": "begin", "metadata": metadata.to_record()})

    def progress(self, done: int, total: int, label: str) -> None:
        """Send the number of finished rows, and the label of the next row."""
        self._send({"kind": "progress", "done": done, "total": total, "label": label})

    def row(self, row: "CollectiveRow") -> None:
        self._send({"kind": "row", "row": row.to_record()})

    def end(self, report: "Report") -> None:
        """Send the report after the last row."""
        from gpubench.model.results.report import Table
        from gpubench.model.terms.plain import to_plain

        sections = {
            name: [to_plain(row) for row in section.rows()]
            for name, section in report.sections.items()
            if isinstance(section, Table)
        }
        self._send({"kind": "end", "report": report.to_record(), "sections": sections})

    def error(self, error: "GpubenchError") -> None:
        """Send the error that ends this rank."""
        self._send({"kind": "error", "error": error.to_record(), "at_seconds": time.monotonic()})

    def lost(self, lost: "LostRank") -> None:
        """Report a rank that ended without reporting an error itself."""
        state = lost.state.to_record()
        self._send({"kind": "lost", "state": state, "at_seconds": lost.end_seconds, "status": lost.status})

    def close(self) -> None:
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())
