"""Managed memory with CuPy on NumPy: driver calls, and the limit of allocations."""

import pytest

from gpubench.backends import managed as adapter
from gpubench.backends.copies import open_copies
from gpubench.backends.managed import CudaManaged
from gpubench.errors import CouldNotMeasureError
from gpubench.machine import host as host_memory
from gpubench.machine.nvml import Driver
from gpubench.measure.p2p.copies import CopyBench
from gpubench.measure.p2p.request import Method, P2pRequest
from gpubench.model.terms.operation import Block, DataPattern, DataType, Engine, ManagedSupport
from gpubench.ports.backend import Region
from gpubench.ports.copies import HOST, CopyStream
from gpubench.simulated.links import NoCounters
from tests.fakes import cupy_on_numpy
from tests.fakes.cupy_on_numpy import Cuda, ManagedDriver, Runtime

SIZE = 47_000
WORDS = DataPattern(DataType.INT64, None, 4)
BLOCK = Block(row=3, buffers=1, stride=SIZE // 8, offset=0, count=SIZE // 8)
H200 = {83: 1, 88: 0, 89: 1, 100: 0}


class Machine:
    """Two fake GPUs with 8 GiB free each, and their driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int] | None = None, status: int = 0):
        self.runtime = Runtime(2)
        cupy_on_numpy.install(monkeypatch, self.runtime, cuda=Cuda(self.runtime))
        self.copies = open_copies(Driver(version="580"))
        self.driver = ManagedDriver(H200 if attributes is None else attributes, status)
        self.managed = CudaManaged(self.copies, self.driver)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 16 * 2**30)
    return Machine(monkeypatch)


def test_what_the_driver_says_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ManagedSupport(device="GPU1", managed=True, concurrent=True, pageable=False, host_page_tables=False)
    assert Machine(monkeypatch).managed.support()[1] == expected
    (first, _) = Machine(monkeypatch, {83: 1, 89: 0}).managed.support()
    assert first == ManagedSupport(device="GPU0", managed=True, concurrent=False)
    assert first.missing_feature == "GPU0 supports neither prefetch nor advice (concurrentManagedAccess 0)"


def test_advice_is_given_and_taken_back(machine: Machine) -> None:
    pages = machine.managed.allocate(SIZE)
    machine.managed.advise(pages, HOST, 1, stays=True)
    machine.managed.advise(pages, HOST, 1, stays=False)
    assert machine.driver.calls == [(3, SIZE, -1), (5, SIZE, 1), (4, SIZE, -1), (6, SIZE, 1)]


def test_gpus_and_the_host_fill_and_check_the_same_bytes(machine: Machine) -> None:
    pages = machine.managed.allocate(SIZE)
    on_gpu = machine.managed.on(pages, 1)
    assert machine.managed.on(pages, 1) is on_gpu
    assert machine.managed.on(pages, HOST) is pages
    on_gpu.fill_sent(WORDS, BLOCK, 2)
    assert pages.count_wrong(WORDS, [(BLOCK, 2)]) == 0
    pages.array(0, 1, "uint8")[:] ^= 1
    assert on_gpu.count_wrong(WORDS, [(BLOCK, 2)]) == 1


def test_a_kernel_reads_managed_memory(machine: Machine) -> None:
    pages, arrived = machine.managed.allocate(SIZE), machine.copies.allocate(0, SIZE)
    pages.fill_sent(WORDS, BLOCK, 1)
    assert machine.managed.seconds(CopyStream(0, Engine.SM, Region(pages, 0), Region(arrived, 0), SIZE)) > 0
    assert arrived.count_wrong(WORDS, [(BLOCK, 1)]) == 0


@pytest.mark.parametrize(
    ("host_gib", "most"), [(16, "2 GiB, 25% of the free memory of GPU0"), (4, "1 GiB, 25% .* host")]
)
def test_never_more_than_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, host_gib: int, most: str
) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: host_gib * 2**30)
    allocated = len(machine.runtime.allocations)
    with pytest.raises(CouldNotMeasureError, match=most) as raised:
        machine.managed.allocate(3 * 2**30)
    assert "smaller --sizes" in raised.value.next_step
    assert len(machine.runtime.allocations) == allocated, "refused before anything was taken"


def test_a_refusal_of_the_driver_names_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, status=101)
    pages = machine.managed.allocate(SIZE)
    with pytest.raises(CouldNotMeasureError, match="managed memory to GPU1 failed: cuMemPrefetchAsync answered 101"):
        machine.managed.prefetch(pages, 1, 1)
    with pytest.raises(CouldNotMeasureError, match="managed memory of the host failed: cuMemAdvise answered 101"):
        machine.managed.advise(pages, HOST, 0, stays=True)


def test_every_way_of_a_run_moves_the_right_data(machine: Machine) -> None:
    asked = P2pRequest(
        pairs=((0, 1), (1, 0)),
        series=(),
        host_bytes=SIZE,
        pattern_bytes=SIZE,
        method=Method(samples=2),
        check=True,
        managed_bytes=SIZE,
        managed=tuple(machine.managed.support()),
    )
    bench = CopyBench(asked, machine.copies, NoCounters(), managed=machine.managed)
    assert bench.enable_peer_access() == {}
    ways = list(asked.managed_copies(2))
    cells = dict(zip(ways, bench.measure(ways), strict=True))
    assert {str(way): cell.error for way, cell in cells.items() if cell.error} == {}
    assert {str(way): cell.wrong for way, cell in cells.items() if cell.wrong != 0} == {}
    assert len(ways) == 2 * (5 + 3) + 2 * 3


def test_everything_is_given_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "load_cuda", lambda: machine.driver)
    before = len(machine.runtime.allocations)
    opened = adapter.open_managed(machine.copies)
    opened.on(opened.allocate(SIZE), 0)
    machine.copies.close()
    assert len(machine.runtime.allocations) <= before
