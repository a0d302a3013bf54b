"""`gpubench kv` on simulated machines: verdicts, faults, sizes, recordings, stored results, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError
from gpubench.jobs.check import ChildCommands
from gpubench.jobs.kv_plan import KvPlan
from gpubench.jobs.plans import Depth
from gpubench.model.facts.snapshot import is_amd
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.ucx import Allocation
from gpubench.profiles import all_profiles, load
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import environment, gpubench

H200 = ("--simulate", "hgx-h200-4")
QUICK = ("--blocks", "1", "--sizes", "64K,64M")
MACHINES = [profile.name for profile in all_profiles() if profile.match.visible and not is_amd(profile.gpu.name)]
WITHOUT_PEER_ACCESS = ("rtx-4090-2", "rtx-5090-2")


def report(*words: str, quick: tuple[str, ...] = QUICK) -> tuple[int, dict[str, Any]]:
    ended = CliRunner().invoke(app, ["kv", *words, *quick, "--format", "json"], catch_exceptions=False)
    return ended.exit_code, json.loads(ended.stdout)


def refused(*words: str) -> GpubenchError:
    error = CliRunner().invoke(app, ["kv", *words]).exception
    assert isinstance(error, GpubenchError), error
    return error


@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_fails_only_for_what_ucx_does_by_default(name: str) -> None:
    code, document = report("--simulate", name)
    found = {(finding["id"], finding["severity"]) for finding in document["findings"]}
    has_nvlinks, gpus = load(name).nvlink is not None, load(name).match.visible
    if name in WITHOUT_PEER_ACCESS:
        assert (code, document["verdict"], found) == (0, "SKIP", {("peer-access-refused", "SKIP")})
    elif has_nvlinks:
        assert (code, document["verdict"]) == (0, "PASS")
        assert found <= {("peer-access-refused", "SKIP")}
    else:
        assert (code, found) == (1, {("kv-get-without-nvlink", "FAIL")})
    assert len(document["kv"]) == max(gpus * (gpus - 1), 1) * 5
    assert "not judged" not in document["sentence"] or gpus == 1 or name in WITHOUT_PEER_ACCESS


KINDS = {
    "node0:kv=expandable": ("kv-memory-expandable", "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"),
    "node0:kv=async": ("kv-memory-pool", "export PYTORCH_CUDA_ALLOC_CONF=backend:native"),
    "node0:kv=managed": ("kv-memory-managed", ""),
    "node0:kv=pid": ("kv-pid-namespaces", ""),
    "node0:kv=ucx_tls": ("ucx-tls", "gpubench p2p && unset UCX_TLS"),
}


@pytest.mark.parametrize("machine", ["hgx-h200-4", "hgx-h200-8/1"])
@pytest.mark.parametrize("fault", KINDS)
def test_a_fault_of_all_transfers_is_one_finding_with_its_cure(fault: str, machine: str) -> None:
    code, document = report("--simulate", machine, "--fault", fault)
    id_, command = KINDS[fault]
    (finding,) = document["findings"]
    assert (code, finding["id"], finding["severity"]) == (1, id_, "FAIL")
    assert finding["next_command"] == command
    assert finding["commands"] or finding["comment"]
    assert len(finding["subjects"]) == (12 if machine == "hgx-h200-4" else 1)
    between = [row for row in document["kv"] if row["destination"] != "host"]
    assert {(row["verdict"], row["host_staged"], row["transport"]) for row in between} == {("FAIL", True, "tcp/lo")}


def test_the_last_line_keeps_cause_and_cure_if_all_pairs_are_host_staged() -> None:
    options = ("--simulate", "hgx-h200-8", "--fault", "node0:kv=async", "--sizes", "1M", "--blocks", "1", "--no-host")
    last_line = gpubench("kv", *options).stdout.splitlines()[-1]
    assert last_line == (
        "FAIL (simulated): KV transfers reach 450 MB/s, because the memory is allocated with cudaMallocAsync. "
        "Try: export PYTORCH_CUDA_ALLOC_CONF=backend:native"
    )


def test_a_pair_without_cuda_ipc_fails_and_no_other() -> None:
    code, document = report(*H200, "--fault", "link1-2:ipc=no")
    (finding,) = document["findings"]
    assert (code, finding["id"], finding["subjects"]) == (1, "kv-staged-unexplained", ["GPU1 → GPU2", "GPU2 → GPU1"])
    failed = {(row["source"], row["destination"]) for row in document["kv"] if row["verdict"] == "FAIL"}
    assert failed == {("GPU1", "GPU2"), ("GPU2", "GPU1")}


@pytest.mark.parametrize(
    ("fault", "id_"),
    [("link0-3:staged=yes", "p2p-slow"), ("gpu2:speed=0.5", "p2p-slow"), ("link0-1:corrupts=yes", "wrong-data")],
)
def test_a_fault_of_the_links_fails_kv(fault: str, id_: str) -> None:
    """The transfers are as fast as a plain copy, but the copy is slow."""
    code, document = report(*H200, "--fault", fault)
    assert (code, id_ in {finding["id"] for finding in document["findings"]}) == (1, True)


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        ({}, ("malloc",)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}, ("malloc", "expandable")),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, ("malloc", "async")),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ("malloc",)),
    ],
)
def test_what_pytorch_would_allocate_is_measured_too(setting: dict[str, str], kinds: tuple[str, ...]) -> None:
    assert KvPlan(timeout_s=30.0).allocations(setting) == kinds
    assert KvPlan(timeout_s=30.0, memory=(Allocation.MANAGED,)).allocations(setting) == ("managed",)


def test_a_recording_gives_the_same_report(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    code, before = report("--simulate", "hgx-h200-2", "--fault", "node0:kv=pid", "--record", folder)
    again, after = report("--replay", folder, quick=())
    assert (again, after["sentence"]) == (code, before["sentence"])
    assert after["findings"] == before["findings"]
    assert after["kv"] == before["kv"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda line: line.replace('"pair": [0, 1]', '"pair": [0, 7]'), "the pair [0, 7]"),
        (lambda line: line.replace('"transfers": 50', '"transfers": -50'), "kv.jsonl"),
        (lambda line: line.replace('"malloc"', '"heap"'), "kv.jsonl"),
        (lambda line: line[: len(line) // 2], "kv.jsonl"),
        (lambda _: "[]", "kv.jsonl"),
    ],
)
def test_an_edited_recording_is_refused_with_its_line(edit: Any, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    report("--simulate", "hgx-h200-2", "--record", str(folder))
    path = folder / "kv.jsonl"
    head, first, *others = path.read_text().splitlines()
    path.write_text("\n".join([head, edit(first), *others]) + "\n")
    error = refused("--replay", str(folder))
    assert said in str(error)
    assert "kv.jsonl" in str(error)


def test_comparing_two_results_never_passes_because_no_row_is_compared(tmp_path: Path) -> None:
    for name, fault in (("base", ()), ("same", ("--seed", "7")), ("new", ("--fault", "node0:kv=expandable"))):
        gpubench("kv", "--simulate", "hgx-h200-2", *QUICK, *fault, "-o", str(tmp_path / f"{name}.json"))
    base = str(tmp_path / "base.json")
    for name in ("same", "new"):
        compared = gpubench("compare", base, str(tmp_path / f"{name}.json"))
        assert (compared.returncode, compared.stdout.splitlines()[-1].partition(" ")[0]) == (3, "ERROR")
        assert "nothing-compared" in compared.stdout


@pytest.mark.parametrize(
    ("words", "said", "expected"),
    [
        (("--sizes", "3"), "--sizes 3", "multiples of 8 bytes"),
        (("--sizes", "1"), "--sizes 1", "multiples of 8 bytes"),
        (("--sizes", "10000", "--blocks", "3"), "--sizes 10000 with --blocks 3", "blocks of equal size"),
        (("--sizes", "4K", "--blocks", "256"), "--sizes 4K with --blocks 256", "of 1K or more"),
        (("--blocks", "0"), "--blocks '0'", "numbers of blocks"),
        (("--blocks", "x"), "--blocks 'x'", "numbers of blocks"),
        (("--memory", "foo"), "--memory 'foo' is not known", "malloc, expandable, async, managed"),
        ((*H200, "--pairs", "0-9"), "--pairs 0-9: there is no GPU9", "GPUs from GPU0, GPU1, GPU2, GPU3"),
        (("--pairs", "1-1"), "--pairs '1-1' is not a pair", "two different GPUs"),
        (("--timeout", "0.001"), "--timeout 0.001", "from 0.1 to 86400"),
        (("--isolate", "uts"), "--isolate 'uts' is not known", "pid, ipc, net"),
        ((*H200, "--isolate", "pid"), "--isolate and --simulate exclude each other", "node0:kv=pid"),
        ((*H200, "--visible", "own"), "--visible and --simulate exclude each other", ""),
        ((*H200, "--backend", "nixl"), "--backend and --simulate exclude each other", ""),
        (("--backend", "mooncake"), "--backend 'mooncake' is not known", "ucx, nixl"),
    ],
)
def test_bad_input_is_one_clear_message(words: tuple[str, ...], said: str, expected: str) -> None:
    error = refused(*words)
    assert (error.exit_code, error.seen.startswith(said)) == (2, True), error.seen
    assert expected in error.expected
    assert error.next_step


def test_a_machine_without_gpus_is_an_error() -> None:
    error = refused("--simulate", "host")
    assert (error.exit_code, error.seen) == (3, "no usable GPU: this machine has none")
    with_isolation = refused("--isolate", "pid")  # Advice to install UCX would not help here
    assert with_isolation.seen.startswith("no usable GPU")


@pytest.mark.parametrize(
    ("words", "said", "cure"),
    [((), "--backend ucx: no UCX was found", "pip install libucx-cu13"),
     (("--backend", "nixl"), "--backend nixl: NIXL is not in this Python environment", "pip install nixl")],
)  # fmt: skip
def test_missing_libraries_are_named_with_their_package(
    words: tuple[str, ...], said: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubench.jobs.kv.ucx_copies", lambda _: {})
    monkeypatch.setattr("gpubench.jobs.kv.is_nixl_installed", lambda: False)
    monkeypatch.setattr("gpubench.jobs.kv.usable_driver", lambda _: None)
    error = refused(*words)
    assert (error.exit_code, error.seen) == (3, said)
    assert cure in error.next_step


def test_kv_under_a_launcher_is_refused() -> None:
    ended = gpubench("kv", env=environment(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "kv starts the two processes of each transfer itself" in ended.stderr


def test_a_narrow_terminal_keeps_the_path_and_the_verdict() -> None:
    text = gpubench("kv", *H200, "--fault", "node0:kv=expandable", "--width", "80").stdout
    *page, last = text.rstrip("\n").splitlines()
    assert max(map(len, page)) <= 80
    assert len(last) <= 160
    assert re.search(r"GPU0 +GPU1 .*host-staged, tcp/lo .*FAIL", text)


def test_kv_ends_when_it_is_interrupted() -> None:
    words = [sys.executable, "-m", "gpubench", "kv", "--simulate", "hgx-h200-8", "--sizes", "1K:256M:2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as started:
        time.sleep(1.0)
        os.kill(started.pid, signal.SIGINT)
        started.communicate(timeout=60)
    assert started.returncode in (0, 130)


def check(*words: str) -> tuple[int, dict[str, Any]]:
    ended = CliRunner().invoke(app, ["check", *words, "--format", "json"], catch_exceptions=False)
    return ended.exit_code, json.loads(ended.stdout)


def kv_check(document: dict[str, Any]) -> list[tuple[str, int, str | None]]:
    return [(row["verdict"], row["findings"], row["note"]) for row in document["checks"] if row["check"] == "kv"]


def test_check_makes_a_transfer_only_if_it_is_asked_for(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    code, plain = check(*H200)
    asked_code, asked = check(*H200, "--kv", "--record", folder)
    assert (code, asked_code, plain.get("kv"), kv_check(plain)) == (0, 0, None, [])
    assert [(row["source"], row["destination"], row["direction"], row["verdict"]) for row in asked["kv"]] == [
        (f"GPU{source}", f"GPU{1 - source}", way, "PASS") for source in (0, 1) for way in ("write", "read")
    ]
    assert kv_check(asked) == [("PASS", 0, None)]
    assert asked["findings"] == plain["findings"]
    assert check("--replay", folder)[1]["kv"] == asked["kv"]


@pytest.mark.parametrize("fault", KINDS)
def test_a_fault_of_transfers_is_the_same_finding_in_check(fault: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    code, document = check(*H200, "--kv", "--fault", fault, "--record", folder)
    (finding,) = document["findings"]
    _, alone = report(*H200, "--fault", fault, "--pairs", "0-1")
    assert (code, finding, kv_check(document)) == (1, alone["findings"][0], [("FAIL", 1, None)])
    replayed_code, replayed = check("--replay", folder)
    assert (replayed_code, replayed["findings"]) == (1, [finding])


def test_an_edited_check_passes_no_transfer_through_host_memory(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    check(*H200, "--kv", "--fault", "node0:kv=pid", "--record", str(folder))
    path = folder / "check.jsonl"
    line = json.loads(path.read_text())
    line["findings"], line["transferred"]["verdict"] = [], "PASS"
    path.write_text(json.dumps(line) + "\n")
    code, document = check("--replay", str(folder))
    assert (code, document["verdict"], kv_check(document)) == (1, "FAIL", [("FAIL", 0, None)])


@pytest.mark.parametrize("fault", ["link0-1:speed=0.4", "gpu2:nvlink=9"])
def test_a_fault_of_the_links_is_no_finding_about_transfers(fault: str) -> None:
    _, document = check(*H200, "--kv", "--fault", fault)
    assert [found[0] for found in kv_check(document)] == ["PASS"]


def test_faults_of_transfers_need_a_check_of_transfers() -> None:
    error = CliRunner().invoke(app, ["check", *H200, "--fault", "node0:kv=pid"]).exception
    assert isinstance(error, GpubenchError)
    assert (error.exit_code, error.seen) == (2, "--fault of a KV transfer without --kv")


def test_check_without_ucx_says_that_it_made_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubench.jobs.kv.ucx_copies", lambda _: {})
    nodes = [Topology(snapshots(parse_machine("hgx-h200-2"))[0])]
    found = ChildCommands(nodes, Depth.DEFAULT, 30.0).transfers().transferred
    assert found is not None
    assert (found.verdict, found.rows) == ("SKIP", ())
    assert found.note == "not measured: --backend ucx: no UCX was found"


def test_a_transfer_that_ends_without_a_report_is_an_error_of_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, the child of check cannot measure anything."""
    monkeypatch.setattr("gpubench.jobs.kv.choose_library", lambda _: (None, {}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nodes = [Topology(snapshots(parse_machine("hgx-h200-2"))[0])]
    found = ChildCommands(nodes, Depth.DEFAULT, 60.0).transfers().transferred
    assert found is not None
    assert (found.verdict, found.note.startswith("gpubench kv ended with exit code 3")) == ("ERROR", True)


def test_a_cluster_is_measured_on_its_first_node() -> None:
    machine = ("kv", "--simulate", "hgx-h100-8*2", "--pairs", "0-1", *QUICK)
    healthy = gpubench(*machine)
    assert (healthy.returncode, "node1" in healthy.stdout) == (0, False)
    elsewhere = gpubench(*machine, "--fault", "node1:kv=pid")
    assert elsewhere.returncode == 2
    assert "on a node that kv does not measure" in elsewhere.stderr


def test_many_blocks_alone_leave_the_path_of_a_healthy_machine_undisputed() -> None:
    found = gpubench("kv", "--simulate", "hgx-h200-4/2", "--sizes", "256M", "--blocks", "4096")
    assert (found.returncode, "path-disputed" in found.stdout) == (0, False)
