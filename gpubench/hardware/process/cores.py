"""The cores that a thread runs on."""

import os
from contextlib import suppress


def leave_core() -> None:
    """Let this thread, and what it starts from now on, run on any core that the job may use.

    mpirun binds a rank to a core by default: what is done beside its work would take time from it.
    """
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
