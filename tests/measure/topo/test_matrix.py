"""Findings from the matrix of `nvidia-smi topo -m` alone."""

from itertools import pairwise

import pytest

from gpubench.measure.topo import examine
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import FallbackRow, Report
from gpubench.readers.machines.topo_matrix import read

Paths = list[list[str]]


def alike(gpus: int, path: str) -> Paths:
    return [["X" if row == column else path for column in range(gpus)] for row in range(gpus)]


def grouped(sizes: list[int], inside: str, outside: str) -> Paths:
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    rows = alike(len(group), outside)
    return [
        [inside if path != "X" and group[row] == group[column] else path for column, path in enumerate(cells)]
        for row, cells in enumerate(rows)
    ]


def cube_mesh(gpus: int, single: str = "NV1", double: str = "NV2") -> Paths:
    """Return a hybrid cube mesh of 8 GPUs, or its first GPUs."""
    rows = alike(8, "SYS")
    for pairs, path in (("01 02 13 24 35 46 57 67", single), ("03 06 12 17 23 45 47 56", double)):
        changed(rows, path, *((int(pair[0]), int(pair[1])) for pair in pairs.split()))
    return [row[:gpus] for row in rows[:gpus]]


def changed(rows: Paths, path: str, *pairs: tuple[int, int], back: bool = True) -> Paths:
    for one, other in pairs:
        rows[one][other] = path
        rows[other][one] = path if back else rows[other][one]
    return rows


def changed_gpu(rows: Paths, gpu: int, path: str) -> Paths:
    return changed(rows, path, *((gpu, other) for other in range(len(rows)) if other != gpu))


def text_of(rows: Paths) -> str:
    names = [f"GPU{number}" for number in range(len(rows))]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity"]
    lines += ["\t".join([name, *row, "0-31"]) for name, row in zip(names, rows, strict=True)]
    return "\n".join(lines) + "\n"


def report_of(text: str) -> Report:
    return examine([Topology(read(text, "box"))])


def fallback(report: Report) -> list[FallbackRow]:
    return report.rows(FallbackRow)


LOST: list[tuple[str, Paths, str]] = [
    ("a pair of a switched board", changed(alike(4, "NV18"), "PHB", (1, 2)), "WARN nvlink-down GPU1 → GPU2"),
    ("a pair of eight GPUs", changed(alike(8, "NV12"), "SYS", (0, 7)), "WARN nvlink-down GPU0 → GPU7"),
    ("a GPU of a switched board", changed_gpu(alike(4, "NV18"), 3, "NV12"), "FAIL nvlink-down GPU3"),
    ("a GPU of eight", changed_gpu(alike(8, "NV12"), 5, "NV11"), "FAIL nvlink-down GPU5"),
    ("two GPUs", changed_gpu(changed_gpu(alike(8, "NV18"), 5, "NV16"), 2, "NV16"), "FAIL nvlink-down GPU2, GPU5"),
    ("a GPU without any", changed_gpu(alike(8, "NV18"), 0, "SYS"), "WARN nvlink-down GPU0"),
    ("a pair of a mesh", changed(alike(4, "NV4"), "NV3", (0, 3)), "FAIL nvlink-down GPU0 → GPU3"),
    ("a pair of a mesh without any", changed(alike(4, "NV6"), "SYS", (0, 3)), "WARN nvlink-down GPU0 → GPU3"),
    ("a GPU of a mesh", changed_gpu(alike(4, "NV4"), 1, "NV2"), "FAIL nvlink-down GPU1"),
    ("one direction", changed(alike(4, "NV18"), "PHB", (1, 2), back=False), "WARN nvlink-doubtful GPU1 → GPU2"),
    ("two counts", changed(alike(2, "NV4"), "NV3", (0, 1), back=False), "WARN nvlink-doubtful GPU0 → GPU1"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "found"), [pytest.param(rows, found, id=name) for name, rows, found in LOST])
def test_a_link_that_differs_from_its_siblings_is_named(rows: Paths, found: str) -> None:
    report = report_of(text_of(rows))
    (finding,) = report.findings
    assert f"{finding.severity} {finding.id} {finding.subject.strip()}".startswith(found)
    assert {row.conclusion for row in fallback(report)} == {"unknown"}


HEALTHY: list[tuple[str, Paths]] = [
    ("HGX of eight", alike(8, "NV18")),
    ("four of a board", alike(4, "NV18")),
    ("two of a board", alike(2, "NV18")),
    ("DGX-2", alike(16, "NV6")),
    ("partitions of a board", grouped([4, 4], "NV18", "NODE")),
    ("partitions of different size", grouped([4, 2, 2], "NV18", "NODE")),
    ("mesh of four", alike(4, "NV6")),
    ("mesh of four and a display card", changed_gpu(alike(5, "NV4"), 4, "SYS")),
    ("DGX-1 V100", cube_mesh(8)),
    *((f"{gpus} GPUs of a DGX-1 V100", cube_mesh(gpus)) for gpus in range(2, 8)),
    ("DGX-1 P100", cube_mesh(8, "NV1", "NV1")),
    *((f"{gpus} GPUs of a DGX-1 P100", cube_mesh(gpus, "NV1", "NV1")) for gpus in range(2, 8)),
    ("DGX Station V100", changed(alike(4, "NV1"), "NV2", (0, 3), (1, 2))),
    ("ring of four", changed(alike(4, "SYS"), "NV2", *pairwise([0, 1, 2, 3]), (0, 3))),
    ("bridged pairs", grouped([2, 2, 2, 2], "NV12", "SYS")),
    ("one bridge, three GPUs", grouped([2, 1], "NV4", "NODE")),
    ("one bridge, four GPUs", grouped([2, 1, 1], "NV4", "NODE")),
    ("bridges of four", grouped([4, 4], "NV6", "SYS")),
    ("one bridge of four, five GPUs", grouped([4, 1], "NV6", "SYS")),
    ("AC922", grouped([3, 3], "NV2", "SYS")),
    ("four of an AC922", grouped([3, 1], "NV2", "SYS")),
    ("PCIe switches", grouped([2, 2, 2, 2], "PIX", "SYS")),
]  # fmt: skip


@pytest.mark.parametrize("rows", [pytest.param(rows, id=name) for name, rows in HEALTHY])
def test_a_regular_pattern_is_healthy_and_no_design_is_proven(rows: Paths) -> None:
    report = report_of(text_of(rows))
    assert not report.findings
    assert {row.conclusion for row in fallback(report)} == {"unknown"}
    assert {row.how.rpartition("; ")[2] for row in fallback(report)} == {
        "peer access not known: nvidia-smi topo -p2p r shows it"
    }


@pytest.mark.parametrize("path", ["NODE", "SYS"])
def test_nccls_policy_is_by_design_if_no_pair_of_the_node_is_nearer(path: str) -> None:
    (row,) = fallback(report_of(text_of(alike(4, path))))
    assert (row.conclusion, row.cause, row.verdict) == ("direct impossible", "nccl-default-level", "SKIP")


def test_another_model_next_to_a_switched_board_is_no_sibling() -> None:
    names = [f"GPU {number}: NVIDIA {'T400' if number == 4 else 'H200'} (UUID: GPU-{number})" for number in range(5)]
    text = text_of(changed_gpu(alike(5, "NV18"), 4, "SYS")) + "\n".join(names) + "\n"
    assert "nvlink-down" not in {finding.id for finding in report_of(text).findings}
