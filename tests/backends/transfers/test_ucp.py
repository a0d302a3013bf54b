"""The structures of UCX's C API, and what a worker of a transfer does, without UCX and without a GPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubench.backends import kv_worker, ucp
from gpubench.backends.kv_worker import Worker
from gpubench.backends.ucp import TransferBlock
from gpubench.model.paths.ucx import Allocation
from gpubench.model.terms.operation import Direction
from gpubench.ports.transfers import TransferCase
from tests.fakes.transfer_worker import host_cupy

LAYOUTS: dict[str, dict[str, int]] = {
    "_ContextParameters": {"field_mask": 0, "features": 8},
    "_EndpointParameters": {"address": 8, "error_mode": 16, "on_error": 24, "on_error_argument": 32},
    "_MemoryParameters": {"address": 8, "length": 16},
    "_RequestParameters": {"op_attr_mask": 0, "memory_type": 48, "memory": 64},
}
"""Offsets that a C compiler printed for ucp.h of UCX 1.22.0 on x86-64."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_structures_have_the_layout_of_ucx(name: str) -> None:
    structure, offsets = getattr(ucp, name), LAYOUTS[name]
    assert {field: getattr(structure, field).offset for field in offsets} == offsets


class Memmove:
    """A library that moves data between two workers of this process. It loses the blocks in `lost`."""

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost
        self.sizes: list[int] = []

    def register(self, _name: str, _address: int, _size_bytes: int) -> None: ...

    def address(self) -> bytes:
        return b"address"

    def connect(self, peer: bytes) -> None:
        assert peer == b"address"

    def prepare(self, _own: str, _peers: str, blocks: list[TransferBlock], *, writes: bool) -> Callable[[], float]:
        self.sizes.append(sum(block.size_bytes for block in blocks))

        def move() -> float:
            for number, block in enumerate(blocks):
                if number not in self.lost:
                    ends = (block.remote, block.local) if writes else (block.local, block.remote)
                    ctypes.memmove(*ends, block.size_bytes)
            return 0.2

        return move

    def progress(self) -> int:
        return 0


def workers(monkeypatch: pytest.MonkeyPatch, library: Memmove, size_bytes: int) -> tuple[Worker, Worker]:
    monkeypatch.setattr(kv_worker, "load_cupy", host_cupy)
    monkeypatch.setattr(kv_worker, "read_driver", lambda _: None)
    monkeypatch.setattr(kv_worker, "UcxProcess", lambda *_: library)
    one, other = Worker(), Worker()
    opened = [
        worker.open(Path("libucp.so.0"), 0, Allocation.MALLOC, size_bytes, seed)
        for seed, worker in enumerate((one, other), 1)
    ]
    for worker, (peer, end) in ((one, opened[1]), (other, opened[0])):
        worker.connect(*peer)
        assert end.exportable is False
    return one, other


def write(size_bytes: int, blocks: int = 1) -> TransferCase:
    return TransferCase(Direction.WRITE, size_bytes, blocks)


@pytest.mark.parametrize("direction", [Direction.WRITE, Direction.READ])
@pytest.mark.parametrize(("size", "blocks"), [(4096, 1), (4096, 4), (1024, 1), (8, 1)])
def test_every_word_of_a_transfer_is_verified(
    direction: Direction, size: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, case = Memmove(), TransferCase(direction, size, blocks)
    one, other = workers(monkeypatch, library, 4096)
    other.clear(case)
    assert other.count_wrong(case, 1) == size // 8
    moved = (one if direction is Direction.WRITE else other).transfer(case, 0.1)
    assert (other.count_wrong(case, 1), other.count_wrong(case, 2)) == (0, size // 8)
    assert library.sizes == [size]
    assert moved.transfers >= len(moved.seconds) >= 1


@pytest.mark.parametrize("lost", [(0,), (3,), (1, 2)])
def test_a_lost_block_is_counted(lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = workers(monkeypatch, Memmove(lost), 4096)
    other.clear(write(4096))
    one.transfer(write(4096, 4), 0.1)
    assert other.count_wrong(write(4096), 1) == len(lost) * 1024 // 8


def test_both_processes_send_different_data(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = workers(monkeypatch, Memmove(), 4096)
    case = write(4096)
    one.transfer(case, 0.1)
    other.transfer(case, 0.1)
    assert (other.count_wrong(case, 1), one.count_wrong(case, 2)) == (0, 0)
    assert other.count_wrong(case, 2) > 500
