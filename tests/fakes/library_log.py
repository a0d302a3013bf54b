"""NCCL's log of a rank, replayed from a recording: first connections, then a line per operation."""

import re
from collections.abc import Iterable
from pathlib import Path

LOGS = Path(__file__).parents[1] / "logs"
HEAD = "vm:4310:4310 [0] NCCL INFO "

_TUNING = re.compile(rb"AllReduce: (\d+) Bytes -> Algo ")


def recorded(name: str, rank: int, machine: str = "h200x4") -> list[bytes]:
    """Return what a rank wrote in the run of this folder."""
    return sorted((LOGS / f"{machine}-{name}").glob("*.log"))[rank].read_bytes().splitlines()


def said(*messages: str) -> list[bytes]:
    """Format messages as lines of NCCL's log."""
    return [(HEAD + message).encode() for message in messages]


def sent_between(pairs: Iterable[tuple[int, int]], via: str) -> list[bytes]:
    """Return what both ends of sends between these ranks write."""
    return said(
        *(f"Channel 00/1 : {src}[0] -> {dst}[0] [{end}] via {via}" for src, dst in pairs for end in ("send", "receive"))
    )


class FakeLog:
    """`ports.LibraryLog`. Recorded lines about an operation appear when operations are tried, in order of size."""

    def __init__(self, lines: Iterable[bytes] = (), no_log: str = "", no_tuning: str = "") -> None:
        lines = list(lines)
        self.no_log = no_log
        self.no_tuning = no_tuning
        self._tunings = {int(found[1]): line for line in lines if (found := _TUNING.search(line))}
        self._next = [line for line in lines if not _TUNING.search(line)]
        self._begun = False
        self.is_on = True

    def is_readable(self) -> bool:
        return not self.no_log

    def lines(self) -> list[bytes]:
        assert self.is_on
        found, self._next = self._next, []
        if self._begun and self._tunings:
            found.append(self._tunings.pop(min(self._tunings)))
        self._begun = True
        return found

    def switch_off(self) -> None:
        self.is_on = False
