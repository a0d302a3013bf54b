"""The job as torchrun started it: ranks meet over Gloo, at the store that the environment names, and need no MPI."""

import os
from collections.abc import Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any, NoReturn, TypeVar

from gpubench.hardware.torch.library import load_torch
from gpubench.hardware.torch.meeting import LEAST_SECONDS, meet
from gpubench.hardware.torch.refusals import first_line, torch_refused
from gpubench.model.facts.launched_by import LaunchedBy
from gpubench.model.terms.statistics.lateness import ClockOffset

T = TypeVar("T")

_ROUND_TRIPS = 10
_HOURS = timedelta(hours=6)
"""For torch's own time-out: gpubench's watchdog ends what hangs."""


class TorchGroup:
    """A group over a process group of Gloo; `members` are its ranks as torch counts them in the whole job."""

    def __init__(self, torch: Any, process_group: Any, members: Sequence[int]) -> None:
        self._torch, self._distributed = torch, torch.distributed
        self._process_group, self.members = process_group, members
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        found: list[Any] = [None] * self.size
        self._distributed.all_gather_object(found, value, group=self._process_group)
        return found

    def collect(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on the first rank; None on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._distributed.gather_object(value, found, self.members[0], group=self._process_group)
        return found

    def broadcast(self, value: T | None, root: int = 0) -> T:
        """Root's value, on every rank."""
        held: list[Any] = [value]
        self._distributed.broadcast_object_list(held, self.members[root], group=self._process_group)
        received: T = held[0]
        return received

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._distributed.barrier(group=self._process_group)

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Each of the values as it is on the rank where it is largest."""
        found = self._torch.tensor(list(values), dtype=self._torch.float64)
        self._distributed.all_reduce(found, self._distributed.ReduceOp.MAX, group=self._process_group)
        largest: list[float] = found.tolist()
        return largest

    def clock_offset(self) -> ClockOffset:
        """The difference of this rank's clock to the first rank's, as MPI's group finds it: by messages to and fro."""
        if self.rank == 0:
            for other in range(1, self.size):
                for _ in range(_ROUND_TRIPS):
                    self._receive(other)
                    self._send(perf_counter(), other)
            return ClockOffset(0.0, 0.0)
        return min((self._round_trip() for _ in range(_ROUND_TRIPS)), key=lambda offset: offset.uncertainty)

    def _round_trip(self) -> ClockOffset:
        asked = perf_counter()
        self._send(asked, 0)
        answer = self._receive(0)
        arrived = perf_counter()
        return ClockOffset(answer - (asked + arrived) / 2, (arrived - asked) / 2)

    def _send(self, seconds: float, peer: int) -> None:
        given = self._torch.tensor([seconds], dtype=self._torch.float64)
        self._distributed.send(given, self.members[peer], group=self._process_group)

    def _receive(self, peer: int) -> float:
        taken = self._torch.zeros(1, dtype=self._torch.float64)
        self._distributed.recv(taken, self.members[peer], group=self._process_group)
        return float(taken[0])

    def split(self, color: int, key: int) -> "TorchGroup":
        """The group of the ranks with the same color, ordered by key."""
        keyed = self.gather((color, key, self.members[self.rank]))
        members = [member for own, _, member in sorted(keyed) if own == color]
        part = self._distributed.new_group(
            sorted(members), backend="gloo", timeout=_HOURS, use_local_synchronization=True
        )
        if members != sorted(members):
            raise ValueError("torch orders the ranks of a group as those of the job")
        return TorchGroup(self._torch, part, members)


def start(launched_by: LaunchedBy, _imports: Sequence[str] = (), seconds: float = LEAST_SECONDS) -> TorchGroup:
    """Meet the other ranks of torchrun's job, for which each waits so many seconds.

    Raises CouldNotMeasureError: there is no torch here, ranks are missing, or Gloo cannot connect them.
    """
    found = load_torch("gloo")
    store = meet(found.distributed, launched_by, os.environ, seconds)
    try:
        found.distributed.init_process_group(
            "gloo", store=store, rank=launched_by.rank, world_size=launched_by.size, timeout=_HOURS
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused("gloo", first_line(error)) from error
    return TorchGroup(found.torch, found.distributed.group.WORLD, range(launched_by.size))


def finish() -> None:
    """End torch's process groups, if no backend has done so."""
    found = load_torch("gloo")
    if found.distributed.is_initialized():
        found.distributed.destroy_process_group()


def abort(_group: object, exit_code: int) -> NoReturn:
    """End this process at once: torchrun then ends the others."""
    os._exit(exit_code)
