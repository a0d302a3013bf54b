"""The program of a watchdog, which a rank starts: `python -m gpubench.hardware.watchdog.main SETUP`."""

import ctypes
import json
import signal
import socket
import sys
from contextlib import suppress

from gpubench.errors import GpubenchError
from gpubench.hardware.launch.channel_sender import ChannelSender, remove_if_abandoned
from gpubench.hardware.process.cores import leave_core
from gpubench.hardware.watchdog.addresses import local_name
from gpubench.hardware.watchdog.process import Watchdog
from gpubench.hardware.watchdog.progress_block import ProgressBlock
from gpubench.hardware.watchdog.stderr_line import write_stderr_line
from gpubench.hardware.watchdog.watched import Watched
from gpubench.model.terms.foreign_text import error_text, printable_line
from gpubench.model.terms.hang import LostRank

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PROCESS_NAME = b"gpubench-watch"


def main() -> None:
    """Watch the rank that started this process, by the descriptors that it handed over."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback: the rank says that its watchdog was killed
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # it reports the death of its rank also where it is stopped
    leave_core()
    setup = json.loads(sys.argv[1])
    watched = Watched(**setup["watched"])
    job = setup["job"]
    block = ProgressBlock(setup["block"])
    control = socket.socket(fileno=setup["control"])
    datagrams = [socket.socket(fileno=each) for each in setup["datagrams"]]
    channel = socket.socket(fileno=setup["channel"]) if "channel" in setup else None
    reporter = _StderrReporter() if channel is None else _ChannelReporter(channel)
    Watchdog(watched, block, control, _local_socket(job, watched.rank), job, datagrams, reporter).run()
    if channel is not None:
        remove_if_abandoned(channel)


def _local_socket(job: str, rank: int) -> socket.socket:
    """The socket that other watchdogs of this host ask; a nameless one where its name is taken."""
    local = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    local.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before it has a name: no sender stays unknown
    try:
        local.bind(local_name(job, rank))
    except OSError:
        local.bind("")
    return local


class _StderrReporter:
    """Reports on stderr, where the rank's own errors go."""

    sees_all_losses = False

    def error(self, error: GpubenchError) -> None:
        """Print it."""
        write_stderr_line(error_text(error).removeprefix("gpubench: "))

    def lost(self, lost: LostRank) -> None:
        """Print it: not every mpirun names the rank that was killed."""
        self.error(lost.error("; rows measured before are in the outputs"))

    def note(self, text: str) -> None:
        """Print it."""
        write_stderr_line(printable_line(f"note: {text}"))


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

    def note(self, text: str) -> None:
        """Print it: the launcher passes on what ranks print."""
        write_stderr_line(printable_line(f"note: {text}"))


if __name__ == "__main__":
    main()
