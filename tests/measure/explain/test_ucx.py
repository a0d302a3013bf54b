"""How GPU memory moves between processes, as UCX's protocol tables say it."""

from pathlib import Path

import pytest

from gpubench.model.terms.verdict import Verdict
from tests.cli.running import gpubench
from tests.fakes.nccl_logs import Job
from tests.measure.explain.test_report import ids, report_of, rows, via

LOGS = Path(__file__).parents[2] / "ucx"
PUT = "remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1]"
GET = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]"
DIRECT, EMULATED = "zero-copy | cuda_ipc/cuda", "software emulation | tcp/lo"


def table(*ranges: str, title: str = PUT, scope: str = "intra-node", process: str = "node1:7") -> str:
    lines = [f"agent {scope} cfg#2", title, *ranges]
    return "".join(f"[1.0] [{process}:0]   | {line} |\n" for line in lines)


@pytest.mark.parametrize(
    ("log", "verdict", "found"),
    [
        ("nixl-write-direct.log", Verdict.PASS, []),
        ("nixl-write-direct-one-gpu-each.log", Verdict.PASS, []),
        ("nixl-read-direct.log", Verdict.PASS, []),
        ("perftest-tag-direct.client.log", Verdict.PASS, []),
        ("nixl-write-mnnvl-asked.log", Verdict.WARN, ["kv-mnnvl-refused"]),
        ("nixl-write-expandable-segments.log", Verdict.FAIL, ["kv-staged-unexplained"]),
        ("nixl-write-malloc-async.log", Verdict.FAIL, ["kv-memory-pool"]),
        ("perftest-put-managed.client.log", Verdict.FAIL, ["kv-memory-managed"]),
        ("perftest-tag-no-cuda-ipc.client.log", Verdict.FAIL, ["kv-staged-unexplained"]),
    ],
)
def test_logs_of_two_h200s(log: str, verdict: Verdict, found: list[str]) -> None:
    """The healthy logs have tables of host memory over TCP, too."""
    report = report_of((LOGS / log).read_bytes())
    assert (report.verdict, ids(report)) == (verdict, found)


@pytest.mark.parametrize(
    ("text", "verdict", "found"),
    [
        (table("0..inf | " + DIRECT), Verdict.PASS, []),
        (table("0..64 | " + EMULATED, "65..inf | " + DIRECT), Verdict.PASS, []),
        (table("0..2M | " + EMULATED, f"{2**21 + 1}..inf | " + DIRECT), Verdict.WARN, ["kv-staged-unexplained"]),
        (table("0..inf | zero-copy | rc_mlx5/mlx5_0:1"), Verdict.WARN, ["kv-nic-inside-node"]),
        (table("0..inf | zero-copy | rc_mlx5/mlx5_0:1", scope="inter-node"), Verdict.PASS, []),
        (table("0..inf | copy-in | rc_mlx5/mlx5_0:1", scope="inter-node"), Verdict.FAIL, ["kv-no-gpudirect"]),
        (table("0..inf | zero-copy | tcp/eth0", scope="inter-node"), Verdict.WARN, ["kv-no-rdma-device"]),
        (table("0..inf | teleport | cuda_ipc/cuda"), Verdict.WARN, ["path-unknown"]),
        (table("0..inf | zero-copy | warp/9"), Verdict.WARN, ["path-unknown"]),
        (table("0..64 | " + DIRECT), Verdict.SKIP, ["no-payload-tables"]),
        (table("0..inf | " + EMULATED, title=PUT.replace("cuda/GPU0", "host memory")), Verdict.SKIP, None),
        (table("0..inf | " + EMULATED, scope="self"), Verdict.SKIP, None),
        ("2026-11-28 05:59:17 NIXL INFO    _api.py:405 Backend UCX was instantiated\n", Verdict.SKIP, None),
        (
            table("0..inf | (?) rendezvous zero-copy read from remote | cuda_ipc/cuda",
                  title="tagged message by ucp_tag_send* from cuda/GPU0"),
            Verdict.SKIP,
            None,
        ),
    ],
)  # fmt: skip
def test_only_large_messages_between_gpus_are_judged(text: str, verdict: Verdict, found: list[str] | None) -> None:
    report = report_of(text)
    assert (report.verdict, ids(report)) == (verdict, ["no-payload-tables"] if found is None else found)


