"""The table of all_reduce_bench.py, made here after its source."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.results.result_file import UserFacts
from gpubench.readers.results.ml_engineering import read, recognises

HEAD = """Environment:
- software: torch=2.7.1, cuda=12.8, nccl=(2, 26, 2)
- hardware: _CudaDeviceProperties(name='NVIDIA H200', major=9, minor=0, total_memory=143167MB)

"""
TITLE = "The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):\n\n"
TABLE = """| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   0.83GBps |   0.47GBps |
|   16GiB | 480.11GBps | 274.35GBps |
"""


@pytest.mark.parametrize(
    ("title", "mode"),
    [
        (TITLE, "latency"),
        (TITLE.replace("trials)", "trials, up to 10 queued calls per trial)"), "throughput"),
        (TITLE.replace("bandwidth of", "bandwidth and the per-call latency of"), "latency"),
    ],
)
def test_payloads_are_binary_and_gbps_decimal(title: str, mode: str) -> None:
    assert recognises(HEAD + title + TABLE)
    found = read(HEAD + title + TABLE, "bench.txt")
    small, large = found.latencies
    assert (small.size_bytes, large.size_bytes) == (32 * 2**10, 16 * 2**30)
    assert (large.busbw_gb_s, large.ranks, large.iterations) == (480.11, 8, 20)
    assert large.time_us == pytest.approx(16 * 2**30 / 274.35e9 * 1e6)
    assert large.mode == mode
    assert (large.placement, large.dtype, large.op, large.verified) == ("in_place", "float32", "sum", "no")
    assert found.circumstances.models == ("NVIDIA H200",)
    assert found.circumstances.libraries == {"NCCL": "2.26.2"}


def test_the_table_alone_takes_its_ranks_from_the_user() -> None:
    text = "".join(f"> {line}\n" for line in TABLE.replace("KiB", "KB").splitlines())
    found = read(text, "x")
    assert [(row.size_bytes, row.ranks, row.busbw_gb_s) for row in found.latencies] == [
        (32 * 2**10, None, None),
        (16 * 2**30, None, None),
    ]
    found = read(text, "x", UserFacts(ranks=8))
    assert [row.busbw_gb_s for row in found.latencies] == [0.83, 480.11]


@pytest.mark.parametrize(
    "row", ["481.0", "481.00GBps |", "481.45GB", "  nanGBps | 275.01GBps |", "-1.00GBps | 1.00GBps |"]
)
def test_a_row_that_is_cut_or_no_number_is_left_out_and_named(row: str) -> None:
    found = read(f"{TITLE}{TABLE}|   32GiB | {row}", "x")
    assert (len(found.latencies), found.complete) == (2, False)
    assert "line 7" in found.left_out[0]


def test_a_table_without_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match="no measured values, of all_reduce_bench"):
        read(TITLE + TABLE[:80], "x")
