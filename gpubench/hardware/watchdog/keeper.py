"""The watchdog's process as its rank has it: started, told things, and started again where it ends first."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict

from gpubench.hardware.launch.channel_sender import connect
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.process.names import process_state
from gpubench.hardware.watchdog.addresses import job_name
from gpubench.hardware.watchdog.progress_block import ProgressBlock
from gpubench.hardware.watchdog.stderr_line import write_stderr_line
from gpubench.hardware.watchdog.watched import Watched
from gpubench.model.terms.foreign_text import printable_line

_MOST_STARTS = 4
_SECONDS_STOPPED = 0.8
"""A suspended job is continued as a whole, within less; a watchdog that is still stopped then, somebody stopped."""

_SECONDS_TO_END = 5.0
"""What a watchdog takes at the most to end with its rank on a busy machine, where it is not stopped."""

_SECONDS_TO_END_TOO = 0.5
"""Where a whole job is killed, the rank follows its watchdog within that, and needs none."""


class WatchdogKeeper:
    """A watchdog for the rank `watched`, and another one, told the same, where that is killed, is stopped or breaks.

    The rank keeps the sockets at which other watchdogs ask, so that the next one is found where the first was. A rank
    inside a call that holds Python's lock notices the end of its watchdog once that call returns.
    """

    def __init__(
        self, watched: Watched, block: ProgressBlock, datagrams: Sequence[socket.socket], channel: str | None
    ) -> None:
        self._watched = watched
        self._block = block
        self._datagrams = datagrams
        self._channel = channel
        self._answers: Mapping[str, Callable[[], object]] = {}
        self._told: dict[object, Mapping[str, object]] = {}
        self._starts = 0
        self._lock = threading.Lock()
        self._start()
        self._thread = threading.Thread(target=self._keep, name="gpubench-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process that watches now."""
        return self._process.pid

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message, which the next watchdog gets too; of each kind the last."""
        with self._lock:
            self._told[message["kind"]] = message
            self._send(self._control, message)

    def answer(self, answers: Mapping[str, Callable[[], object]]) -> None:
        """Have a thread answer the watchdog's requests from now on, by their kind."""
        is_first = not self._answers
        self._answers = answers
        if is_first:
            self.tell({"kind": "helps"})
            self._listen(self._control)

    def close(self) -> None:
        """End the watchdog of a rank that has left: it is killed where it does not follow."""
        with self._lock, suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            self._process.kill()
            self._note("did not end with its rank and was killed")
        for each in (self._control, *self._datagrams):
            each.close()

    def _start(self) -> None:
        control, other = socket.socketpair()
        with other, ExitStack() as stack:
            descriptors = {"block": self._block.descriptor, "control": other.fileno()}
            datagrams = [each.fileno() for each in self._datagrams]
            if self._channel:
                # The line is made now, so that the launcher waits for the reports of this rank's watchdog.
                with suppress(OSError):  # the launcher is gone
                    descriptors["channel"] = stack.enter_context(connect(self._channel)).fileno()
            # Everybody on this host can read a command line: the secret comes later, by the control socket.
            setup = descriptors | {
                "datagrams": datagrams,
                "watched": asdict(self._watched),
                "job": job_name(os.environ),
            }
            # The rank's own words behind it are for people who look at the list of processes.
            command = module_command("gpubench.hardware.watchdog.main", json.dumps(setup), *sys.argv[1:])
            self._process = subprocess.Popen(
                command,
                env=with_package(os.environ),
                pass_fds=(*descriptors.values(), *datagrams),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = control
        self._starts += 1

    def _keep(self) -> None:
        while not self._block.left():
            was_stopped = self._killed_where_stopped()
            status = self._process.wait()
            time.sleep(0 if self._block.left() else _SECONDS_TO_END_TOO)
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
            how = "was stopped by a signal, and killed since it did not go on" if was_stopped else how
            with self._lock:
                if self._block.left():
                    if was_stopped:
                        self._note(how)
                    return
                is_watched = self._starts < _MOST_STARTS and self._start_again()
                then = "another one was started" if is_watched else "without one, nobody ends this rank if it hangs"
                self._note(f"{how}; {then}")
                if not is_watched:
                    return

    def _killed_where_stopped(self) -> bool:
        """Wait until the watchdog has ended, and kill it where somebody stopped it: whether that was so."""
        kinds = os.WEXITED | os.WNOWAIT  # whoever asks `_process` finds the end
        try:
            while (seen := os.waitid(os.P_PID, self.pid, kinds | os.WSTOPPED)) and seen.si_code == os.CLD_STOPPED:
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)  # or the next question finds the same stop
                time.sleep(_SECONDS_STOPPED)
                if process_state(self.pid) == "T":
                    self._process.kill()
                    return True
        except ChildProcessError:  # the process was started with SIGCHLD ignored, and the kernel tells nothing
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
        for message in self._told.values():
            self._send(self._control, message)
        if self._answers:
            self._listen(self._control)
        return True

    def _listen(self, control: socket.socket) -> None:
        threading.Thread(target=self._respond, args=(control,), name="gpubench-abort", daemon=True).start()

    def _respond(self, control: socket.socket) -> None:
        with suppress(OSError), control.makefile("rb") as questions:
            for line in questions:
                kind = json.loads(line)["kind"]
                self._send(control, {"kind": kind, "text": str(self._answers[kind]() or "")})

    def _send(self, control: socket.socket, message: Mapping[str, object]) -> None:
        # Without a watchdog, which somebody may have killed, the run goes on.
        with suppress(OSError):
            control.sendall(json.dumps(message).encode() + b"\n")
