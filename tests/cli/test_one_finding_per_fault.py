"""The findings of check and p2p on simulated faults, exactly: one fault is one finding, two faults are two.

To add a fault, add a line to ONE or TWO: machine, faults, and id and subject of each FAIL and WARN of a command.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.model.profiles.fault import FAULT_KEYS
from tests.cli.running import ROOT

HGX, FOUR, TWO_GPUS, OVER_PCIE, MESH, CARDS = (
    *("hgx-h100-8", "hgx-h200-4", "hgx-h200-2", "l40s-8", "dgx-1-v100", "rtx-4090-2"),
)
Found = tuple[tuple[str, str], ...]
NOTHING: Found = ()
_BUS_ID = re.compile(r" \([0-9a-f:.]+\)")
_MORE = re.compile(r", .* more$|, GPU.*")


@cache
def findings(command: str, machine: str, *faults: str) -> tuple[Found, str]:
    """Id and first subject of each FAIL and WARN, without PCI addresses, and the last line."""
    options = [option for fault in faults for option in ("--fault", fault)]
    result = CliRunner().invoke(app, [command, "--simulate", machine, *options, "--format", "json"])
    document = json.loads(result.stdout)
    found = [each for each in document["findings"] if each["severity"] in ("FAIL", "WARN")]
    return tuple((each["id"], _MORE.sub("", _BUS_ID.sub("", each["subject"]))) for each in found), document["sentence"]


def one(id_: str, subject: str) -> Found:
    return ((id_, subject),)


P2P_SLOW, STAGED, REFUSED = "p2p-slow", "host-staged", "peer-access-refused"
BOTH_ENDS = (("nvlink-down", "GPU0"), ("nvlink-down", "GPU3"))
ONE: tuple[tuple[str, str, Found, Found], ...] = (
    (HGX, "gpu3:nvlink=9", one("nvlink-down", "GPU3"), one("nvlink-down", "GPU3")),
    (HGX, "gpu3:nvlink=0", one("nvlinks-all-down", "GPU3"), one("nvlinks-all-down", "GPU3")),
    (HGX, "gpu3:speed=0.5", one(P2P_SLOW, "GPU3"), one(P2P_SLOW, "GPU3")),
    (HGX, "gpu3:width=4", one("pcie-width", "GPU3"), one("pcie-width", "GPU3")),
    (HGX, "gpu3:generation=1", one("pcie-generation", "GPU3"), one("pcie-generation", "GPU3")),
    (HGX, "gpu3:p2p=NS", one(REFUSED, "GPU0 → GPU3"), one(REFUSED, "GPU0 → GPU3")),
    (HGX, "gpu3:cuda_peer=no", one("cuda-nvml-disagree", "GPU0 → GPU3"), one("cuda-nvml-disagree", "GPU0 → GPU3")),
    (HGX, "gpu3:fabric=not_started", one("fabric-not-ready", "GPU3"), one("fabric-not-ready", "GPU3")),
    (HGX, "gpu3:health=degraded_bandwidth", one("fabric-unhealthy", "GPU3"), one("fabric-unhealthy", "GPU3")),
    (HGX, "gpu3:lost=yes", one("gpu-lost", "GPU3"), one("gpu-lost", "GPU3")),
    (HGX, "gpu3:missing=yes", one("gpu-missing", "node0"), one("gpu-missing", "node0")),
    (HGX, "gpu3:busy=4711", one("gpu-in-use", "GPU3"), one("gpu-in-use", "GPU3")),
    (HGX, "gpu3:rows=pending", one("row-remap-pending", "GPU3"), one("row-remap-pending", "GPU3")),
    (HGX, "gpu3:rows=failure", one("row-remap-failed", "GPU3"), one("row-remap-failed", "GPU3")),
    (HGX, "gpu3:ecc=off", one("ecc-off", "GPU3"), NOTHING),
    (HGX, "gpu3:errors=3", one("memory-errors", "GPU3"), NOTHING),
    (HGX, "gpu3:temperature=95", one("gpu-hot", "GPU3"), NOTHING),
    (HGX, "gpu3:replays=9", NOTHING, NOTHING),
    (HGX, "gpu3:mig=on", NOTHING, NOTHING),
    (HGX, "gpu3:throttle=hw_slowdown", one("gpu-hw-slowdown", "GPU3"), one("gpu-hw-slowdown", "GPU3")),
    (HGX, "gpu3:throttle=sw_power_cap", one("clocks-capped", "GPU3"), NOTHING),
    (HGX, "link1-2:speed=0.5", one(P2P_SLOW, "GPU1 → GPU2"), one(P2P_SLOW, "GPU1 → GPU2")),
    (HGX, "link1-2:staged=yes", one(STAGED, "GPU1 → GPU2"), one(STAGED, "GPU1 → GPU2")),
    (HGX, "link1-2:p2p=NS", one(REFUSED, "GPU1 → GPU2"), one(REFUSED, "GPU1 → GPU2")),
    (HGX, "link1-2:corrupts=yes", one("wrong-data", "GPU1 → GPU2"), one("wrong-data", "GPU1 → GPU2")),
    (HGX, "nic2:state=down", one("rdma-port-down", "mlx5_2"), NOTHING),
    (HGX, "nic2:rate=100", one("rdma-port-slow", "mlx5_2"), NOTHING),
    (HGX, "nic2:width=4", one("pcie-width", "mlx5_2"), NOTHING),
    (HGX, "nic2:generation=1", one("pcie-generation", "mlx5_2"), NOTHING),
    (HGX, "nic2:missing=yes", one("nic-absent", "GPU2"), NOTHING),
    (HGX, "nic2:errors=9", NOTHING, NOTHING),
    (HGX, "node0:acs=on", one("acs-nic-redirect", "GPU0 – mlx5_0"), NOTHING),
    (HGX, "node0:iommu=on", one("iommu-translating", "GPU0"), NOTHING),
    (HGX, "node0:env=NCCL_P2P_DISABLE=1", one("nccl-p2p-disabled", "GPU0 → GPU1"), NOTHING),
    (HGX, "node0:env=NCCL_MAX_NCHANNELS=1", one("nccl-few-channels", "this job"), NOTHING),
    (HGX, "node0:env=NCCL_PROTO=LL", one("nccl-algorithm-forced", "this job"), NOTHING),
    (HGX, "node0:env=NCCL_ALGO=Tree", one("nccl-algorithm-forced", "this job"), NOTHING),
    (TWO_GPUS, "gpu1:nvlink=9", one("nvlink-down", "GPU1"), one("nvlink-down", "GPU1")),
    (TWO_GPUS, "gpu1:speed=0.5", one(P2P_SLOW, "GPU0 → GPU1"), one(P2P_SLOW, "GPU0 → GPU1")),
    (TWO_GPUS, "gpu1:p2p=NS", one(REFUSED, "all 2 GPU pairs"), one(REFUSED, "all 2 GPU pairs")),
    (TWO_GPUS, "link0-1:staged=yes", one(STAGED, "GPU0 → GPU1"), one(STAGED, "GPU0 → GPU1")),
    (OVER_PCIE, "gpu3:width=4", one("pcie-width", "GPU3"), one("pcie-width", "GPU3")),
    (OVER_PCIE, "gpu3:speed=0.5", one("host-copies-slow", "GPU3"), one("host-copies-slow", "GPU3")),
    (OVER_PCIE, "link1-2:speed=0.5", one(P2P_SLOW, "GPU1 → GPU2"), one(P2P_SLOW, "GPU1 → GPU2")),
    (OVER_PCIE, "link1-2:staged=yes", one(STAGED, "GPU1 → GPU2"), one(STAGED, "GPU1 → GPU2")),
    (OVER_PCIE, "gpu3:p2p=CNS", one(REFUSED, "GPU0 → GPU3"), one(REFUSED, "GPU0 → GPU3")),
    (OVER_PCIE, "gpu3:p2p=NS", one(REFUSED, "GPU0 → GPU3"), one(REFUSED, "GPU0 → GPU3")),
    ("hgx-a100-4", "gpu1:nvlink=9", one("nvlink-down", "GPU1"), one("nvlink-down", "GPU1")),
    (MESH, "gpu3:width=4", one("pcie-width", "GPU3"), one("pcie-width", "GPU3")),
    (MESH, "gpu3:speed=0.5", one(P2P_SLOW, "GPU3"), one(P2P_SLOW, "GPU3")),
    # A link has two ends, and each has its own number there.
    (MESH, "link0-3:nvlink=1", BOTH_ENDS, BOTH_ENDS),
    (MESH, "link0-3:speed=0.5", one(P2P_SLOW, "GPU0 → GPU3"), one(P2P_SLOW, "GPU0 → GPU3")),
)
"""One fault: what check finds, and what p2p finds. NOTHING is written by hand where a command cannot see a fault."""

ELSEWHERE = {
    *("driver", "cuda", "peermem"),  # versions and modules of one node are facts, and no fault
    *("clique", "imex", "mnnvl"),  # NVLink domains of several nodes
    *("silent", "driver_missing"),  # ERROR: nothing could be measured
    *("bandwidth", "traffic", "dips", "dies", "hangs", "uplink", "hang", "kv", "ipc"),  # of other commands alone
}
"""Keys of --fault of which no line is."""

TWO: tuple[tuple[str, tuple[str, str], tuple[tuple[str, str], tuple[str, str]]], ...] = (
    (HGX, ("gpu3:speed=0.5", "link0-6:staged=yes"), ((P2P_SLOW, "GPU3"), (STAGED, "GPU0 → GPU6"))),
    (HGX, ("gpu6:speed=0.5", "link0-6:staged=yes"), ((P2P_SLOW, "GPU6"), (STAGED, "GPU0 → GPU6"))),
    (HGX, ("gpu3:nvlink=9", "link0-6:staged=yes"), (("nvlink-down", "GPU3"), (STAGED, "GPU0 → GPU6"))),
    (HGX, ("gpu5:nvlink=12", "gpu3:speed=0.5"), (("nvlink-down", "GPU5"), (P2P_SLOW, "GPU3"))),
    (HGX, ("gpu3:nvlink=12", "gpu3:speed=0.5"), (("nvlink-down", "GPU3"), (P2P_SLOW, "GPU3"))),
    (HGX, ("gpu3:p2p=NS", "link1-2:staged=yes"), ((REFUSED, "GPU0 → GPU3"), (STAGED, "GPU1 → GPU2"))),
    (HGX, ("gpu3:width=4", "gpu3:speed=0.5"), (("pcie-width", "GPU3"), (P2P_SLOW, "GPU3"))),
    (OVER_PCIE, ("gpu3:width=4", "link1-2:speed=0.5"), (("pcie-width", "GPU3"), (P2P_SLOW, "GPU1 → GPU2"))),
)
"""Two independent faults are two findings in both commands."""

CAUSE_OF_THE_FIGURE = (
    (("gpu3:speed=0.5", "link0-6:staged=yes"), STAGED, "(6 %)"),
    (("gpu3:nvlink=9", "link0-6:staged=yes"), STAGED, "(6 %)"),
    (("gpu5:nvlink=12", "gpu3:speed=0.5"), P2P_SLOW, "(50 %)"),
)
"""Two faults of which one alone costs as much as was measured: all-reduce stands below that one."""


@pytest.mark.parametrize(("machine", "fault", "in_check", "in_p2p"), ONE, ids=[f"{line[0]} {line[1]}" for line in ONE])
def test_one_fault_is_one_finding(machine: str, fault: str, in_check: Found, in_p2p: Found) -> None:
    assert findings("check", machine, fault)[0] == in_check
    assert findings("p2p", machine, fault)[0] == in_p2p


NVLINK_17, ENV = "gpu5:nvlink=17", "node0:env=NCCL_P2P_DISABLE=1"
PARTS = (
    ("allreduce", HGX, (NVLINK_17, ENV), (STAGED, "ranks 0 → 1"), ("nvlink-down", "GPU5")),
    ("allreduce", HGX, (NVLINK_17, "link0-3:staged=yes"), (STAGED, "ranks 0 → 3, 3 → 0"), ("nvlink-down", "GPU5")),
    ("allreduce", HGX, ("gpu5:fabric=in_progress", ENV), (STAGED, "ranks 0 → 1"), ("fabric-not-ready", "GPU5")),
    (
        *("allreduce", HGX, ("gpu5:fabric=in_progress", "link0-3:staged=yes")),
        *((STAGED, "ranks 0 → 3, 3 → 0"), ("fabric-not-ready", "GPU5")),
    ),
    ("allreduce", HGX, ("gpu5:fabric=in_progress",), ("fabric-not-ready", "GPU5")),
    ("check", MESH, ("link0-1:staged=yes",), (STAGED, "GPU0 → GPU1")),
    ("check", "hgx-a100-4", ("link0-2:staged=yes",), (STAGED, "GPU0 → GPU2")),
    ("check", "gb200-nvl72", ("node3:imex=down",), ("imex-service-stopped", "node3")),
    ("check", "gb200-nvl72", ("node3:clique=7",), ("mnnvl-clique-differs", "node3")),
)
"""Command, machine, faults, and exactly what it finds: a fault explains the paths that end at it, and no others."""


@pytest.mark.parametrize(("command", "machine", "faults", "found"), [(*each[:3], each[3:]) for each in PARTS])
def test_a_fault_explains_what_it_is_part_of(command: str, machine: str, faults: tuple[str, ...], found: Found) -> None:
    assert findings(command, machine, *faults)[0] == found


def test_what_is_left_of_paths_has_a_cause_of_its_own() -> None:
    options = ["--fault", "gpu3:p2p=NS", "--fault", "link1-2:staged=yes", "--format", "json"]
    document = json.loads(CliRunner().invoke(app, ["p2p", "--simulate", HGX, *options]).stdout)
    assert [each["cause"][:30] for each in document["findings"] if each["id"] == STAGED] == [
        "the driver grants peer access,"
    ]


@pytest.mark.parametrize("status", ["CNS", "NS"])
def test_a_refusal_is_not_blamed_on_a_fabric_that_is_ready(status: str) -> None:
    options = ["--fault", f"gpu5:p2p={status}", "--format", "json"]
    document = json.loads(CliRunner().invoke(app, ["topo", "--simulate", HGX, *options]).stdout)
    refused = next(each for each in document["findings"] if each["id"] == REFUSED)
    assert "abric" not in refused["cause"]
    assert refused["commands"] == ["nvidia-smi topo -p2p r"]


SLOW_LATELY = (
    ("node0:env=NCCL_P2P_DISABLE=1", "host-staged: "),
    ("link0-3:staged=yes", "host-staged: "),
    (NVLINK_17, "a device"),
)
"""A fault of the newest result of an allreduce, and how the cause begins that compare names."""


@pytest.mark.parametrize(("fault", "cause"), SLOW_LATELY)
def test_compare_names_the_cause_that_the_new_result_holds(fault: str, cause: str, tmp_path: Path) -> None:
    base, new = (str(tmp_path / name) for name in ("base.json", "new.json"))
    sweep = ["allreduce", "--simulate", HGX, "--sizes", "256M"]
    CliRunner().invoke(app, [*sweep, "-o", base])
    CliRunner().invoke(app, [*sweep, "--fault", fault, "-o", new])
    found = json.loads(CliRunner().invoke(app, ["compare", base, new, "--format", "json"]).stdout)["findings"]
    stored = json.loads(Path(new).read_text())["findings"][0]
    assert [each["id"] for each in found] == ["slower"]
    assert found[0]["cause"].startswith(cause)
    assert (found[0]["commands"] == stored["commands"]) is (stored["id"] == STAGED)


def test_every_fault_has_a_line() -> None:
    tried = {fault.partition(":")[2].partition("=")[0] for _, fault, *_ in ONE}
    assert {key.key for key in FAULT_KEYS} - ELSEWHERE == tried - ELSEWHERE


@pytest.mark.parametrize("command", ["check", "p2p"])
@pytest.mark.parametrize(("machine", "faults", "found"), TWO, ids=["+".join(line[1]) for line in TWO])
def test_two_faults_are_two_findings(command: str, machine: str, faults: tuple[str, str], found: Found) -> None:
    assert sorted(findings(command, machine, *faults)[0]) == sorted(found)


@pytest.mark.parametrize(("faults", "cause", "percent"), CAUSE_OF_THE_FIGURE)
def test_a_slow_collective_stands_below_the_fault_that_costs_as_much(
    faults: tuple[str, ...], cause: str, percent: str
) -> None:
    options = [option for fault in faults for option in ("--fault", fault)]
    document = json.loads(CliRunner().invoke(app, ["check", "--simulate", HGX, *options, "--format", "json"]).stdout)
    below = {each["id"]: " ".join(each["consequences"]) for each in document["findings"]}
    assert [id_ for id_, lines in below.items() if "allreduce of" in lines] == [cause]
    assert percent in document["sentence"]


COMPARED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (HGX, ("gpu3:nvlink=9",), ("nvlink-down: GPU3",)),
    (HGX, ("gpu3:speed=0.5",), ("p2p-slow: GPU3",)),
    (HGX, ("gpu3:p2p=NS",), ("peer-access-refused: GPU0 → GPU3",)),
    (HGX, ("gpu3:width=4",), ("pcie-width: GPU3",)),
    (HGX, ("gpu3:lost=yes",), ("gpu-lost: GPU3",)),
    (HGX, ("gpu3:nvlink=9", "link1-2:staged=yes"), ("nvlink-down: GPU3", "host-staged: GPU1 → GPU2")),
    (HGX, ("gpu3:temperature=95", "link1-2:staged=yes"), ("host-staged: GPU1 → GPU2", "gpu-hot: GPU3")),
    (OVER_PCIE, ("gpu3:width=4",), ("pcie-width: GPU3",)),
    (OVER_PCIE, ("gpu3:speed=0.5",), ("host-copies-slow: GPU3",)),
)
"""A healthy check compared with one of an ill machine: each fault is one new finding, and nothing else is found."""


@pytest.mark.parametrize(("machine", "faults", "found"), COMPARED, ids=["+".join(line[1]) for line in COMPARED])
def test_compare_reports_a_fault_once(
    machine: str, faults: tuple[str, ...], found: tuple[str, ...], tmp_path: Path
) -> None:
    options = [option for fault in faults for option in ("--fault", fault)]
    base, new = (str(tmp_path / name) for name in ("base.json", "new.json"))
    CliRunner().invoke(app, ["check", "--simulate", machine, "-o", base])
    CliRunner().invoke(app, ["check", "--simulate", machine, *options, "-o", new])
    document = json.loads(CliRunner().invoke(app, ["compare", base, new, "--format", "json"]).stdout)
    grave = [each for each in document["findings"] if each["severity"] in ("FAIL", "WARN")]
    assert {each["id"] for each in grave} == {"new-finding"}
    assert tuple(_MORE.sub("", _BUS_ID.sub("", each["subject"])) for each in grave) == found


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("node3.gpu3:nvlink=9", one("nvlink-down", "node3 GPU3")),
        ("node2.gpu1:p2p=NS", one(REFUSED, "node2 GPU0 → GPU1")),
        ("node1.link0-6:staged=yes", one("gpu-pair-slow", "node1 GPU0 and GPU6")),
    ],
)
def test_scan_names_a_part_of_a_node_once(fault: str, found: Found) -> None:
    assert findings("scan", "hgx-h100-8*4", fault)[0] == found


def test_the_profile_of_another_model_is_one_finding(tmp_path: Path) -> None:
    profile = tmp_path / "ours.toml"
    profile.write_text((ROOT / "profiles" / "hgx-h200-8.toml").read_text())
    result = CliRunner().invoke(app, ["check", "--simulate", HGX, "--profile", str(profile), "--format", "json"])
    document = json.loads(result.stdout)
    assert [each["id"] for each in document["findings"]] == ["gpu-model"]
    assert document["sentence"].endswith("NVIDIA H100 80GB HBM3. Try: nvidia-smi -L")


def test_what_a_condition_names_is_no_difference_between_nodes() -> None:
    assert findings("check", "hgx-h100-8*4", "node3.gpu5:nvlink=12")[0] == one("nvlink-down", "node3 GPU5")
    # Nothing but the comparison names a module that is missing on one node.
    assert findings("check", "hgx-h100-8*4", "node3:peermem=no")[0] == one("node-differs", "node3")
