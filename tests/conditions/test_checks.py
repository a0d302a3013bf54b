import re
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench import profiles
from gpubench.conditions.checks import CHECKS, WIRING, gpu_count_findings, presence_findings, run
from gpubench.conditions.circumstances import Facts, joined
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import (
    DriverFacts,
    Fabric,
    GpuDirectFacts,
    GpuFacts,
    NicFacts,
    NicKind,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PcieLink,
    PciPlace,
    PciSwitch,
    ProbeFailure,
    RemappedRows,
    Snapshot,
)
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import PeerAccess, Topology, find_refusal, nccl_keeps_off
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.simulated.machine import SimulatedMachine, parse_machine, snapshots
from tests.fakes.planted_faults import findings


def examined(nodes: Sequence[Snapshot], ranks: Sequence[RankFacts] = ()) -> tuple[Finding, ...]:
    topologies = [Topology(node) for node in nodes]
    return run(WIRING, Facts(topologies, group_nodes(topologies), ranks))


def machine(name: str, *faults: str) -> list[Snapshot]:
    return snapshots(parse_machine(name), [parse_fault(fault) for fault in faults])


HEALTHY = machine("hgx-h100-8")[0]
GPU0, NIC0 = HEALTHY.gpus[0], HEALTHY.nics[0]


def said(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.id, finding.severity, finding.subject) for finding in findings]


def with_gpus(**facts: Any) -> Snapshot:
    return replace(HEALTHY, gpus=tuple(replace(gpu, **facts) for gpu in HEALTHY.gpus))


def with_gpu(index: int, **facts: Any) -> Snapshot:
    gpus = [replace(gpu, **facts) if gpu.index == index else gpu for gpu in HEALTHY.gpus]
    return replace(HEALTHY, gpus=tuple(gpus))


def with_nic(index: int, **facts: Any) -> Snapshot:
    nics = [replace(nic, **facts) if number == index else nic for number, nic in enumerate(HEALTHY.nics)]
    return replace(HEALTHY, nics=tuple(nics))


def subject_of(device: GpuFacts | NicFacts) -> str:
    return f"{device.device} ({device.bus_id})"


BY_DESIGN = {"rtx-4090-2", "rtx-5090-2", "dgx-1-v100"}


@pytest.mark.parametrize("profile", profiles.all_profiles(), ids=lambda profile: profile.name)
def test_healthy_machines_have_no_findings(profile: Any) -> None:
    found = examined(snapshots(SimulatedMachine(profile)))
    assert [finding for finding in found if finding.severity is not Verdict.SKIP] == []
    assert ([finding.id for finding in found] == ["peer-access-refused"]) is (profile.name in BY_DESIGN)
    assert not examined(snapshots(parse_machine(f"{profile.name}*3"))[-2:]) or profile.name in BY_DESIGN


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("gpu3:nvlink=12", ("nvlink-down", "FAIL")),
        ("gpu3:nvlink=0", ("nvlinks-all-down", "FAIL")),
        ("gpu3:width=8", ("pcie-width", "FAIL")),
        ("gpu3:generation=3", ("pcie-generation", "WARN")),
        ("gpu3:lost=yes", ("gpu-lost", "FAIL")),
        ("gpu3:throttle=hw_thermal_slowdown", ("gpu-hw-slowdown", "FAIL")),
        ("gpu3:throttle=sw_thermal_slowdown", ("gpu-throttled", "WARN")),
        ("gpu3:throttle=sw_power_cap", ("clocks-capped", "WARN")),
        ("gpu3:rows=pending", ("row-remap-pending", "FAIL")),
        ("gpu3:rows=failure", ("row-remap-failed", "FAIL")),
        ("gpu3:health=route_unhealthy", ("fabric-unhealthy", "FAIL")),
        ("gpu3:health=incorrect_configuration", ("fabric-unhealthy", "FAIL")),
        ("gpu3:health=fabric_manager_disconnected", ("fabric-unhealthy", "FAIL")),
    ],
)
def test_a_fault_of_a_gpu_is_found_and_nothing_else(fault: str, found: tuple[str, str]) -> None:
    (finding,) = examined(machine("hgx-h100-8", fault))
    assert (finding.id, finding.severity, finding.subject) == (*found, subject_of(HEALTHY.gpus[3]))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("nic3:state=down", ("rdma-port-down", "FAIL")),
        ("nic3:state=init", ("rdma-port-down", "FAIL")),
        ("nic3:rate=200", ("rdma-port-slow", "FAIL")),
        ("nic3:width=4", ("pcie-width", "FAIL")),
        ("nic3:generation=3", ("pcie-generation", "WARN")),
    ],
)
def test_a_fault_of_a_nic_is_found_and_nothing_else(fault: str, found: tuple[str, str]) -> None:
    (finding,) = examined(machine("hgx-h100-8", fault))
    assert (finding.id, finding.severity, finding.subject) == (*found, subject_of(HEALTHY.nics[3]))


@pytest.mark.parametrize("fault", ["gpu3:ecc=off", "gpu3:busy=77"])
def test_what_somebody_may_want_is_no_finding(fault: str) -> None:
    assert examined(machine("hgx-h100-8", fault)) == ()


def test_a_fabric_that_is_not_ready_refuses_peer_access_too() -> None:
    fabric, refused = examined(machine("hgx-h100-8", "gpu3:fabric=in_progress"))
    assert said([fabric]) == [("fabric-not-ready", "FAIL", subject_of(HEALTHY.gpus[3]))]
    assert (refused.id, refused.severity, len(refused.subjects)) == ("peer-access-refused", "FAIL", 14)


