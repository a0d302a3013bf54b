"""Protocol tables of UCX, in logs of NIXL and ucx_perftest on two H200s."""

from pathlib import Path

import pytest

from gpubench.model.paths.ucx import ProtocolRange, ProtocolTable, UcxRoute
from gpubench.readers.ucx_log import read_tables

LOGS = Path(__file__).parents[1] / "ucx"


def payload(name: str, size_bytes: int = 2**28) -> list[tuple[str, str, UcxRoute]]:
    with (LOGS / name).open() as lines:
        tables = [table for table in read_tables(lines) if table.is_payload]
    rows = [(table, table.at(size_bytes)) for table in tables]
    return [(f"{table.local} {table.remote}", row.config, row.route) for table, row in rows if row is not None]


@pytest.mark.parametrize(
    ("name", "memory", "config", "route"),
    [
        ("nixl-write-direct.log", "cuda/GPU0 cuda/dev[3]", "cuda_ipc/cuda", UcxRoute.PEER),
        ("nixl-read-direct.log", "cuda/GPU0 cuda/dev[3]", "cuda_ipc/cuda", UcxRoute.PEER),
        ("nixl-write-direct-one-gpu-each.log", "cuda/GPU0 cuda/dev[2]", "cuda_ipc/cuda", UcxRoute.PEER),
        ("nixl-write-expandable-segments.log", "cuda/GPU0 cuda", "tcp/lo", UcxRoute.EMULATED),
        ("nixl-write-own-pid-namespaces.log", "cuda/GPU0 cuda", "tcp/lo", UcxRoute.EMULATED),
        ("nixl-write-malloc-async.log", "cuda-managed/GPU0 cuda-managed", "tcp/lo", UcxRoute.EMULATED),
        ("perftest-put-direct.client.log", "cuda/GPU0 cuda/dev[0]", "cuda_ipc/cuda", UcxRoute.PEER),
        ("perftest-put-managed.client.log", "cuda-managed memory cuda-managed", "sysv/memory", UcxRoute.EMULATED),
    ],
)
def test_the_only_table_of_gpu_memory_says_how_the_cache_moves(
    name: str, memory: str, config: str, route: UcxRoute
) -> None:
    assert payload(name) == [(memory, config, route)]


def test_messages_through_host_memory_are_staged() -> None:
    found = payload("perftest-tag-no-cuda-ipc.client.log")
    assert {route for _, _, route in found} == {UcxRoute.STAGED}
    assert [memory for memory, _, _ in found] == ["cuda/GPU0 ", "cuda/GPU0 cuda"]
    assert {route for _, _, route in payload("perftest-tag-direct.client.log")} == {UcxRoute.PEER}


@pytest.mark.parametrize(
    ("description", "config", "route"),
    [
        ("zero-copy", "rc_mlx5/mlx5_0:1", UcxRoute.RDMA),
        ("zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", UcxRoute.RDMA),
        ("copy-in", "rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("zero-copy", "tcp/eth0", UcxRoute.STAGED),
        ("zero-copy", "warp_drive/9", UcxRoute.UNKNOWN),
        ("teleport", "cuda_ipc/cuda", UcxRoute.UNKNOWN),
    ],
)
def test_words_of_a_newer_ucx_are_never_direct(description: str, config: str, route: UcxRoute) -> None:
    assert ProtocolRange(0, None, description, config).route is route


def test_sizes_have_units_and_both_ends_belong_to_a_range() -> None:
    lines = [
        "[1.5] [h:7  :0]  | c inter-node cfg#1 |",
        "[1.5] [h:7  :0]  | remote memory write by ucp_put* from cuda/GPU0 to cuda/dev[1] |",
        "[1.5] [h:7  :0]  | 0..4K | short | rc_mlx5/mlx5_0:1 |",
        "[1.5] [h:9  :0]  | a line of another process | that is no range |",
        "[1.5] [h:7  :0]  | 4097..inf | zero-copy | rc_mlx5/mlx5_0:1 |",
    ]
    (table,) = read_tables(lines)
    assert isinstance(table, ProtocolTable)
    assert (table.process, table.is_intra_node) == ("h:7", False)
    first, second = table.at(4096), table.at(4097)
    assert first is not None
    assert second is not None
    assert (first.description, second.description) == ("short", "zero-copy")
