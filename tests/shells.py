"""A shell whose gpubench this process runs: its three processes are most of what a command of an example takes."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cli.running import environment, gpubench

LAUNCHER = 'while [ $# -gt 0 ] && [ "$1" != gpubench ]; do shift; done; exec "$@"'
_ASKING = """printf '%s\\0' "$PWD" "$@" > "$ASKING/asked"
read -r code < "$ASKING/answered"
cat "$ASKING/stdout"
cat "$ASKING/stderr" >&2
exit "$code"
"""


class Ended(NamedTuple):
    """How a command ended, and the arguments and exit codes of what it ran of gpubench."""

    returncode: int
    stdout: str
    stderr: str
    ran: Sequence[tuple[Sequence[str], int]]


def make_programs(folder: Path, scripts: Mapping[str, str]) -> None:
    """Write what stands in for gpubench, and other scripts of bash by their names."""
    for name, text in {"gpubench": _ASKING, **scripts}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def run(
    command: Sequence[str],
    programs: Path,
    folder: Path,
    arguments: Callable[[Sequence[str]], Sequence[str]],
    **variables: str,
) -> Ended:
    """Run a command in a folder, whose gpubench gets other arguments: those of a machine that does not exist."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="shell-") as place:
        return _run(command, Path(place), folder, arguments, variables | {"PATH": path, "ASKING": place})


def _run(
    command: Sequence[str],
    place: Path,
    folder: Path,
    arguments: Callable[[Sequence[str]], Sequence[str]],
    variables: Mapping[str, str],
) -> Ended:
    asked, answered = place / "asked", place / "answered"
    os.mkfifo(asked)
    os.mkfifo(answered)
    telling = ["bash", "-c", '"$@"; code=$?; : > "$ASKING/asked"; exit $code', "bash"]  # the last question is empty
    ran = []
    with (
        (place / "out").open("w") as stdout,
        (place / "err").open("w") as stderr,
        subprocess.Popen(
            [*telling, *command],
            cwd=folder,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
        ) as shell,
    ):
        try:
            while words := asked.read_text().split("\0")[:-1]:
                done = gpubench(*arguments(words[1:]), cwd=Path(words[0]))
                ran.append((words[1:], done.returncode))
                (place / "stdout").write_text(done.stdout)
                (place / "stderr").write_text(done.stderr)
                answered.write_text(f"{done.returncode}\n")
            shell.wait()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    return Ended(shell.returncode, (place / "out").read_text(), (place / "err").read_text(), ran)