def test_mig_takes_peer_access_away_by_design() -> None:
    refused, split = examined(machine("hgx-h100-8", "gpu3:mig=on"))
    assert refused.cause.startswith("MIG is enabled")
    assert (split.id, split.severity) == ("mig-on", "SKIP")
    assert (refused.id, refused.severity, len(refused.subjects)) == ("peer-access-refused", "SKIP", 14)


def broken(*stages: str, error: str) -> tuple[Finding, ...]:
    failures = tuple(ProbeFailure(stage=stage, error=error) for stage in stages)
    return examined([replace(HEALTHY, failures=failures)])


@pytest.mark.parametrize(("stage", "cause"), [("nvml", "libnvidia-ml"), ("cuda", "libcuda"), ("sysfs", "/sys")])
def test_a_source_that_broke_is_an_error_with_a_cause_of_its_own(stage: str, cause: str) -> None:
    (finding,) = broken(stage, error="killed by SIGSEGV")
    assert said([finding]) == [("probe-failed", "ERROR", f"node0, {stage}")]
    assert finding.seen == "killed by SIGSEGV"
    assert cause in finding.cause
    assert "fabric" not in finding.cause
    assert "a bug" in broken("other", error="broke")[0].cause


def test_a_reader_that_got_no_cpu_says_nothing_of_the_driver() -> None:
    (finding,) = broken("nvml", error="no answer within 20 s: it waited 15 s for a CPU")
    assert said([finding]) == [("probe-failed", "ERROR", "node0, nvml")]
    assert "CPUs" in finding.cause


def test_cuda_that_is_not_ready_is_an_answer_about_the_machine() -> None:
    (finding,) = broken("cuda", error="cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)")
    assert said([finding]) == [("cuda-refuses", "FAIL", "node0, cuda")]
    assert "fabric manager" in finding.cause
    both = broken("nvml", "cuda", error="CUDA_ERROR_SYSTEM_NOT_READY")
    assert {(finding.id, finding.severity) for finding in both} == {("probe-failed", "ERROR")}


def test_gpus_without_a_driver_are_a_warning() -> None:
    (finding,) = examined(machine("hgx-h100-8", "node0:driver_missing=yes"))
    assert said([finding]) == [("driver-missing", "ERROR", "node0")]
    assert finding.seen.startswith("8 NVIDIA GPUs on the PCI bus, but ")
    laptop = replace(HEALTHY, gpus=(), nics=(), pairs=(), driver=DriverFacts(absent="none"))
    assert examined([laptop]) == ()


def test_a_driver_that_only_this_process_cannot_reach_is_not_missing() -> None:
    (bare,) = machine("hgx-h100-8", "node0:driver_missing=yes")
    (finding,) = examined([replace(bare, driver=replace(bare.driver, version="580.159.04"))])
    assert said([finding]) == [("probe-failed", "ERROR", "node0")]
    assert finding.seen == "driver 580.159.04 is loaded, but NVML does not start (Driver Not Loaded)"
    assert "container" in finding.cause


def test_links_that_are_down_are_numbered() -> None:
    (finding,) = examined(machine("hgx-h100-8", "gpu3:nvlink=16"))
    assert finding.seen == "2 of 18 NVLinks down (links 16-17)"
    assert finding.expected == "18 active NVLinks, like its siblings"


def test_a_gpu_without_a_bridge_is_said_and_nothing_against_it() -> None:
    (node,) = machine("hgx-h200-2")
    bridged = tuple(replace(link, peer=NvlinkPeer.GPU) for link in node.gpus[0].nvlinks or ())
    gpus = (
        *(replace(gpu, nvlinks=bridged, fabric=None) for gpu in node.gpus),
        replace(node.gpus[0], index=2, bus_id="0000:ff:00.0", nvlinks=down(bridged), fabric=None),
    )
    found = [
        finding for finding in examined([replace(node, gpus=gpus, pairs=(), nvswitches=())]) if "nvlink" in finding.id
    ]
    assert [(finding.severity, finding.cause) for finding in found] == [
        ("SKIP", "this GPU has no NVLink bridge, or the bridge is not seated")
    ]
    # Links that lead to another GPU show a bridge with one end down.
    led = tuple(replace(link, peer_bus_id="0000:ff:00.0") for link in bridged)
    gpus = (replace(gpus[0], nvlinks=led), *gpus[1:])
    found = [
        finding for finding in examined([replace(node, gpus=gpus, pairs=(), nvswitches=())]) if "nvlink" in finding.id
    ]
    assert [finding.severity for finding in found] == ["FAIL"]


def down(links: Sequence[NvLink]) -> tuple[NvLink, ...]:
    return tuple(replace(link, active=False) for link in links)


def test_all_links_down_are_found_where_there_is_a_switch() -> None:
    nvlinks = down(GPU0.nvlinks or ())
    switched = examined([with_gpus(nvlinks=nvlinks, fabric=None)])
    assert said(switched) == [("nvlinks-all-down", "FAIL", joined([subject_of(gpu) for gpu in HEALTHY.gpus]))]
    assert switched[0].expected == "18 active NVLinks"
    registered = replace(with_gpus(nvlinks=nvlinks), nvswitches=())
    assert [finding.id for finding in examined([registered])] == ["nvlinks-all-down"]
    shown = replace(with_gpus(nvlinks=nvlinks, fabric=None), nvswitches=())
    assert [finding.id for finding in examined([shown])] == ["nvlinks-all-down"]
    hidden = tuple(replace(link, peer=None) for link in nvlinks)
    bare = replace(with_gpus(nvlinks=hidden, fabric=None), nvswitches=())
    assert examined([bare]) == ()


