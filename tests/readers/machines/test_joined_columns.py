"""Columns of nvidia-smi topo that run together."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import Snapshot
from gpubench.readers.machines.topo_matrix import cells_apart, header_apart, joined_in, read, row_apart

TABS = """\tGPU0\tGPU1\tmlx5_0\tmlx5_bond_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPIX\tSYS\t0-15\t0
GPU1\tNV12\t X \tPXB\tNODE\t0-15\t0
mlx5_0\tPIX\tPXB\t X \tSYS\t\t
mlx5_bond_1\tSYS\tNODE\tSYS\t X \t\t
"""


def pairs_of(node: Snapshot) -> dict[tuple[str, str], str | None]:
    return {(pair.source, pair.destination): pair.path for pair in node.pairs}


@pytest.mark.parametrize("blank", ["", " "])
def test_a_text_that_lost_its_tabs_says_the_same(blank: str) -> None:
    joined = TABS.replace("\t ", blank).replace(" \t", blank).replace("\t", "")
    assert "PXB" in joined
    assert "\t" not in joined
    found = read(joined, "topo.txt")
    assert pairs_of(found) == pairs_of(read(TABS, "topo.txt"))
    assert [gpu.cpu_affinity for gpu in found.gpus] == [None, None], "0-150 may be 0-15 and 0"


@pytest.mark.parametrize(
    ("words", "apart"),
    [
        (["NV12PIX"], ["NV12", "PIX"]),
        (["XNV4", "SYS"], ["X", "NV4", "SYS"]),
        (["SYS0-15,32-47"], ["SYS", "0-15,32-47"]),
        (["NV120-15"], ["NV12", "0-15"]),
        (["NV40-15"], ["NV4", "0-15"]),
        (["NV18NV18X"], ["NV18", "NV18", "X"]),
        (["NV124-200"], ["NV124-200"]),
        (["OKGNSNS"], ["OK", "GNS", "NS"]),
        (["PIXjunk"], ["PIXjunk"]),
        (["PIX", "N/A"], ["PIX", "N/A"]),
        (["X" * 8000], ["X" * 8000]),
    ],
)
def test_cells(words: list[str], apart: list[str]) -> None:
    assert cells_apart(words) == apart


def test_rows_and_headers() -> None:
    columns = ["GPU1", "GPU12", "mlx5_0"]
    assert row_apart(["GPU12PIXSYS", "X"], columns) == ["GPU12", "PIX", "SYS", "X"]
    assert row_apart(["mlx5_0PIX"], columns) == ["mlx5_0", "PIX"]
    assert row_apart(["GPU13"], columns) == ["GPU13"]
    assert row_apart([], columns) == []
    assert header_apart("GPU0GPU10NIC0mlx5_0mlx5_1CPU AffinityNUMA AffinityGPU NUMA ID").split() == [
        *("GPU0", "GPU10", "NIC0", "mlx5_0", "mlx5_1"),
        *("CPU", "Affinity", "NUMA", "Affinity", "GPU", "NUMA", "ID"),
    ]
    assert joined_in("GPU0 GPU1") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GPU0GPU1kluge0kluge1\nGPU0XNV12PIXSYS\n", "line 1: columns run together: 'GPU0GPU1kluge0kluge1'"),
        ("GPU0GPU1\nGPU0 XNV124-200\nGPU1 NV12X\n", "then 'XNV124-200'"),
    ],
)
def test_what_no_word_splits_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(text, "topo.txt")
