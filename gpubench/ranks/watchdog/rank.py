"""The rank's side of the watchdog: start it, restart it if it dies, report progress to it, and mark NVTX ranges."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, Protocol

from msgspec.structs import asdict

from gpubench.machine.children import module_command, package_environment
from gpubench.machine.host import process_state
from gpubench.model.terms.ranks import Phase
from gpubench.model.terms.units import printable_line
from gpubench.ports.group import Group
from gpubench.ranks.channel import connect
from gpubench.ranks.watchdog.peers import WatchdogAddress, job_name, listen_everywhere, listen_locally, listener_address
from gpubench.ranks.watchdog.progress import END_SIGNAL, ProgressBlock, Watched, write_stderr_line

_LIBRARY = "libnvToolsExt.so.1"  # NVTX 2, part of CUDA up to version 12. NVTX 3 comes with the Python package `nvtx`
_DOMAIN = "gpubench"


class Enter(Protocol):
    def __call__(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Begin a phase."""


class Nvtx(NamedTuple):
    """The calls that begin and end an NVTX range on this thread. They take nanoseconds if no profiler is recording."""

    push: Callable[[str], object]
    pop: Callable[[], object]


def wrap_in_ranges(enter: Enter, nvtx: Nvtx | None) -> Enter:
    """Wrap `enter` so that each phase becomes an NVTX range. Return `enter` unchanged if NVTX is not installed."""
    if nvtx is None:
        return enter
    is_open = False

    def enter_range(phase: Phase, label: str = "", operations: int = 0) -> None:
        nonlocal is_open
        if is_open:
            nvtx.pop()
        nvtx.push(f"{phase} {label}".strip())
        is_open = True
        enter(phase, label, operations)

    return enter_range


def find_nvtx() -> Nvtx | None:
    """Load NVTX 3 from the Python package `nvtx`, or else NVTX 2 from an older CUDA. None if neither is installed."""
    with suppress(ImportError):
        import nvtx

        return Nvtx(lambda text: nvtx.push_range(text, domain=_DOMAIN), lambda: nvtx.pop_range(domain=_DOMAIN))
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(_LIBRARY)
        push, pop = library.nvtxRangePushA, library.nvtxRangePop
        push.argtypes = (ctypes.c_char_p,)
        return Nvtx(lambda text: push(f"{_DOMAIN}: {text}".encode()), pop)
    return None


_MOST_STARTS = 4
# If the watchdog is still stopped after this time, a signal stopped only the watchdog and not its whole job
_SECONDS_STOPPED = 0.8
_SECONDS_TO_END = 5.0  # Enough for a watchdog on a busy machine to exit, unless a signal has stopped it
_SECONDS_TO_END_TOO = 0.5  # If a whole job is killed, the rank dies within this time after its watchdog


