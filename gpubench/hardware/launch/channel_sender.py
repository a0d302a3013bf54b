"""A rank's end of the channel to the gpubench that launched it; watchdogs report through it too.

It imports little: a watchdog starts with every rank, beside its rank's own start, and reads no files once something
hangs.
"""

import json
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubench.errors import GpubenchError
    from gpubench.model.results.report import CollectiveRow, Metadata, Report
    from gpubench.model.terms.hang import LostRank


def connect(path: str) -> socket.socket:
    """A line to the gpubench that listens there, which goes on listening until the last one is closed."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    return line


def remove_if_abandoned(line: socket.socket) -> None:
    """Remove the folder in which a launcher listened that was killed: nobody else can, and nobody answers there."""
    path = line.getpeername()
    try:
        connect(path).close()
    except ConnectionRefusedError:
        import shutil

        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # noqa: PTH120 - pathlib takes long to import
    except OSError:
        pass  # it has ended and removed it


class ChannelSender:
    """The rank's end: a listener that sends what it gets over a new line, or over one that is connected already.

    The first message is a hello, where the rank is alive.
    """

    def __init__(self, way: str | socket.socket, *, alive: bool = True) -> None:
        self._socket = connect(way) if isinstance(way, str) else way
        if alive:
            self._send({"kind": "hello"})

    def begin(self, metadata: "Metadata") -> None:
        """The run is set up."""
        self._send({"kind": "begin", "metadata": metadata.to_record()})

    def progress(self, done: int, total: int, label: str) -> None:
        """`done` of `total` rows are measured and `label` is next."""
        self._send({"kind": "progress", "done": done, "total": total, "label": label})

    def row(self, row: "CollectiveRow") -> None:
        """One more row is measured."""
        self._send({"kind": "row", "row": row.to_record()})

    def end(self, report: "Report") -> None:
        """All rows were measured."""
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
        self._send({"kind": "error", "error": error.to_record()})

    def lost(self, lost: "LostRank") -> None:
        """Send a rank that ended without an error of its own."""
        state = lost.state.to_record()
        self._send({"kind": "lost", "state": state, "at_seconds": lost.at_seconds, "status": lost.status})

    def close(self) -> None:
        """Close the line."""
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
