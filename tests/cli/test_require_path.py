"""`--require-path` of every command that has it: exit code 1 for another path, 2 for a missing one, 3 if not proven."""

import json
from pathlib import Path

import pytest

from tests.cli.running import ROOT, environment, gpubench, without_gpus

LOGS = ROOT / "tests/logs"
STAGED = ("--fault", "link0-3:staged=yes")
QUICK = ("--no-patterns", "--no-host")
COMMANDS = {
    "allreduce": ("allreduce", "--sizes", "256M"),
    "p2p": ("p2p", *QUICK),
    "kv": ("kv", "--sizes", "256M", "--blocks", "1"),
    "check": ("check",),
    "watch": ("watch", "--for", "3s"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_healthy_machine_passes(name: str) -> None:
    result = gpubench(*COMMANDS[name], "--simulate", "hgx-h200-4", "--require-path", "nvlink,p2p", "-q")
    assert (result.returncode, "path-required" in result.stdout) == (0, False), result.stdout


@pytest.mark.parametrize(
    ("name", "fault", "line"),
    [
        ("allreduce", STAGED, "2 of 12 pairs used a path other than nvlink: rank 0 → 3 host memory, rank 3 → 0 host"),
        ("p2p", STAGED, "2 of 12 pairs used a path other than nvlink: GPU0 → GPU3 host memory, GPU3 → GPU0 host"),
        ("check", STAGED, "2 of 12 pairs used a path other than nvlink: GPU0 → GPU3 host memory, GPU3 → GPU0 host"),
        ("kv", ("--fault", "node0:kv=pid"), "12 of 12 pairs used a path other than nvlink: GPU0 → GPU1 tcp/lo"),
        ("watch", ("--fault", "node0:traffic=staged"), "1 of 1 job used a path other than nvlink: python (torch"),
        ("allreduce", ("--fault", "gpu1:nvlink=0"), "6 of 12 pairs used a path other than nvlink: rank 0 → 1"),
        ("check", ("--fault", "node0:env=NCCL_P2P_DISABLE=1"), "12 of 12 pairs used a path other than nvlink: GPU0"),
    ],
)
def test_another_path_fails_and_is_named_in_the_last_line(name: str, fault: tuple[str, ...], line: str) -> None:
    arguments = ("--simulate", "hgx-h200-4", *fault, "--require-path", "nvlink", "--format", "json")
    result = gpubench(*COMMANDS[name], *arguments)
    document = json.loads(result.stdout)
    assert (result.returncode, document["verdict"]) == (1, "FAIL")
    assert document["findings"][0]["id"] == "path-required"
    assert document["findings"][0]["subject"].startswith(line)
    assert line.partition(":")[0] in document["sentence"]


def test_a_known_cause_is_in_the_finding_and_its_cure_is_the_next_command() -> None:
    fault = ("--simulate", "hgx-h200-4", "--fault", "node0:env=NCCL_P2P_DISABLE=1")
    for command in ("allreduce", "check"):
        document = json.loads(gpubench(*COMMANDS[command], *fault, "--require-path", "p2p", "--format", "json").stdout)
        assert "NCCL_P2P_DISABLE=1 in the environment" in document["findings"][0]["cause"]
        assert document["sentence"].endswith("Try: gpubench p2p && unset NCCL_P2P_DISABLE")


@pytest.mark.parametrize(
    ("command", "machine", "required", "reason"),
    [
        ("allreduce", "l40s-8", "nvlink", "there are no NVLinks, and the paths are PHB, SYS"),
        ("p2p", "rtx-4090-2", "p2p", "no peer access between GPUs: GPU not supported"),
        ("check", "hgx-h100-8", "ib", "it applies between nodes, but there is only one node: node0"),
        ("kv", "hgx-h100-8*2", "ib", "it applies between nodes, but there is only one node: node0"),
        ("allreduce", "hgx-h100-8*2", "roce", "node0 has mlx5_0 (infiniband)"),
        ("allreduce", "mi300x-8", "nvlink", "there are no NVLinks, and the paths are XGMI"),
        ("watch", "hgx-h100-8*2", "efa", "node0 has mlx5_0 (infiniband)"),
        ("check", "hgx-h100-8*2", "mnnvl", "no GPU belongs to an NVLink domain of several nodes"),
        ("check", "gh200-1", "nvlink", "it applies between GPUs of one node, but there is only one on node0"),
    ],
)
def test_a_path_that_no_hardware_here_has_is_wrong_usage(
    command: str, machine: str, required: str, reason: str
) -> None:
    result = gpubench(*COMMANDS[command], "--simulate", machine, "--require-path", required)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"--require-path {required}: {reason}" in result.stderr


@pytest.mark.parametrize(
    ("machine", "required"),
    [("hgx-h100-8*2", "nvlink,ib"), ("gb200-nvl72*4", "mnnvl"), ("gb200-nvl-4*2", "nvlink"), ("dgx-1-v100", "nvlink")],
)
def test_a_simulated_collective_takes_the_paths_of_its_profile(machine: str, required: str) -> None:
    result = gpubench(*COMMANDS["allreduce"], "--simulate", machine, "--require-path", required, "-q")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("log", "required", "code", "words"),
    [
        ("h200x4-normal", "p2p", 0, ""),
        ("h200x4-normal", "nvlink", 3, "4 of 4 pairs not proven to use nvlink: rank 0 → 1 P2P/CUMEM"),
        ("h200x4-p2p-disabled", "nvlink", 1, "4 of 4 pairs used a path other than nvlink: rank 0 → 1 SHM/direct"),
        (
            "h200x4-normal",
            "ib",
            2,
            "--require-path ib: no pair in this log can take that path: all use P2P/CUMEM",
        ),
        ("h100x1-two-hosts-of-two", "ib", 1, "2 of 2 pairs used a path other than ib: rank 1 → 2 NET/Socket"),
        (
            "h200x4-p2p-disabled",
            "ib",
            2,
            "--require-path ib: no pair in this log can take that path: all use SHM/direct",
        ),
        ("h100x1-four-ranks-one-gpu", "ib", 2, "--require-path ib: no pair in this log can take that path: all use"),
    ],
)
def test_logs_of_real_jobs(log: str, required: str, code: int, words: str) -> None:
    result = gpubench("explain", str(LOGS / log), "--require-path", required, "-q")
    assert result.returncode == code
    assert words in " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    ("log", "required", "code", "words"),
    [
        ("nixl-write-direct", "p2p", 0, ""),
        (
            "nixl-write-direct",
            "nvlink",
            3,
            "1 of 1 pair not proven to use nvlink: vm:598 cuda/GPU0 → cuda/dev[3] cuda",
        ),
        (
            "nixl-write-direct",
            "ib",
            2,
            "--require-path ib: no pair in this log can take that path: all use cuda_ipc/cuda",
        ),
        ("nixl-write-tcp-only", "p2p", 1, "1 of 1 pair used a path other than p2p: vm:1301 cuda/GPU0 → cuda tcp/lo"),
        ("perftest-tag-direct.client", "p2p", 0, ""),
        (
            "perftest-tag-no-cuda-ipc.server",
            "p2p",
            1,
            "2 of 2 pairs used a path other than p2p: vm:1733 cuda → cuda/GPU0",
        ),
        ("perftest-put-latency.client", "p2p", 3, "try: export UCX_PROTO_INFO=y"),
    ],
)
def test_tables_of_ucx_are_judged(log: str, required: str, code: int, words: str) -> None:
    result = gpubench("explain", str(ROOT / f"tests/ucx/{log}.log"), "--require-path", required, "-q")
    shown = " ".join((result.stdout + result.stderr).split())
    assert (result.returncode, words in shown, "NCCL_DEBUG" in shown) == (code, True, False), shown