def test_siblings_are_of_one_model_and_the_larger_of_two_counts_is_usual() -> None:
    fewer = (GPU0.nvlinks or ())[:4]
    mixed = [replace(gpu, name="NVIDIA Other", nvlinks=fewer) if gpu.index >= 4 else gpu for gpu in HEALTHY.gpus]
    assert examined([replace(HEALTHY, gpus=tuple(mixed))]) == ()
    two = machine("hgx-h200-2", "gpu1:nvlink=9")
    assert said(examined(two)) == [("nvlink-down", "FAIL", subject_of(two[0].gpus[1]))]


def test_a_pair_that_lost_its_links_to_each_other_is_no_matter_of_policy() -> None:
    lost = machine("dgx-1-v100", "link1-2:nvlink=0")
    ends = "GPU1 (0000:0b:00.0) → GPU2 (0000:0c:00.0)", "GPU2 (0000:0c:00.0) → GPU1 (0000:0b:00.0)"
    pair = next(finding for finding in examined(lost) if finding.id == "nvlink-down" and "→" in finding.subject)
    assert (pair.severity, pair.subjects) == (Verdict.FAIL, ends)
    assert pair.next_command.endswith("-i 0000:0b:00.0,0000:0c:00.0")
    node = Topology(lost[0])
    assert not nccl_keeps_off(node, node.gpus[1], node.gpus[2])
    healthy = Topology(machine("dgx-1-v100")[0])
    assert nccl_keeps_off(healthy, healthy.gpus[1], healthy.gpus[4]), "no link is missing there"
    tns = PeerAccess(cuda=False, nvml="TNS", reason="TNS")
    assert not find_refusal(node, node.gpus[1], node.gpus[2], tns).is_by_design
    assert find_refusal(node, node.gpus[1], node.gpus[4], tns).is_by_design


def test_two_cards_without_a_bridge_may_never_have_had_one() -> None:
    bare = machine("hgx-a100-4", "gpu0:nvlink=0", "gpu1:nvlink=0")
    assert not any("→" in finding.subject for finding in examined(bare) if finding.id == "nvlink-down")


@pytest.mark.parametrize(
    "node",
    [
        with_gpu(2, nvlinks=None),
        with_gpu(2, nvlinks=tuple(replace(link, active=None) for link in GPU0.nvlinks or ())),
        with_gpus(nvlinks=tuple(replace(link, peer=None, peer_bus_id=None) for link in GPU0.nvlinks or ())),
        replace(with_gpus(nvlinks=(), fabric=None), nvswitches=()),
        replace(with_gpus(nvlinks=None, fabric=None), nvswitches=()),
    ],
    ids=["not counted", "unknown states", "hidden ends", "no NVLinks", "unknown NVLinks"],
)
def test_nvlinks_that_are_unknown_or_do_not_exist_are_no_finding(node: Snapshot) -> None:
    assert examined([node]) == ()


@pytest.mark.parametrize("place_or_model", ["place", "model"])
def test_a_nic_is_not_missed_if_paths_are_unknown_or_nics_are_virtual(place_or_model: str) -> None:
    node = replace(HEALTHY, gpus=tuple(replace(gpu, place=PciPlace()) for gpu in HEALTHY.gpus))
    if place_or_model == "model":
        first, *others = HEALTHY.nics
        virtual = (replace(nic, model="ConnectX-7 Virtual Function") for nic in others)
        node = replace(HEALTHY, nics=(first, *virtual))
    assert "nic-absent" not in [finding.id for finding in examined([node])]


def test_a_link_of_unknown_state_is_not_called_down() -> None:
    first, second, *rest = GPU0.nvlinks or ()
    silent = (replace(first, active=None), replace(second, active=False), *rest)
    assert [finding.id for finding in examined([with_gpu(2, nvlinks=silent)])] == ["nvlink-doubtful"]
    assert below(profiles.load("hgx-h100-8"), with_gpus(nvlinks=silent)) == []


def test_errors_of_links_are_counted_by_link() -> None:
    first, second, *rest = GPU0.nvlinks or ()
    nvlinks = (replace(first, errors={"replay": 2, "recovery": 0, "crc_flit": 7000}), second, *rest)
    (finding,) = examined([with_gpu(4, nvlinks=nvlinks)])
    assert said([finding]) == [("nvlink-errors", "WARN", subject_of(HEALTHY.gpus[4]))]
    assert finding.seen == "2 replay on link 0, 7,000 crc_flit on link 0 since boot, at unknown times"
    assert finding.expected == "few (its siblings have 0)"


@pytest.mark.parametrize(
    ("fabric", "seen"),
    [
        (Fabric(state="not_supported", health_mask=1), None),
        (Fabric(), None),
        (Fabric(state="completed"), None),
        (Fabric(state="completed", status="success", health_mask=0xAA), None),
        (Fabric(state="completed", status="success", health_mask=0), None),
        (Fabric(state="completed", status="success", health_mask=0x1AA), None),
        (Fabric(state="not_started"), "fabric state not started"),
        (Fabric(state="in_progress", status="success"), "fabric state in progress"),
        (Fabric(state="completed", status="Insufficient Resources"), "fabric status Insufficient Resources"),
        (Fabric(state="in_progress", status="Unknown Error"), "fabric state in progress, fabric status Unknown Error"),
    ],
)
def test_the_fabric_s_opinion(fabric: Fabric, seen: str | None) -> None:
    found = examined([with_gpu(1, fabric=fabric)])
    assert [finding.seen for finding in found] == ([] if seen is None else [seen])
    assert all(finding.id == "fabric-not-ready" for finding in found)


