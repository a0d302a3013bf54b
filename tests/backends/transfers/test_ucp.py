"""The structures of UCX's C API, and what a worker of a transfer does, without UCX and without a GPU."""

import ctypes
from typing import Any

import pytest

from gpubench.backends import kv_worker, ucp
from gpubench.backends.kv_worker import IN, OUT, Worker
from gpubench.backends.ucp import TransferBlock
from tests.fakes.transfer_worker import host_cupy

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "_ContextParameters": (88, {"features": 8, "tag_sender_mask": 40, "name": 72, "node_local_id": 80}),
    "_WorkerParameters": (200, {"thread_mode": 8, "cpu_mask": 16, "flags": 168, "client_id": 192}),
    "_EndpointParameters": (104, {"error_mode": 16, "on_error": 24, "flags": 48, "local_socket_address": 88}),
    "_MemoryParameters": (48, {"address": 8, "length": 16, "memory_type": 32, "exported": 40}),
    "_RequestParameters": (96, {"op_attr_mask": 0, "memory_type": 48, "memory": 64, "remote_count": 88}),
}
"""Sizes and offsets that a C compiler printed for ucp.h of UCX 1.22.0 on x86-64."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_structures_have_the_layout_of_ucx(name: str) -> None:
    structure, (size, offsets) = getattr(ucp, name), LAYOUTS[name]
    assert ctypes.sizeof(structure) == size
    assert {field: getattr(structure, field).offset for field in offsets} == offsets


class Memmove:
    """A library that moves data between two workers of this process. It loses the blocks in `lost`."""

    version = "memmove"

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost
        self.sizes: list[int] = []

    def register(self, name: str, _address: int, _size_bytes: int) -> bytes:
        return name.encode()

    def address(self) -> bytes:
        return b"address"

    def connect(self, address: bytes, keys: dict[str, bytes]) -> None:
        assert (address, keys[IN]) == (b"address", IN.encode())

    def prepare(self, _own: str, _peers: str, blocks: list[TransferBlock], *, writes: bool) -> Any:
        self.sizes.append(sum(block.size_bytes for block in blocks))
        return [(block.remote, block.local) if writes else (block.local, block.remote) for block in blocks], blocks

    def transfer(self, prepared: Any) -> float:
        for number, ((to, origin), block) in enumerate(zip(*prepared, strict=True)):
            if number not in self.lost:
                ctypes.memmove(to, origin, block.size_bytes)
        return 0.2

    def progress(self) -> int:
        return 0


def workers(monkeypatch: pytest.MonkeyPatch, library: Memmove, size_bytes: int) -> tuple[Worker, Worker]:
    monkeypatch.setattr(kv_worker, "load_cupy", host_cupy)
    monkeypatch.setattr(kv_worker, "read_driver", lambda _: None)
    monkeypatch.setattr(kv_worker, "UcxProcess", lambda *_: library)
    one, other = Worker(), Worker()
    facts = [worker.open("ucx", "", 0, "malloc", size_bytes, seed) for seed, worker in enumerate((one, other), 1)]
    for worker, peer in ((one, facts[1]), (other, facts[0])):
        worker.connect(peer["address"], peer["keys"], peer["buffers"])
    assert [fact["exportable"] for fact in facts] == [False, False]
    return one, other


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(("size", "blocks"), [(4096, 1), (4096, 4), (1024, 1), (8, 1)])
def test_every_word_of_a_transfer_is_verified(
    writes: bool, size: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Memmove()
    one, other = workers(monkeypatch, library, 4096)
    other.clear(IN, size)
    assert other.count_wrong(IN, 1, size) == size // 8
    if writes:
        found = one.transfer(IN, size, blocks, 0.1, writes=True)
    else:
        found = other.transfer(IN, size, blocks, 0.1, writes=False)
    assert (other.count_wrong(IN, 1, size), other.count_wrong(IN, 2, size)) == (0, size // 8)
    assert library.sizes == [size]
    assert found["transfers"] >= len(found["seconds"]) >= 1


@pytest.mark.parametrize("lost", [(0,), (3,), (1, 2)])
def test_a_lost_block_is_counted(lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = workers(monkeypatch, Memmove(lost), 4096)
    other.clear(IN, 4096)
    one.transfer(IN, 4096, 4, 0.1, writes=True)
    assert other.count_wrong(IN, 1, 4096) == len(lost) * 1024 // 8


def test_both_processes_send_different_data(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = workers(monkeypatch, Memmove(), 4096)
    one.transfer(IN, 4096, 1, 0.1, writes=True)
    other.transfer(IN, 4096, 1, 0.1, writes=True)
    assert (other.count_wrong(IN, 1, 4096), one.count_wrong(IN, 2, 4096)) == (0, 0)
    assert one.count_wrong(OUT, 1, 4096) == 0
    assert other.count_wrong(IN, 2, 4096) > 500