def test_counters_of_a_node_do_not_prove_the_network_of_a_job() -> None:
    arguments = ("--simulate", "hgx-h100-8*2", "--require-path", "ib", "-q")
    result = gpubench(*COMMANDS["watch"], *arguments)
    assert result.returncode == 3
    assert "2 of 2 jobs not proven to use ib: python (torch node0:29500) on node0 RDMA" in " ".join(
        result.stdout.split()
    )


def test_kv_proposes_its_own_proof_and_refuses_faults_that_it_ignores() -> None:
    machine = (*COMMANDS["kv"], "--simulate", "hgx-h200-4")
    unproven = gpubench(*machine, "--require-path", "p2p", "--fault", "link0-1:staged=yes", "--format", "json")
    finding = json.loads(unproven.stdout)["findings"][0]
    assert finding["subject"].startswith("2 of 12 pairs not proven to use p2p: GPU0 → GPU1")
    assert finding["next_command"] == "gpubench p2p --evidence"
    refused = gpubench(*machine, "--fault", "node0:env=NCCL_P2P_DISABLE=1")
    assert (refused.returncode, "--fault node0:env=NCCL_P2P_DISABLE=1 with kv" in refused.stderr) == (2, True)


def nccl_log(path: str, devices: str = "", nodes: int = 1) -> str:
    """A log of two ranks whose connection takes this path."""
    hosts, head = ("a", "b"), "NCCL INFO"
    lines = []
    for rank in range(2):
        who = f"{hosts[rank * (nodes - 1)]}:{10 + rank}:{10 + rank} [{rank}] {head}"
        init = f"comm 0x{rank + 1} rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank + 1}000"
        lines += [
            f"{who} Bootstrap : Using eth0:10.0.0.{rank}<0>",
            f"{who} NCCL version 2.28.9+cuda13.0",
            *([f"{who} NET/IB : Using {devices}; OOB eth0:10.0.0.{rank}<0>"] if devices else []),
            f"{who} ncclCommInitRankConfig {init} commId 0xabc - Init START",
            f"{who} GPU/0-1000 :GPU/0-1000 (0/5000.0/LOC) GPU/0-2000 (2/240.0/NVL) ",
            f"{who} GPU/0-2000 :GPU/0-1000 (2/240.0/NVL) GPU/0-2000 (0/5000.0/LOC) ",
        ]
        other = 1 - rank
        for way in ("[send]", "[receive]") if path.startswith("NET") else ("",):
            ends = (other, rank) if way == "[receive]" else (rank, other)
            shown = f"{way} via {path}" if way else f"via {path}"
            lines.append(f"{who} Channel 00/0 : {ends[0]}[{ends[0]}] -> {ends[1]}[{ends[1]}] {shown}")
        lines.append(f"{who} ncclCommInitRankConfig {init} commId 0xabc - Init COMPLETE")
    return "\n".join(lines) + "\n"


