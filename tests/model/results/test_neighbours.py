"""What the rows of one sweep show about each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.results.neighbours import RowPlace, late_rank, lone_slow_rows, slow_range
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.nccl_tests import text
from tests.fakes.measured_rows import row

K, M, G = 2**10, 2**20, 2**30
SIZES = [K << number for number in range(23)]


def healthy(size_bytes: int, **changes: Any) -> CollectiveRow:
    """A row of a curve with 15 µs of latency and 300 GB/s."""
    return row(size_bytes, 15.0 + size_bytes / 300e3, 1.0, **changes)


def sweep(slower: dict[int, float], **changes: Any) -> list[CollectiveRow]:
    """A sweep in which some sizes take that many times as long."""
    rows = [healthy(size, **changes) for size in SIZES]
    return [replace(each, time_us=each.time_us * slower.get(each.size_bytes, 1.0)) for each in rows]


def between(low: int, high: int, times: float) -> dict[int, float]:
    return {size: times for size in SIZES if low <= size <= high}


@pytest.mark.parametrize(
    ("slower", "changes", "found"),
    [
        ({}, {}, None),
        (between(64 * M, 256 * M, 1.2), {}, (64 * M, 256 * M)),
        (between(64 * M, 256 * M, 1.3), {}, (64 * M, 256 * M)),
        (between(G, 4 * G, 1.15), {}, (G, 4 * G)),
        (between(8 * K, 256 * K, 1.5), {}, (8 * K, 256 * K)),
        (between(8 * K, 256 * K, 1.1), {}, None),  # 1.5 µs: hosts do that
        (between(K, 64 * K, 1.5), {}, None),  # the start of a job
        ({128 * M: 2.0}, {}, None),  # one size may be an accident
        (between(64 * M, 256 * M, 1.3), {"ci95_percent": 40.0}, None),  # within the noise that the rows state
        (between(64 * M, 256 * M, 1.3), {"nodes": 2}, None),  # algorithms change between nodes
        (between(64 * M, 256 * M, 1.3), {"backend": "host"}, None),  # caches
        (between(64 * M, 256 * M, 1.3), {"mode": "latency"}, None),
    ],
)
def test_a_range_of_sizes_that_is_slower_than_its_neighbours_is_found(
    slower: dict[int, float], changes: dict[str, Any], found: tuple[int, int] | None
) -> None:
    rows = sweep(slower, **changes)
    shown = slow_range(rows)
    assert (None if shown is None else (shown.rows[0].size_bytes, shown.rows[-1].size_bytes)) == found


TABLES = [path for path in sorted(Path("tests/results/h200x4").glob("*.txt")) if path.stem != "nvbandwidth"]


@pytest.mark.parametrize("file", TABLES, ids=lambda path: path.stem)
def test_no_range_of_a_healthy_table_is_slow(file: Path) -> None:
    assert slow_range(list(_rows(file))) is None


def _rows(file: Path) -> Sequence[CollectiveRow]:
    read = text.read(file.read_text(), file.name)
    return [each for each in read.rows if each.size_bytes >= K]


F, P, W = Verdict.FAIL, Verdict.PASS, Verdict.WARN


@pytest.mark.parametrize(
    ("verdicts", "lone"),
    [
        ((P, F, P), 1),
        ((P, W, P), 1),
        ((P, P, F), 0),  # one neighbour alone says little
        ((P, F, F), 0),
        ((F, F, P), 0),
    ],
)
def test_one_slow_row_among_good_neighbours_is_lone(verdicts: tuple[Verdict, ...], lone: int) -> None:
    places = [RowPlace.of(healthy(size)) for size in (M, 2 * M, 4 * M)]
    assert len(lone_slow_rows(dict(zip(places, verdicts, strict=True)))) == lone


def test_far_sizes_are_no_neighbours_and_the_other_placement_is_one() -> None:
    far = [RowPlace.of(healthy(size)) for size in (K, 256 * M, 4 * G)]
    assert not lone_slow_rows(dict(zip(far, (P, F, P), strict=True)))
    both = [RowPlace.of(healthy(size, placement=each)) for size in (2 * G, 4 * G) for each in ("in_place", "out")]
    assert lone_slow_rows(dict(zip(both, (P, P, P, F), strict=True))) == {both[3]}
    assert not lone_slow_rows(dict(zip(both, (P, P, F, F), strict=True)))


def _late(times: float, rank: int = 2, **changes: Any) -> CollectiveRow:
    """A row of eight ranks, one of which takes that many times as long."""
    made = healthy(256 * M, **changes)
    mean = made.time_us * (1 + (times - 1) / made.ranks)
    return replace(made, time_us=mean, time_us_slowest_rank=made.time_us * times, slowest_rank=rank)


@pytest.mark.parametrize(
    ("rows", "rank"),
    [
        ([_late(1.02), _late(1.02)], None),
        ([_late(1.08), _late(1.08)], 2),
        ([_late(2.0), _late(2.0), _late(1.0)], 2),
        ([_late(2.0), _late(1.0)], None),  # in one of two rows
        ([_late(1.3, 2), _late(1.3, 5)], None),  # now this rank, now that one
        ([_late(1.3, ci95_percent=30.0)], None),
        ([_late(1.1, root=0)], None),  # the root has other work
        ([_late(1.1, backend="host")], None),
        ([_late(1.3, backend="host")], 2),
        ([_late(2.0, ranks_per_gpu=2)], None),
        ([replace(_late(2.0), size_bytes=M)], None),
        ([replace(_late(1.1), time_us=_late(1.1).time_us * 1.08)], None),  # all but one are late: one is early
    ],
)
def test_a_rank_that_is_late_in_most_rows_is_found(rows: list[CollectiveRow], rank: int | None) -> None:
    found = late_rank(rows)
    assert (None if found is None else found.rank) == rank
