"""A command of gpubench's own as a process of its own, with a deadline: ended with all that it started."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpubench.hardware.launch.interpreter import with_package
from gpubench.model.facts.launched_by import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ, as_if_alone

_OWN_ERROR = "gpubench: error: "
_SECONDS_TO_END = 5.0


class Ended(NamedTuple):
    """What a child has left: its exit code, its stdout, and what it said on stderr."""

    code: int
    output: bytes
    said: str

    @property
    def own_words(self) -> str:
        """The last error of gpubench's on stderr, without what stands before it; all of stderr where there is none."""
        return self.said.rpartition(_OWN_ERROR)[2]


def run_child(
    command: Sequence[str], timeout_s: float | None, environment: Mapping[str, str] = os.environ
) -> Ended | None:
    """Run it, without defaults of options from the environment or a file; None where it did not end in time."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=with_package(as_if_alone(environment) | {DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ}),
        start_new_session=True,
    ) as child:
        try:
            output, said = child.communicate(timeout=timeout_s)
        except BaseException as broken:
            _end(child)
            if isinstance(broken, subprocess.TimeoutExpired):
                return None
            raise
        return Ended(child.returncode, output, said.decode(errors="replace"))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it started: politely, then not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
            child.wait(_SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return
