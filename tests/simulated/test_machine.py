import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench import profiles
from gpubench.collectives.expected import ETHERNET_EFFICIENCY
from gpubench.collectives.registry import COLLECTIVES, SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.facts.health import describe_health
from gpubench.model.facts.snapshot import NvlinkPeer, PciPlace, Snapshot
from gpubench.model.profiles.fault import FAULT_KEYS, parse_fault
from gpubench.model.profiles.profile import NvlinkKind, Profile, SwitchKind
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import MOST_NODES, SimulatedMachine, parse_machine, snapshots
from gpubench.simulated.times import CollectiveTimes

PROFILES = profiles.all_profiles()
NAMES = [each.name for each in COLLECTIVES]


def node(machine: str, *faults: str) -> Snapshot:
    return snapshots(parse_machine(machine), [parse_fault(fault) for fault in faults])[0]


class Times(CollectiveTimes):
    def ideal_seconds(self, name: str, size_bytes: int, *, ranks_per_node: int | None = None) -> float:
        """Seconds without noise."""
        return self._model(name, ranks_per_node).seconds(size_bytes)


def times(machine: str, *faults: str, seed: int = 0) -> Times:
    return Times(parse_machine(machine), [parse_fault(fault) for fault in faults], seed)


def pair_of(snapshot: Snapshot, source: str, destination: str) -> Any:
    return next(each for each in snapshot.pairs if (each.source, each.destination) == (source, destination))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a machine"),
        ("*4", "is not a machine"),
        ("hgx-h200-4*", "is not a machine"),
        ("hgx-h200-4*x", "is not a machine"),
        ("hgx-h200-4*0", "has 0 nodes"),
        (f"hgx-h200-4*{MOST_NODES + 1}", "has 16385 nodes"),
        ("hgx-h201-4", "no profile is called"),
    ],
)
def test_what_is_no_machine_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_machine(text)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_healthy_node_is_complete_and_says_that_it_is_simulated(profile: Profile) -> None:
    (snapshot,) = snapshots(SimulatedMachine(profile))
    assert (snapshot.origin, snapshot.source, snapshot.host) == (Origin.SIMULATED, f"profile {profile.name}", "node0")
    gpus = snapshot.gpus
    assert [gpu.index for gpu in gpus] == [gpu.cuda_index for gpu in gpus] == list(range(profile.match.visible))
    ids: list[str | None] = [gpu.bus_id for gpu in gpus] + [nic.bus_id for nic in snapshot.nics]
    ids += [switch.bus_id for switch in snapshot.switches] + list(snapshot.nvswitches)
    assert len(set(ids)) == len(ids)
    assert len(snapshot.pairs) == len(gpus) * (len(gpus) - 1)
    switch_ids = {switch.bus_id for switch in snapshot.switches}
    for gpu in gpus:
        assert set(gpu.place.switches) <= switch_ids
        assert len(gpu.nvlinks or ()) == (profile.nvlink.links if profile.nvlink else 0)
        assert all(link.active and not any(link.errors.values()) for link in gpu.nvlinks or ())
        for name in ("mig", "ecc", "bar1_bytes"):
            assert (getattr(gpu, name) is None) == (name in gpu.unknown)
    assert all(nic.state == "active" for nic in snapshot.nics)
    assert [port.nic for port in snapshot.rdma_ports] == [nic.name for nic in snapshot.nics if nic.rdma]
    names = [device.bus_id for device in snapshot.pci_devices]
    assert names == sorted(set(names))
    assert set(ids) - set(names) == set(snapshot.nvswitches)
    assert all(device.above is None or device.above in names for device in snapshot.pci_devices)
    assert from_plain(Snapshot, to_plain(snapshot)) == snapshot


