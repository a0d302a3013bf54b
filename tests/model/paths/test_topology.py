from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.facts.snapshot import (
    SOFTWARE_RDMA,
    DriverFacts,
    Fabric,
    GpuDirectFacts,
    GpuFacts,
    HostFacts,
    NicFacts,
    NicKind,
    NumaNode,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PcieLink,
    PciPlace,
    PciSwitch,
    ProbeFailure,
    Snapshot,
)
from gpubench.model.paths.topology import (
    PATH_CLASSES,
    Topology,
    is_policy_known,
    link_under_load,
    pcie_ceiling_gb_s,
    pcie_gb_s,
    pcie_path_class,
)
from gpubench.model.terms.verdict import Origin

GEN4_X16 = PcieLink(generation=4, width=16, max_generation=4, max_width=16)
GEN5_X16 = PcieLink(generation=5, width=16, max_generation=5, max_width=16)


def node(
    gpus: Sequence[GpuFacts],
    nics: Sequence[NicFacts] = (),
    *,
    pairs: Sequence[PairFacts] = (),
    switches: Sequence[PciSwitch] = (),
    numa_nodes: int = 2,
    gpudirect: GpuDirectFacts | None = None,
) -> Topology:
    return Topology(
        Snapshot(
            host="n1",
            origin=Origin.RECORDED,
            source="a test",
            machine=HostFacts(numa_nodes=tuple(NumaNode(number=number) for number in range(numa_nodes))),
            gpudirect=gpudirect or GpuDirectFacts(),
            gpus=tuple(gpus),
            nics=tuple(nics),
            switches=tuple(switches),
            pairs=tuple(pairs),
        )
    )


def gpu(index: int, **facts: Any) -> GpuFacts:
    usual: dict[str, Any] = {"bus_id": f"0000:{index + 16:02x}:00.0", "pcie": GEN4_X16}
    return GpuFacts(index=index, **(usual | facts))


def nic(name: str = "mlx5_0", **facts: Any) -> NicFacts:
    usual: dict[str, Any] = {
        "kind": NicKind.INFINIBAND,
        "bus_id": "0000:e0:00.0",
        "pcie": GEN5_X16,
        "rate_gbit_s": 400.0,
    }
    return NicFacts(name=name, **(usual | facts))


def place(bridge: str = "pci0000:00", *switches: str, port: str | None = None, numa: int | None = 0) -> PciPlace:
    return PciPlace(host_bridge=bridge, root_port=port, switches=switches, numa_node=numa)


def links(count: int, to: GpuFacts | None = None, *, down: int = 0, raw_gb_s: float | None = 26.562) -> Any:
    peer = NvlinkPeer.SWITCH if to is None else NvlinkPeer.GPU
    return tuple(
        NvLink(
            number=number,
            active=number >= down,
            version="4.0",
            raw_gb_s=raw_gb_s,
            peer=peer,
            peer_bus_id=None if to is None else to.bus_id,
        )
        for number in range(count)
    )


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (place("a", "s1", port="p1"), place("a", "s1", port="p1"), "PIX"),
        (place("a", port="p1"), place("a", port="p1"), "PIX"),
        (place("a", "s1", "s2"), place("a", "s1", "s3"), "PXB"),
        (place("a", "s1", "s2"), place("a", "s1"), "PXB"),
        (place("a", "s1", "s2"), place("a", "s1", "s2"), "PIX"),
        (place("a", "s1", port="p1"), place("a", "s2", port="p1"), "PXB"),
        (place("a", "s1", port="p1"), place("a", "s2", port="p2"), "PHB"),
        (place("a", "s1", port="p1"), place("a", port="p2"), "PHB"),
        (place("a"), place("a"), "PHB"),
        (place("a", numa=0), place("b", numa=0), "NODE"),
        (place("a", numa=0), place("b", numa=1), "SYS"),
        (place("a", "s1", numa=0), place("b", "s1", numa=1), "SYS"),
        (place("a", numa=None), place("b", numa=1), None),
        (place("a", numa=None), place("a", numa=None), "PHB"),
        (PciPlace(), place("a"), None),
        (place("a"), PciPlace(), None),
    ],
)
def test_path_classes_are_those_of_the_legend(one: PciPlace, other: PciPlace, path: str | None) -> None:
    assert pcie_path_class(one, other, 2) == path
    assert pcie_path_class(other, one, 2) == path


