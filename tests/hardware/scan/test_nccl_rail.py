"""A GPU as a rail, on stand-ins for GPU and NCCL: two ends in two threads, and one whose other end fails."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.hardware.node.nvml.library import Driver
from gpubench.hardware.scan import nccl_rail
from gpubench.hardware.scan.host_exchange import WrongDataError
from gpubench.hardware.scan.nccl_rail import EXCHANGED_BYTES, NcclRail
from gpubench.model.terms.data_pattern import Block, DataPattern

ID = bytes(128)


@dataclass
class Memory:
    """GPU memory of which is known what was written last."""

    address: int
    holds: object = None

    def fill_sent(self, _data: DataPattern, block: Block, rank: int) -> None:
        self.holds = block.row, rank

    def fill_byte(self, _size_bytes: int, value: int) -> None:
        self.holds = value

    def count_wrong(self, _data: DataPattern, blocks: list[tuple[Block, int]]) -> int:
        ((block, rank),) = blocks
        return 0 if self.holds == (block.row, rank) else block.count


@dataclass
class Wire:
    """What the two ranks of a communicator send each other."""

    ways: tuple["Queue[object]", "Queue[object]"] = field(default_factory=lambda: (Queue(), Queue()))
    damages: bool = False


class Communicator:
    """Carries what memories hold; its stream is idle once both have arrived."""

    aborted: list[int]

    def __init__(self, wire: Wire, memories: dict[int, Memory], rank: int) -> None:
        self._wire, self._memories, self._rank = wire, memories, rank
        self.ended = ""

    def exchange(self, send: int, receive: int, size_bytes: int, _stream: int, deadline: float) -> None:
        assert size_bytes == EXCHANGED_BYTES
        self._wire.ways[self._rank].put(self._memories[send].holds)
        try:
            arrived = self._wire.ways[1 - self._rank].get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        self._memories[receive].holds = "damaged" if self._wire.damages else arrived

    def check(self) -> None:
        """Nothing is wrong."""

    def close(self, _deadline: float) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


@dataclass
class End:
    """One end: its rail, and the communicators that it made."""

    rail: NcclRail
    made: list[Communicator]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Wire, End, End]:
    wire, found = Wire(), []
    local = threading.local()
    for _ in range(2):
        memories = {1: Memory(1), 2: Memory(2)}
        free = iter(memories.values())
        device: Any = SimpleNamespace(
            allocate=lambda _size, free=free: next(free),
            stream=SimpleNamespace(ptr=0, done=True, synchronize=lambda: None),
            memories=memories,
        )
        rail = NcclRail(0, Driver())
        found.append((End(rail, []), device))
    devices = {id(end.rail): (end, device) for end, device in found}

    def open_rail(rail: NcclRail) -> Callable[[], object]:
        end, device = devices[id(rail)]

        def opened() -> object:
            local.end, local.device = end, device
            return device, SimpleNamespace()

        return opened

    for end, device in found:
        end.rail._buffers = device.allocate(0), device.allocate(0)
        monkeypatch.setattr(end.rail, "_open", open_rail(end.rail))

    def make(_library: object, unique_id: bytes, rank: int, _deadline: float) -> Communicator:
        assert unique_id == ID
        made = Communicator(wire, local.device.memories, rank)
        local.end.made.append(made)
        return made

    monkeypatch.setattr(nccl_rail, "new_unique_id", lambda _library: ID)
    monkeypatch.setattr(nccl_rail, "PairCommunicator", make)
    monkeypatch.setattr(nccl_rail, "_SECONDS_OF_COPYING", 0.0)
    return wire, found[0][0], found[1][0]


def both(one: End, other: End, seconds: float = 20.0) -> list[float | Exception]:
    """What each end found, or raised."""
    sockets, found = socket.socketpair(), dict[int, float | Exception]()

    def run(place: int, end: End) -> None:
        with sockets[place] as connection:
            try:
                found[place] = end.rail.exchange(connection, time.monotonic() + seconds, leads=place == 0)
            except Exception as error:  # noqa: BLE001 - what it was is what the test looks at
                found[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((one, other))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [found[place] for place in range(2)]


def test_both_ends_have_a_figure_and_close(ends: tuple[Wire, End, End]) -> None:
    _, one, other = ends
    for number in (1, 2):
        assert all(isinstance(each, float) and each > 0 for each in both(one, other))
        assert [each.ended for end in (one, other) for each in end.made] == ["closed"] * 2 * number


def test_data_that_arrive_damaged_are_no_figure(ends: tuple[Wire, End, End]) -> None:
    wire, one, other = ends
    wire.damages = True
    found = both(one, other)
    assert [type(each) for each in found] == [WrongDataError, WrongDataError]
    assert str(found[0]) == f"{EXCHANGED_BYTES // 8} wrong elements"
    assert [each.ended for end in (one, other) for each in end.made] == ["aborted"] * 2


def test_a_partner_that_leaves_or_says_nothing_is_given_up(ends: tuple[Wire, End, End]) -> None:
    _, one, _ = ends
    for leaves in (True, False):
        mine, its = socket.socketpair()
        if leaves:
            its.close()
        with pytest.raises(OSError) as caught, mine:  # noqa: PT011 - TimeoutError is one
            one.rail.exchange(mine, time.monotonic() + 0.2, leads=True)
        assert leaves != isinstance(caught.value, TimeoutError)
        its.close()
    assert {each.ended for each in one.made} <= {"aborted"}
