"""Managed memory on real GPUs: verified data, the place of pages, and the limit of allocations."""

from collections.abc import Iterator

import pytest

from gpubench.backends.copies import CudaCopies, open_copies
from gpubench.backends.managed import CudaManaged, open_managed
from gpubench.errors import CouldNotMeasureError
from gpubench.machine.nvml import NvmlCounters
from gpubench.measure.p2p.copies import CopyBench
from gpubench.measure.p2p.request import ManagedCopy, Method, P2pRequest
from gpubench.model.paths.p2p import MOVED_SHARE
from gpubench.model.terms.operation import Block, DataPattern, DataType, ManagedWay
from gpubench.ports.copies import HOST
from tests.gpu.machine import DRIVER, has_gpu

SIZE = 8 * 2**20
WORDS = DataPattern(DataType.INT64, None, 4)
BLOCK = Block(row=7, buffers=1, stride=SIZE // 8, offset=0, count=SIZE // 8)

pytestmark = [pytest.mark.gpu, has_gpu]


@pytest.fixture
def copies() -> Iterator[CudaCopies]:
    opened = open_copies(DRIVER)
    yield opened
    opened.close()


@pytest.fixture
def managed(copies: CudaCopies) -> CudaManaged:
    opened = open_managed(copies)
    if any(each.missing_feature for each in opened.support()):
        pytest.skip("no concurrent managed access here")
    return opened


def request(managed: CudaManaged, gpus: int) -> P2pRequest:
    return P2pRequest(
        pairs=tuple((a, b) for a in range(gpus) for b in range(gpus) if a != b),
        series=(),
        host_bytes=SIZE,
        pattern_bytes=SIZE,
        method=Method(samples=3),
        check=True,
        managed_bytes=SIZE,
        managed=tuple(managed.support()),
    )


def test_every_way_moves_the_right_data(copies: CudaCopies, managed: CudaManaged) -> None:
    asked = request(managed, len(copies.gpus))
    counters = NvmlCounters([gpu.bus_id for gpu in copies.gpus])
    bench = CopyBench(asked, copies, counters, managed=managed)
    bench.enable_peer_access()
    ways = list(asked.managed_copies(len(copies.gpus)))
    cells = dict(zip(ways, bench.measure(ways), strict=True))
    assert {str(way): cell.error for way, cell in cells.items() if cell.error} == {}
    assert {str(way): cell.wrong for way, cell in cells.items() if cell.wrong != 0} == {}
    for gpu in range(len(copies.gpus)):
        resident, faults = (
            cells[ManagedCopy(way, None, gpu)].typical_seconds for way in (ManagedWay.RESIDENT, ManagedWay.FAULTS)
        )
        assert resident < faults, "a prefetch that brought nothing"
    shares = [cell.carried.nvlink_share for way, cell in cells.items() if way.way is ManagedWay.PREFETCH]
    assert all(share is None or share > MOVED_SHARE for share in shares)
    counters.close()


def test_a_check_finds_what_is_wrong_at_either_end(copies: CudaCopies, managed: CudaManaged) -> None:
    pages = managed.allocate(SIZE)
    managed.prefetch(pages, 0, 0)
    on_gpu = managed.on(pages, 0)
    on_gpu.fill_sent(WORDS, BLOCK, 1)
    assert on_gpu.count_wrong(WORDS, [(BLOCK, 1)]) == 0
    managed.prefetch(pages, HOST, 0)
    assert pages.count_wrong(WORDS, [(BLOCK, 1)]) == 0
    pages.array(SIZE // 2, 1, "uint8")[:] ^= 1
    assert pages.count_wrong(WORDS, [(BLOCK, 1)]) == 1
    managed.prefetch(pages, 0, 0)
    assert on_gpu.count_wrong(WORDS, [(BLOCK, 1)]) == 1


def test_more_than_a_quarter_of_what_is_free_is_refused(copies: CudaCopies, managed: CudaManaged) -> None:
    free = min(copies.free_bytes().values())
    with pytest.raises(CouldNotMeasureError, match=r"more than .* GiB, 25% of what is free"):
        managed.allocate(free // 4 + 2**21)