def test_functions_of_one_card_are_neighbours_wherever_they_are() -> None:
    card, other = nic("a", bus_id="0000:05:00.0"), nic("b", bus_id="0000:05:00.0")
    assert node([], [card, other]).path(card, other) == "PIX"
    nowhere = (nic("a", bus_id=None), nic("b", bus_id=None))
    assert node([], nowhere).path(*nowhere) == "?"


@pytest.mark.parametrize(
    ("mine", "theirs", "count"),
    [
        (Fabric(clique=1, cluster_uuid="u"), Fabric(clique=1, cluster_uuid="u"), 18),
        (Fabric(clique=1, cluster_uuid="u"), Fabric(clique=2, cluster_uuid="u"), 0),
        (Fabric(clique=1, cluster_uuid="u"), Fabric(clique=1, cluster_uuid="v"), 0),
        (Fabric(clique=1, cluster_uuid="u"), Fabric(), 18),
        (None, Fabric(clique=1), 18),
    ],
)
def test_switched_gpus_of_different_cliques_are_apart(mine: Fabric | None, theirs: Fabric, count: int) -> None:
    one, other = gpu(0, nvlinks=links(18), fabric=mine), gpu(1, nvlinks=links(18), fabric=theirs)
    assert node([one, other]).nvlinks(one, other) == count


def test_hidden_far_ends_join_nobody_unless_they_are_switches() -> None:
    hidden = tuple(replace(link, peer=None, peer_bus_id=None) for link in links(18))
    one, other = gpu(0, nvlinks=hidden, bus_id=None), gpu(1, nvlinks=hidden, bus_id=None)
    assert node([one, other]).nvlinks(one, other) == 0
    switched = gpu(0, nvlinks=links(18), bus_id=None), gpu(1, nvlinks=links(18), bus_id=None)
    assert node(switched).path(*switched) == "NV18"


def test_unknown_links_are_no_answer_and_nics_have_none() -> None:
    one, other, card = gpu(0), gpu(1, nvlinks=links(18)), nic()
    topology = node([one, other], [card])
    assert topology.nvlinks(one, other) is None
    assert topology.nvlinks(other, one) is None
    assert topology.path(one, other) == "?"
    assert topology.nvlinks(one, card) == topology.nvlinks(card, one) == 0


def test_where_nvlinks_are_unknown_pcie_is_no_limit() -> None:
    one, other = gpu(0, place=place("a", "s1")), gpu(1, nvlinks=links(18), place=place("a", "s1"))
    lost = gpu(2, lost="GPU is lost", place=place())
    card = nic(place=place())
    topology = node([one, other, lost], [card])
    for pair in ((one, other), (other, one)):
        limit = topology.limit(*pair)
        assert (limit.gb_s, limit.note) == (None, "it is unknown whether NVLinks connect them")
        assert topology.path(*pair) == "PIX"
    assert topology.limit(other, lost).note == topology.limit(lost, one).note == "GPU is lost"
    assert topology.limit(one, card).gb_s == pcie_gb_s(4, 16)
    stated = node([one, other], pairs=[PairFacts(source="GPU0", destination="GPU1", path="PIX")])
    assert stated.limit(one, other).gb_s == pcie_gb_s(4, 16)


