"""Comparison of two machines by collective."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure.compare.report import compare_machines
from gpubench.model.results.compare import MachineRow
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.verdict import Verdict
from tests.fakes.noisy_results import collective_row
from tests.measure.compare.test_report import file, pair

SIZES = (1024, 2**20, 2**30, 2**32)


def sweep(*gb_s: float, **changes: Any) -> list[CollectiveRow]:
    return [
        collective_row(size, busbw_gb_s=value, time_us=10.0 + number, **changes)
        for number, (size, value) in enumerate(zip(SIZES, gb_s, strict=False))
    ]


def machines(report: Report) -> list[MachineRow]:
    return report.rows(MachineRow)


def test_a_faster_machine_by_peak_half_of_it_and_latency() -> None:
    base = file(*sweep(1.0, 60.0, 470.0, 479.0, ranks=8, nodes=1))
    new = file(*sweep(1.0, 60.0, 800.0, 839.0, ranks=8, nodes=1))
    report = compare_machines([base], [new])
    (row,) = machines(report)
    assert (report.verdict, report.findings) == (Verdict.SKIP, ())
    assert (row.size_bytes, round(row.ratio, 2), row.base_peak_bytes, row.base_half_bytes) == (
        2**32,
        1.75,
        2**32,
        2**30,
    )
    assert (row.base_node_gb_s, row.new_node_gb_s) == (8 * 479, 8 * 839)
    assert (row.latency_bytes, row.base_latency_us, row.reason) == (1024, 10.0, None)


def test_jobs_of_other_sizes_compare_per_gpu_and_node_but_not_by_time() -> None:
    (row,) = machines(
        compare_machines([file(*sweep(1.0, 479.0, ranks=8, nodes=1))], [file(*sweep(1.0, 358.0, ranks=64, nodes=16))])
    )
    assert (row.base_gpus, row.new_gpus, row.base_node_gb_s, row.new_node_gb_s) == (8, 64, 8 * 479, 4 * 358)
    assert row.latency_bytes is None
    assert row.reason == "64 ranks, not 8 (times grow with the number of ranks)"


def test_without_a_common_size_the_peaks_compare() -> None:
    base, new = sweep(1.0, 40.0), [replace(row, size_bytes=3 * row.size_bytes) for row in sweep(1.0, 50.0)]
    (row,) = machines(compare_machines([file(*base)], [file(*new)]))
    assert (row.size_bytes, row.ratio, row.reason) == (None, 1.25, "no size in common")


def test_copies_between_gpus_are_the_median_pair() -> None:
    host = pair(source="host", note="pinned host memory")
    (row,) = machines(compare_machines([file(pair(), host)], [file(pair(bandwidth_gb_s=790.0), host)]))
    assert (row.what, row.ratio, row.base_gpus) == ("copies write ce", 2.0, 2)


@pytest.mark.parametrize(
    ("new", "said"), [(file(), "no values, not allreduce"), (file(pair()), "copies write ce, not")]
)
def test_nothing_in_common_says_why(new: Any, said: str) -> None:
    report = compare_machines([file(*sweep(1.0, 2.0))], [new])
    assert report.verdict is Verdict.ERROR
    assert said in report.findings[0].seen
