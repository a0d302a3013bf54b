"""KV transfers on real GPUs: the path with every kind of memory, in namespaces, and with settings of UCX."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubench.backends.transfer_libraries import ucx_copies, ucx_transports
from tests.cli.running import environment, gpubench
from tests.gpu.machine import SHARES, between_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any("cuda" in ucx_transports(library) for library in ucx_copies(os.environ)),
        reason="no UCX with CUDA: pip install libucx-cu13",
    ),
]
QUICK = ("--sizes", "64K,64M", "--blocks", "1", "--pairs", "0-1")
WITHOUT_PAIR = QUICK[:-2]  # On one GPU, both processes use it
DIRECT = "SKIP" if SHARES else "PASS"  # The speed of two processes on one GPU is not judged


def kv(*words: str, **variables: str) -> tuple[int, dict[str, Any]]:
    # UCX reads through host memory on a GPU whose NVLinks it does not see.
    env = environment(UCX_CUDA_IPC_ENABLE_GET_ZCOPY="on", **variables)
    ended = gpubench("kv", *(WITHOUT_PAIR if SHARES else QUICK), *words, "--format", "json", env=env)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def between_processes(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in document["kv"] if row["destination"] != "host"]


@pytest.mark.parametrize("visible", ["all", "own"])
def test_plain_memory_is_direct_and_right(visible: str) -> None:
    code, document = kv("--visible", visible)
    rows = between_processes(document)
    assert (code, document["verdict"]) == (0, DIRECT), document["sentence"]
    assert {(row["host_staged"], row["verified"]) for row in rows} == {(False, "last")}
    assert all("cuda_ipc" in row["transport"] for row in rows)
    assert {row["direction"] for row in rows} == {"write", "read"}
    if SHARES:
        assert {row["verdict"] for row in rows} == {None}
        assert "speed not judged" in document["sentence"]


@between_gpus("transfers from one to the other")
def test_a_transfer_between_gpus_reaches_three_quarters_of_a_copy() -> None:
    _, document = kv()
    large = [row for row in between_processes(document) if row["size_bytes"] == 64 * 2**20]
    assert len(large) == 4
    assert min(row["expected_percent"] for row in large) >= 75
    assert {row["verdict"] for row in large} == {"PASS"}


@pytest.mark.parametrize(
    ("memory", "id_"),
    [("expandable", "kv-memory-expandable"), ("async", "kv-memory-pool"), ("managed", "kv-memory-managed")],
)
def test_memory_that_cuda_ipc_cannot_export_fails_with_its_cause(memory: str, id_: str) -> None:
    code, document = kv("--memory", memory)
    assert (code, [finding["id"] for finding in document["findings"]]) == (1, [id_]), document["sentence"]
    assert {(row["host_staged"], row["verified"]) for row in between_processes(document)} == {(True, "last")}


def test_settings_of_ucx_fail_with_their_cause() -> None:
    code, document = kv(UCX_TLS="^cuda_ipc")
    assert (code, [finding["id"] for finding in document["findings"]]) == (1, ["ucx-tls"]), document["sentence"]


def test_pid_namespaces_fail_with_their_cause() -> None:
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("no right to create PID namespaces")
    code, document = kv("--isolate", "pid")
    assert (code, [finding["id"] for finding in document["findings"]]) == (1, ["kv-pid-namespaces"])


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    code, before = kv("--record", folder)
    ended = gpubench("kv", "--replay", folder, "--format", "json")
    after = json.loads(ended.stdout)
    assert (ended.returncode, after["verdict"], after["findings"]) == (code, before["verdict"], before["findings"])
    assert [row | {"origin": "measured"} for row in after["kv"]] == before["kv"]


def test_check_makes_a_transfer_and_leaves_no_process() -> None:
    ended = gpubench("check", "--kv", "--format", "json", env=environment(UCX_CUDA_IPC_ENABLE_GET_ZCOPY="on"))
    document = json.loads(ended.stdout)
    assert [row["verdict"] for row in document["checks"] if row["check"] == "kv"] == [DIRECT], document["sentence"]
    assert {row["host_staged"] for row in document["kv"]} == {False}
    workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if "kv_worker" in _words(path)]
    assert workers == []


def _words(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_an_interrupted_run_leaves_no_process() -> None:
    words = [sys.executable, "-m", "gpubench", "kv"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as started:
        try:
            started.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.kill(started.pid, 2)
            started.communicate(timeout=60)
    assert started.returncode in (0, 1, 130)
    assert not any("kv_worker" in _words(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