def test_nvlinks_without_a_speed_have_no_limit() -> None:
    nameless = tuple(replace(link, version=None, raw_gb_s=None) for link in links(4))
    one, other = gpu(0, nvlinks=nameless), gpu(1, nvlinks=nameless)
    topology = node([one, other])
    assert topology.limit(one, other).gb_s is None
    assert topology.limit(one, other).note == "4 NVLinks with unknown speed"
    assert topology.nvlink_total(one).note == "the speed of the NVLinks is unknown"
    stated = node([gpu(0), gpu(1)], pairs=[PairFacts(source="GPU0", destination="GPU1", path="NV4")])
    assert stated.limit(*stated.gpus).note == "4 NVLinks with unknown speed"


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({}, "NVLinks are unknown"),
        ({"unknown": {"nvlinks": "NVML did not answer"}}, "NVML did not answer"),
        ({"lost": "GPU is lost"}, "GPU is lost"),
        ({"nvlinks": (NvLink(number=0), NvLink(number=1, active=True))}, "the active NVLinks are unknown"),
        ({"nvlinks": (NvLink(number=0),), "unknown": {"nvlinks.active": "Unknown Error"}}, "Unknown Error"),
        ({"nvlinks": ()}, "no NVLink"),
        ({"nvlinks": links(12, down=12)}, "none of 12 NVLinks is active"),
    ],
)
def test_no_total_without_active_links(facts: dict[str, Any], note: str) -> None:
    one = gpu(0, **facts)
    total = node([one]).nvlink_total(one)
    assert (total.gb_s, total.note) == (None, note)


def test_an_uplink_that_is_not_known_is_said_to_be_so() -> None:
    one, other = gpu(0, nvlinks=(), place=place("a", "s1")), gpu(1, nvlinks=(), place=place("a"))
    limit = node([one, other]).limit(one, other)
    assert limit.gb_s == pcie_gb_s(4, 16)
    assert limit.note == "PCIe 4 x16 at GPU0; the uplink of switch s1 is not known"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {
                "failures": (
                    ProbeFailure(stage="sysfs", error="broke"),
                    ProbeFailure(stage="nvml", error="no answer within 20 s"),
                    ProbeFailure(stage="cuda", error="killed by SIGSEGV"),
                )
            },
            "nvml: no answer within 20 s; cuda: killed by SIGSEGV",
        ),
        ({"driver": DriverFacts(absent="no driver is loaded")}, "no driver is loaded"),
        ({"driver": DriverFacts(version="550")}, "nvidia-smi topo -p2p r shows it"),
    ],
)
def test_who_did_not_answer_of_peer_access_is_named(facts: dict[str, Any], reason: str) -> None:
    topology = Topology(replace(node([gpu(0), gpu(1)]).snapshot, **facts))
    assert topology.peer_access(*topology.gpus).reason == reason


@pytest.mark.parametrize(
    ("facts", "word", "possible", "contradicts", "reason"),
    [
        ({"cuda": True, "read": "OK", "write": "OK"}, "OK", True, False, "possible"),
        ({"cuda": False, "read": "GNS", "write": "GNS"}, "GNS", False, False, "GPU not supported"),
        ({"read": "OK", "write": "CNS"}, "CNS", False, False, "chipset not supported"),
        ({"read": "TNS", "write": "OK"}, "TNS", False, False, "topology not supported"),
        ({"write": "OK"}, "OK", True, False, "possible"),
        ({"read": "XYZ"}, "XYZ", False, False, "XYZ"),
        ({"cuda": True}, "OK", True, False, "possible"),
        ({"cuda": False}, "no", False, False, "refused by CUDA"),
        ({"cuda": False, "read": "OK"}, "OK!", False, True, "CUDA reports refused, NVML reports possible"),
        ({"cuda": True, "read": "NS"}, "NS!", False, True, "CUDA reports possible, NVML reports not supported"),
        ({"read": "U", "write": "U"}, "?", None, False, "NVML: unknown to the driver"),
        ({"read": "U", "unknown": {"cuda": "no CUDA"}}, "?", None, False, "NVML: unknown to the driver; no CUDA"),
        ({"cuda": True, "read": "U"}, "OK", True, False, "possible; NVML: unknown to the driver"),
        ({"cuda": False, "read": "U"}, "no", False, False, "refused by CUDA; NVML: unknown to the driver"),
        ({"read": "U", "write": "OK"}, "OK", True, False, "possible"),
        ({"read": "U", "write": "GNS"}, "GNS", False, False, "GPU not supported"),
        ({}, "?", None, False, "nvidia-smi topo -p2p r shows it"),
        ({"unknown": {"cuda": "no CUDA", "read": "no NVML"}}, "?", None, False, "no CUDA; no NVML"),
    ],
)
def test_peer_access_in_one_word_and_in_several(
    facts: dict[str, Any], word: str, possible: bool | None, contradicts: bool, reason: str
) -> None:
    topology = node([gpu(0), gpu(1)], pairs=[PairFacts(source="GPU0", destination="GPU1", **facts)])
    access = topology.peer_access(*topology.gpus)
    assert (access.label, access.possible, access.contradicts, access.reason) == (word, possible, contradicts, reason)


