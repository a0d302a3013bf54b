"""What faults cost a step: as long as collectives took that were measured with them, and never silently nothing."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.profiles.fault import FAULT_KEYS, FaultKey, Subject, ValueKind
from gpubench.model.profiles.profile import NicKindOfMachine
from gpubench.readers.registry import read_results
from gpubench.simulated.machine import OF_DOMAINS
from gpubench.training.cluster import PlannedMachine
from gpubench.training.fault_costs import fault_cases
from gpubench.training.program import CommunicatorRanks
from gpubench.training.report import FaultCase
from tests.cli.running import ROOT, gpubench, without_gpus
from tests.training.jobs import planned_machine

RECORDED = ROOT / "tests" / "plan" / "h200x2"
GPT = "layers = 16\nhidden = 2048\nheads = 16\nsequence = 2048\nbatch = 4\nbiases = true\n"
MACHINES = [
    ("hgx-h200-2", 1),
    ("hgx-h200-4", 1),
    ("hgx-h200-8", 1),
    ("hgx-h200-8", 2),
    ("hgx-h100-8", 4),
    ("l40s-8", 1),
    ("gb200-nvl72", 18),
]
LARGE = 2**28


def case(fault: str, name: str, nodes: int = 1) -> FaultCase:
    (found,) = fault_cases(planned_machine(name, nodes), [fault], None, [])
    return found


def ratio(found: FaultCase, collective: str, group: CommunicatorRanks, size: int) -> float:
    """Of times with and without the fault, on a machine that is as fast as it can be."""
    return found.seconds(collective, group, size, 1e-9) / 1e-9


def times(fabric: str, collective: str) -> dict[int, float]:
    return {row.size_bytes: row.time_us for row in read_results(RECORDED / fabric / f"{collective}.json").rows}


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reducescatter"])
def test_a_staged_pair_costs_what_was_measured_with_one(collective: str) -> None:
    healthy, staged = times("healthy", collective), times("staged", collective)
    found = case("link0-1:staged=yes", "hgx-h200-2")
    for size in (2**22, 2**24, 2**26, 2**28, 2**30):
        predicted = found.seconds(collective, CommunicatorRanks(2), size, healthy[size] * 1e-6) * 1e6
        assert predicted == pytest.approx(staged[size], rel=0.15), size


def test_a_fault_of_what_is_slow_already_is_no_second_one() -> None:
    """With NCCL_P2P_DISABLE=1 a staged pair changes nothing, and half the NVLinks neither."""
    staged = times("staged", "allreduce")
    for fault in ("link0-1:staged=yes", "gpu0:nvlink=9"):
        found = case(fault, "hgx-h200-2").seconds("allreduce", CommunicatorRanks(2), 2**26, staged[2**26] * 1e-6)
        assert found * 1e6 == pytest.approx(staged[2**26], rel=0.03)


def value_of(key: FaultKey) -> str:
    kinds = {ValueKind.COUNT: "2", ValueKind.FACTOR: "0.5", ValueKind.RATE: "100", ValueKind.VERSION: "12.1"}
    kinds[ValueKind.VARIABLE] = "NCCL_P2P_DISABLE=1"
    return key.words[0] if key.words else kinds.get(key.kind, "round2")


SUBJECTS = {
    Subject.GPU: "gpu0",
    Subject.NIC: "nic0",
    Subject.LINK: "link0-1",
    Subject.NODE: "node0",
    Subject.LEAF: "leaf0",
    Subject.RAIL: "leaf0.rail0",
}
SLOWING = {
    Subject.GPU: ("nvlink", "p2p", "cuda_peer", "mig", "fabric", "speed"),
    Subject.LINK: ("p2p", "staged", "speed"),
}
"""Faults that some collective of a node feels whose GPUs reach each other by NVLink."""

SLOW_RAILS = ("nic0:state=down", "nic0:rate=100", "nic0:width=1", "nic0:missing=yes", "nic0:bandwidth=0.5")
"""Faults that an all-to-all of several nodes feels, which sends over the NIC near each GPU."""


@pytest.mark.parametrize(("name", "nodes"), MACHINES)
@pytest.mark.parametrize("key", FAULT_KEYS, ids=lambda key: f"{key.subject}:{key.key}")
def test_every_fault_is_felt_or_refused_and_none_passes_as_healthy(key: FaultKey, name: str, nodes: int) -> None:
    text = f"{SUBJECTS[key.subject]}:{key.key}={value_of(key)}"
    planned = planned_machine(name, nodes)
    by_switch = planned.profile is not None and planned.profile.nvlink is not None
    is_domain = planned.profile is not None and planned.profile.domain is not None
    felt = is_domain and key.key in OF_DOMAINS
    felt |= (by_switch and key.key in SLOWING.get(key.subject, ())) or (
        nodes > 1 and text in SLOW_RAILS and not is_domain
    )
    cases, refused = [], ""
    try:
        cases = fault_cases(planned, [text], None, [])
    except UsageError as error:
        refused = error.seen
    assert bool(cases) != bool(refused)
    assert not felt or cases, refused
    for each in cases:
        other = "alltoall" if text in SLOW_RAILS and nodes > 1 else "allgather"  # NVSwitches reduce, and use no pair
        collectives = ("allreduce", other)
        factors = [ratio(each, one, CommunicatorRanks(planned.gpus, nodes), LARGE) for one in collectives]
        assert min(factors) >= 1
        assert not felt or max(factors) > 1.1


@pytest.mark.parametrize("links", [9, 6, 2])
def test_fewer_nvlinks_slow_by_the_ratio_of_the_bandwidths(links: int) -> None:
    for name, count in (("hgx-h200-2", 2), ("hgx-h200-4", 4), ("hgx-h200-8", 8)):
        factor = ratio(case(f"gpu0:nvlink={links}", name), "allreduce", CommunicatorRanks(count), 2**32)
        assert factor == pytest.approx(18 / links, rel=0.03)
        gathered = ratio(case(f"gpu0:nvlink={links}", name), "allgather", CommunicatorRanks(count), 2**20)
        assert gathered > 1.05, "the smallest size that a profile knows is no latency alone"


def test_a_rail_that_is_slow_and_does_not_say_so_slows_all_rails() -> None:
    group = CommunicatorRanks(32, 4)
    silent = ratio(case("nic3:bandwidth=0.25", "hgx-h100-8", 4), "alltoall", group, 2**32)
    assert silent == pytest.approx(4, rel=0.03)
    known = case("nic3:rate=100", "hgx-h100-8", 4)
    channels = ratio(known, "allreduce", group, 2**32)
    assert channels == pytest.approx(8 / 7, rel=0.03), "NCCL's channels leave out a port whose rate it knows"
    assert ratio(known, "alltoall", group, 2**32) == pytest.approx(4, rel=0.03), "a GPU sends by the NIC near it"


def test_two_nodes_reduce_no_slower_with_seven_nics_of_eight() -> None:
    """Their trees send S once: seven NICs carry 322 GB/s of that, and NVLS inside a node reaches 260."""
    group = CommunicatorRanks(16, 2)
    assert ratio(case("nic3:missing=yes", "hgx-h100-8", 2), "allreduce", group, 2**32) == pytest.approx(1)
    assert ratio(case("nic3:missing=yes", "hgx-h100-8", 2), "allgather", group, 2**28) > 1.1
    assert ratio(case("nic3:bandwidth=0.5", "hgx-h100-8", 2), "allreduce", group, 2**32) > 1.3


def with_nics(*nics: NicKindOfMachine) -> PlannedMachine:
    """Two nodes of eight H100s with other NICs."""
    machine = planned_machine("hgx-h100-8", 2)
    assert machine.profile is not None
    return replace(machine, profile=replace(machine.profile, nic=nics))


def test_a_slow_nic_counts_from_what_its_slot_lets_through() -> None:
    """PCIe 4 x16 carries 252 of 400 Gb/s: half of that is what is left, as of any NIC."""
    nic = NicKindOfMachine(name="mlx5_0", kind=NicKind.INFINIBAND, rate_gbit_s=400, pcie_generation=4, pcie_width=16)
    machine = with_nics(nic, replace(nic, name="mlx5_1"))
    (found,) = fault_cases(machine, ["nic0:bandwidth=0.5"], None, [])
    assert ratio(found, "alltoall", CommunicatorRanks(16, 2), 2**32) == pytest.approx(2, rel=0.03)


def test_a_slow_ethernet_port_beside_rdma_slows_no_collective() -> None:
    rdma = NicKindOfMachine(name="mlx5_0", kind=NicKind.INFINIBAND, rate_gbit_s=400)
    machine = with_nics(rdma, NicKindOfMachine(name="eth0", kind=NicKind.ETHERNET, rate_gbit_s=25))
    with pytest.raises(UsageError, match="plan") as refused:
        fault_cases(machine, ["nic1:bandwidth=0.5"], None, [])
    assert "bandwidth has no effect on the time of a collective" in str(refused.value.reason)


def plan(tmp_path: Path, *words: str) -> dict[str, list[dict[str, float | str | None]]]:
    model = tmp_path / "gpt-0.8B.toml"
    model.write_text(GPT)
    result = gpubench("plan", str(model), "--tflops", "589", *words, "--format", "json")
    assert result.returncode == 0, result.stderr
    found: dict[str, list[dict[str, float | str | None]]] = json.loads(result.stdout)
    return found


@without_gpus
def test_a_collective_longer_than_the_backward_pass_costs_more_than_it_hides(tmp_path: Path) -> None:
    """The gradients of 806 M parameters take 57 ms through host memory, the backward pass 51."""
    curves = ("--results", str(RECORDED / "healthy"), "--layout", "ddp")
    staged, half = plan(tmp_path, *curves)["fault_costs"][1:]
    assert (staged["fault"], half["fault"]) == ("link0-1:staged=yes", "gpu0:nvlink=9")
    assert isinstance(staged["communication_ms"], float)
    assert isinstance(staged["exposed_ms"], float)
    assert 54 < staged["communication_ms"] < 62
    assert isinstance(staged["slowed_ms"], float)
    assert staged["exposed_ms"] + staged["slowed_ms"] > staged["communication_ms"] - 51.4 - 3
    assert staged["note"] is None
    measured = plan(tmp_path, "--results", str(RECORDED / "staged"), "--layout", "ddp", "--bucket-mb", "25")
    assert staged["step_ms"] == pytest.approx(measured["layouts"][0]["step_ms"], rel=0.03)
    assert half["note"] is None


def test_a_fault_that_no_collective_of_the_layout_meets_says_so(tmp_path: Path) -> None:
    (row,) = plan(tmp_path, "--simulate", "hgx-h200-8", "--layout", "ddp", "--fault", "nic0:rate=100")["fault_costs"]
    assert row["slower_percent"] == 0
    assert "no collective of ddp takes longer" in str(row["note"])


@pytest.mark.parametrize(
    ("machine_name", "fault", "reason"),
    [
        ("hgx-h200-2", "gpu0:throttle=sw_power_cap", "throttle has no effect on the time of a collective"),
        ("hgx-h200-8", "gpu0:ecc=off", "ecc has no effect on the time of a collective"),
        ("hgx-h200-8*2", "gpu0:width=4", "traffic between nodes is not modelled"),
        ("hgx-h200-8", "node0:dips=0.5", "only scan simulates it"),
        ("hgx-h200-2", "gpu0:lost=yes", "the job then lacks this GPU"),
        ("hgx-h200-2", "nic0:bandwidth=0.5", "has no rate for NIC 0"),
        ("hgx-h100-8*2", "nic0:bandwidth=0.9,rate=100", "the combined effect of bandwidth, rate on one NIC"),
        ("hgx-h100-8*2", "nic0:bandwidth=0.9,missing=yes", "the combined effect of bandwidth, missing on one NIC"),
        ("a100-pcie-2*2", "nic0:state=down", "no NIC that is up"),
    ],
)
def test_a_fault_of_which_nothing_follows_is_refused(machine_name: str, fault: str, reason: str) -> None:
    words = ("plan", "--parameters", "1B", "--simulate", machine_name, "--layout", "ddp", "--fault", fault)
    result = gpubench(*words)
    assert result.returncode == 2, result.stdout
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
