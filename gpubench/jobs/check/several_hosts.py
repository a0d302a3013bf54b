"""Check the nodes of an allocation, or of a file of hosts, in one command: ranks are started there, a rank a GPU."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.formats.delivery import say
from gpubench.hardware.launch.interpreter import with_package
from gpubench.hardware.launch.launcher import find_launcher
from gpubench.hardware.launch.several_hosts import hosts_of, mpirun_command, srun_command
from gpubench.hardware.node.nvml.library import read_driver
from gpubench.model.facts.launched_by import launched_by


def start(arguments: Sequence[str], *, hosts: Path | None, gpus: int | None) -> int:
    """Say which launcher starts `gpubench` with these arguments, and become it: srun, or mpirun of named hosts.

    `gpus` are those of every node, None for as many as this one shows; without any there are as many ranks as every
    host has room for, one where nobody says.
    Raises GpubenchError: hosts that cannot be read, no allocation, no launcher, or one that started this process.
    """
    launch = launched_by(os.environ)
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"{'--slurm' if hosts is None else '--hosts'} under {launch.launcher}",
            expected="one process, which starts the ranks",
            next_step=launch.without_it,
        )
    ranks = gpus or read_driver(os.environ).visible
    if hosts is None:
        command, environment = srun_command(os.environ, ranks or 1, arguments), dict(os.environ)
    else:
        room, mpirun = hosts_of(hosts), find_launcher()
        ranks = ranks or min((slots for slots in room.values() if slots is not None), default=1)
        command, environment = mpirun_command(mpirun, list(room), ranks, arguments), mpirun.on_hosts(os.environ)
    say(f"gpubench: {shlex.join(command)}", to=sys.stderr)
    os.execve(command[0], command, with_package(environment))
    raise AssertionError("exec returns where it fails alone")