def test_a_lost_gpu_is_the_reason_why_access_is_not_known() -> None:
    topology = node([gpu(0), gpu(1, lost="GPU is lost")])
    assert topology.peer_access(*topology.gpus).reason == "GPU is lost"
    assert topology.peer_access(*topology.gpus[::-1]).reason == "GPU is lost"


@pytest.mark.parametrize(("cpu", "gpus", "known"), [(None, 2, False), ("AMD EPYC", 2, True), (None, 3, True)])
def test_what_nccl_takes_over_pcie_is_known_with_the_processor_where_that_decides(
    cpu: str | None, gpus: int, *, known: bool
) -> None:
    """On AMD's NCCL takes any path between two GPUs."""
    found = node(
        [gpu(index) for index in range(gpus)], pairs=[PairFacts(source="GPU0", destination="GPU1", path="SYS")]
    )
    machine = replace(found.snapshot, machine=replace(found.snapshot.machine, cpu=cpu))
    assert is_policy_known(Topology(machine), *machine.gpus[:2]) is known


def test_the_nearest_gpus_of_a_nic() -> None:
    near, also, far = gpu(0, place=place("a", "s1")), gpu(1, place=place("a", "s1")), gpu(2, place=place("b", numa=1))
    card = nic(place=place("a", "s1"))
    assert node([far, near, also], [card]).nearest_gpus(card) == (near, also)
    assert node([far], [card]).nearest_gpus(card) == (far,)
    homeless = nic(place=PciPlace())
    assert node([near], [homeless]).nearest_gpus(homeless) == ()
    assert node([], [card]).nearest_gpus(card) == ()


@pytest.mark.parametrize(
    ("peermem", "dma_buf", "possible", "words"),
    [
        (True, None, True, "nvidia-peermem is loaded"),
        (True, False, True, "nvidia-peermem is loaded"),
        (False, True, True, "dma-buf, if"),
        (None, True, True, "dma-buf, if"),
        (False, False, False, "nvidia-peermem is not loaded, and the GPU driver offers no dma-buf"),
        (False, None, None, "nvidia-peermem is not loaded, and it is unknown"),
        (None, None, None, "nvidia-peermem was not checked, and it is unknown"),
        (None, False, None, "nvidia-peermem was not checked"),
    ],
)
def test_gpudirect_and_by_what(peermem: bool | None, dma_buf: bool | None, possible: bool | None, words: str) -> None:
    card = nic()
    answer, reason = node([], [card], gpudirect=GpuDirectFacts(peermem=peermem, dma_buf=dma_buf)).gpudirect(card)
    assert answer is possible
    assert reason.startswith(words)


@pytest.mark.parametrize(
    ("efa_peermem", "dma_buf", "possible", "words"),
    [
        (True, False, True, "efa_nv_peermem is loaded"),
        (False, True, True, "dma-buf, if the NIC's driver supports it too (efa_nv_peermem is not loaded"),
        (False, False, None, "efa_nv_peermem is not loaded (older EFA drivers do not need it)"),
        (None, None, None, "efa_nv_peermem was not checked, and it is unknown"),
    ],
)
def test_efa_has_a_module_of_its_own(efa_peermem: bool, dma_buf: bool, possible: bool | None, words: str) -> None:
    card = nic("rdmap0", kind=NicKind.EFA)
    facts = GpuDirectFacts(peermem=False, efa_peermem=efa_peermem, dma_buf=dma_buf)
    answer, reason = node([], [card], gpudirect=facts).gpudirect(card)
    assert answer is possible
    assert reason.startswith(words)