class WatchdogKeeper:
    """Start a rank's watchdog. If it dies, start another one at the same addresses."""

    def __init__(
        self, watched: Watched, block: ProgressBlock, listeners: Sequence[socket.socket], channel: str | None
    ) -> None:
        self._watched = watched
        self._block = block
        self._job = job_name(os.environ)
        self._local = [*filter(None, [listen_locally(self._job, watched.rank)])]
        self._listeners = listeners
        self._channel = channel
        self._answers: Mapping[str, Callable[[], object]] = {}
        self._sent: dict[object, Mapping[str, object]] = {}
        self._starts = 0
        self._lock = threading.Lock()
        self._start()
        self._thread = threading.Thread(target=self._keep, name="gpubench-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message to the watchdog. If the watchdog is restarted, send the last message of each kind again."""
        with self._lock:
            self._sent[message["kind"]] = message
            self._write(self._control, message)

    def answer(self, answers: Mapping[str, Callable[[], object]]) -> None:
        """Answer the watchdog's requests in a thread. `answers` maps each kind of request to the function that
        answers it.
        """
        is_first, self._answers = not self._answers, answers
        if is_first:
            self.send({"kind": "helps"})
            self._listen(self._control)

    def close(self) -> None:
        """End the watchdog after its rank has finished. Kill it if it does not exit."""
        with self._lock, suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            self._process.kill()
            self._note("did not end with its rank and was killed")
        for line in (self._control, *self._local, *self._listeners):
            line.close()

    def _start(self) -> None:
        control, other = socket.socketpair()
        with other, ExitStack() as stack:
            descriptors = {"block": self._block.descriptor, "control": other.fileno()}
            local, listeners = ([line.fileno() for line in lines] for lines in (self._local, self._listeners))
            if self._channel:
                # Connect now, so that the launcher waits until this watchdog has reported.
                with suppress(OSError):  # the launcher has exited
                    descriptors["channel"] = stack.enter_context(connect(self._channel)).fileno()
            # All users on this host can read the command line, so the secret is sent later through the control socket.
            setup = descriptors | {
                "local": local,
                "listeners": listeners,
                "watched": asdict(self._watched),
                "job": self._job,
                "path": self._channel,
            }
            # Append the rank's own arguments, for people who look at `ps`.
            command = module_command("gpubench.ranks.watchdog.main", json.dumps(setup), *sys.argv[1:])
            self._process = subprocess.Popen(
                command,
                env=package_environment(os.environ),
                pass_fds=(*descriptors.values(), *local, *listeners),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = control
        self._starts += 1

    def _keep(self) -> None:
        while not self._block.left():
            was_stopped = self._kill_if_stopped()
            status = self._process.wait()
            time.sleep(0 if self._block.left() else _SECONDS_TO_END_TOO)
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
            how = "was stopped by a signal, and killed because it did not continue" if was_stopped else how
            with self._lock:
                if self._block.left():
                    if was_stopped:
                        self._note(how)
                    return
                is_watched = self._starts < _MOST_STARTS and self._start_again()
                then = "another watchdog was started" if is_watched else "without one, a hang of this rank is not ended"
                self._note(f"{how}; {then}")
                if not is_watched:
                    return

    def _kill_if_stopped(self) -> bool:
        """Wait until the watchdog has ended. If a signal stopped it, kill it and return True."""
        kinds = os.WEXITED | os.WNOWAIT  # leave the exit status for `_process.wait`
        try:
            while (seen := os.waitid(os.P_PID, self.pid, kinds | os.WSTOPPED)) and seen.si_code == os.CLD_STOPPED:
                # consume this stop event, or waitid returns it again
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
                time.sleep(_SECONDS_STOPPED)
                if process_state(self.pid) == "T":
                    self._process.kill()
                    return True
        except ChildProcessError:  # the kernel reports no children while SIGCHLD is ignored
            pass
        return False

    def _note(self, text: str) -> None:
        write_stderr_line(printable_line(f"note: the watchdog of {self._watched.place} {text}"))

    def _start_again(self) -> bool:
        before = self._control
        try:
            self._start()
        except OSError:
            return False
        before.close()
        for message in self._sent.values():
            self._write(self._control, message)
        if self._answers:
            self._listen(self._control)
        return True

    def _listen(self, control: socket.socket) -> None:
        threading.Thread(target=self._respond, args=(control,), name="gpubench-abort", daemon=True).start()

    def _respond(self, control: socket.socket) -> None:
        with suppress(OSError), control.makefile("rb") as questions:
            for line in questions:
                kind = json.loads(line)["kind"]
                self._write(control, {"kind": kind, "text": str(self._answers[kind]() or "")})

    def _write(self, control: socket.socket, message: Mapping[str, object]) -> None:
        # If the watchdog was killed, the run continues without it.
        with suppress(OSError):
            control.sendall(json.dumps(message).encode() + b"\n")


_SECRET_BYTES = 32


class RankProgress:
    """Report this rank's progress to its watchdog."""

    def __init__(self, block: ProgressBlock, own: WatchdogAddress, watchdog: WatchdogKeeper) -> None:
        self.enter = wrap_in_ranges(block.enter, find_nvtx())
        self.completed = block.completed
        self._block = block
        self._own = own
        self._watchdog = watchdog

    def exchange_addresses(self, group: Group) -> None:
        """Exchange the watchdogs' addresses and a shared secret between all ranks. A collective call over all ranks."""
        own = [job_name(os.environ), os.urandom(_SECRET_BYTES).hex()] if group.rank == 0 else None
        job, secret = group.broadcast(own)
        address = (self._own.place, self._own.host, list(self._own.addresses))
        self._watchdog.send({"kind": "met", "job": job, "secret": secret, "cards": group.gather(address)})

    def name_ranks(self, places: Sequence[object]) -> None:
        """Send descriptions of all ranks to the watchdog, after GPUs have been assigned to ranks."""
        self._watchdog.send({"kind": "places", "places": [str(place) for place in places]})

    def answer_watchdog(self, trouble: Callable[[], str], abort: Callable[[], object]) -> None:
        """Set the functions that run if this rank hangs: `trouble` returns the library's error, and `abort` aborts
        the library.

        They run in a thread when the watchdog requests them. A later call replaces both.
        """
        self._watchdog.answer({"trouble": trouble, "abort": abort})

    @property
    def is_ending(self) -> bool:
        """True if the watchdog or the rank itself has begun to end this rank."""
        return self._block.left()

    def leave(self) -> None:
        """Record that this rank reports its own error, so that no watchdog reports the rank as lost."""
        self._block.leave()
        self._watchdog.send({"kind": "breaks"})

    def close(self) -> None:
        """End the watchdog. Call this after the last step that may hang."""
        self._block.leave()
        self._watchdog.close()


def start(rank: int, ranks: int, host: str, timeout_s: float, channel: str | None) -> RankProgress:
    """Start this process's watchdog. Call this before initializing MPI and CUDA, because both may hang."""
    block = ProgressBlock()
    block.enter(Phase.LAUNCH)
    listeners = listen_everywhere()
    address = WatchdogAddress(f"rank {rank} on {host}", host, [listener_address(listener) for listener in listeners])
    exit_on_signal(END_SIGNAL)
    watched = Watched(rank, ranks, address.place, host, os.getpid(), timeout_s)
    return RankProgress(block, address, WatchdogKeeper(watched, block, listeners, channel))


def exit_on_signal(number: signal.Signals) -> None:
    """Make a signal end this process immediately, even inside a library call. The exit code is the signal number."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
