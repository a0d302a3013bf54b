"""Copies on real GPUs: verified data on all routes, counters that match the copied bytes, and detected faults."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import isfinite
from pathlib import Path
from time import perf_counter

import pytest

from gpubench.backends.copies import CudaCopies, open_copies
from gpubench.errors import CouldNotMeasureError
from gpubench.machine.nvml import NvmlCounters
from gpubench.measure.paths import Meter
from gpubench.model.paths.p2p import Carried
from gpubench.model.terms.operation import POISON, Block, DataPattern, DataType, Engine, HostMemory, Place
from gpubench.ports.backend import Memory, Region
from gpubench.ports.copies import CopyStream
from tests.cli.running import gpubench
from tests.gpu.machine import DRIVER, between_gpus, has_gpu

SIZE = 8 * 2**20 + 24
"""The last bytes are no multiple of the 16 bytes that an SM moves at once"""

WORDS = DataPattern(DataType.INT64, None, 4)
BLOCK = Block(row=5, buffers=1, stride=SIZE // 8, offset=0, count=SIZE // 8)
SLACK_BYTES = 64 * 1024
"""Counters count whole KiB per link, and also synchronisation between GPUs"""

pytestmark = [pytest.mark.gpu, has_gpu]
several = between_gpus("copies from one to the other")


@pytest.fixture
def copies() -> Iterator[CudaCopies]:
    opened = open_copies(DRIVER)
    yield opened
    opened.close()


@pytest.fixture
def pairs(copies: CudaCopies) -> list[tuple[int, int]]:
    found = [pair for pair in permutations(range(len(copies.gpus)), 2) if copies.can_reach(*pair)]
    if not found:
        pytest.skip("no GPU here reaches another")
    return found


@pytest.fixture
def ways(copies: CudaCopies) -> list[tuple[Place, Place]]:
    """Return all pairs of GPUs with peer access. With one GPU, return it and host memory in both directions."""
    pairs = permutations(range(len(copies.gpus)), 2)
    found: list[tuple[Place, Place]] = [pair for pair in pairs if copies.can_reach(*pair)]
    return found or [(0, HostMemory.PINNED), (HostMemory.PINNED, 0)]


def gpu_of(way: tuple[Place, Place]) -> int:
    """Return the first GPU of a pair."""
    return next(place for place in way if isinstance(place, int))


def buffers(copies: CudaCopies, size_bytes: int = SIZE) -> dict[Place, tuple[Memory, Memory]]:
    places: list[Place] = [*range(len(copies.gpus)), *HostMemory]
    return {place: (copies.allocate(place, size_bytes), copies.allocate(place, size_bytes)) for place in places}


def copied(copies: CudaCopies, ends: tuple[Memory, Memory], engine: Engine, by: int, rank: int) -> tuple[int, float]:
    """Return wrong elements and seconds of one copy of fresh data."""
    source, destination = ends
    source.fill_sent(WORDS, BLOCK, rank)
    destination.fill_byte(SIZE, POISON)
    assert destination.count_wrong(WORDS, [(BLOCK, rank)]) > SIZE // 8 - 100
    seconds = copies.seconds([CopyStream(by, engine, Region(source, 0), Region(destination, 0), SIZE)], 1)
    return destination.count_wrong(WORDS, [(BLOCK, rank)]), seconds


@several
def test_every_pair_engine_direction_and_way_moves_the_right_data(
    copies: CudaCopies, pairs: Sequence[tuple[int, int]]
) -> None:
    memory, rank = buffers(copies), 0
    for peer_access in (False, True):
        for pair in pairs if peer_access else ():
            copies.enable(*pair)
        for source, destination in pairs:
            for engine in Engine if peer_access else (Engine.CE,):
                for by in (source, destination):
                    rank += 1
                    ends = memory[source][0], memory[destination][1]
                    wrong, seconds = copied(copies, ends, engine, by, rank % 4)
                    assert wrong == 0, (source, destination, engine, by, peer_access)
                    assert isfinite(seconds)
                    assert 0 < seconds < 10


def test_copies_to_and_from_the_host_move_the_right_data(copies: CudaCopies) -> None:
    memory = buffers(copies)
    for gpu in range(len(copies.gpus)):
        for host in HostMemory:
            for engine in Engine if host is HostMemory.PINNED else (Engine.CE,):
                for source, destination in ((gpu, host), (host, gpu)):
                    wrong, _ = copied(copies, (memory[source][0], memory[destination][1]), engine, gpu, 2)
                    assert wrong == 0, (source, destination, engine)


def test_one_wrong_element_is_found(copies: CudaCopies) -> None:
    for source, destination in buffers(copies).values():
        wrong, _ = copied(copies, (source, destination), Engine.CE, 0, 3)
        assert wrong == 0
        destination.array(8 * 12345, 1, "uint64")[:] ^= 1
        assert destination.count_wrong(WORDS, [(BLOCK, 3)]) == 1


def test_sms_copy_from_and_to_any_byte(copies: CudaCopies) -> None:
    source, destination = copies.allocate(0, SIZE), copies.allocate(0, SIZE)
    source.fill_sent(WORDS, BLOCK, 0)
    for origin, to, size in ((0, 0, 1), (16, 32, 4097), (1, 1, 70_001), (3, 8, 65_536), (0, 16, 5_000_003)):
        destination.fill_byte(SIZE, POISON)
        copies.seconds([CopyStream(0, Engine.SM, Region(source, origin), Region(destination, to), size)], 1)
        given, taken = source.array(0, SIZE, "uint8").get(), destination.array(0, SIZE, "uint8").get()
        assert (taken[to : to + size] == given[origin : origin + size]).all()
        assert (taken[:to] == POISON).all()
        assert (taken[to + size :] == POISON).all()


@several
def test_links_count_what_goes_over_them_and_nothing_else(copies: CudaCopies, pairs: Sequence[tuple[int, int]]) -> None:
    counters = NvmlCounters([gpu.bus_id for gpu in copies.gpus])
    if counters.read(0).nvlink_sent is None or counters.read(0).pcie_sent is None:
        pytest.skip("no counters here")
    memory, (source, destination) = buffers(copies), pairs[0]
    ends = memory[source][0], memory[destination][1]

    def carried(engine: Engine, copied: int) -> tuple[Carried, Carried]:
        meter = Meter(counters)
        before = [meter.read(gpu) for gpu in (source, destination)]
        copies.seconds([CopyStream(source, engine, Region(ends[0], 0), Region(ends[1], 0), SIZE)], copied)
        due = copied * SIZE
        return meter.since(before[0], due), meter.since(before[1], due, receives=True)

    for side, headers in zip(carried(Engine.CE, 20), (1.09, 1.08), strict=True):
        assert side.nvlink_bytes == pytest.approx(0, abs=SLACK_BYTES)
        assert side.pcie_share == pytest.approx(headers, abs=0.03)
    for pair in (pairs[0], pairs[0][::-1]):
        copies.enable(*pair)
    for engine in Engine:
        for side in carried(engine, 100):
            assert side.nvlink_share == pytest.approx(1, rel=0.001)
            assert side.pcie_bytes is not None
            assert side.pcie_bytes < 100 * SIZE / 100
    counters.close()


@several
def test_sms_are_refused_what_they_cannot_address(copies: CudaCopies) -> None:
    memory = buffers(copies)
    with pytest.raises(CouldNotMeasureError, match="cannot address"):
        copied(copies, (memory[0][0], memory[1][1]), Engine.SM, 0, 0)
    assert copied(copies, (memory[0][0], memory[1][1]), Engine.CE, 0, 0)[0] == 0


def test_several_streams_at_once_and_more_copies_than_a_stream_holds(
    copies: CudaCopies, ways: Sequence[tuple[Place, Place]]
) -> None:
    memory = buffers(copies)
    for peer_access in (False, True):
        for source, destination in ways if peer_access else ():
            if isinstance(source, int) and isinstance(destination, int):
                copies.enable(source, destination)
        for size, repeats in ((16, 1200), (SIZE, 30)):
            streams = [
                CopyStream(gpu_of(way), Engine.CE, Region(memory[way[0]][0], 0), Region(memory[way[1]][1], 0), size)
                for way in ways
            ]
            assert isfinite(copies.seconds(streams, repeats))


def test_what_does_not_fit_is_refused_and_the_rest_goes_on(copies: CudaCopies) -> None:
    with pytest.raises(CouldNotMeasureError, match="out of memory"):
        copies.allocate(0, 2**50)
    source, destination = copies.allocate(0, SIZE), copies.allocate(0, SIZE)
    assert copied(copies, (source, destination), Engine.CE, 0, 1)[0] == 0


def test_behind_the_gate_the_host_does_not_count(copies: CudaCopies, ways: Sequence[tuple[Place, Place]]) -> None:
    source, destination = ways[0]
    if isinstance(source, int) and isinstance(destination, int):
        copies.enable(source, destination)
    ends = Region(copies.allocate(source, 16), 0), Region(copies.allocate(destination, 16), 0)
    copy = CopyStream(gpu_of(ways[0]), Engine.CE, *ends, 16)
    copies.seconds([copy], 100)
    together = copies.seconds([copy], 100) / 100
    start = perf_counter()
    for _ in range(100):
        copies.seconds([copy], 1)
    alone = (perf_counter() - start) / 100
    assert 0 < together < 1
    if together >= alone:
        pytest.skip(f"{together * 1e6:.1f} µs a copy at once, {alone * 1e6:.1f} one by one")


def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    folder, words = tmp_path / "recorded", ["--format", "csv", "--no-patterns"]
    measured = gpubench("p2p", "--record", str(folder), *words)
    assert measured.returncode == 0, measured.stderr
    replayed = gpubench("p2p", "--replay", str(folder), *words)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.replace(",recorded,", ",measured,") == measured.stdout
