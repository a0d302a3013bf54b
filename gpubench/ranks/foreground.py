"""Run a command in the foreground, as a shell does: it has this process's terminal, standard input and process group.

`launch` starts ranks of gpubench in the background instead.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpubench.machine.children import die_with_parent, set_subreaper

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SI_KERNEL = 0x80  # asm-generic/siginfo.h. A terminal's Ctrl-C has this code, and reaches the whole process group
_SECONDS_TO_END = 5.0
_SECONDS_BETWEEN_LOOKS = 0.05
_SIGNAL_EXIT = 128
"""Shells add the signal number to this value if a signal killed a command."""


class ForegroundJob:
    """A running command. Signals to this process reach it once, and it ends if this process is killed.

    - `program`: the path of the program that `command` names
    - `stdout`: the file descriptor of its standard output
    - `was_signalled`: a signal to this process or from the terminal asked the command to end
    """

    def __init__(self, program: str, command: Sequence[str], environment: Mapping[str, str], stdout: int) -> None:
        self.was_signalled = False
        set_subreaper()
        # A blocked signal waits until `wait` takes it, so none is lost between two calls.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
        try:
            self._process = subprocess.Popen(
                command, executable=program, env=environment, stdout=stdout, preexec_fn=self._before_exec
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            raise

    def _before_exec(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        die_with_parent(signal.SIGTERM)  # torchrun and mpirun then end their ranks, which SIGKILL would orphan

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the command still runs after `seconds`. It is 128+n after signal n."""
        until = time.monotonic() + seconds
        while (code := self._process.poll()) is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            received = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD), left)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self.was_signalled |= received.si_signo not in (signal.SIGUSR1, signal.SIGUSR2)
                if received.si_code != _SI_KERNEL:
                    self._process.send_signal(received.si_signo)
        return code if code >= 0 else _SIGNAL_EXIT - code

    def end(self) -> None:
        """Let signals interrupt this process again. If a signal ended the command, end the processes it left behind.

        They get SIGTERM, and five seconds later SIGKILL. A command that ends by itself may leave a daemon on purpose.
        """
        if self.was_signalled or (self._process.returncode or 0) < 0:
            for number in (signal.SIGTERM, signal.SIGKILL):
                _end_children(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _end_children(number: int) -> None:
    until = time.monotonic() + _SECONDS_TO_END
    asked = set[int]()
    while (found := _children()) and time.monotonic() < until:
        for pid in set(found) - asked:
            with suppress(OSError):  # It has ended, or it belongs to another user
                os.kill(pid, number)
        asked.update(found)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _children() -> list[int]:
    """Return the running children of this process, which include orphans. Zombies are removed."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        found += [int(pid) for pid in path.read_text().split()]
    return found
