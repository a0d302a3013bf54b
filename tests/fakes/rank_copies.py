"""Copies between ranks that are threads: data really move between NumPy arrays, times are made up, and faults can
be planted.
"""

import threading
from dataclasses import dataclass, field
from queue import Queue
from typing import TYPE_CHECKING

from gpubench.backends.mpi.backends import NumpyMemory
from gpubench.errors import CouldNotMeasureError
from gpubench.model.terms.operation import Direction
from gpubench.ports.backend import Memory
from gpubench.ports.copies import LinkBytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

IPC_GB_S, NETWORK_GB_S = 400.0, 45.0
LATENCY_SECONDS = 2e-8
SECONDS_TO_ARRIVE = 10

Pair = tuple[int, int]


@dataclass
class Fabric:
    """What all ranks of a test share: memory by handle, messages, and faults by ordered pair."""

    closed_to: set[Pair] = field(default_factory=set)
    unshared: set[int] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    wrong: set[Pair] = field(default_factory=set)
    stale: set[Pair] = field(default_factory=set)
    uncounted: set[Pair] = field(default_factory=set)
    slow: dict[Pair, float] = field(default_factory=dict)
    noise: dict[Pair, list[float]] = field(default_factory=dict)
    stuck: dict[Pair, threading.Event] = field(default_factory=dict)
    meeting: threading.Barrier | None = None
    memories: dict[bytes, tuple[int, NumpyMemory]] = field(default_factory=dict)
    messages: dict[Pair, "Queue[Bytes]"] = field(default_factory=dict)
    sent_bytes: dict[int, int] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    copied: list[tuple[int, Pair, int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def queue(self, pair: Pair) -> "Queue[Bytes]":
        with self.lock:
            return self.messages.setdefault(pair, Queue())

    def seconds(self, pair: Pair, size_bytes: int, repeats: int, gb_s: float) -> float:
        share = self.slow.get(pair, 1.0)
        noise = self.noise.get(pair)
        if noise:
            share *= noise[0]
            noise.append(noise.pop(0))
        return repeats * (LATENCY_SECONDS + size_bytes / (gb_s * share * 1e9))


class FakeRankCopies:
    """`ports.RankCopies`, and `ports.LinkCounters` of one GPU."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank

    def allocate(self, size_bytes: int) -> Memory:
        if self._rank in self._fabric.full:
            raise CouldNotMeasureError("out of memory")
        return NumpyMemory(size_bytes)

    def export(self, memory: Memory) -> bytes:
        assert isinstance(memory, NumpyMemory)
        if self._rank in self._fabric.unshared:
            raise CouldNotMeasureError("cudaErrorNotSupported", reason="WSL")
        handle = f"{self._rank}:{id(memory)}".encode()
        with self._fabric.lock:
            self._fabric.memories[handle] = (self._rank, memory)
        return handle

    def copy(self, own: Memory, other: bytes, direction: Direction, size_bytes: int, repeats: int) -> float:
        fabric = self._fabric
        owner, memory = fabric.memories[other]
        pair = (self._rank, owner) if direction is Direction.WRITE else (owner, self._rank)
        if (self._rank, owner) in fabric.closed_to:
            raise CouldNotMeasureError("cudaErrorInvalidResourceHandle", reason="different containers")
        if fabric.meeting is not None:
            fabric.meeting.wait(SECONDS_TO_ARRIVE)
        if pair in fabric.stuck:
            assert fabric.stuck[pair].wait(SECONDS_TO_ARRIVE)
        source, destination = (own, memory) if direction is Direction.WRITE else (memory, own)
        if pair not in fabric.stale:
            destination.array(0, size_bytes, "uint8")[:] = source.array(0, size_bytes, "uint8")
        if pair in fabric.wrong:
            destination.array(size_bytes - 1, 1, "uint8")[:] ^= 1
        with fabric.lock:
            fabric.copied.append((self._rank, pair, size_bytes, repeats))
            if pair not in fabric.uncounted:
                fabric.sent_bytes[pair[0]] = fabric.sent_bytes.get(pair[0], 0) + size_bytes * repeats
        return fabric.seconds(pair, size_bytes, repeats, IPC_GB_S)

    def exchange(self, own: Memory, peer: int, size_bytes: int, repeats: int, *, sends: bool) -> float:
        pair = (self._rank, peer) if sends else (peer, self._rank)
        data = own.array(0, size_bytes, "uint8")
        if sends:
            self._fabric.queue(pair).put(data.copy())
        else:
            data[:] = self._fabric.queue(pair).get(timeout=SECONDS_TO_ARRIVE)
            data[-1:] ^= pair in self._fabric.wrong
        # The receiver notices later that all data have arrived.
        return self._fabric.seconds(pair, size_bytes, repeats, NETWORK_GB_S) * (0.9 if sends else 1.0)

    def release(self) -> None:
        self._note("release")

    def close(self) -> None:
        self._note("close")

    def read(self, gpu: int) -> LinkBytes:
        assert gpu == 0
        with self._fabric.lock:
            return LinkBytes(nvlink_sent=self._fabric.sent_bytes.get(self._rank, 0))

    def _note(self, what: str) -> None:
        with self._fabric.lock:
            self._fabric.events.append((what, self._rank))
