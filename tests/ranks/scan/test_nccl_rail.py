"""A GPU as a rail with fake CUDA and NCCL: two ends in two threads, and failures of one end."""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.backends import scan_worker as worker
from gpubench.backends.scan_worker import PAIR, NcclRail, Ring, WrongDataError
from gpubench.errors import ClientRefusedError
from gpubench.machine.nvml import Driver
from gpubench.model.results.scan import EXCHANGED_BYTES
from gpubench.model.terms.operation import Block, DataPattern
from tests.ranks.scan.rings import everywhere

ID = bytes(128)


@dataclass
class Memory:
    """GPU memory that records the last write."""

    address: int
    holds: object = None

    def fill_sent(self, _data: DataPattern, block: Block, rank: int) -> None:
        self.holds = block.row, rank

    def fill_byte(self, _size_bytes: int, value: int) -> None:
        self.holds = value

    def count_wrong(self, _data: DataPattern, blocks: list[tuple[Block, int | None]]) -> int:
        ((block, rank),) = blocks
        return 0 if self.holds == (block.row, rank) else block.count


@dataclass
class Wire:
    """Messages between the ranks of a communicator."""

    ways: "defaultdict[tuple[int, int], Queue[object]]" = field(default_factory=lambda: defaultdict(Queue))
    damages: bool = False


class Communicator:
    """Transfers the contents of memories. Its stream is idle when both have arrived."""

    aborted: list[int]

    def __init__(self, wire: Wire, memories: dict[int, Memory], rank: int) -> None:
        self._wire, self._memories, self._rank = wire, memories, rank
        self.ended = ""

    def exchange(
        self, addresses: tuple[int, int], peers: tuple[int, int], size_bytes: int, _stream: int, deadline: float
    ) -> None:
        assert size_bytes == EXCHANGED_BYTES
        (send, receive), (to, source) = addresses, peers
        self._wire.ways[self._rank, to].put(self._memories[send].holds)
        try:
            arrived = self._wire.ways[source, self._rank].get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        self._memories[receive].holds = "damaged" if self._wire.damages else arrived

    def all_reduce(self, addresses: tuple[int, int], count: int, _stream: int, _deadline: float) -> None:
        assert count * 8 == EXCHANGED_BYTES
        sent = self._memories[addresses[0]].holds
        assert isinstance(sent, tuple)
        self._memories[addresses[1]].holds = "damaged" if self._wire.damages else (sent[0], None)

    def check(self) -> None: ...

    def close(self, _deadline: float) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Runtime:
    """CUDA in a process that MPS may have broken."""

    CUDARuntimeError = RuntimeError
    broken = False

    def deviceSynchronize(self) -> None:  # noqa: N802 - CUDA's name
        if self.broken:
            raise RuntimeError("cudaErrorIllegalAddress")


@dataclass
class End:
    """A rail and the communicators that it made."""

    rail: NcclRail
    made: list[Communicator]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Wire, End, End, End]:
    wire, found = Wire(), []
    local = threading.local()
    for _ in range(3):
        memories = {1: Memory(1), 2: Memory(2)}
        free = iter(memories.values())
        device: Any = SimpleNamespace(
            allocate=lambda _size, free=free: next(free),
            stream=SimpleNamespace(ptr=0, done=True, synchronize=lambda: None),
            memories=memories,
            identity=SimpleNamespace(mps=False),
            cupy=SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime())),
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

    def make(_library: object, unique_id: bytes, rank: int, ranks: int, _deadline: float) -> Communicator:
        assert unique_id == ID
        assert rank < ranks
        made = Communicator(wire, local.device.memories, rank)
        local.end.made.append(made)
        return made

    monkeypatch.setattr(worker, "new_unique_id", lambda _library: ID)
    monkeypatch.setattr(worker, "BoundedCommunicator", make)
    monkeypatch.setattr(worker, "_MOST_REPEATS", 2)
    return wire, found[0][0], found[1][0], found[2][0]


def all_of(*ends: End, seconds: float = 20.0, reduces: bool = False) -> list[float | Exception]:
    """Return the result or exception of each end of a ring."""

    def run(own: Ring) -> float | Exception:
        rail = ends[own.place].rail
        try:
            return (rail.all_reduce if reduces else rail.exchange)(own, time.monotonic() + seconds)
        except Exception as error:  # noqa: BLE001 - what it was is what the test looks at
            return error

    return everywhere(len(ends), run)


def test_both_ends_have_a_figure_and_close(ends: tuple[Wire, End, End, End]) -> None:
    _, *own = ends
    for number in (1, 2):
        assert all(isinstance(each, float) and each > 0 for each in all_of(*own[:2]))
        assert [each.ended for end in own for each in end.made] == ["closed"] * 2 * number


def test_three_are_a_ring_that_sends_one_way(ends: tuple[Wire, End, End, End]) -> None:
    wire, *own = ends
    assert all(isinstance(each, float) and each > 0 for each in all_of(*own))
    assert set(wire.ways) == {(0, 1), (1, 2), (2, 0)}
    assert [each.ended for end in own for each in end.made] == ["closed"] * 3


def test_an_all_reduce_is_of_all_ends_and_its_sums_are_looked_at(ends: tuple[Wire, End, End, End]) -> None:
    wire, *own = ends
    assert all(isinstance(each, float) and each > 0 for each in all_of(*own, reduces=True))
    assert wire.ways == {}
    wire.damages = True
    assert [type(each) for each in all_of(*own, reduces=True)] == [WrongDataError] * 3
    assert [each.ended for end in own for each in end.made] == ["closed", "aborted"] * 3


def test_data_that_arrive_damaged_are_no_figure(ends: tuple[Wire, End, End, End]) -> None:
    wire, one, other, _ = ends
    wire.damages = True
    found = all_of(one, other)
    assert [type(each) for each in found] == [WrongDataError, WrongDataError]
    assert str(found[0]) == f"{EXCHANGED_BYTES // 8:,} wrong elements"
    assert [each.ended for end in (one, other) for each in end.made] == ["aborted"] * 2


def test_a_partner_that_leaves_or_says_nothing_is_given_up(ends: tuple[Wire, End, End, End]) -> None:
    _, one, _, _ = ends
    for leaves in (True, False):
        mine, its = socket.socketpair()
        if leaves:
            its.close()
        mine.settimeout(0.2)
        with pytest.raises(OSError) as caught, mine:  # noqa: PT011 - TimeoutError is one
            one.rail.exchange(Ring(0, PAIR, mine, mine), time.monotonic() + 0.2)
        assert leaves != isinstance(caught.value, TimeoutError)
        its.close()
    assert {each.ended for each in one.made} <= {"aborted"}


@pytest.mark.parametrize("mps", [True, False])
def test_under_mps_what_breaks_may_be_another_clients_death(ends: tuple[Wire, End, End, End], *, mps: bool) -> None:
    _, one, other, _ = ends
    device: Any = one.rail._open()[0]
    device.identity.mps = mps
    one.rail.open()
    device.cupy.cuda.runtime.broken = True
    with pytest.raises(ClientRefusedError, match="cudaErrorIllegalAddress") if mps else nullcontext():
        one.rail.open()

    def fails() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    device.stream.synchronize = fails
    found = all_of(one, other, seconds=0.5)
    assert type(found[0]) is (ConnectionError if mps else RuntimeError)
    assert [each.ended for each in one.made] == ["aborted"]
