"""Run child processes side by side until each has answered with one line of JSON, or the deadline has passed."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from gpubench.hardware.launch.launcher import die_with_parent

_SECONDS_TO_END = 1.0
"""Time for a child that answered, or was killed, to end. One inside a driver's call may never do so."""

_SECONDS_TO_EXIT = 10.0
"""Time for a child whose output has ended to end itself: its exit status is the only explanation."""

_CHUNK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class StageResult:
    """A child's answer, or why there is none."""

    document: dict[str, Any] | None = None
    error: str = ""
    timed_out: bool = False


def run_stages(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], timeout_s: float
) -> dict[str, StageResult]:
    """The results of all commands, by name. None is left running, save one that even SIGKILL does not reach."""
    with Stages(commands, environment) as stages:
        return stages.results(timeout_s)


class Stages:
    """Children that run while something else is done here; usable as a context, which ends those that still do."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._children = {name: _Child(command, environment) for name, command in commands.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for child in self._children.values():
            child.end()

    def results(self, timeout_s: float) -> dict[str, StageResult]:
        """Their answers so far and within the time from now on, by name."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for child in self._children.values():
                if child.output is not None:
                    selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map():
                left = deadline - time.monotonic()
                for key, _ in selector.select(max(left, 0.0)):
                    if key.data.read():
                        selector.unregister(key.fileobj)
                if left <= 0:
                    break  # with what lay there, though this process may have come late to it
        return {name: child.result(timeout_s) for name, child in self._children.items()}


class _Child:
    """A process, and what it has written so far.

    A line that is JSON is its answer. The end of its output is not waited for: a thread that hangs in a driver keeps it
    open after everything has been written.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._written = b""
        self._document: dict[str, Any] | None = None
        self._ended = False
        self._start_error = ""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                preexec_fn=die_with_parent,
            )
            self.output = self._process.stdout
        except (OSError, subprocess.SubprocessError) as error:
            self._start_error = str(error)

    def read(self) -> bool:
        """Take what there is to read; true once there will be nothing more of interest."""
        assert self.output is not None
        chunk = os.read(self.output.fileno(), _CHUNK_BYTES)
        self._written += chunk
        self._ended = not chunk
        for line in self._written.splitlines(keepends=True) if b"\n" in chunk else ():
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                self._document = document if isinstance(document, dict) else None
        return self._ended or self._document is not None

    def result(self, timeout_s: float) -> StageResult:
        """The answer, or the reason why there is none."""
        if self._document is not None:
            return StageResult(self._document)
        if self._process is None:
            return StageResult(error=f"it does not start: {self._start_error}")
        if not self._ended:
            return StageResult(error=f"no answer within {timeout_s:g} s", timed_out=True)
        return StageResult(error=self._cause_of_end(self._process))

    def _cause_of_end(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_EXIT)
        code = process.returncode
        self._complaints.seek(0)
        *_, complaint = "", *self._complaints.read().decode(errors="replace").strip().splitlines()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"killed by {name}" + (f": {complaint}" if complaint else "")
        if complaint and code != 0:
            return complaint
        return "it ended without an answer" + (f" (exit code {code})" if code else "")

    def end(self) -> None:
        """End the process where it still runs, and close its files."""
        self._complaints.close()
        if self._process is None or self.output is None:
            return
        self.output.close()
        if self._document is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
