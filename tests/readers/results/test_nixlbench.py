"""nixlbench's tables, made here after benchmark/nixlbench/src/utils/utils.cpp."""

import pytest

from gpubench.errors import UsageError
from gpubench.readers.results.nixlbench import read, recognises

TIMES = "Avg Prep (us)  P99 Prep (us)  Avg Post (us)  P99 Post (us)  Avg Tx (us)    P99 Tx (us)    \n"
HEADER = f"Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  {TIMES}{'-' * 160}\n"
WITH_SUM = HEADER.replace("Avg Lat.", "Aggregate B/W (GB/Sec)   Network Util (%)    Avg Lat.")
OLD = "Block Size (B)      Batch Size     Avg Lat. (us)  B/W (MiB/Sec)  B/W (GiB/Sec)  B/W (GB/Sec)\n"
ROW = "67108864            1              0.412000       162883.0       1.0  1.0  1.0  1.0  1.0  1.0\n"


def options(backend: str = "UCX", way: str = "WRITE") -> str:
    return (
        f"Backend (--backend=[UCX,GDS,GDS_MT,POSIX,Mooncake,HF3FS,OBJ,AZURE_BLOB]): {backend}\n"
        "Initiator seg type (--initiator_seg_type=[DRAM,VRAM])       : VRAM\n"
        "Target seg type (--target_seg_type=[DRAM,VRAM])             : DRAM\n"
        f"Op type (--op_type=[READ,WRITE])                            : {way}\n"
    )


@pytest.mark.parametrize(
    ("text", "gb_s", "size"),
    [
        (HEADER + ROW, 0.412, 2**26),
        (WITH_SUM + ROW.replace("0.412000", "0.5 1.0 4.0"), 0.5, 2**26),
        (
            OLD + "67108864            1              39.746         1.61022e+06    1572.48        1688.44\n",
            1688.44,
            2**26,
        ),
        (
            OLD + "4096                1             3.11355        1254.6         1.22519        1.31554\n",
            1.31554,
            4096,
        ),
    ],
)
def test_the_column_of_gb_is_found_in_every_version(text: str, gb_s: float, size: int) -> None:
    assert recognises(text)
    (row,) = read(text, "nixl.txt").pairs
    assert (row.bandwidth_gb_s, row.size_bytes, row.engine) == (gb_s, size, "nixl")
    assert (row.source, row.destination) == ("initiator", "target")


@pytest.mark.parametrize(
    ("before", "ends"),
    [
        (options(), ("initiator (device)", "target (host)")),
        (options(way="READ"), ("target (host)", "initiator (device)")),
        (options(backend="POSIX"), ("initiator (device)", "storage (POSIX)")),
        ('$ nixlbench --seg_type="VRAM" --backend UCX\n', ("initiator (device)", "target (device)")),
        ("$ nixlbench --initiator_seg_type VRAM --op_type=READ\n", ("target", "initiator (device)")),
    ],
)
def test_options_name_both_ends(before: str, ends: tuple[str, str]) -> None:
    (row,) = read(before + HEADER + ROW, "nixl.txt").pairs
    assert (row.source, row.destination) == ends


def test_a_batch_counts_as_one_transfer_of_many_blocks() -> None:
    (row,) = read(HEADER + ROW.replace("1  ", "64 ", 1), "nixl.txt").pairs
    assert (row.size_bytes, row.destination) == (64 * 2**26, "target, 64 blocks")


def test_a_row_that_is_cut_is_left_out_and_named() -> None:
    found = read(HEADER + ROW + "134217728           1              0.4\n", "nixl.txt")
    assert (len(found.pairs), found.complete) == (1, False)
    assert found.left_out[0].startswith("line 4 (134217728 1 0.4)")
    with pytest.raises(UsageError, match="no measured values"):
        read(HEADER, "nixl.txt")
