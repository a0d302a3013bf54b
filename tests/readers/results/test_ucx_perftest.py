"""ucx_perftest's tables, made here after src/tools/perf/perftest_run.c."""

import pytest

from gpubench.errors import UsageError
from gpubench.readers.results.ucx_perftest import read, recognises

TABLE = (
    "+--------------+--------------+------------------------------+---------------------+-----------------------+\n"
    "|              |              |       overhead (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |\n"
    "|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |\n"
    "+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+\n"
)
STAGE = "[thread 0]                34      0.200     5.200     5.200     1798.00    1798.00          18          18\n"
FINAL = "Final:                   100      1.500   150.000   150.000    41000.00   42000.00         600         600\n"


def box(test: str = "tag match bandwidth", send: str = "cuda", receive: str = "host", size: int = 4096) -> str:
    rows = [("API", "protocol layer"), ("Test", test), ("Send memory", send), ("Recv memory", receive)]
    return "".join(f"| {f'{name}:':13s} {value:60s}  |\n" for name, value in [*rows, ("Message size", f"{size}")])


def test_the_overall_bandwidth_of_the_final_row_counts_in_mib() -> None:
    text = TABLE + box() + STAGE + FINAL
    assert recognises(text)
    (row,) = read(text, "ucx.txt").pairs
    assert row.bandwidth_gb_s == pytest.approx(42000 * 2**20 / 1e9)
    assert (row.source, row.destination) == ("client (device)", "server (host)")
    assert (row.size_bytes, row.direction, row.engine) == (4096, "write", "ucx")


@pytest.mark.parametrize(
    ("command", "ends", "size"),
    [
        ("$ ucx_perftest host1 -t tag_bw -m cuda -s 1048576", ("client (device)", "server (device)"), 2**20),
        ("# ucx_perftest -m cuda,host -t ucp_put_bw -s $((1024*1024*2))", ("client (device)", "server (host)"), 2**21),
        ("ucx_perftest -t tag_bw 10.0.0.1", ("client (host)", "server (host)"), 8),
        ("ucx_perftest -t ucp_get_bw -m cuda 10.0.0.1 -s 64", ("server (device)", "client (device)"), 64),
    ],
)
def test_options_stand_for_a_box_that_was_cut(command: str, ends: tuple[str, str], size: int) -> None:
    (row,) = read(f"{command}\n{TABLE}{FINAL}", "ucx.txt").pairs
    assert (row.source, row.destination, row.size_bytes) == (*ends, size)


def test_several_runs_and_a_test_of_latency() -> None:
    text = TABLE + box() + FINAL + TABLE + box(size=8192) + FINAL + TABLE + box(test="tag match latency") + FINAL
    found = read(text, "ucx.txt")
    assert [row.size_bytes for row in found.pairs] == [4096, 8192]
    assert found.left_out == ("line 30: a test of latency",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TABLE + box() + STAGE, "no measured values"),
        (TABLE + FINAL, "its size is unknown"),
        (TABLE + box() + FINAL.replace("600         600", "600"), "not a valid row"),
        (TABLE + box() + FINAL.replace("42000.00", "0.00"), "not a valid row"),
    ],
)
def test_what_has_no_bandwidth_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(text, "ucx.txt")