@pytest.mark.parametrize("said", [True, False])
def test_what_nccl_said_of_gpudirect_comes_first(said: bool) -> None:
    card = nic(gpudirect=said)
    facts = GpuDirectFacts(peermem=not said, dma_buf=not said)
    assert node([], [card], gpudirect=facts).gpudirect(card) == (said, "according to NCCL")


def test_software_rdma_has_no_gpudirect() -> None:
    card = nic(kind=NicKind.ROCE, model=SOFTWARE_RDMA)
    assert not card.rdma
    answer, reason = node([], [card], gpudirect=GpuDirectFacts(peermem=True)).gpudirect(card)
    assert (answer, reason) == (False, "software RDMA, in which the CPU moves the data")


def test_plain_ethernet_has_no_gpudirect() -> None:
    card = nic(kind=NicKind.ETHERNET)
    assert node([], [card], gpudirect=GpuDirectFacts(peermem=True)).gpudirect(card)[0] is False


BRIDGES = ("pci0000:00", "pci0000:40", "pci0001:00")
PCIE_LINKS = st.builds(
    PcieLink,
    generation=st.sampled_from([None, 1, 3, 4, 5]),
    width=st.sampled_from([None, 1, 4, 8, 16]),
    max_generation=st.sampled_from([None, 4, 5, 6]),
    max_width=st.sampled_from([None, 8, 16]),
)


