"""A rank's side of its watchdog: start it before anything can hang, report progress to it, and end it."""

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict

from gpubench.hardware.launch.channel_sender import connect
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.watchdog.peers import WatchdogAddress, job_name, own_addresses
from gpubench.hardware.watchdog.phase_ranges import find_nvtx, with_ranges
from gpubench.hardware.watchdog.process import END_SIGNAL, Watched
from gpubench.hardware.watchdog.progress_block import ProgressBlock
from gpubench.model.terms.hang import Phase
from gpubench.ports.group import Group


class RankProgress:
    """The progress of this rank, and the line to its watchdog."""

    def __init__(
        self, block: ProgressBlock, control: socket.socket, own: WatchdogAddress, watchdog: "subprocess.Popen[bytes]"
    ) -> None:
        self.enter = with_ranges(block.enter, find_nvtx())
        self.completed = block.completed
        self._block = block
        self._control = control
        self._own = own
        self._watchdog = watchdog
        self._answers: dict[str, Callable[[], object]] = {}

    def exchange_addresses(self, group: Group) -> None:
        """Give the watchdogs of all ranks each other's addresses; every rank of the job calls it."""
        secret = group.broadcast(secrets.token_hex(16) if group.rank == 0 else None)
        address = (self._own.place, self._own.host, self._own.port, list(self._own.addresses))
        self._send({"kind": "met", "secret": secret, "cards": group.gather(address)})

    def name_ranks(self, places: Sequence[object]) -> None:
        """Give the watchdog the ranks in words, once they have GPUs."""
        self._send({"kind": "places", "places": [str(place) for place in places]})

    def answer_watchdog(self, trouble: Callable[[], str], abort: Callable[[], object]) -> None:
        """Start a thread that answers the watchdog of a rank that hangs: with the library's error, and with an abort.

        One communicator may follow another: the last one answers.
        """
        is_first = not self._answers
        self._answers = {"trouble": trouble, "abort": abort}
        if is_first:
            threading.Thread(target=self._answer, name="gpubench-abort", daemon=True).start()
            self._send({"kind": "helps"})

    @property
    def is_ending(self) -> bool:
        """True where the watchdog, or this rank itself, has begun to end this rank."""
        return self._block.left()

    def leave(self) -> None:
        """Note that this rank ends with an error that it reports itself, so that no watchdog has to."""
        self._block.leave()
        self._send({"kind": "breaks"})

    def close(self) -> None:
        """End the watchdog, after the last thing that may hang."""
        self._block.leave()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._watchdog.wait()

    def _send(self, message: dict[str, object]) -> None:
        # Without a watchdog, which somebody may have killed, the run goes on.
        with suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self) -> None:
        with suppress(OSError), self._control.makefile("rb") as questions:
            for line in questions:
                kind = json.loads(line)["kind"]
                self._send({"kind": kind, "text": str(self._answers[kind]() or "")})


def start(rank: int, ranks: int, host: str, timeout_s: float, channel: str | None) -> RankProgress:
    """Start the watchdog of this process, which is about to be a rank.

    It comes before MPI and CUDA: MPI_Init may be what hangs, with Python's lock held, so that no thread could help. It
    is a program of its own: after a mere fork, the first write to every page is a fault in the midst of what is timed.
    """
    block = ProgressBlock()
    block.enter(Phase.LAUNCH)
    own, other = socket.socketpair()
    with other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, ExitStack() as stack:
        datagrams.bind(("", 0))
        address = WatchdogAddress(f"rank {rank} on {host}", host, datagrams.getsockname()[1], own_addresses())
        die_at_once_on(END_SIGNAL)
        descriptors = {"block": block.descriptor, "control": other.fileno(), "datagrams": datagrams.fileno()}
        if channel:
            # The line is made now, so that the launcher waits for the reports of this rank's watchdog.
            with suppress(OSError):  # the launcher is gone
                descriptors["channel"] = stack.enter_context(connect(channel)).fileno()
        watched = Watched(rank, ranks, address.place, host, os.getpid(), timeout_s)
        setup = descriptors | {"watched": asdict(watched), "job": job_name(os.environ)}
        # The rank's own words behind it are for people who look at the list of processes.
        command = module_command("gpubench.hardware.watchdog.main", json.dumps(setup), *sys.argv[1:])
        watchdog = subprocess.Popen(
            command,
            env=with_package(os.environ),
            pass_fds=tuple(descriptors.values()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return RankProgress(block, own, address, watchdog)


def die_at_once_on(number: signal.Signals) -> None:
    """Have a signal end this process with its number as exit code, wherever it is.

    The handler is libc's `_exit`: no Python, so it works inside any library, with Python's lock held or lost.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
