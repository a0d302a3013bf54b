"""How ranks tell the gpubench that launched them what they measured: JSON lines over a socket of the local host."""

import json
import selectors
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpubench.errors import GpubenchError
from gpubench.hardware.launcher import RankWatch
from gpubench.model.evidence_rows import EVIDENCE_SECTION, FALLBACK_SECTION, EvidenceRow, FallbackRow
from gpubench.model.plain import from_plain, to_plain
from gpubench.model.report import CollectiveRow, Metadata, Report, Section, Table

if TYPE_CHECKING:
    from subprocess import Popen

Message = dict[str, Any]

_SECTION_ROWS: Mapping[str, type[EvidenceRow] | type[FallbackRow]] = {
    EVIDENCE_SECTION: EvidenceRow,
    FALLBACK_SECTION: FallbackRow,
}

_SECONDS_BETWEEN_LOOKS = 0.1
_READ_BYTES = 1 << 16


class ChannelSender:
    """The rank's end: a listener whose words travel. Its first is a hello: a rank is alive."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._send({"kind": "hello"})

    def begin(self, metadata: Metadata) -> None:
        """The run is set up."""
        self._send({"kind": "begin", "metadata": metadata.to_record()})

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""
        self._send({"kind": "progress", "done": done, "total": total, "label": label})

    def row(self, row: CollectiveRow) -> None:
        """One more row is measured."""
        self._send({"kind": "row", "row": row.to_record()})

    def end(self, report: Report) -> None:
        """All rows were measured."""
        sections = {
            name: [to_plain(row) for row in section.rows()]
            for name, section in report.sections.items()
            if isinstance(section, Table)
        }
        self._send({"kind": "end", "report": report.to_record(), "sections": sections})

    def error(self, error: GpubenchError) -> None:
        """This rank cannot go on."""
        self._send({"kind": "error", "error": error.to_record()})

    def close(self) -> None:
        """Nothing more will be said."""
        self._socket.close()

    def _send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def report_in(message: Message) -> Report:
    """The report in a message that ends a run, with its sections."""
    sections: dict[str, Section] = {}
    for name, kind in _SECTION_ROWS.items():
        if name in message["sections"]:
            rows = [from_plain(kind, record) for record in message["sections"][name]]
            sections[name] = Table(kind.columns(), partial(list, rows))
    return replace(Report.from_record(message["report"]), sections=sections)


@dataclass(frozen=True, slots=True)
class Chatter:
    """Text that mpirun or a rank printed."""

    text: str


class ChannelReceiver:
    """The launcher's end, usable as a context: a socket in a private directory that any rank may connect to."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gpubench-")
        self.path = str(Path(self._directory.name) / "ranks")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(128)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self._directory.cleanup()

    def messages(self, job: "Popen[bytes]") -> Iterator[Message | Chatter]:
        """What the ranks send and print, in the order it arrives, until the job has ended and all is read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            if job.stdout is not None:
                selector.register(job.stdout, selectors.EVENT_READ, _Lines())
            ended, watch = False, RankWatch(job)
            while True:
                # Once the job is gone, one more look without waiting finds what it had still sent.
                events = selector.select(0 if ended else _SECONDS_BETWEEN_LOOKS)
                # What a rank says of its end comes before what mpirun says of it, which waits for another look.
                rank_speaks = any(key.fileobj is not job.stdout for key, _ in events)
                for key, _ in events:
                    if rank_speaks and key.fileobj is job.stdout:
                        continue
                    if key.data is None:
                        connection, _ = self._listener.accept()
                        selector.register(connection, selectors.EVENT_READ, _Lines())
                    else:
                        yield from _read(selector, key)
                if events:
                    continue
                if ended:
                    return
                ended = watch.ended()


class _Lines:
    """Bytes that arrive in pieces, given out in whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def rest(self) -> list[bytes]:
        return [self._rest] if self._rest else []


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> Iterator[Message | Chatter]:
    source, lines = key.fileobj, key.data
    from_rank = isinstance(source, socket.socket)
    data = source.recv(_READ_BYTES) if isinstance(source, socket.socket) else _read_pipe(source)
    # What a rank had not finished saying when it died is no message.
    complete = lines.feed(data) if data else [] if from_rank else lines.rest()
    if not data:
        selector.unregister(source)
        if isinstance(source, socket.socket):
            source.close()
    for line in complete:
        yield json.loads(line) if from_rank else Chatter(line.decode(errors="replace"))


def _read_pipe(source: Any) -> bytes:
    data: bytes = source.read1(_READ_BYTES)
    return data
