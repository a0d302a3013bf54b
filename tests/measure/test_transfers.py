"""Transfers that other benchmarks measured: by the rate of a NIC, or inside a node by what host memory carries."""

import pytest
from msgspec.structs import replace

from gpubench.measure.transfers import TransferMachine, judge_transfers
from gpubench.model.paths.nodes import build_topologies
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.report import PairRow
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import load
from gpubench.readers.transfers import name_end, transfer_row
from gpubench.simulated.machine import SimulatedMachine, snapshots

MIB = 2**20
NIC = TransferMachine(nic_gb_s=50.0)


def inside(profile: str) -> TransferMachine:
    (node,) = build_topologies(snapshots(SimulatedMachine(load(profile), 1)))
    return TransferMachine(wiring=Wiring([GpuPlace("n", 0, gpu.bus_id) for gpu in node.gpus], {0: node}))


def row(gb_s: float, engine: str = "ucx", size: int = 64 * MIB, memory: str = "cuda", blocks: str = "") -> PairRow:
    ends = name_end("client", memory), name_end("server", memory) + blocks
    return transfer_row(ends, engine, size, gb_s, direction="write", scope="network" if engine == "rdma" else None)


def verdict_of(one: PairRow, machine: TransferMachine) -> str | None:
    (judged,), report = judge_transfers([one], machine, "x.txt")
    assert report.verdict == judged.verdict
    return judged.verdict


@pytest.mark.parametrize(
    ("engine", "gb_s", "verdict"),
    [
        ("rdma", 48.0, "PASS"),
        ("rdma", 39.0, "WARN"),
        ("rdma", 24.0, "FAIL"),
        ("rdma", 53.0, "SKIP"),
        ("ucx", 24.0, "FAIL"),
        ("mpi", 48.0, "PASS"),
        ("nixl", 48.0, "PASS"),
        ("nixl", 25.0, "SKIP"),
        ("nixl", 15.0, "WARN"),
        ("nixl", 0.4, "FAIL"),
    ],
)
def test_between_nodes_the_rate_of_the_nic_decides(engine: str, gb_s: float, verdict: str) -> None:
    assert verdict_of(row(gb_s, engine), NIC) == verdict


def test_with_a_machine_its_nics_are_the_limit_between_nodes_only() -> None:
    machine = replace(inside("hgx-h100-8"), nic_gb_s=50.0, missing="not alike")
    assert verdict_of(row(24.0, "rdma"), machine) == "FAIL"
    assert verdict_of(row(48.0, "mpi", memory="host"), replace(machine, missing="")) == "SKIP"


def test_both_directions_have_twice_the_rate() -> None:
    assert verdict_of(replace(row(78.0, "rdma"), direction="both"), NIC) == "WARN"
    assert verdict_of(replace(row(96.0, "rdma"), direction="both"), NIC) == "PASS"


@pytest.mark.parametrize(
    ("one", "verdict", "staged"),
    [
        (row(0.4), "FAIL", True),
        (row(44.0), "FAIL", True),
        (row(70.0), "SKIP", None),
        (row(200.0), "SKIP", False),
        (row(350.0), "PASS", False),
        (row(3.1, "mpi", 4 * MIB), "FAIL", True),
        (row(3.1, "mpi", 1 * MIB), "SKIP", None),
        (row(3.1, "nixl", 16 * MIB), "SKIP", None),
        (row(0.4, "nixl"), "FAIL", True),
        (row(0.4, "nixl", blocks=", 64 blocks"), "SKIP", None),
        (row(0.4, memory="host"), "SKIP", None),
        (row(0.4, "rdma"), "SKIP", None),
    ],
)
def test_inside_a_node_host_memory_is_told_from_nvlinks(one: PairRow, verdict: str, staged: bool | None) -> None:
    (judged,), report = judge_transfers([one], inside("hgx-h100-8"), "x.txt")
    assert (judged.verdict, judged.host_staged, report.verdict) == (verdict, staged, verdict)
    assert ("host-staged" in {finding.id for finding in report.findings}) == bool(staged)


def test_only_the_largest_size_is_judged() -> None:
    judged, report = judge_transfers([row(0.1, size=8), row(49.0), row(1.0, size=4096)], NIC, "x.txt")
    assert [one.verdict for one in judged] == [None, "PASS", None]
    assert report.verdict is Verdict.PASS


@pytest.mark.parametrize("one", [row(0.4), row(0.4, "rdma"), row(0.4, "nixl", blocks=", 64 blocks")])
def test_nothing_passes_or_fails_on_an_unknown_machine(one: PairRow) -> None:
    _, report = judge_transfers([one], TransferMachine(), "x.txt")
    assert report.verdict is Verdict.SKIP
    (finding,) = report.findings
    assert finding.cure.text.startswith("gpubench report x.txt --")


@pytest.mark.parametrize(("memory", "why"), [("host", "not between two GPUs"), ("", "whether it used GPU memory")])
def test_a_row_says_why_it_is_not_judged(memory: str, why: str) -> None:
    (judged,), _ = judge_transfers([row(0.4, memory=memory)], inside("hgx-h100-8"), "x.txt")
    assert why in (judged.note or "")


def test_storage_has_no_limit_that_a_nic_knows() -> None:
    one = transfer_row(("initiator (device)", "storage (POSIX)"), "nixl", 64 * MIB, 0.4)
    assert verdict_of(one, NIC) == "SKIP"
