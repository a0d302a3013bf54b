"""A fault has one severity, subject, expected value, cause and cure, in every command that can see it."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.model.terms.verdict import FIGURES, WRONG_DATA

COMMANDS = {
    "topo": ("topo",),
    "p2p": ("p2p",),
    "kv": ("kv", "--blocks", "1"),
    "allreduce": ("allreduce", "--sizes", "256M"),
    "quick": ("check", "--quick"),
    "check": ("check",),
    "bare": (),
}
SCAN = {"scan": ("scan", "--quick")}  # Of three nodes or more
CHECKS = ("quick", "check", "bare")  # Those that look at clocks, memory, NICs' redirection and versions too
FACTS = ("topo", *CHECKS)
JOBS = (*FACTS, "allreduce")
ALL = (*JOBS, "p2p", "kv")
COPIES = ("p2p", "check", "bare")
USED = ("p2p", "kv", *CHECKS)

PART, PCIE, TWO, THREE = "hgx-h200-4", "l40s-8", "hgx-h100-4*2", "hgx-h100-4*3"

FAULTS = [
    (PART, "gpu2:nvlink=12", "nvlink-down", "FAIL", ALL),
    (PART, "gpu2:nvlink=0", "nvlinks-all-down", "FAIL", ALL),
    (PART, "gpu2:width=4", "pcie-width", "FAIL", ALL),
    (PART, "gpu2:generation=1", "pcie-generation", "WARN", FACTS),
    (PART, "gpu2:p2p=NS", "peer-access-refused", "FAIL", ALL),
    (PART, "link0-3:p2p=NS", "peer-access-refused", "FAIL", ALL),
    (PART, "gpu2:cuda_peer=no", "cuda-nvml-disagree", "FAIL", ALL),
    (PART, "gpu2:lost=yes", "gpu-lost", "FAIL", ALL),
    ("hgx-h100-8", "gpu2:missing=yes", "gpu-missing", "FAIL", ALL),
    (PART, "gpu2:mig=on", "mig-on", "SKIP", ALL),
    (PART, "gpu2:ecc=off", "ecc-off", "WARN", CHECKS),
    (PART, "gpu2:throttle=hw_slowdown", "gpu-hw-slowdown", "FAIL", ALL),
    (PART, "gpu2:throttle=sw_power_cap", "clocks-capped", "WARN", FACTS),
    (PART, "gpu2:rows=pending", "row-remap-pending", "FAIL", ALL),
    (PART, "gpu2:rows=failure", "row-remap-failed", "FAIL", ALL),
    (PART, "gpu2:fabric=not_started", "fabric-not-ready", "FAIL", ALL),
    (PART, "gpu2:health=degraded_bandwidth", "fabric-unhealthy", "FAIL", ALL),
    (PART, "gpu2:errors=9", "memory-errors", "FAIL", CHECKS),
    (PART, "gpu2:temperature=95", "gpu-hot", "WARN", CHECKS),
    (PART, "gpu2:busy=8342", "gpu-in-use", "WARN", USED),
    (PART, "gpu2:speed=0.5", "p2p-slow", "FAIL", COPIES),
    (PART, "link0-3:speed=0.4", "p2p-slow", "FAIL", COPIES),
    (PART, "link0-3:staged=yes", "host-staged", "FAIL", COPIES),
    (PART, "link0-3:corrupts=yes", "wrong-data", "FAIL", COPIES),
    ("hgx-h100-8", "nic1:state=down", "rdma-port-down", "FAIL", FACTS),
    ("hgx-h100-8", "nic1:rate=100", "rdma-port-slow", "FAIL", FACTS),
    ("hgx-h100-8", "nic1:width=1", "pcie-width", "FAIL", FACTS),
    ("hgx-h100-8", "nic1:generation=1", "pcie-generation", "WARN", FACTS),
    ("hgx-h100-8", "nic1:missing=yes", "nic-absent", "FAIL", FACTS),
    ("hgx-h100-8", "node0:acs=on", "acs-nic-redirect", "WARN", CHECKS),
    ("hgx-h100-8", "node0:iommu=on", "iommu-translating", "WARN", CHECKS),
    (PART, "node0:silent=nvml", "driver-silent", "ERROR", FACTS),
    (PART, "node0:driver_missing=yes", "driver-missing", "ERROR", FACTS),
    (PCIE, "gpu2:width=1", "pcie-width", "FAIL", ALL),
    (PCIE, "gpu2:generation=1", "pcie-generation", "WARN", JOBS),
    (PCIE, "gpu2:p2p=GNS", "peer-access-refused", "FAIL", ALL),
    (PCIE, "gpu2:p2p=CNS", "peer-access-refused", "WARN", ALL),
    (PCIE, "gpu2:p2p=NS", "peer-access-refused", "WARN", ALL),
    (PCIE, "link1-2:p2p=TNS", "peer-access-refused", "WARN", ALL),
    ("hgx-a100-4", "gpu1:nvlink=9", "nvlink-down", "FAIL", ALL),
    ("hgx-h100-8*2", "node1.gpu3:missing=yes", "gpu-missing", "FAIL", JOBS),
    (PCIE, "gpu2:rows=pending", "row-remap-pending", "FAIL", ALL),
    (PCIE, "link1-2:speed=0.5", "p2p-slow", "FAIL", COPIES),
    (TWO, "node1.gpu2:nvlink=12", "nvlink-down", "FAIL", JOBS),
    (TWO, "node1.gpu2:rows=pending", "row-remap-pending", "FAIL", JOBS),
    (TWO, "node1.nic1:state=down", "rdma-port-down", "FAIL", JOBS),
    (TWO, "node1:driver=550.54.15", "driver-differs", "FAIL", CHECKS),
    (TWO, "node1:driver_missing=yes", "driver-missing", "ERROR", FACTS),
    (THREE, "node1.gpu2:nvlink=12", "nvlink-down", "FAIL", (*JOBS, "scan")),
    (THREE, "node1.gpu2:rows=pending", "row-remap-pending", "FAIL", (*JOBS, "scan")),
    (THREE, "node1.nic1:state=down", "rdma-port-down", "FAIL", (*JOBS, "scan")),
    (THREE, "node1:driver_missing=yes", "driver-missing", "ERROR", (*FACTS, "scan")),
]
"""Machine, fault, the finding that names it with its severity, and the commands that can see it."""


OF_UCX = "kv-get-without-nvlink"
"""By default, UCX reads through host memory on every machine without NVLinks."""


def report(command: str, machine: str, *faults: str) -> dict[str, Any]:
    planted = [word for fault in faults for word in ("--fault", fault)]
    arguments = [*(COMMANDS | SCAN)[command], "--simulate", machine, *planted, "--format", "json", "--no-progress"]
    document: dict[str, Any] = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    document["findings"] = [finding for finding in document["findings"] if finding["id"] != OF_UCX]
    return document


def what_is_the_same(finding: dict[str, Any]) -> dict[str, Any]:
    """A finding without what a command measured: what follows from it, and the values of a slow copy."""
    measured = [
        "severity",
        "consequences",
        "expected_percent",
        *(["seen"] if finding["id"] in (*FIGURES, WRONG_DATA) else []),
    ]
    return {name: value for name, value in finding.items() if name not in measured}


@pytest.mark.parametrize(("machine", "fault", "id_", "severity", "commands"), FAULTS, ids=lambda each: str(each)[:30])
def test_a_fault_is_one_finding_in_every_command(
    machine: str, fault: str, id_: str, severity: str, commands: tuple[str, ...]
) -> None:
    found = {}
    for command in commands:
        document = report(command, machine, fault)
        named = [each for each in document["findings"] if each["id"] == id_]
        assert named, (command, document["sentence"])
        # A doubt that explains what fails, fails: the severity of its gravest consequence.
        assert named[0]["severity"] == severity or named[0]["consequences"], command
        assert document["verdict"] not in ("PASS", "SKIP") or severity == "SKIP", (command, document["sentence"])
        found[command] = what_is_the_same(named[0])
    first = found[commands[0]]
    assert {command: each for command, each in found.items() if each != first} == {}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("machine", "fault", "id_"),
    [
        (PART, "gpu2:fabric=not_started", "fabric-not-ready"),
        (PART, "gpu2:mig=on", "mig-on"),
        (PCIE, "gpu2:p2p=CNS", "peer-access-refused"),
    ],
)
def test_what_follows_from_a_fault_is_no_finding_of_its_own(machine: str, fault: str, id_: str, command: str) -> None:
    assert [each["id"] for each in report(command, machine, fault)["findings"]] == [id_]


@pytest.mark.parametrize(("machine", "fault"), [(PART, "link0-3:speed=0.5"), (PCIE, "link1-2:speed=0.4")])
def test_what_a_copy_fails_an_all_reduce_fails(machine: str, fault: str) -> None:
    assert {report(command, machine, fault)["verdict"] for command in ("p2p", "allreduce", "check")} == {"FAIL"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_header_and_a_last_line_say_once_that_a_machine_is_simulated(command: str) -> None:
    out = CliRunner().invoke(app, [*COMMANDS[command], "--simulate", PART, "--no-progress"]).stdout.splitlines()
    assert out[0].endswith("(SIMULATED)")
    assert out[-1].count("(simulated)") == 1
    assert "SIMULATED" not in "".join(out[1:])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", ["gpu2:throttle=hw_slowdown", "gpu2:fabric=not_started", "gpu2:nvlink=12"])
def test_the_last_line_names_the_gpu(fault: str, command: str) -> None:
    assert "node0 GPU2: " in report(command, PART, fault)["sentence"]


@pytest.mark.parametrize("machine", [PART, PCIE, TWO])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_healthy_machine_has_no_fault_in_any_command(command: str, machine: str) -> None:
    document = report(command, machine)
    assert {each["severity"] for each in document["findings"]} <= {"SKIP"}, document["sentence"]


def test_the_last_line_on_wrong_data_names_a_rank_and_the_cure() -> None:
    arguments = ["allreduce", "--simulate", PART, "--fault", "link0-1:corrupts=yes", "--no-progress"]
    last = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout.splitlines()[-1]
    assert last.startswith("FAIL (simulated): rank 0 on node0 (GPU 0, 0000:00:06.0) and 1 more: 2,147,483,648 wrong")
    assert last.endswith(" rows. Try: gpubench allreduce --sizes 8 --dtype float32")


@pytest.mark.parametrize(
    "command", [("p2p",), ("p2p", "--evidence"), ("p2p", "--veto"), ("allreduce", "--sizes", "1G")]
)
def test_counts_of_wrong_elements_have_separators(command: tuple[str, ...]) -> None:
    arguments = [*command, "--simulate", PART, "--fault", "link0-1:corrupts=yes", "--no-progress"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert re.search(r"\d,\d{3} wrong element", shown), shown
    assert not re.search(r"\d{4} wrong element|wrong elements +\d{4}", shown), shown