def test_a_fabric_that_is_unhealthy_is_so_whether_it_is_ready_or_not() -> None:
    (found,) = examined([with_gpu(1, fabric=Fabric(state="completed", status="success", health_mask=0xA9))])
    assert (found.id, found.severity, found.seen) == ("fabric-unhealthy", "FAIL", "fabric health: degraded bandwidth")
    both = examined([with_gpu(1, fabric=Fabric(state="in_progress", health_mask=0xA6))])
    assert [(finding.id, finding.seen) for finding in both] == [
        ("fabric-not-ready", "fabric state in progress"),
        ("fabric-unhealthy", "fabric health: route recovery"),
    ]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (RemappedRows(correctable=9, uncorrectable=3, pending=False, failure=False), []),
        (RemappedRows(correctable=0, uncorrectable=1, pending=True, failure=False), [("row-remap-pending", "FAIL")]),
        (RemappedRows(correctable=0, uncorrectable=1, pending=False, failure=True), [("row-remap-failed", "FAIL")]),
        (RemappedRows(correctable=0, uncorrectable=1, pending=True, failure=True), [("row-remap-failed", "FAIL")]),
        (None, []),
    ],
)
def test_rows_that_wait_or_cannot(rows: RemappedRows | None, found: list[tuple[str, str]]) -> None:
    assert [(finding.id, finding.severity) for finding in examined([with_gpu(6, remapped_rows=rows)])] == found


@pytest.mark.parametrize(
    ("reasons", "found"),
    [
        (("sw_power_cap",), ["a power cap lowers the clocks of an unused GPU"]),
        ((), []),
        (None, []),
        (("sw_power_cap", "hw_slowdown", "hw_power_brake"), ["clocks lowered: hw slowdown, hw power brake"]),
        (("sw_thermal_slowdown",), ["clocks lowered: sw thermal slowdown"]),
    ],
)
def test_what_holds_clocks_down_is_said_once(reasons: tuple[str, ...] | None, found: list[str]) -> None:
    assert [finding.seen for finding in examined([with_gpu(6, throttle_reasons=reasons, idle=False)])] == found


@pytest.mark.parametrize(
    ("link", "idle", "found"),
    [
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), True, []),
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), None, []),
        (PcieLink(generation=1, width=16, max_generation=5, max_width=16), False, []),
        (PcieLink(generation=3, width=16, max_generation=5, max_width=16), False, ["generation 3 of 5"]),
        (PcieLink(generation=1, width=8, max_generation=5, max_width=16), True, ["8 of 16 lanes"]),
        (
            PcieLink(generation=4, width=8, max_generation=5, max_width=16),
            False,
            ["8 of 16 lanes", "generation 4 of 5"],
        ),
        (PcieLink(generation=4, width=8), False, []),
        (PcieLink(), False, []),
    ],
)
def test_pcie_links_lose_lanes_or_speed(link: PcieLink, idle: bool | None, found: list[str]) -> None:
    seen = [finding.seen for finding in examined([with_gpu(1, pcie=link, idle=idle)])]
    assert seen == [f"PCIe trained to {trained}" for trained in found]


def test_the_uplink_of_a_switch_is_a_link_too() -> None:
    narrow = PciSwitch(bus_id="0000:97:00.0", link=PcieLink(generation=4, width=8, max_generation=4, max_width=16))
    switched = replace(HEALTHY, switches=(narrow,))
    assert said(examined([switched])) == [("pcie-uplink", "FAIL", "the uplink of switch 0000:97:00.0")]
    assert said(examined([switched, replace(switched, host="node1")]))[0][2] == (
        "node0 the uplink of switch 0000:97:00.0, node1 the uplink of switch 0000:97:00.0"
    )


