"""The rank that a watchdog belongs to, and the signal by which it ends it: what both have to know of each other."""

import signal
from dataclasses import dataclass

END_SIGNAL = signal.SIGQUIT
"""Ends a rank with exit code 3: its handler is C's `_exit`, which is called with the signal's number, and that is 3."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The rank that a watchdog belongs to."""

    rank: int
    ranks: int
    place: str
    host: str
    pid: int
    timeout_s: float
