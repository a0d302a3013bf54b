"""The program of a watchdog, which a rank starts: `python -m gpubench.hardware.watchdog.main SETUP`."""

import ctypes
import json
import os
import select
import socket
import sys
from contextlib import suppress

from gpubench.errors import GpubenchError
from gpubench.hardware.launch.channel_sender import ChannelSender
from gpubench.hardware.watchdog.peers import local_name
from gpubench.hardware.watchdog.process import Watchdog, Watched
from gpubench.hardware.watchdog.progress_block import ProgressBlock
from gpubench.model.terms.foreign_text import error_text
from gpubench.model.terms.hang import LostRank

_PR_SET_NAME = 15
_PROCESS_NAME = b"gpubench-watch"
_SECONDS_TO_WRITE = 2.0
_STDERR = 2


def main() -> None:
    """Watch the rank that started this process, by the descriptors that it handed over."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
    with suppress(OSError):  # the rank's core is the rank's alone
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    setup = json.loads(sys.argv[1])
    watched = Watched(**setup["watched"])
    job = setup["job"]
    block = ProgressBlock(setup["block"])
    control, datagrams = socket.socket(fileno=setup["control"]), socket.socket(fileno=setup["datagrams"])
    reporter = _ChannelReporter(socket.socket(fileno=setup["channel"])) if "channel" in setup else _StderrReporter()
    Watchdog(watched, block, control, _local_socket(job, watched.rank), job, datagrams, reporter).run()


def _local_socket(job: str, rank: int) -> socket.socket:
    """The socket that other watchdogs of this host ask; a nameless one where its name is taken."""
    local = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        local.bind(local_name(job, rank))
    except OSError:
        local.bind("")
    return local


class _StderrReporter:
    """Reports on stderr, where the rank's own errors go."""

    sees_all_losses = False

    def error(self, error: GpubenchError) -> None:
        """Print it, unless stderr is full and nobody reads it."""
        _, writable, _ = select.select([], [_STDERR], [], _SECONDS_TO_WRITE)
        if writable:
            with suppress(OSError):
                os.write(_STDERR, f"{error_text(error)}\n".encode())

    def lost(self, lost: LostRank) -> None:
        """Print it: not every mpirun names the rank that was killed."""
        self.error(lost.error("; rows measured before are in the outputs"))


class _ChannelReporter:
    """Reports to the gpubench that launched this rank, over a line that is open for as long as this process lives."""

    sees_all_losses = True

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def error(self, error: GpubenchError) -> None:
        """Pass it on."""
        with suppress(OSError):
            ChannelSender(self._line).error(error)

    def lost(self, lost: LostRank) -> None:
        """Send it; the launcher names the first rank that was killed, and not those that ended with it."""
        with suppress(OSError):
            ChannelSender(self._line, alive=False).lost(lost)


if __name__ == "__main__":
    main()