NO_RDMA = "nic-absent", "0 RDMA NICs under its PCIe switch"


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"state": None}, []),
        ({"state": "down", "kind": NicKind.ETHERNET}, [NO_RDMA]),
        ({"rate_gbit_s": 10.0, "kind": NicKind.ETHERNET}, [NO_RDMA]),
        ({"state": "down", "kind": NicKind.ROCE}, [("rdma-port-down", "port is down")]),
        ({"state": "init"}, [("rdma-port-down", "port is init")]),
        ({"rate_gbit_s": 200.0}, [("rdma-port-slow", "200 Gb/s")]),
        ({"rate_gbit_s": None}, []),
        ({"rate_gbit_s": 800.0}, []),
        ({"rate_gbit_s": 100.0, "model": "another"}, [("nics-differ", "model another")]),
    ],
)
def test_ports_are_active_and_as_fast_as_their_siblings(facts: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert [(finding.id, finding.seen) for finding in examined([with_nic(2, **facts)])] == found


def test_a_port_that_is_down_is_not_slow_as_well_and_no_measure_of_others() -> None:
    (found,) = examined([with_nic(2, state="down", rate_gbit_s=10.0)])
    assert found.id == "rdma-port-down"
    nics = [
        replace(nic, state="down", rate_gbit_s=800.0) if number > 1 else nic for number, nic in enumerate(HEALTHY.nics)
    ]
    assert {finding.id for finding in examined([replace(HEALTHY, nics=tuple(nics))])} == {"rdma-port-down"}


def test_gpus_of_unknown_links_are_no_measure_of_others() -> None:
    silent = tuple(replace(link, active=None) for link in GPU0.nvlinks or ())
    gpus = [replace(gpu, nvlinks=silent) if gpu.index > 1 else gpu for gpu in HEALTHY.gpus]
    gpus[1] = replace(gpus[1], nvlinks=(*(GPU0.nvlinks or ())[:12], *down((GPU0.nvlinks or ())[12:])))
    assert said(examined([replace(HEALTHY, gpus=tuple(gpus))])) == [
        ("nvlink-down", "FAIL", subject_of(HEALTHY.gpus[1]))
    ]


def test_gpudirect_is_missed_only_where_there_is_something_to_miss() -> None:
    without = GpuDirectFacts(peermem=False, dma_buf=False)
    (finding,) = examined([replace(HEALTHY, gpudirect=without)])
    assert (finding.id, finding.severity) == ("gpudirect-module-missing", "WARN")
    rdma = [nic.name for nic in HEALTHY.nics if nic.rdma]
    assert finding.subject == ", ".join(rdma)
    assert examined([replace(HEALTHY, gpudirect=without, gpus=(), pairs=())]) == ()
    assert examined([replace(HEALTHY, gpudirect=GpuDirectFacts(peermem=False))]) == ()
    ethernet = tuple(replace(nic, kind=NicKind.ETHERNET) for nic in HEALTHY.nics)
    assert examined([replace(HEALTHY, gpudirect=without, nics=ethernet)]) == ()
    both = examined([replace(HEALTHY, gpudirect=without), replace(HEALTHY, gpudirect=without, host="node1")])
    assert both[0].subject.startswith(f"node0 {rdma[0]}, ")


def pairs_saying(**facts: Any) -> tuple[PairFacts, ...]:
    return tuple(replace(pair, **facts) for pair in HEALTHY.pairs)


UNWIRED = replace(with_gpus(nvlinks=(), fabric=None), nvswitches=())


@pytest.mark.parametrize(
    ("status", "severity", "likely"),
    [
        ("GNS", "SKIP", "this GPU model has no P2P"),
        ("CNS", "WARN", "chipset not supported"),
        ("TNS", "WARN", "different sockets"),
        ("DR", "WARN", "registry key"),
        ("NS", "WARN", "does not support peer access"),
        ("XYZ", "WARN", "no reason"),
    ],
)
def test_a_refusal_has_its_cause(status: str, severity: str, likely: str) -> None:
    (finding,) = examined([replace(UNWIRED, pairs=pairs_saying(cuda=False, read=status, write=status))])
    assert said([finding]) == [("peer-access-refused", severity, "all 56 GPU pairs")]
    assert likely in finding.cause
    assert f"NVML reports {status} (" in finding.seen
    assert (finding.expected == "host memory, by design") is (severity == "SKIP")


def test_cuda_alone_can_refuse() -> None:
    (finding,) = examined([replace(UNWIRED, pairs=pairs_saying(cuda=False, read=None, write=None))])
    assert finding.seen == "no peer access: refused by CUDA; copies go through host memory"


def test_a_refusal_between_linked_gpus_is_the_fabric_s() -> None:
    for node, blamed in ((with_gpus(fabric=None), True), (HEALTHY, False)):
        (finding,) = examined([replace(node, pairs=pairs_saying(cuda=False, read="NS", write="NS"))])
        assert (finding.severity, finding.subject) == ("FAIL", "all 56 GPU pairs")
        assert ("fabric is not ready" in finding.cause) is blamed, "NVML says that this fabric is ready"


def test_a_mesh_of_nvlinks_has_pairs_without_by_design() -> None:
    """On a DGX-1, opposite GPUs of a ring of four have TNS."""
    (node,) = machine("hgx-h200-4")
    ring = {0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (0, 2)}
    gpus = tuple(
        replace(
            gpu,
            fabric=None,
            nvlinks=tuple(
                NvLink(number=i, active=True, peer=NvlinkPeer.GPU, peer_bus_id=node.gpus[other].bus_id)
                for i, other in enumerate(ring[gpu.index])
            ),
        )
        for gpu in node.gpus
    )
    across = {("GPU0", "GPU2"), ("GPU2", "GPU0"), ("GPU1", "GPU3"), ("GPU3", "GPU1")}
    pairs = tuple(
        replace(pair, cuda=False, read="TNS", write="TNS") if (pair.source, pair.destination) in across else pair
        for pair in node.pairs
    )
    (finding,) = examined([replace(node, gpus=gpus, pairs=pairs)])
    assert (finding.id, finding.severity) == ("peer-access-refused", "SKIP")
    assert "DGX-1" in finding.cause
    bare = tuple(replace(gpu, nvlinks=()) for gpu in gpus)
    (finding,) = examined([replace(node, gpus=bare, pairs=pairs)])
    assert finding.severity == "WARN"
    assert "different sockets or I/O hubs" in finding.cause


def test_a_driver_that_does_not_know_refuses_nothing() -> None:
    silent = pairs_saying(cuda=True, read="U", write="U")
    assert examined([replace(UNWIRED, pairs=silent)]) == ()
    assert examined([replace(UNWIRED, pairs=tuple(replace(pair, cuda=None) for pair in silent))]) == ()


def test_some_pairs_are_named_and_others_counted() -> None:
    (finding,) = examined(machine("hgx-h100-8", "gpu3:p2p=TNS"))
    assert finding.subject == "GPU0 → GPU3, GPU1 → GPU3, GPU2 → GPU3, GPU3 → GPU0 and 10 more"
    (elsewhere, differs) = examined(machine("hgx-h100-8*4", "node2.link0-1:p2p=TNS"))
    assert elsewhere.subject == "node2 GPU0 → GPU1, GPU1 → GPU0"
    assert differs.id == "node-differs"


def test_a_contradiction_is_told_for_each_pair() -> None:
    found = examined(machine("hgx-h200-2", "gpu1:cuda_peer=no"))
    assert [(finding.id, finding.severity) for finding in found] == [("cuda-nvml-disagree", "FAIL")]
    gpus = machine("hgx-h200-2")[0].gpus
    one, other = (subject_of(gpu) for gpu in gpus)
    assert found[0].subject == f"{one} → {other}, {other} → {one}"
    assert found[0].seen == "CUDA reports refused, NVML reports possible"


def test_access_nobody_asked_about_is_no_finding() -> None:
    assert examined([replace(HEALTHY, pairs=())]) == ()


def test_an_odd_node_is_named_with_what_differs() -> None:
    found = examined(machine("hgx-h100-8*4", "node2.gpu5:ecc=off"))
    assert said(found) == [("node-differs", "WARN", "node2")]
    assert found[0].seen == "GPU5 ECC off (others on)"
    assert found[0].expected == "the same as 3 other nodes of kind A"


def test_a_second_kind_of_the_same_gpus_is_one_warning() -> None:
    nodes = machine("hgx-h100-8*12")
    others = [replace(node, driver=replace(node.driver, cuda="1.2")) for node in nodes[7:]]
    (finding,) = examined([*nodes[:7], *others])
    assert said([finding]) == [("node-differs", "WARN", "kind B: node7-11")]
    assert finding.seen == f"CUDA 1.2 (others {HEALTHY.driver.cuda})"
    assert finding.expected == "the same as the 7 nodes of kind A, which have the same GPUs"
    assert finding.subjects == tuple(f"node{number}" for number in range(7, 12))


@pytest.mark.parametrize("few", [1, 2, 6])
def test_of_as_many_nodes_as_others_neither_are_the_usual_ones(few: int) -> None:
    nodes = machine(f"hgx-h100-8*{2 * few}")
    others = [replace(node, machine=replace(node.machine, product="another")) for node in nodes[few:]]
    (finding,) = examined([*nodes[:few], *others])
    assert finding.subjects == tuple(f"node{number}" for number in range(2 * few))
    assert "product another (on node0" in finding.seen
    assert "do not show" in finding.expected


def test_a_node_without_gpus_among_many_is_found() -> None:
    bare = replace(HEALTHY, host="login", gpus=(), pairs=())
    missing, finding = examined([bare, *machine("hgx-h100-8*4")])
    assert said([missing]) == [("gpu-missing", "ERROR", "login")]
    assert (missing.seen, missing.expected) == ("no GPU", "GPUs, like 4 other nodes")
    assert (finding.id, finding.subject) == ("node-differs", "login")
    assert finding.seen.startswith("GPU models none (others ")
    silent = replace(bare, failures=(ProbeFailure(stage="nvml", error="no answer", timed_out=True),))
    assert "gpu-missing" not in [finding.id for finding in examined([silent, HEALTHY])]


def test_all_subjects_are_kept_where_the_text_counts_them() -> None:
    (finding,) = examined([with_gpus(throttle_reasons=("hw_slowdown",))])
    assert finding.subject.endswith(" and 4 more")
    assert finding.subjects == tuple(subject_of(gpu) for gpu in HEALTHY.gpus)
    (pairs,) = examined(machine("hgx-h100-8", "gpu3:p2p=TNS"))
    assert len(pairs.subjects) == 14
    assert pairs.subjects[:2] == ("GPU0 → GPU3", "GPU1 → GPU3")
    (nics,) = examined([replace(HEALTHY, gpudirect=GpuDirectFacts(peermem=False, dma_buf=False))])
    assert nics.subjects == tuple(nic.name for nic in HEALTHY.nics if nic.rdma)


def test_a_link_of_plain_ethernet_is_no_finding() -> None:
    narrow = PcieLink(generation=2, width=1, max_generation=4, max_width=8)
    assert [finding.id for finding in examined([with_nic(0, pcie=narrow, kind=NicKind.ETHERNET)])] == ["nic-absent"]
    assert {finding.id for finding in examined([with_nic(0, pcie=narrow)])} == {
        "pcie-width",
        "pcie-generation",
        "nics-differ",
    }


@pytest.mark.parametrize(
    ("machine_name", "missing", "named"),
    [
        ("hgx-h100-8", (0,), 1),
        ("hgx-h100-8", (0, 5), 2),
        ("hgx-h100-8", (0, 3, 5), 0),  # it may have been built with five
        ("hgx-a100-8", (1,), 2),  # two NICs below the switch of two GPUs
        ("hgx-h100-4", (3,), 0),  # behind host bridges, as far from every GPU
        ("hgx-h100-8", range(8), 0),  # nothing to compare with; the profile knows
    ],
)
def test_a_nic_that_is_gone_is_missed_below_the_switch_of_its_gpu(
    machine_name: str, missing: Sequence[int], named: int
) -> None:
    found = examined(machine(machine_name, *(f"nic{number}:missing=yes" for number in missing)))
    assert sum(len(finding.subjects) for finding in found if finding.id == "nic-absent") == named


def test_gns_is_by_design_where_no_pair_of_those_models_has_peer_access() -> None:
    every = [f"link{one}-{other}:p2p=GNS" for one in range(8) for other in range(one)]
    assert {finding.severity for finding in examined(machine("l40s-8", *every))} == {Verdict.SKIP}
    some = examined(machine("l40s-8", "gpu3:p2p=GNS"))
    assert [(finding.id, finding.severity) for finding in some] == [("peer-access-refused", Verdict.FAIL)]


def test_equal_findings_become_one() -> None:
    found = examined(machine("hgx-h100-8*2", *(f"node{node}.gpu{gpu}:width=8" for node in (0, 1) for gpu in (1, 2, 6))))
    assert [finding.id for finding in found] == ["pcie-width"]
    assert found[0].subject.endswith("and 2 more")
    everywhere = examined(machine("hgx-h100-8", *(f"gpu{gpu}:lost=yes" for gpu in range(6))))
    assert [finding.id for finding in everywhere] == ["gpu-lost"]
    assert everywhere[0].subject.endswith(f"{subject_of(HEALTHY.gpus[3])} and 2 more")
    assert everywhere[0].subject.count("GPU") == 4


def test_a_subject_without_a_bus_id_is_its_name() -> None:
    node = Topology(HEALTHY)
    assert Facts([node]).circumstances.names_with_ids(0, GpuFacts(index=2)) == "GPU2"
    assert Facts([node]).circumstances.names_with_ids(0) == "node0"


def rank(number: int, node: int = 0, **facts: Any) -> RankFacts:
    return RankFacts(rank=number, host=f"n{node}", node=node, local_rank=number, pid=number, **facts)


def test_ranks_alike_have_no_findings() -> None:
    ranks = [rank(number, number // 2, shm_device=7, environment={"NCCL_ALGO": "Ring"}) for number in range(4)]
    assert examined([HEALTHY], ranks) == ()
    separate = [rank(0, 0, shm_device=1), rank(1, 1, shm_device=2), rank(2, 1)]
    assert examined([HEALTHY], separate) == ()


def test_ranks_of_a_host_share_memory() -> None:
    ranks = [rank(0, 0, shm_device=1), rank(1, 1, shm_device=3), rank(2, 0, shm_device=2)]
    (finding,) = examined([HEALTHY], ranks)
    assert said([finding]) == [("shm-not-shared", "FAIL", "ranks 0, 2 on n0")]
    assert finding.seen == "2 ranks of one host have 2 separate /dev/shm"


def test_settings_of_nccl_are_the_same_on_all_ranks() -> None:
    ranks = [rank(number, environment={"NCCL_ALGO": "Ring", "PATH": str(number)}) for number in range(6)]
    ranks.append(rank(6, 1, environment={"NCCL_DEBUG": "INFO"}))
    algo, debug = examined([HEALTHY], ranks)
    assert (algo.id, algo.severity, algo.subject) == ("settings-differ", "WARN", "NCCL_ALGO")
    assert algo.seen == "Ring on ranks 0-5 on n0; unset on rank 6 on n1"
    assert debug.subject == "NCCL_DEBUG"
    in_file = [rank(0), rank(1, 1, nccl_files={"/etc/nccl.conf": {"NCCL_IB_TC": "106"}})]
    (found,) = examined([HEALTHY], in_file)
    assert (found.id, found.seen) == (
        "settings-differ",
        "unset on rank 0 on n0; 106 on rank 1 on n1; in /etc/nccl.conf",
    )
    assert found.next_command == "grep -n NCCL_IB_TC /etc/nccl.conf"
    assert algo.subjects == debug.subjects == ("n1",)


def below(profile: Profile | None, *nodes: Snapshot) -> list[tuple[str, str, str, str]]:
    topologies = [Topology(node) for node in nodes]
    found = run(CHECKS, Facts(topologies, group_nodes(topologies), (), [profile] * len(nodes)))
    return [
        (finding.id, finding.severity, finding.seen, finding.expected)
        for finding in found
        if finding.id == "below-profile"
    ]


def test_what_all_gpus_lack_is_found_against_the_profile() -> None:
    profile = profiles.load("hgx-h100-8")
    fewer = with_gpus(nvlinks=(*(GPU0.nvlinks or ())[:12], *down((GPU0.nvlinks or ())[12:])))
    seen = ("12 NVLinks active on every GPU", "18 NVLinks, as in profile hgx-h100-8")
    assert set(below(profile, fewer)) == {("below-profile", "FAIL", *seen)}
    slow = with_gpus(pcie=PcieLink(generation=4, width=16, max_generation=4, max_width=16))
    seen = ("PCIe at most 4 x16", "PCIe 5 x16, as in profile hgx-h100-8")
    assert set(below(profile, slow)) == {("below-profile", "FAIL", *seen)}
    assert below(None, fewer) == below(None, slow) == []


def test_a_profile_has_nothing_to_say_of_what_some_lack_or_nobody_knows() -> None:
    profile = profiles.load("hgx-h100-8")
    assert below(profile, HEALTHY) == []
    assert below(profile, machine("hgx-h100-8", "gpu3:nvlink=12")[0]) == []
    assert below(profile, with_gpus(nvlinks=None, pcie=PcieLink())) == []
    assert below(profile, replace(HEALTHY, gpus=(), nics=(), pairs=())) == []
    assert below(profiles.load("rtx-4090-2"), machine("rtx-4090-2")[0]) == []


def test_checks_have_names_of_their_own_and_say_what_they_look_for() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.summary for check in CHECKS)
    assert all(re.fullmatch(r"[a-z0-9_]+", check.name) for check in CHECKS)


def test_a_bridged_pair_has_links_and_peers() -> None:
    def bridged(index: int, other: str) -> GpuFacts:
        link = NvLink(number=0, active=True, version="3.0", raw_gb_s=25.0, peer=NvlinkPeer.GPU, peer_bus_id=other)
        return GpuFacts(index=index, name="A100", bus_id=f"0000:0{index}:00.0", nvlinks=(link,) * 12)

    pair = (bridged(0, "0000:01:00.0"), bridged(1, "0000:00:00.0"))
    assert examined([replace(HEALTHY, gpus=pair, pairs=(), nvswitches=(), pci_devices=())]) == ()


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (8, []),
        (9, [("gpu-missing", "FAIL", "8 GPUs, 9 expected", "9 GPUs, as --expect-gpus requires")]),
        (1, [("gpu-model", "FAIL", "8 GPUs, 1 expected", "1 GPU, as --expect-gpus requires")]),
    ],
)
def test_as_many_gpus_as_somebody_said(expected: int, found: list[tuple[str, str, str, str]]) -> None:
    told = presence_findings(Facts([Topology(HEALTHY)], expected_gpus=expected))
    assert [(finding.id, finding.severity, finding.seen, finding.expected) for finding in told] == found
    counted = gpu_count_findings({"n0": 8, "n1": 8}, expected)
    assert [(each.id, each.subjects) for each in counted] == [(each[0], ("n0", "n1")) for each in found]


