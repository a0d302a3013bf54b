"""Copies between two processes with CuPy on NumPy: data, directions, and errors."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpubench.backends.copies import CudaRankCopies, Network
from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.errors import CouldNotMeasureError
from gpubench.machine.nvml import Driver
from gpubench.model.terms.operation import POISON, Block, DataPattern, DataType, Direction
from gpubench.ports.backend import Memory
from tests.fakes import cupy_on_numpy
from tests.fakes.cupy_on_numpy import LIBRARY, SEND_US, Cuda, Nccl, Runtime

if TYPE_CHECKING:
    from gpubench.ports.group import Group

SIZE = 1000
WORDS = DataPattern(DataType.INT64, None, 2)
BLOCK = Block(row=3, buffers=1, stride=SIZE // 8, offset=0, count=SIZE // 8)


class Ranks:
    """Two ranks with a GPU each, which take turns on one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, network: bool = False, gate: bool = True) -> None:
        self.runtime = Runtime(2)
        self.gate = Cuda(self.runtime, status=0 if gate else 801)
        self.offered = b""
        cupy_on_numpy.install(monkeypatch, self.runtime, Nccl(2), cuda=self.gate)
        self.copies = [CudaRankCopies(self.device(rank), self.network(rank) if network else None) for rank in range(2)]

    def device(self, rank: int) -> Any:
        return open_device(rank, 2, "here", Driver(version="580"))

    def network(self, rank: int) -> Network:
        group = SimpleNamespace(rank=rank, size=2, broadcast=self._broadcast)
        return Network(cast("Group", group), NcclLibrary())

    def _broadcast(self, offered: bytes | None) -> bytes:
        self.offered = offered or self.offered
        return self.offered

    def buffers(self) -> tuple[Memory, Memory]:
        """Return filled memory of rank 0, and empty memory of rank 1."""
        sent, arrived = self.copies[0].allocate(SIZE), self.copies[1].allocate(SIZE)
        sent.fill_sent(WORDS, BLOCK, 0)
        arrived.fill_byte(SIZE, POISON)
        return sent, arrived


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_handle_is_opened_once_and_closed_at_the_end(ranks: Ranks) -> None:
    sent, arrived = ranks.buffers()
    handle = ranks.copies[1].export(arrived)
    for _ in range(3):
        ranks.copies[0].copy(sent, handle, Direction.WRITE, SIZE, 1)
    assert len(ranks.runtime.opened) == 1
    ranks.copies[0].release()
    assert not ranks.runtime.opened
    for each in ranks.copies:
        each.close()
    assert not ranks.runtime.allocations
    assert not ranks.runtime.pinned


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ("cudaErrorInvalidResourceHandle: invalid resource handle", "different containers or PID namespaces"),
        ("cudaErrorMapBufferObjectFailed: mapping of buffer object failed", "different containers or PID namespaces"),
        ("cudaErrorPeerAccessUnsupported: peer access is not supported", "no peer access, which CUDA IPC"),
    ],
)
@pytest.mark.parametrize("function", ["ipcOpenMemHandle", "ipcGetMemHandle"])
def test_refused_sharing_says_what_cuda_said_and_what_it_means(
    ranks: Ranks, function: str, answer: str, meaning: str
) -> None:
    sent, arrived = ranks.buffers()
    ranks.runtime.fail[function] = answer
    with pytest.raises(CouldNotMeasureError) as raised:
        ranks.copies[0].copy(sent, ranks.copies[1].export(arrived), Direction.WRITE, SIZE, 1)
    assert "through CUDA IPC failed" in raised.value.seen
    assert answer in raised.value.seen
    assert meaning in raised.value.reason


def test_a_copy_that_fails_is_named(ranks: Ranks) -> None:
    sent, arrived = ranks.buffers()
    handle = ranks.copies[1].export(arrived)
    ranks.runtime.fail["memcpyAsync"] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(
        CouldNotMeasureError, match=r"copying 1000 bytes through CUDA IPC \(write by GPU 0000:0a:00.0\)"
    ):
        ranks.copies[0].copy(sent, handle, Direction.WRITE, SIZE, 1)


def test_memory_that_is_not_there_is_named(ranks: Ranks) -> None:
    ranks.runtime.fail["malloc"] = "cudaErrorMemoryAllocation: out of memory"
    with pytest.raises(CouldNotMeasureError, match=r"allocating 1G on GPU 0000:0b:00.0 failed"):
        ranks.copies[1].allocate(2**30)


def test_between_nodes_nccl_sends_what_the_peer_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, network=True)
    sent, arrived = ranks.buffers()
    assert ranks.copies[0].exchange(sent, 1, SIZE, 2, sends=True) == pytest.approx(2 * SEND_US * 1e-6)
    assert ranks.copies[1].exchange(arrived, 0, SIZE, 2, sends=False) == pytest.approx(2 * SEND_US * 1e-6)
    assert not ranks.gate.waits
    assert arrived.count_wrong(WORDS, [(BLOCK, 0)]) == 0
    assert ranks.copies[0].libraries()["NCCL"] == f"2.28.9 from {LIBRARY}"
    for each in ranks.copies:
        each.close()


def test_on_one_node_there_is_no_nccl(ranks: Ranks) -> None:
    sent, _ = ranks.buffers()
    assert "NCCL" not in ranks.copies[0].libraries()
    with pytest.raises(CouldNotMeasureError, match="all ranks are on one node"):
        ranks.copies[0].exchange(sent, 1, SIZE, 1, sends=True)


def test_what_fails_at_the_end_is_passed_over(ranks: Ranks) -> None:
    sent, arrived = ranks.buffers()
    ranks.copies[0].copy(sent, ranks.copies[1].export(arrived), Direction.WRITE, SIZE, 1)
    for function in ("ipcCloseMemHandle", "free"):
        ranks.runtime.fail[function] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    ranks.copies[0].release()
    ranks.copies[0].close()
    assert ranks.runtime.allocations
