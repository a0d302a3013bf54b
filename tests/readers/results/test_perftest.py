"""perftest's tables, made here after src/perftest_parameters.h and src/cuda_memory.c."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.results.report import PairRow
from gpubench.readers.results.perftest import read, recognises

LINE = "---------------------------------------------------------------------------------------\n"
CUDA = "Picking device No. 0\n[pid = 4711, dev = 0] device name = [NVIDIA A100-SXM4-80GB]\ncreating CUDA Ctx\n"


def run(
    test: str = "RDMA_Write BW Test",
    unit: str = "MB",
    rows: str = " 65536      5000             23506.21            23500.00\t\t   0.376000\n",
    before: str = "",
    nic: str = "mlx5_0",
) -> str:
    return (
        f"{before}{LINE}                    {test}\n Dual-port       : OFF\t\tDevice         : {nic}\n"
        f" Link type       : IB\n{LINE} local address: LID 0x14 QPN 0x00d4 PSN 0x22ea5b RKey 0x1ff VAddr 0x007f\n{LINE}"
        f" #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]\n{rows}{LINE}"
    )


def read_rows(text: str) -> list[PairRow]:
    assert recognises(text)
    return list(read(text, "ib.txt").pairs)


@pytest.mark.parametrize(
    ("unit", "printed", "gb_s"), [("MB", "23500.00", 24.641536), ("MiB", "23500.00", 24.641536), ("Gb", "196.00", 24.5)]
)
def test_mb_has_two_to_the_20_bytes_and_gb_are_bits(unit: str, printed: str, gb_s: float) -> None:
    (row,) = read_rows(run(unit=unit, rows=f" 65536      5000       0.00       {printed}      0.376\n"))
    assert row.bandwidth_gb_s == pytest.approx(gb_s)
    assert (row.size_bytes, row.engine, row.scope) == (65536, "rdma", "network")


@pytest.mark.parametrize(
    ("test", "direction", "ends"),
    [
        ("RDMA_Write BW Test", "write", ("mlx5_0", "remote")),
        ("RDMA_Read BW Test", "read", ("remote", "mlx5_0")),
        ("Send Bidirectional BW Test", "both", ("mlx5_0", "remote")),
    ],
)
def test_the_test_says_which_way_the_data_go(test: str, direction: str, ends: tuple[str, str]) -> None:
    (row,) = read_rows(run(test))
    assert (row.direction, row.source, row.destination) == (direction, *ends)


@pytest.mark.parametrize("before", [CUDA, "$ ib_write_bw -d mlx5_0 --use_cuda=0 10.0.0.1\n", "Picking GPU number 3\n"])
def test_gpu_memory_is_that_of_the_next_run_alone(before: str) -> None:
    first, second, third = read_rows(run(before=before) + run() + run(nic="mlx5_1"))
    assert (first.source, first.destination) == ("mlx5_0 (device)", "remote")
    assert (second.source, second.destination) == ("mlx5_0", "remote, run 2")
    assert (third.source, third.destination) == ("mlx5_1", "remote")


def test_lines_of_launchers_colors_and_warnings_do_not_hide_rows() -> None:
    warning = "Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.\n"
    text = run(
        rows=f"{warning}\x1b[32m 65536 5000 0.00 98.02 0.18\x1b[0m\nnode1:  131072 5000 0.00 98.20 0.09\n", unit="Gb"
    )
    assert [row.size_bytes for row in read_rows(f"> {text}".replace("\n", "\n> "))] == [65536, 131072]


def test_a_row_that_is_cut_or_impossible_is_left_out_and_named() -> None:
    whole = " 8192 5000 100.0 99.0 0.1\n"
    found = read(run(rows=f"{whole} 16384 5000 100.0\n 32768 5000 100.0 nan 0.1\n"), "ib.txt")
    assert len(found.pairs) == 1
    assert not found.complete
    assert [text.partition(" (")[0] for text in found.left_out] == ["line 10", "line 11"]


def test_numbers_after_the_table_are_no_rows() -> None:
    assert len(read_rows(run() + " 0 1 2 3\n 4 5 6 7 8 9\n")) == 1


def test_a_run_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="has no measured values, of perftest"):
        read(run(rows=""), "ib.txt")
    assert not recognises(" #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]\n 2 1000 1.6 5.9 1.7\n")