def test_a_gpu_that_is_gone_is_said_once_whoever_expects_it() -> None:
    (seven,) = machine("hgx-h100-8", "gpu7:missing=yes")
    profile = profiles.load("hgx-h100-8")
    for asked, expected_gpus in ((True, None), (False, 8), (True, 8)):
        facts = Facts([Topology(seven)], profiles=[profile], asked=asked, expected_gpus=expected_gpus)
        assert [(finding.id, finding.severity) for finding in run(CHECKS, facts)] == [("gpu-missing", Verdict.FAIL)]
    other = Facts([Topology(seven)], profiles=[profile], asked=True, expected_gpus=7)
    assert [finding.seen for finding in presence_findings(other)] == ["7 GPUs, the board has 8"]


def missing(node: Snapshot, profile: str = "hgx-h100-8") -> list[str]:
    found = run(CHECKS, Facts([Topology(node)], (), (), [profiles.load(profile)]))
    return [f"{finding.severity} {finding.seen}" for finding in found if finding.id == "gpu-missing"]


def test_a_gpu_that_left_no_trace_is_missed_on_a_board() -> None:
    (seven,) = machine("hgx-h100-8", "gpu7:missing=yes")
    assert missing(seven) == ["FAIL 7 GPUs, the board has 8"]
    assert missing(HEALTHY) == []
    assert missing(replace(seven, gpus_of_others=1)) == []
    assert missing(replace(seven, nvswitches=())) == []
    assert missing(replace(seven, machine=replace(seven.machine, virtual_machine=True))) == []
    assert missing(replace(seven, machine=replace(seven.machine, virtual_machine=None))) == []
    assert run(CHECKS, Facts([Topology(seven)])) == ()


