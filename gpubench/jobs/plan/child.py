"""A command of gpubench's own in a process of its own, with a deadline."""

import os
import subprocess
from collections.abc import Sequence

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.model.facts.launched_by import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ, as_if_alone


def run_command(arguments: Sequence[str], timeout_s: float) -> None:
    """Run it; CouldNotMeasureError where it cannot measure, or does not end in time."""
    name = f"gpubench {arguments[0]}"
    environment = with_package(as_if_alone(os.environ) | {DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ})
    try:
        done = subprocess.run(
            module_command("gpubench", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CouldNotMeasureError(
            f"{name} did not end within {timeout_s:g} s", next_step=f"gpubench {' '.join(arguments[:1])}"
        ) from None
    if done.returncode not in (0, 1):
        said = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        raise CouldNotMeasureError(
            f"{name} ended with exit code {done.returncode}: {said or 'it said nothing'}",
            next_step=f"gpubench {arguments[0]} shows more",
        )
