"""Ranks as threads of one process, so that a job is an ordinary test."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpubench.model.terms.statistics import ClockOffset

T = TypeVar("T")

SECONDS_TO_MEET = 60


class World:
    """A place where n threads exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS_TO_MEET)
        self._meetings = [0] * size
        self._values: list[list[Any]] = [[None] * size, [None] * size]

    def exchange(self, rank: int, value: T) -> list[T]:
        # a faster rank is at most one meeting ahead, and uses the other list
        values = self._values[self._meetings[rank] % 2]
        self._meetings[rank] += 1
        values[rank] = value
        self._barrier.wait()
        return list(values)

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """`ports.Group` over a world of threads."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def gather(self, value: T) -> list[T]:
        return self._world.exchange(self.rank, value)

    def collect(self, value: T) -> list[T] | None:
        values = self._world.exchange(self.rank, value)
        return values if self.rank == 0 else None

    def broadcast(self, value: T | None, root: int = 0) -> T:
        received = self._world.exchange(self.rank, value)[root]
        assert received is not None
        return received

    def barrier(self) -> None:
        self._world.exchange(self.rank, None)

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        return [max(each) for each in zip(*self._world.exchange(self.rank, values), strict=True)]

    def clock_offset(self) -> ClockOffset:
        return ClockOffset(0.0, 0.0)

    def split(self, color: int, key: int) -> "ThreadGroup":
        keyed = self._world.exchange(self.rank, (color, key, self.rank))
        mine = sorted((each[1], each[2]) for each in keyed if each[0] == color)
        worlds = self._world.exchange(self.rank, World(len(mine)))
        ranks = [rank for _, rank in mine]
        return ThreadGroup(worlds[ranks[0]], ranks.index(self.rank))


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `body` as every rank of a job. Return the results in rank order, or raise the first rank's exception."""
    world = World(size)

    def run(rank: int) -> T:
        try:
            return body(ThreadGroup(world, rank))
        except BaseException:
            world.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]