def _to_processor(link: NvLink) -> NvLink:
    return link if link.active else replace(link, active=True, peer=NvlinkPeer.CPU, peer_bus_id="0004:00:00.0")


def test_a_gpu_is_missed_where_the_nvlinks_of_all_others_lead_nowhere() -> None:
    (three,) = machine("hgx-a100-4", "gpu1:missing=yes")
    assert missing(three, "hgx-a100-4") == ["FAIL 3 GPUs, the board has 4"]
    assert missing(replace(three, gpus_of_others=1), "hgx-a100-4") == []
    assert missing(replace(three, machine=replace(three.machine, virtual_machine=True)), "hgx-a100-4") == []
    assert missing(machine("hgx-a100-4", "link0-1:nvlink=2")[0], "hgx-a100-4") == []
    to_cpu = [replace(gpu, nvlinks=tuple(map(_to_processor, gpu.nvlinks or ()))) for gpu in three.gpus]
    assert missing(replace(three, gpus=tuple(to_cpu)), "hgx-a100-4") == [], "POWER9 has NVLinks"
    (root,) = [finding for finding in findings("hgx-a100-4", ["gpu1:missing=yes"], 0) if finding.id == "gpu-missing"]
    assert [consequence.partition(":")[0] for consequence in root.consequences] == ["below-profile"]