def paired(name: str = "hgx-h100-8") -> Profile:
    """Four GPUs, each pair of neighbours joined by six NVLinks, on nested PCIe switches."""
    profile = profiles.load(name)
    nvlink = NvlinkKind(
        version="4.0", raw_gb_s=26.5625, links=12, to=NvlinkPeer.GPU, pairs=((0, 1, 6), (1, 2, 6), (2, 3, 6), (3, 0, 6))
    )
    switches = (
        SwitchKind(name="a", pcie_generation=5, pcie_width=16, numa=0),
        SwitchKind(name="b", pcie_generation=5, pcie_width=16, numa=0, above="a"),
    )
    gpu = replace(profile.gpu, places=("a", "b", "b", "b"))
    nics = tuple(replace(nic, place=None) for nic in profile.nic)
    match = replace(profile.match, visible=4)
    return replace(profile, nvlink=nvlink, switch=switches, gpu=gpu, match=match, nic=nics)


def test_gpus_may_be_joined_directly_and_switches_nested() -> None:
    machine = SimulatedMachine(paired())
    (healthy,) = snapshots(machine)
    peers = [link.peer_bus_id for link in healthy.gpus[1].nvlinks or ()]
    assert peers == [healthy.gpus[0].bus_id] * 6 + [healthy.gpus[2].bus_id] * 6
    assert pair_of(healthy, "GPU0", "GPU2").nvlink == "NS"
    assert pair_of(healthy, "GPU0", "GPU3").nvlink == "OK"
    assert healthy.switches[1].place.switches == (healthy.switches[0].bus_id,)
    assert pair_of(healthy, "GPU0", "GPU1").pcie_path == "PXB"
    assert pair_of(healthy, "GPU1", "GPU2").pcie_path == "PIX"
    (broken,) = snapshots(machine, [parse_fault("link1-2:nvlink=2")])
    active = [sum(bool(link.active) for link in gpu.nvlinks or ()) for gpu in broken.gpus]
    assert active == [12, 8, 8, 12]
    (cut,) = snapshots(machine, [parse_fault("link1-2:nvlink=00")])
    assert pair_of(cut, "GPU2", "GPU1").nvlink == "NS"
    with pytest.raises(UsageError, match="6 NVLinks connect the two GPUs"):
        snapshots(machine, [parse_fault("link1-2:nvlink=7")])
    with pytest.raises(UsageError, match="no NVLink connects the two GPUs directly"):
        snapshots(machine, [parse_fault("link0-2:nvlink=1")])
    halved = Times(machine, [parse_fault("link1-2:nvlink=3")])
    whole = Times(machine)
    ratio = halved.ideal_seconds("allreduce", 2**34) / whole.ideal_seconds("allreduce", 2**34)
    assert ratio == pytest.approx(2, rel=0.01)


def gpu_fact(machine: str, fault: str) -> Any:
    return node(machine, f"gpu1:{fault}").gpus[1]


def test_every_fault_of_a_gpu_shows_in_its_facts() -> None:
    links = gpu_fact("hgx-h100-8", "nvlink=12").nvlinks
    assert [link.number for link in links if not link.active] == list(range(12, 18))
    assert gpu_fact("hgx-h100-8", "width=8").pcie.width == 8
    assert gpu_fact("hgx-h100-8", "width=8").pcie.max_width == 16
    slow = gpu_fact("hgx-h100-8", "generation=1")
    assert (slow.pcie.generation, slow.idle) == (1, False)
    assert gpu_fact("hgx-h100-8", "mig=on").mig is True
    assert gpu_fact("hgx-h100-8", "ecc=off").ecc is False
    assert gpu_fact("hgx-h100-8", "throttle=hw_slowdown").throttle_reasons == ("hw_slowdown",)
    assert gpu_fact("hgx-h100-8", "rows=pending").remapped_rows.pending is True
    assert gpu_fact("hgx-h100-8", "rows=failure").remapped_rows.failure is True
    fabric = gpu_fact("hgx-h100-8", "fabric=in_progress").fabric
    assert (fabric.state, fabric.status) == ("in_progress", None)
    busy = gpu_fact("hgx-h100-8", "busy=4711")
    assert ([each.pid for each in busy.processes], busy.idle) == ([4711], False)
    assert gpu_fact("hgx-h100-8", "speed=0.5") == node("hgx-h100-8").gpus[1]


