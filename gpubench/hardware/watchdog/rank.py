"""A rank's side of its watchdog: start it before anything can hang, report progress to it, and end it."""

import ctypes
import os
import signal
from collections.abc import Callable, Sequence

from gpubench.hardware.watchdog.addresses import WatchdogAddress, bound_sockets, job_name
from gpubench.hardware.watchdog.keeper import WatchdogKeeper
from gpubench.hardware.watchdog.phase_ranges import find_nvtx, with_ranges
from gpubench.hardware.watchdog.progress_block import ProgressBlock
from gpubench.hardware.watchdog.watched import END_SIGNAL, Watched
from gpubench.model.terms.hang import Phase
from gpubench.ports.group import Group

_SECRET_BYTES = 32


class RankProgress:
    """The progress of this rank, and the line to its watchdog."""

    def __init__(self, block: ProgressBlock, own: WatchdogAddress, watchdog: WatchdogKeeper) -> None:
        self.enter = with_ranges(block.enter, find_nvtx())
        self.completed = block.completed
        self._block = block
        self._own = own
        self._watchdog = watchdog

    def exchange_addresses(self, group: Group) -> None:
        """Give the watchdogs of all ranks each other's addresses and a secret; every rank of the job calls it."""
        own = [job_name(os.environ), os.urandom(_SECRET_BYTES).hex()] if group.rank == 0 else None
        job, secret = group.broadcast(own)
        address = (self._own.place, self._own.host, list(self._own.addresses))
        self._watchdog.tell({"kind": "met", "job": job, "secret": secret, "cards": group.gather(address)})

    def name_ranks(self, places: Sequence[object]) -> None:
        """Give the watchdog the ranks in words, once they have GPUs."""
        self._watchdog.tell({"kind": "places", "places": [str(place) for place in places]})

    def answer_watchdog(self, trouble: Callable[[], str], abort: Callable[[], object]) -> None:
        """Start a thread that answers the watchdog of a rank that hangs: with the library's error, and with an abort.

        One communicator may follow another: the last one answers.
        """
        self._watchdog.answer({"trouble": trouble, "abort": abort})

    @property
    def is_ending(self) -> bool:
        """True where the watchdog, or this rank itself, has begun to end this rank."""
        return self._block.left()

    def leave(self) -> None:
        """Note that this rank ends with an error that it reports itself, so that no watchdog has to."""
        self._block.leave()
        self._watchdog.tell({"kind": "breaks"})

    def close(self) -> None:
        """End the watchdog, after the last thing that may hang."""
        self._block.leave()
        self._watchdog.close()


def start(rank: int, ranks: int, host: str, timeout_s: float, channel: str | None) -> RankProgress:
    """Start the watchdog of this process, which is about to be a rank.

    It comes before MPI and CUDA: MPI_Init may be what hangs, with Python's lock held, so that no thread could help. It
    is a program of its own: after a mere fork, the first write to every page is a fault in the midst of what is timed.
    """
    block = ProgressBlock()
    block.enter(Phase.LAUNCH)
    datagrams = bound_sockets()
    address = WatchdogAddress(f"rank {rank} on {host}", host, [each.getsockname() for each in datagrams])
    die_at_once_on(END_SIGNAL)
    watched = Watched(rank, ranks, address.place, host, os.getpid(), timeout_s)
    return RankProgress(block, address, WatchdogKeeper(watched, block, datagrams, channel))


def die_at_once_on(number: signal.Signals) -> None:
    """Have a signal end this process with its number as exit code, wherever it is.

    The handler is libc's `_exit`: no Python, so it works inside any library, with Python's lock held or lost.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