@st.composite
def places(draw: st.DrawFn, switches: Sequence[PciSwitch]) -> PciPlace:
    """Below one of the switches, or at a root port of its own, or nobody knows where."""
    above = draw(st.sampled_from([None, *switches]))
    if above is not None:
        return replace(above.place, switches=(*above.place.switches, above.bus_id))
    bridge = draw(st.sampled_from([None, *BRIDGES]))
    return PciPlace(
        host_bridge=bridge,
        root_port=draw(st.sampled_from([None, "p1", "p2"])),
        numa_node=draw(st.sampled_from([None, 0, 1])),
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[PciSwitch, ...]:
    switches: list[PciSwitch] = []
    for number in range(draw(st.integers(0, 5))):
        where = draw(places(switches).filter(lambda each: each.host_bridge is not None))
        switches.append(PciSwitch(bus_id=f"0000:{number:02x}:00.0", link=draw(PCIE_LINKS), place=where))
    return tuple(switches)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """GPUs and NICs anywhere in a PCI tree; both ends of an NVLink say the same of it, and all have one speed."""
    switches = draw(trees())
    gpus = [
        gpu(number, pcie=draw(PCIE_LINKS), place=draw(places(switches))) for number in range(draw(st.integers(1, 5)))
    ]
    ends: list[list[NvLink]] = [[] for _ in gpus]
    speed = draw(st.sampled_from([("4.0", 26.562), ("5.0", 53.125), ("3.0", None), ("4.0", None)]))

    def attach(index: int, active: bool, peer: NvlinkPeer | None, bus_id: str | None) -> None:
        number = len(ends[index])
        ends[index].append(
            NvLink(number=number, active=active, version=speed[0], raw_gb_s=speed[1], peer=peer, peer_bus_id=bus_id)
        )

    for one in range(len(gpus)):
        for other in range(one):
            for active in draw(st.lists(st.booleans(), max_size=3)):
                attach(one, active, NvlinkPeer.GPU, gpus[other].bus_id)
                attach(other, active, NvlinkPeer.GPU, gpus[one].bus_id)
        for active in draw(st.lists(st.booleans(), max_size=4)):
            attach(one, active, draw(st.sampled_from([NvlinkPeer.SWITCH, None])), None)
    fabrics = st.none() | st.builds(Fabric, clique=st.sampled_from([None, 0, 1]))
    linked = [
        replace(each, nvlinks=draw(st.sampled_from([tuple(ends[each.index]), None])), fabric=draw(fabrics))
        for each in gpus
    ]
    nics = [
        nic(
            f"mlx5_{number}",
            bus_id=f"0000:e{number}:00.0",
            pcie=draw(PCIE_LINKS),
            place=draw(places(switches)),
            rate_gbit_s=draw(st.sampled_from([None, 25.0, 200.0, 800.0])),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    return node(linked, nics, switches=switches, numa_nodes=draw(st.integers(0, 2)))


@given(machines())
def test_the_path_matrix_is_symmetric_and_has_known_words(topology: Topology) -> None:
    names = [device.device for device in topology.devices]
    assert list(topology.matrix) == names
    for source, row in topology.matrix.items():
        assert list(row) == names
        assert row[source] == "X"
        for destination, word in row.items():
            assert word == topology.matrix[destination][source]
            if source != destination:
                assert word in (*PATH_CLASSES, "?") or (word.startswith("NV") and int(word[2:]) > 0)


def least(*rates: float | None) -> float:
    return min(rate for rate in rates if rate is not None)


@given(machines())
def test_no_pair_is_above_what_either_end_can_do(topology: Topology) -> None:
    for source, destination in permutations(topology.devices, 2):
        limit = topology.limit(source, destination)
        assert limit.note
        if limit.gb_s is None:
            continue
        assert limit.gb_s > 0
        if topology.path(source, destination).startswith("NV"):
            assert isinstance(source, GpuFacts)
            assert isinstance(destination, GpuFacts)
            assert limit.gb_s <= least(topology.nvlink_total(source).gb_s, topology.nvlink_total(destination).gb_s)
            continue
        assert limit.gb_s <= least(*(pcie_ceiling_gb_s(link_under_load(end)) for end in (source, destination)))
        if source.place.host_bridge != destination.place.host_bridge:
            assert limit.gb_s <= least(topology.pcie_total(source).gb_s, topology.pcie_total(destination).gb_s)
        for end in (source, destination):
            if isinstance(end, NicFacts):
                assert end.rate_gbit_s is not None
                assert limit.gb_s <= end.rate_gbit_s / 8


@given(machines())
def test_totals_are_known_or_say_why_not(topology: Topology) -> None:
    for each in topology.gpus:
        active = sum(bool(link.active) for link in each.nvlinks or ())
        total = topology.nvlink_total(each)
        assert total.note
        assert total.gb_s is None or total.gb_s in (active * 25.0, active * 50.0)
    for device in topology.devices:
        assert topology.pcie_total(device).note
    for card in topology.nics:
        paths = {each.device: topology.pcie_path(each, card) for each in topology.gpus}
        known = [word for word in PATH_CLASSES if word in paths.values()]
        nearest = [each.device for each in topology.nearest_gpus(card)]
        assert nearest == [name for name, word in paths.items() if known and word == known[0]]


@given(trees(), st.integers(0, 2), st.data())
def test_path_classes_are_symmetric_and_a_shared_switch_never_keeps_devices_apart(
    switches: tuple[PciSwitch, ...], numa_nodes: int, data: st.DataObject
) -> None:
    one, other = data.draw(places(switches)), data.draw(places(switches))
    path = pcie_path_class(one, other, numa_nodes)
    assert path == pcie_path_class(other, one, numa_nodes)
    shared = [bus_id for bus_id in one.switches if bus_id in other.switches]
    if not shared:
        return
    removed = data.draw(st.sampled_from(shared))
    without = [replace(each, switches=tuple(bus for bus in each.switches if bus != removed)) for each in (one, other)]
    after = pcie_path_class(without[0], without[1], numa_nodes)
    assert path is not None
    assert after is not None
    assert PATH_CLASSES.index(after) >= PATH_CLASSES.index(path)