@pytest.mark.parametrize(
    ("line", "title", "cause"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", PUT, "kv-memory-expandable"),
        ("[1.0] [node1:7:0] parser.c:1 UCX  INFO  UCX_* env variables: UCX_TLS=tcp,cuda_copy", PUT, "ucx-tls"),
        ("[1.0] [node1:7:0] c.c:1 UCX  DEBUG closing md cuda_ipc because it has no selected", PUT, "ucx-tls"),
        ("x.c:1 UCX  DEBUG cuda-ipc get zcopy disabled as no nvlinks detected", GET, "kv-get-without-nvlink"),
        ("x.c:1 UCX  DEBUG cuda-ipc get zcopy disabled as no nvlinks detected", PUT, "kv-staged-unexplained"),
        ("x.c:1 UCX  DEBUG posix_fd import: peer is in a different pid namespace", PUT, "kv-pid-namespaces"),
        ("[1.0] [node2:9:0] parser.c:1 UCX  INFO  UCX_* env variables: UCX_TLS=tcp", PUT, "kv-staged-unexplained"),
    ],
)
def test_the_log_names_the_cause(line: str, title: str, cause: str) -> None:
    line = line.replace("no selected", "no selected transport resources")
    report = report_of(f"{line}\n" + table("0..inf | " + EMULATED, title=title))
    assert ids(report) == [cause]


def test_two_containers_of_one_node_have_the_same_process_id() -> None:
    first, second = (table("0..inf | " + EMULATED, process=f"{pod}:1") for pod in ("prefill-0", "decode-0"))
    assert ids(report_of(first + second)) == ["kv-pid-namespaces"]
    proven = "".join(
        f"[1.0] [{pod}:1:0] p.c:1 UCX  INFO  UCX_* env variables: UCX_TLS=tcp\n" for pod in ("prefill-0", "decode-0")
    )
    assert ids(report_of(proven + first + second)) == ["ucx-tls"]
    assert ids(report_of(first + second.replace("decode-0:1", "decode-0:8"))) == ["kv-staged-unexplained"]


def test_logs_of_nccl_and_ucx_are_both_judged() -> None:
    report = report_of(*Job(via=via("SHM/direct")).logs(), table("0..inf | " + DIRECT))
    assert report.verdict is Verdict.FAIL
    assert len(rows(report, "kv_paths")) == 1


def test_a_version_of_nccl_in_a_log_of_ucx_is_no_missing_connection() -> None:
    version = "node1:7:7 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
    assert ids(report_of(version)) == ["no-connections"]
    assert report_of(version + table("0..inf | " + DIRECT)).verdict is Verdict.PASS


def test_rows_at_the_beginning_of_a_file_belong_to_no_table() -> None:
    """A scrollback may begin in the middle of a table."""
    title = table().replace("[node1:7:0]   ", "")
    report = report_of(title + "| 0..64 | zero-copy | cuda_ipc/cuda |\n", "| 65..inf | zero-copy | cuda_ipc/cuda |\n")
    assert ids(report) == ["no-payload-tables"]


def test_a_table_in_a_document_is_an_example_unless_it_names_its_process() -> None:
    document = "# Transfers\n## Slow\n```text\n{}```\n## Fast\n[see](https://a.b/c)\n"
    found = table("0..inf | " + EMULATED)
    assert ids(report_of(document.format(found))) == ["kv-staged-unexplained"]
    assert ids(report_of(document.format(found.replace("[node1:7:0]   ", "")))) == ["no-payload-tables"]


def test_rows_have_the_direction_of_the_data() -> None:
    (row,) = rows(report_of(table("0..inf | " + DIRECT, title=GET)), "kv_paths")
    assert (row["source"], row["destination"], row["scope"]) == ("cuda/dev[1]", "cuda/GPU0", "node")
    assert (row["route"], row["host_staged"], row["verdict"]) == ("direct", False, "PASS")


