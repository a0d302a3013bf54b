"""The GPUs of this host by a child with a deadline for every answer: a silent driver costs one reading, and no more."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpubench.errors import UsageError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.launch.launcher import die_with_parent
from gpubench.model.facts.traffic import GpuReading
from gpubench.model.terms.plain import from_plain

_MODULE = "gpubench.hardware.traffic.gpu_child"
_CHUNK_BYTES = 2**16
_SECONDS_TO_END = 1.0


class GpuChild:
    """Asks a child for readings. It is asked again only once it has answered: a wedged one is left to itself.

    It has `start_seconds` for its first answer, for which it starts and NVML does, and for all others
    `deadline_seconds`. `command` starts it; by default what asks NVML, of the GPUs with these indices, or of all.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        start_seconds: float,
        deadline_seconds: float,
        indices: Sequence[int] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        asked = [] if indices is None else [",".join(map(str, indices))]
        self._seconds, self._deadline_seconds = start_seconds, deadline_seconds
        self._written = b""
        self._asked_at: float | None = None
        self._ended = ""
        self._process = subprocess.Popen(
            command or module_command(_MODULE, *asked),
            env=with_package(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )

    def read(self) -> tuple[tuple[GpuReading, ...], str | None]:
        """A reading of all GPUs, or why there is none; what it answers too late is passed over."""
        if self._ended:
            return (), self._ended
        if self._asked_at is not None and self._line(0.0) is None:
            return (), self._why(f"the driver has not answered for {time.monotonic() - self._asked_at:.0f} s")
        self._ask()
        seconds, self._seconds = self._seconds, self._deadline_seconds
        line = self._line(seconds)
        if line is None:
            return (), self._why(f"the driver did not answer within {seconds:g} s")
        return self._understood(line)

    def _why(self, silent: str) -> str:
        return self._ended or silent

    def close(self) -> None:
        """End the child, without waiting for one that hangs in the driver."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def _line(self, seconds: float) -> bytes | None:
        """The next line of the child within a time; None, and `_ended` where there will be none."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._written:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    return None
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    self._ended = "the process that asks the driver has ended"
                    return None
                self._written += chunk
        line, _, self._written = self._written.partition(b"\n")
        self._asked_at = None
        return line

    def _understood(self, line: bytes) -> tuple[tuple[GpuReading, ...], str | None]:
        try:
            document: dict[str, Any] = json.loads(line)
            silent = document.get("silent")
            return tuple(from_plain(GpuReading, each) for each in document.get("gpus", ())), silent
        except (ValueError, UsageError):
            return (), "the process that asks the driver gave an answer that is none"