@pytest.mark.parametrize(
    ("elsewhere", "rate", "told"), [(200.0, 200.0, 0), (400.0, 200.0, 8), (400.0, 400.0, 0), (40.0, 40.0, 16)]
)
def test_ports_below_their_cards_are_named_if_other_nodes_are_faster_or_they_are_far_below(
    elsewhere: float, rate: float, told: int
) -> None:
    """ConnectX-7 cards at 200 Gb/s on all nodes are by design: the switches are NDR200."""
    nodes = [
        Topology(replace(HEALTHY, host=host, nics=tuple(replace(nic, rate_gbit_s=each) for nic in HEALTHY.nics)))
        for host, each in (("node0", elsewhere), ("node1", rate))
    ]
    facts = Facts(nodes, group_nodes(nodes), profiles=[profiles.load("hgx-h100-8")] * 2)
    found = [finding for finding in run(WIRING, facts) if finding.id == "nic-below-card"]
    assert sum(len(finding.subjects) for finding in found) == told
    assert {finding.severity for finding in found} <= {Verdict.WARN}
    if told == 8:
        assert "the port runs at 200 Gb/s; ConnectX-7 cards reach up to 400" in found[0].seen
        assert found[0].expected.endswith("400 on other nodes")


@pytest.mark.parametrize("stage", ["nvml", "cuda", "sysfs"])
def test_a_silent_source_is_an_error(stage: str) -> None:
    found = examined(machine("hgx-h100-8", f"node0:silent={stage}"))
    assert said(found)[0] == ("driver-silent", "ERROR", f"node0, {stage}")
    assert [finding.severity for finding in found] == ["ERROR"]


def test_twelve_of_eighteen_on_all_is_an_h100_nvl() -> None:
    active = (*(GPU0.nvlinks or ())[:12], *down((GPU0.nvlinks or ())[12:]))
    assert examined([with_gpus(nvlinks=active)]) == ()


def test_hidden_far_ends_are_no_finding() -> None:
    hidden = tuple(replace(link, peer=None, peer_bus_id=None) for link in GPU0.nvlinks or ())
    assert examined([with_gpus(nvlinks=hidden)]) == ()


def test_mig_refuses_by_design() -> None:
    mig = with_gpus(mig=True)
    (finding,) = examined([replace(mig, pairs=pairs_saying(cuda=False, read="NS", write="NS"))])
    assert finding.severity is Verdict.SKIP
    assert finding.cause.startswith("MIG is enabled")


def test_a_node_without_a_driver_is_not_also_different() -> None:
    found = {finding.id for finding in examined(machine("hgx-h100-8*3", "node1:driver_missing=yes"))}
    assert "driver-missing" in found
    assert "node-differs" not in found
