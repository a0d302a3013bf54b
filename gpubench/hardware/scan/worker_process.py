"""A supervisor's hold on one worker: start it, give it tasks, see what became of it, end it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict

from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.process.names import process_state
from gpubench.hardware.scan.messages import Outcome
from gpubench.hardware.scan.worker import WorkerTask
from gpubench.model.facts.launched_by import as_if_alone

SECONDS_TO_BE_KILLED = 2.0
"""A killed process that is still there then hangs in the kernel: its GPU is lost."""

_FAILURES = {
    "deadline": Outcome.DEADLINE,
    "broken": Outcome.BROKEN,
    "failed": Outcome.OWN_WORKER_FAILED,
    "wrong": Outcome.WRONG_DATA,
}


class WorkerProcess:
    """One worker at a time, on one rail; after it died or was killed the next task gets a new one.

    A worker ends with the thread that gave it its first task: one thread gives all tasks.
    """

    def __init__(self, backend: str, device: int, secret: bytes) -> None:
        self.listener = socket.create_server(("", 0), backlog=16)
        self.is_lost = False
        self._words = backend, device
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._received = b""
        self._ended_with: int | None = None

    @property
    def port(self) -> int:
        """Where partners find it, also after it was replaced: the socket is the supervisor's."""
        return int(self.listener.getsockname()[1])

    @property
    def control(self) -> socket.socket | None:
        """The socket on which its answers arrive."""
        return self._control

    def begin(self, task: WorkerTask) -> None:
        """Give it a task; a new worker where there is none."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._received = b""
        with contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(json.dumps(asdict(task)).encode() + b"\n")

    def answer(self, number: int) -> dict[str, object] | None:
        """What it says of a task, once it has; None before. Raises EOFError where it has died."""
        if self._control is None:
            raise EOFError
        with contextlib.suppress(BlockingIOError):
            data = self._control.recv(2**16)
            if not data:
                raise EOFError
            self._received += data
        line, found, rest = self._received.partition(b"\n")
        if not found:
            return None
        self._received = rest
        answer: dict[str, object] = json.loads(line)
        return answer if answer.get("number") == number else None

    def outcome(self, answer: dict[str, object]) -> tuple[float, Outcome, str]:
        """GB/s, outcome and remark of an answer."""
        gb_s = answer.get("gb_s")
        if isinstance(gb_s, float):
            return gb_s, Outcome.DONE, ""
        return 0.0, _FAILURES.get(str(answer.get("failure")), Outcome.OWN_WORKER_FAILED), str(answer.get("remark", ""))

    def state(self) -> Outcome:
        """Why it does not answer, by what the kernel says of it."""
        if self._process is None or self._process.poll() is not None:
            return Outcome.OWN_WORKER_DIED
        letter = process_state(self._process.pid)
        if letter in "Tt":
            return Outcome.OWN_WORKER_STOPPED
        return Outcome.OWN_WORKER_BLOCKED if letter == "D" else Outcome.DEADLINE

    def has_died(self) -> bool:
        """True where it ended by itself since it was started: nobody asked it to."""
        return self._process is not None and self._process.poll() is not None

    def how_it_ended(self) -> str:
        """'signal 9', 'exit code 1'."""
        code = self._ended_with
        if code is None:
            return "no exit code"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it, whatever it does; where even that does not help, the rail is lost."""
        if self._process is not None:
            self._process.poll()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._ended_with = self._process.wait(SECONDS_TO_BE_KILLED)
            except subprocess.TimeoutExpired:
                self.is_lost = True
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """End it, and the socket that partners find it by."""
        self.kill()
        self.listener.close()

    def _start(self) -> None:
        self.kill()
        own, its = socket.socketpair()
        backend, device = self._words
        numbers = str(its.fileno()), str(self.listener.fileno()), str(device)
        self._process = subprocess.Popen(
            module_command("gpubench.hardware.scan.worker", backend, *numbers),
            pass_fds=(its.fileno(), self.listener.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=with_package(as_if_alone(os.environ)),
            start_new_session=True,
        )
        its.close()
        with contextlib.suppress(OSError):  # of one that is dead already, which whoever waits for an answer finds
            own.sendall(self._secret.hex().encode() + b"\n")
        own.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._control = own


def seconds_left(deadline: float) -> float:
    """Until a time of the monotonic clock; 0 where it has passed."""
    return max(0.0, deadline - time.monotonic())