DEVICES = "[0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]"


@pytest.mark.parametrize(
    ("log", "required", "code"),
    [
        (nccl_log("P2P/CUMEM"), "nvlink", 0),
        (nccl_log("NET/IB/1/GDRDMA", DEVICES, nodes=2), "ib", 0),
        (nccl_log("NET/IB/0/GDRDMA", DEVICES, nodes=2), "ib", 1),
        (nccl_log("NET/IB/0/GDRDMA", DEVICES, nodes=2), "roce", 0),
        (nccl_log("NET/IB/1/GDRDMA", nodes=2), "ib", 3),
        (nccl_log("NET/Socket/0", DEVICES, nodes=2), "ib", 1),
        (nccl_log("P2P/CUMEM").replace("[1] NCCL INFO Channel", "[1] NCCL"), "nvlink", 3),
    ],
)
def test_the_number_of_a_device_decides_between_infiniband_and_roce(
    tmp_path: Path, log: str, required: str, code: int
) -> None:
    (tmp_path / "job.log").write_text(log)
    result = gpubench("explain", str(tmp_path / "job.log"), "--require-path", required, "-q")
    assert result.returncode == code, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--require-path", "nvlnk"), "--require-path 'nvlnk' is not known"),
        (("allreduce", "--require-path", "nvlink", "--no-evidence"), "--require-path with --no-evidence"),
        (("allreduce", "--require-path", "nvlink", "--split", "node"), "--require-path with --split node"),
        (("check", "--require-path", "nvlink", "--quick"), "--quick and --require-path exclude each other"),
        (("watch", "--require-path", "nvlink", "--hang"), "--hang and --require-path exclude each other"),
    ],
)
def test_options_that_contradict_it_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = gpubench(*arguments, "--simulate", "hgx-h200-4")
    assert result.returncode == 2
    assert words in result.stderr


@without_gpus
def test_cpu_ranks_have_no_path_between_gpus() -> None:
    result = gpubench("allreduce", "--require-path", "nvlink")
    assert result.returncode == 2
    assert "--require-path needs GPUs" in result.stderr


def test_a_default_from_the_environment_asserts_too() -> None:
    variables = environment(GPUBENCH_REQUIRE_PATH="nvlink,p2p")
    result = gpubench(*COMMANDS["allreduce"], "--simulate", "hgx-h200-4", *STAGED, "-q", env=variables)
    assert result.returncode == 1
    assert "a path other than nvlink" in result.stdout
    assert "a path other than p2p" in result.stdout


@pytest.mark.parametrize("name", ["allreduce", "p2p", "check", "kv"])
def test_a_recording_is_judged_by_the_requirement_of_its_replay(tmp_path: Path, name: str) -> None:
    fault = ("--fault", "node0:kv=pid") if name == "kv" else STAGED
    record = gpubench(*COMMANDS[name], "--simulate", "hgx-h200-4", *fault, "--record", str(tmp_path), "--exit-zero")
    assert record.returncode == 0
    result = gpubench(COMMANDS[name][0], "--replay", str(tmp_path), "--require-path", "nvlink", "--format", "json")
    assert json.loads(result.stdout)["findings"][0]["id"] == "path-required"
    assert result.returncode == 1