@pytest.mark.parametrize("machine", ["hgx-h100-8", "hgx-h200-4"])
def test_every_condition_of_the_fabric_is_reported(machine: str) -> None:
    words = next(key.words for key in FAULT_KEYS if key.key == "health")
    for word in words:
        mask = gpu_fact(machine, f"health={word}").fabric.health_mask
        assert describe_health(mask).startswith(word.replace("_", " "))
        assert "," not in describe_health(mask)


def test_refused_peer_access_shows_in_both_directions() -> None:
    refused = node("hgx-h100-8", "gpu1:p2p=CNS")
    assert {pair_of(refused, "GPU1", "GPU3").read, pair_of(refused, "GPU3", "GPU1").write} == {"CNS"}
    assert pair_of(refused, "GPU0", "GPU3").read == "OK"
    cuda = node("hgx-h100-8", "gpu1:cuda_peer=no")
    assert (pair_of(cuda, "GPU1", "GPU3").cuda, pair_of(cuda, "GPU3", "GPU1").read) == (False, "OK")
    link = node("hgx-h100-8", "link2-1:p2p=TNS")
    assert {pair.read for pair in link.pairs if {"GPU1", "GPU2"} == {pair.source, pair.destination}} == {"TNS"}
    assert sum(pair.read == "TNS" for pair in link.pairs) == 2
    assert pair_of(node("hgx-h100-8", "gpu1:nvlink=0"), "GPU3", "GPU1").nvlink == "NS"
    assert node("hgx-h100-8", "link0-1:staged=yes", "link0-2:speed=0.5") == node("hgx-h100-8")


def test_every_fault_of_a_nic_shows() -> None:
    assert node("hgx-h100-8", "nic3:state=init").nics[3].state == "init"
    assert node("hgx-h100-8", "nic3:rate=200").nics[3].rate_gbit_s == 200
    assert node("hgx-h100-8", "nic3:width=8,generation=4").nics[3].pcie.width == 8
    assert node("hgx-h100-8", "nic3:width=8,generation=4").nics[3].pcie.generation == 4
    names = [nic.name for nic in node("hgx-h100-8", "nic3:missing=yes").nics]
    assert names == [f"mlx5_{i}" for i in range(8) if i != 3]


@pytest.mark.parametrize(
    ("machine", "multicast"),
    [("hgx-b200-8", True), ("hgx-a100-8", False), ("h100-nvl-2", False), ("hgx-h200-2", None)],
)
def test_multicast_needs_nvswitches_of_hopper_and_is_unknown_on_a_part_of_a_board(
    machine: str, multicast: bool | None
) -> None:
    assert node(machine).gpus[0].cuda_features.get("multicast") is multicast


def test_every_fault_of_a_node_shows() -> None:
    broken = node("hgx-h100-8", "node0:driver=550.54.15,cuda=12.4,peermem=no")
    assert (broken.driver.version, broken.driver.cuda, broken.gpudirect.peermem) == ("550.54.15", "12.4", False)
    nvml = node("hgx-h100-8", "node0:silent=nvml")
    assert [(each.stage, each.timed_out) for each in nvml.failures] == [("nvml", True)]
    assert (nvml.gpus[0].nvlinks, nvml.gpus[0].cuda_index, nvml.driver.cuda) == (None, 0, None)
    assert (nvml.pairs[0].read, nvml.pairs[0].cuda) == (None, True)
    assert nvml.gpus[0].cuda_features["multicast"]
    cuda = node("hgx-h100-8", "node0:silent=cuda")
    assert (cuda.gpus[0].cuda_index, cuda.gpus[0].name) == (None, "NVIDIA H100 80GB HBM3")
    assert cuda.gpus[0].cuda_features == {}
    assert (cuda.pairs[0].read, cuda.pairs[0].cuda) == ("OK", None)
    assert "cuda" in cuda.pairs[0].unknown
    sysfs = node("hgx-h100-8", "node0:silent=sysfs")
    assert (sysfs.nics, sysfs.switches, sysfs.nvswitches) == ((), (), ())
    assert sysfs.gpus[0].place == PciPlace()
    bare = node("hgx-h100-8", "node0:driver_missing=yes")
    assert bare.driver.absent
    assert (bare.driver.version, bare.pairs, bare.failures) == (None, (), ())
    assert bare.gpus[0].bus_id
    assert bare.gpus[0].uuid is None