def test_the_terminal_shows_large_messages_and_the_last_line_the_transport(tmp_path: Path) -> None:
    shown = " ".join(gpubench("explain", str(LOGS / "perftest-tag-direct.client.log")).stdout.split())
    assert "fetch cuda → cuda/GPU0 1..inf direct cuda_ipc/cuda PASS and 2 rows more" in shown
    assert shown.endswith("PASS: UCX moves GPU memory directly over cuda_ipc/cuda")
    log = tmp_path / "nixl.log"
    log.write_text("NIXL INFO    _api.py:405 Backend UCX was instantiated\n")
    last_line = gpubench("explain", str(log)).stdout.splitlines()[-1]
    assert last_line == "SKIP: 1 line by UCX or NIXL, without protocol tables. Try: export UCX_PROTO_INFO=y"
    skipped = gpubench("explain", str(LOGS / "perftest-put-latency.client.log")).stdout
    assert skipped.splitlines()[-1] == last_line
    assert "NCCL" not in skipped


def test_the_last_line_keeps_the_cause_and_the_cure() -> None:
    last_line = gpubench("explain", str(LOGS / "nixl-write-malloc-async.log")).stdout.splitlines()[-1]
    assert last_line == (
        "FAIL: UCX detects cuda-managed/GPU0, as it does for cudaMallocAsync. "
        "Try: export PYTORCH_CUDA_ALLOC_CONF=backend:native"
    )


def test_rows_without_the_beginning_of_their_table_ask_for_tables_of_ucx() -> None:
    """A scrollback may begin in the middle of a table."""
    report = report_of("[1.0] [node1:7:0]   | 515..inf | eager short | rc_mlx5/mlx5_0:1 |\n")
    assert (report.verdict, ids(report)) == (Verdict.SKIP, ["no-payload-tables"])


@pytest.mark.parametrize(
    ("title", "scope", "transport"),
    [
        (PUT.replace("cuda/", "rocm/"), "intra-node", "tcp/lo"),
        (GET.replace("cuda/", "rocm/"), "intra-node", "cma/memory"),
        ("tagged message by ucp_tag_send*() from cuda/GPU0", "mpi", "rc_mlx5/mlx5_0:1"),
    ],
)
def test_amd_gpus_and_two_hosts_get_no_advice_for_cuda_ipc(title: str, scope: str, transport: str) -> None:
    log = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True UCX_TLS=tcp\n" * title.count("rocm")
    (found,) = report_of(log + table(f"0..inf | copy-in | {transport}", title=title, scope=scope)).findings
    said = " ".join((found.expected, found.cause, *found.commands, found.comment))
    assert found.id == "kv-staged-unexplained"
    assert not any(words in said for words in ("cuda_ipc", "expandable", "PID", "/ns/pid"))
    assert ("rocm_ipc" in said) is ("rocm" in title)


def test_metrics_of_vllm_show_the_cost_of_a_block() -> None:
    line = (
        "KV Transfer metrics: Num successful transfers=80, Avg xfer time (ms)=200.0, P90 xfer time (ms)=235.7, "
        "Avg MB per transfer=313.0, Throughput (MB/s)=1800.9, Avg number of descriptors=40000.0\n"
    )
    (found,) = report_of(line).findings
    assert "1,801 MB/s, and 5.0 µs per block (40,000)" in found.seen
    direct = report_of(line + table(f"0..inf | {DIRECT}"))
    assert (direct.verdict, ids(direct)) == (Verdict.PASS, ["kv-block-cost"])
    assert "40,000 blocks per transfer take 5.0 µs each" in direct.findings[0].seen
    staged = report_of(line + table(f"0..inf | {EMULATED}"))
    assert (staged.verdict, ids(staged)) == (Verdict.FAIL, ["kv-staged-unexplained"])
    few = line.replace("descriptors=40000.0", "descriptors=40.0")
    assert report_of(few + table(f"0..inf | {DIRECT}")).findings == ()
