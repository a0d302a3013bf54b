"""The watchdog's process as its rank has it: started, told things, and ended."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict

from gpubench.hardware.launch.channel_sender import connect
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.watchdog.addresses import job_name
from gpubench.hardware.watchdog.process import Watched
from gpubench.hardware.watchdog.progress_block import ProgressBlock


class WatchdogKeeper:
    """A watchdog for the rank `watched`, which is told things and asks for others."""

    def __init__(
        self, watched: Watched, block: ProgressBlock, datagrams: Sequence[socket.socket], channel: str | None
    ) -> None:
        self._watched = watched
        self._block = block
        self._datagrams = datagrams
        self._channel = channel
        self._answers: Mapping[str, Callable[[], object]] = {}
        self._start()

    @property
    def pid(self) -> int:
        """The process that watches now."""
        return self._process.pid

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message."""
        self._send(self._control, message)

    def answer(self, answers: Mapping[str, Callable[[], object]]) -> None:
        """Have a thread answer the watchdog's requests from now on, by their kind."""
        is_first = not self._answers
        self._answers = answers
        if is_first:
            self.tell({"kind": "helps"})
            self._listen(self._control)

    def close(self) -> None:
        """End the watchdog of a rank that has left."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait()
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