@pytest.mark.parametrize(
    ("machine", "fault", "message"),
    [
        ("hgx-h200-4", "node1.gpu0:mig=on", "there is no node 1"),
        ("hgx-h200-4", "gpu4:mig=on", "there is no GPU 4"),
        ("hgx-h200-4", "link0-4:staged=yes", "there is no GPU 4"),
        ("hgx-h200-4", "nic1:state=down", "there is no NIC 1"),
        ("hgx-h200-4", "gpu0:nvlink=19", "the GPU has 18 NVLinks"),
        ("rtx-4090-2", "gpu0:nvlink=1", "the GPU has no NVLinks"),
        ("rtx-4090-2", "gpu0:generation=5", "its PCIe generation is at most 4.*1 to 4"),
        ("dgx-spark", "nic0:width=8", "its PCIe width is at most 4.*1 to 4"),
        ("dgx-spark", "gpu0:width=8", "profile of this machine does not have the PCIe width of the device"),
        ("gb200-nvl-4", "gpu0:generation=3", "does not have the PCIe generation of the device"),
        ("hgx-h200-4", "nic0:width=8", "does not have the PCIe width of the device.*hgx-h100-8"),
        ("rtx-4090-2", "gpu0:fabric=in_progress", "no NVLink fabric"),
        ("hgx-a100-8", "gpu0:health=route_unhealthy", "no NVLink fabric"),
        ("hgx-h200-4", "link0-1:nvlink=4", "no NVLink connects the two GPUs directly"),
    ],
)
def test_a_fault_that_the_machine_cannot_have_is_refused(machine: str, fault: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        node(machine, fault)
    assert re.search(message, str(error.value), re.DOTALL)


@pytest.mark.parametrize("fault", ["gpu4:mig=on", "link0-4:staged=yes", "nic1:state=down", "node1:peermem=no"])
def test_times_refuse_such_a_fault_too(fault: str) -> None:
    with pytest.raises(UsageError, match="there is no"):
        times("hgx-h200-4", fault)


@pytest.mark.parametrize("fault", ["mig=on", "fabric=not_started", "fabric=in_progress"])
def test_what_takes_peer_access_away_takes_it_from_that_gpu_and_stages_its_copies(fault: str) -> None:
    pairs = node("hgx-h200-4", f"gpu1:{fault}").pairs
    said = {(pair.source, pair.destination): (pair.cuda, pair.read, pair.write) for pair in pairs}
    assert {names for names, access in said.items() if access == (False, "NS", "NS")} == {
        names for names in said if "GPU1" in names
    }
    assert {access for names, access in said.items() if "GPU1" not in names} == {(True, "OK", "OK")}
    slower, usual = times("hgx-h200-4", f"gpu1:{fault}"), times("hgx-h200-4")
    assert slower.ideal_seconds("allreduce", 2**30) > 2 * usual.ideal_seconds("allreduce", 2**30)


@pytest.mark.parametrize(
    ("machine", "fault", "collective", "slower"),
    [
        ("hgx-h100-8", "link2-3:speed=0.5", "allgather", 2.0),
        ("hgx-h100-8", "link0-7:speed=0.5", "broadcast", 2.0),
        ("hgx-h100-8", "link2-5:speed=0.5", "allgather", 1.0),  # the ring has no neighbours GPU2 and GPU5
        ("hgx-h100-8", "link2-3:speed=0.5", "allreduce", 1.0),  # the NVSwitches reduce
        ("hgx-h100-8", "link2-5:speed=0.5", "alltoall", 8 / 7),  # one peer of seven takes twice as long
        ("hgx-h100-8", "link2-5:speed=0.5", "gather", 1.0),  # the root is rank 0
        ("hgx-h100-8", "link0-5:speed=0.5", "scatter", 8 / 7),
        ("hgx-a100-8", "link2-3:speed=0.5", "allreduce", 2.0),
        ("hgx-a100-4", "link0-2:speed=0.5", "allreduce", 2.0),  # NVLinks join pairs: rings use all of them
        ("dgx-1-v100", "link0-3:nvlink=1", "allreduce", 2.0),
        ("dgx-1-v100", "link0-1:nvlink=1", "allreduce", 1.0),  # it has one
        ("dgx-1-v100", "link2-5:speed=0.5", "allreduce", 1.0),  # no NVLink joins the two
        ("l40s-8", "link3-4:speed=0.5", "allreduce", 2.0),
        ("l40s-8", "link2-5:speed=0.5", "allreduce", 1.0),
    ],
)
def test_a_slow_pair_slows_the_collectives_that_use_the_path_between_the_two(
    machine: str, fault: str, collective: str, slower: float
) -> None:
    ratio = times(machine, fault).ideal_seconds(collective, 2**34) / times(machine).ideal_seconds(collective, 2**34)
    assert ratio == pytest.approx(slower, rel=0.03)


@pytest.mark.parametrize(("gpus", "busbw"), [(8, 478.9), (7, 460), (6, 436), (5, 414), (4, 363)])
def test_nvls_on_a_part_of_the_board_is_as_fast_as_published_of_h200s(gpus: int, busbw: float) -> None:
    seconds = times("hgx-h100-8").ideal_seconds("allreduce", 2**33, ranks_per_node=gpus)
    assert 2**33 * 2 * (gpus - 1) / gpus / seconds / 1e9 == pytest.approx(busbw, rel=0.03)


def physical_seconds(machine: SimulatedMachine, name: str, size_bytes: int, ranks: int) -> float:
    collective = next(each for each in COLLECTIVES if each.name == name)
    profile = machine.profile
    nvls = any(each.nvls for each in profile.find(f"{name}.busbw_gb_s"))
    links = profile.carried_gb_s(name, ranks) * (max(1.0, 2 * (ranks - 1) / (ranks + 1)) if nvls else 1)
    return size_bytes * collective.busbw_factor(ranks) / links / 1e9


WITH_TWO = [profile for profile in PROFILES if profile.match.visible > 1]


@given(st.sampled_from(WITH_TWO), st.sampled_from(NAMES), st.integers(1, 2**36), st.integers(1, 2**36), st.data())
def test_times_rise_with_size_and_never_beat_the_links(
    profile: Profile, name: str, one: int, other: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(2, profile.match.visible))
    faults = data.draw(st.sampled_from(["", "gpu1:nvlink=5", "gpu0:speed=0.4", "link0-1:staged=yes"]))
    machine = SimulatedMachine(profile)
    model = Times(machine, [parse_fault(faults)] if faults else [])
    small, large = sorted((one, other))
    fast, slow = (model.ideal_seconds(name, size, ranks_per_node=ranks) for size in (small, large))
    assert 0 < fast <= slow * (1 + 1e-12)
    least = physical_seconds(machine, name, large, ranks)
    assert slow >= least * (1 - 1e-12)
    noisy = model.seconds(name, large, row=data.draw(st.integers(0, 99)), ranks_per_node=ranks)
    assert len(noisy) == ranks
    assert min(noisy) >= least * (1 - 1e-12)
    healthy = Times(machine).ideal_seconds(name, large, ranks_per_node=ranks)
    assert slow >= healthy * (1 - 1e-12)


@pytest.mark.parametrize(
    "fault", ["gpu1:p2p=CNS", "gpu1:cuda_peer=no", "gpu1:nvlink=0", "link0-1:staged=yes", "link0-1:p2p=U"]
)
def test_without_peer_access_the_staged_bandwidth_is_left(fault: str) -> None:
    """All-reduce reached 28.4 GB/s with NCCL_P2P_DISABLE=1 where one copy reaches 38."""
    busbw = 2**34 * 1.5 / times("hgx-h200-4", fault).ideal_seconds("allreduce", 2**34) / 1e9
    assert busbw == pytest.approx(28.4, rel=0.01)


def test_one_rank_a_node_uses_the_network_alone() -> None:
    model = times("hgx-h200-4*2", "node0.nic0:rate=10", "node1.nic0:rate=10")
    size = 2**32
    # Two ranks, factor 1, over an Ethernet NIC of 10 Gb/s: the profile tells no rate, for its machine tells none.
    assert size / model.ideal_seconds("allreduce", size, ranks_per_node=1) / 1e9 == pytest.approx(
        1.25 * ETHERNET_EFFICIENCY, rel=0.01
    )
    assert len(model.seconds("allreduce", size, row=0, ranks_per_node=1)) == 2


@pytest.mark.parametrize("machine", ["hgx-h100-8", "hgx-h200-4", "l40s-8"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_collective_that_no_profile_knows_takes_the_points_of_all_reduce(
    machine: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its latency, and at the busbw of rings: that of NVLS is more than the links carry."""
    made_up = replace(
        collective_named("allgather"), name="swap", busbw_factor=lambda ranks: share * 2 * (ranks - 1) / ranks
    )
    monkeypatch.setitem(SUMMARIES, "swap", "Made up.")
    monkeypatch.setitem(sys.modules, "gpubench.collectives.swap", cast("ModuleType", SimpleNamespace(SWAP=made_up)))
    collective_named.cache_clear()
    parsed = parse_machine(machine)
    rings = tuple(each for each in parsed.profile.expected if not each.nvls)
    ringed = Times(replace(parsed, profile=replace(parsed.profile, expected=rings)))
    usual, model = ringed.ideal_seconds, times(machine).ideal_seconds
    assert model("swap", 8) == pytest.approx(usual("allreduce", 8), rel=0.05)
    assert model("swap", 2**34) == pytest.approx(share * usual("allreduce", 2**34), rel=0.03)


def test_what_cannot_be_simulated_says_why() -> None:
    with pytest.raises(UsageError, match="collective 'allredcue' is not known"):
        times("hgx-h200-4").ideal_seconds("allredcue", 8)
    with pytest.raises(UsageError, match="5 ranks per node of hgx-h200-4"):
        times("hgx-h200-4").ideal_seconds("allreduce", 8, ranks_per_node=5)
    with pytest.raises(UsageError, match="allreduce on one GPU of hgx-h200-4"):
        times("hgx-h200-4/1").ideal_seconds("allreduce", 8)
    with pytest.raises(CouldNotMeasureError, match="no NIC that is up"):
        times("hgx-h200-4/1*2").ideal_seconds("allreduce", 8)
    other = replace(profiles.load("hgx-h200-4"), expected=(), curve=())
    with pytest.raises(UsageError, match="has no expected time for allreduce"):
        Times(SimulatedMachine(other)).ideal_seconds("allreduce", 8)
    with pytest.raises(CouldNotMeasureError, match="no NIC that is up"):
        times("hgx-h100-8*2", *(f"node1.nic{number}:state=down" for number in range(8))).ideal_seconds("allreduce", 8)
    with pytest.raises(CouldNotMeasureError, match="whose rate is known"):
        times("hgx-h200-4*2").ideal_seconds("allreduce", 8)


@pytest.mark.parametrize("fault", ["node3:imex=down", "node3:clique=1", "node3:mnnvl=off"])
def test_a_rack_that_one_node_leaves_uses_the_nics(fault: str) -> None:
    """834 GB/s are published of a rack, 184 of its NICs."""
    size = 8 * 2**30
    whole, split = (times("gb200-nvl72", *each).ideal_seconds("allreduce", size) for each in ((), (fault,)))
    factor = size * 2 * 71 / 72 / 1e9
    assert factor / whole == pytest.approx(834.57)
    assert factor / split < 200


@pytest.mark.parametrize(
    ("text", "nodes", "joined"), [("gb200-nvl72/36", 9, 9), ("gb200-nvl72/64*2", 32, 16), ("gb200-nvl72/2", 18, 18)]
)
def test_a_part_of_a_rack_is_a_smaller_domain(text: str, nodes: int, joined: int) -> None:
    machine = parse_machine(text)
    assert (machine.nodes, machine.domain_nodes, str(machine)) == (nodes, joined, text)


@pytest.mark.parametrize("gpus", [37, 76])
def test_a_rack_has_whole_nodes(gpus: int) -> None:
    with pytest.raises(UsageError, match=f"has {gpus} GPUs"):
        parse_machine(f"gb200-nvl72/{gpus}")
