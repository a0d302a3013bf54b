"""Protocol tables of UCX, in logs of NIXL and ucx_perftest on two H200s."""

from pathlib import Path

import pytest

from gpubench.model.paths.ucx import ProtocolRange, ProtocolTable, UcxRoute
from gpubench.readers.ucx_log import UcxLines, read_tables

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
        ("zero-copy", "rc_mlx5/ibp3:1 50% on path0 and 50% on path1", UcxRoute.RDMA),
        ("zero-copy", "55% on knem/memory and 45% on rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("software emulation", "rc_mlx5/mlx5_0:1", UcxRoute.EMULATED),
        ("sgl software emulation", "rc_mlx5/mlx5_0:1", UcxRoute.RDMA),
        ("(?) rndv using zero-copy read from remote", "rocm_ipc/rocm_ipc", UcxRoute.PEER),
        ("(?) rndv using zero-copy", "rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("zero-copy flushed write to remote", "rc_mlx5/mlx5_0:1", UcxRoute.RDMA),
        ("(?) rendezvous cuda_copy, fenced write to remote, cuda_copy", "rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("(?) rendezvous zero-copy fenced write to remote, cuda", "rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("pipeline cuda_copy, write to remote, frag cuda", "rc_mlx5/mlx5_0:1", UcxRoute.RDMA),
        ("pipeline cuda_copy, write to remote, frag host", "rc_mlx5/mlx5_0:1", UcxRoute.STAGED),
        ("(?) rendezvous no data fetch", "", UcxRoute.UNKNOWN),
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
    assert (table.process, table.same_node) == ("h:7", False)
    first, second = table.at(4096), table.at(4097)
    assert first is not None
    assert second is not None
    assert (first.description, second.description) == ("short", "zero-copy")


@pytest.mark.parametrize("multi", ["multi-frag zero-copy", "eager zero-copy copy-out", "zero-copy"])
def test_the_receiver_of_a_message_copies_the_data(multi: str) -> None:
    assert ProtocolRange(0, None, multi, "rc_mlx5/mlx5_0:1", is_message=True).route is UcxRoute.STAGED


@pytest.mark.parametrize(
    ("text", "context", "sizes"),
    [
        (  # UCX 1.13: no scope, and an empty list of flags
            (
                "| mpi ep_cfg[3] | remote memory write by ucp_put*() from cuda/GPU0 to cuda |\n"
                "|       0..8246 | short | cuda_ipc/cuda |\n"
                "|     8247..inf | zero-copy | cuda_ipc/cuda |"
            ),
            "mpi ep_cfg[3]",
            [(0, 8246), (8247, None)],
        ),
        (  # UCX 1.15 to 1.21, in the output of ucx_info and of an editor
            (
                "# | c intra-node cfg#2 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]    |\n"
                " 7543 [1.0] [node1:7:0] +----+\n"
                "# |                  0 | copy-out | rc_mlx5/m:1 |\n"
                "# |          512K..inf | zero-copy | cuda_ipc/cuda |"
            ),
            "c intra-node cfg#2",
            [(0, 0), (512 * 2**10, None)],
        ),
        (  # UCX 1.22 with UCX_PROTO_INFO=used
            (
                "| c inter-node cfg#1 |\n| remote memory write by ucp_put* from iov[3] cuda/GPU0 to cuda/dev[1] |\n"
                "| Count | Range | Description | Config |\n|    12 | 0..inf | zero-copy | cuda_ipc/cuda |"
            ),
            "c inter-node cfg#1",
            [(0, None)],
        ),
        (  # Without borders, and cut
            (
                "[1.0] | c inter-node cfg#1 | remote memory write by ucp_put* from cuda/GPU0 to cuda\n"
                "[1.0] | 1..64 | software emulation | rc_mlx5/m\n"
                "[1.0] | 65..inf | z"
            ),
            "c inter-node cfg#1",
            [(1, 64)],
        ),
        (
            (
                "    inter-node cfg#2\n    remote memory write by ucp_put*(multi) from cuda/GPU4 to cuda/dev[4]\n"
                "    1..inf | zero-copy | rc_mlx5/mlx5_11:1 50% on path0 and 50% on path1"
            ),
            "inter-node cfg#2",
            [(1, None)],
        ),
    ],
    ids=["1.13", "1.17", "used", "cut", "borderless"],
)
def test_tables_of_all_releases_and_as_people_paste_them(
    text: str, context: str, sizes: list[tuple[int, int | None]]
) -> None:
    (table,) = read_tables(text.split("\n"))
    assert (table.context, table.is_payload) == (context, True)
    assert [(row.first_bytes, row.last_bytes) for row in table.ranges] == sizes


def test_rows_of_another_thread_belong_to_no_table() -> None:
    title = "[1.0] [h:7:0]   | c intra-node cfg#2 | remote memory write by ucp_put* from cuda/GPU0 to cuda |"
    rows = [
        f"[1.0] [h:7:{thread}]   | {first}..inf | zero-copy | cuda_ipc/cuda |" for thread, first in ((1, 0), (0, 9))
    ]
    (table,) = read_tables([title, *rows])
    assert [row.first_bytes for row in table.ranges] == [9]


def test_a_table_without_its_first_line_has_no_scope() -> None:
    """Lines of other processes overwrite the beginning of lines."""
    title = "[1.0] [h:7:0]   | remote memory write by ucp_put* from cuda/GPU0 to cuda/dev[1] |"
    row = "[1.0] [h:7:0]   | 0..inf | zero-copy | cuda_ipc/cuda |"
    first, second = read_tables(["[1.0] [h:7:0]   | c self cfg#0 |", title, row, title, row])
    assert (first.is_payload, second.is_payload, second.context) == (False, True, "")


def test_a_time_of_day_is_not_a_process() -> None:
    line = "[08:04:41] [1.0] [node1:7:0]   | c inter-node cfg#1 | active message by ucp_am_send* from cuda/GPU0 |"
    (table,) = read_tables([line, "[08:04:42] [1.0] [node1:7:0]   | 0..inf | short | rc_mlx5/m:1 |"])
    assert table.process == "node1:7"


def test_lines_that_explain_a_path() -> None:
    lines = UcxLines()
    others, rows = lines.add(
        b"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        b"[1.0] [h:1:0]  ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /a/libucp.so)\n"
        b"[2.0] [h:2:0]  parser.c:2587 UCX  INFO  UCX_* env variables: UCX_TLS=^cuda_ipc UCX_LOG_LEVEL=info\n"
        b"[2.0] [h:2:0]  x.c:1 UCX  WARN  transports 'cuda_ipc','cuda_copy' are not available, please use one or more "
        b"of: self, tcp\n"
        b"[2.0] [h:2:0]  x.c:1 UCX  DEBUG closing md cuda_ipc because it has no selected transport resources\n"
        b"[2.0] [h:2:0]  x.c:1 UCX  DEBUG cuda-ipc get zcopy disabled as no nvlinks detected\n"
        b"[2.0] [h:2:0]   | 0..inf | zero-copy | cuda_ipc/cuda |\n"
    )
    found = lines.facts()
    assert (others.count(b"\n"), rows) == (6, 1)
    assert found.variables == {
        "": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "h:2": {"UCX_TLS": "^cuda_ipc", "UCX_LOG_LEVEL": "info"},
    }
    assert list(found.releases) == ["1.23.0"]
    assert list(found.missing) == ["cuda_ipc", "cuda_copy"]
    assert (list(found.excluded), found.get_disabled) == (["cuda_ipc"], True)


def test_a_block_of_another_program_is_left_as_it_is() -> None:
    block = b"vm:4310:4310 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    lines = UcxLines()
    assert lines.add(block) == (block, 0)
    assert lines.facts().lines == 0
