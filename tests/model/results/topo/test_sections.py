from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import (
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
    Snapshot,
)
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.results.report import Record
from gpubench.model.results.topo import (
    RankRow,
    all_pair_rows,
    gpu_rows,
    kind_rows,
    link_rows,
    nic_rows,
    node_rows,
    pair_rows,
    peer_access,
    rank_rows,
    rows_by_node,
    tree_rows,
)
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots

GEN4_X16 = PcieLink(generation=4, width=16, max_generation=4, max_width=16)
HEALTHY = snapshots(parse_machine("hgx-h100-8"))[0]


def node(*gpus: GpuFacts, nics: tuple[NicFacts, ...] = (), **facts: Any) -> Topology:
    return Topology(Snapshot(host="n1", origin=Origin.RECORDED, source="a test", gpus=gpus, nics=nics, **facts))


def cluster(machine: str, *faults: str) -> list[Topology]:
    return [
        Topology(snapshot) for snapshot in snapshots(parse_machine(machine), [parse_fault(fault) for fault in faults])
    ]


def test_what_is_not_known_of_a_gpu_is_none_and_not_zero() -> None:
    (row,) = gpu_rows(node(GpuFacts(index=4, unknown={"ecc": "Not Supported"})))
    assert (row.nvlinks, row.nvlinks_active, row.nvlink_version) == (None, None, None)
    assert (row.nvlink_gb_s, row.nvlink_gb_s_per_link, row.pcie_gb_s) == (None, None, None)
    assert (row.fabric_state, row.fabric_health, row.remapped_rows_correctable, row.users) == (None, None, None, None)
    assert row.nvlink_errors is None
    assert row.unknown == {"ecc": "Not Supported"}


@pytest.mark.parametrize(
    ("peer", "bus_id", "name"),
    [
        (NvlinkPeer.GPU, "0000:02:00.0", "GPU1"),
        (NvlinkPeer.GPU, "0000:99:00.0", "a GPU"),
        (NvlinkPeer.GPU, None, "a GPU"),
        (NvlinkPeer.SWITCH, "0000:99:00.0", "NVSwitch"),
        (NvlinkPeer.CPU, None, "CPU"),
        (None, None, "unknown"),
    ],
)
def test_the_far_end_of_a_link_has_a_name(peer: NvlinkPeer | None, bus_id: str | None, name: str) -> None:
    link = NvLink(number=3, active=True, version="4.0", raw_gb_s=26.562, peer=peer, peer_bus_id=bus_id)
    topology = node(GpuFacts(index=0, nvlinks=(link,)), GpuFacts(index=1, bus_id="0000:02:00.0"))
    first, second = gpu_rows(topology)
    assert first.nvlink_peers == [name]
    assert second.nvlink_peers == []
    (row,) = link_rows(topology)
    assert (row.gpu, row.link, row.gb_s, row.raw_gb_s, row.peer_bus_id) == ("GPU0", 3, 25.0, 26.562, bus_id)
    assert row.peer == (name if peer else None)


def test_who_uses_a_gpu() -> None:
    users = (GpuProcess(pid=7, name="python"), GpuProcess(pid=8))
    (row,) = gpu_rows(node(GpuFacts(index=0, processes=users, fabric=Fabric(state="completed", health_mask=0))))
    assert row.users == ["7 python", "8"]
    assert row.fabric_health == "not reported"


def test_a_row_a_node_in_the_order_of_the_job() -> None:
    nodes = cluster("hgx-h100-8*4", "node2.gpu5:ecc=off")
    rows = list(node_rows(nodes, group_nodes(nodes)))
    assert [row.node for row in rows] == ["node0", "node1", "node2", "node3"]
    assert [row.differences for row in rows] == [[], [], ["GPU5 ECC off (others on)"], []]
    assert {row.node_kind for row in rows} == {"A"}
    assert len({row.topology for row in rows}) == 1
    assert (rows[0].gpus, rows[0].peermem, rows[0].nvswitches) == (8, True, len(HEALTHY.nvswitches))
    broken = node(failures=(ProbeFailure(stage="nvml", error="no answer", timed_out=True),))
    (row,) = node_rows([broken], group_nodes([broken]))
    assert row.failures == ["nvml: no answer"]


@pytest.mark.parametrize(
    ("pair", "note"),
    [
        ({"cuda": False, "read": "GNS"}, "through host memory: GPU not supported"),
        ({"cuda": False, "read": "OK"}, "through host memory: CUDA reports refused, NVML reports possible"),
        ({}, "peer access not known: nvidia-smi topo -p2p r shows it"),
        ({"cuda": True}, "direct possible"),
    ],
)
def test_a_pair_says_what_peer_access_makes_of_it(pair: dict[str, Any], note: str) -> None:
    gpus = (GpuFacts(index=0, pcie=GEN4_X16, nvlinks=()), GpuFacts(index=1, pcie=GEN4_X16, nvlinks=()))
    topology = node(*gpus, pairs=(PairFacts(source="GPU0", destination="GPU1", **pair),))
    assert next(pair_rows(topology)).note == f"{note}; PCIe 4 x16 at GPU0"


def test_the_pairs_of_many_nodes_are_those_of_each() -> None:
    nodes = cluster("hgx-h100-8*12", *(f"node{number}.gpu{number % 8}:nvlink={number}" for number in range(1, 12, 2)))
    nodes.append(Topology(replace(nodes[0].snapshot, host="other", gpudirect=GpuDirectFacts())))
    nodes.append(Topology(replace(nodes[0].snapshot, host="last", gpus=nodes[0].gpus[:7])))
    assert list(chain.from_iterable(all_pair_rows(nodes))) == [row for each in nodes for row in pair_rows(each)]


@pytest.mark.parametrize("make", [link_rows, nic_rows])
def test_the_devices_of_many_nodes_are_those_of_each(make: Callable[[Topology], Iterator[Record]]) -> None:
    nodes = cluster("hgx-h100-8*9", "node3.gpu2:nvlink=12", "node4.nic1:state=down", "node6.gpu0:lost=yes")
    assert len({id(each.like) for each in nodes}) > 4
    assert list(chain.from_iterable(rows_by_node(nodes, make))) == [row for each in nodes for row in make(each)]


@pytest.mark.parametrize("machine", ["hgx-h100-8", "hgx-h100-4"])
def test_a_pair_says_where_nccl_ends_gpudirect(machine: str) -> None:
    (topology,) = cluster(machine)
    far = "NCCL uses it up to PXB, unless NCCL_NET_GDR_LEVEL is set"
    assert {"PHB" if machine == "hgx-h100-4" else "PIX", "SYS"} <= {row.path_class for row in pair_rows(topology)}
    for row in pair_rows(topology):
        is_mixed = row.source.startswith("GPU") != row.destination.startswith("GPU")
        assert (far in (row.note or "")) is (is_mixed and row.path_class in ("PHB", "NODE", "SYS"))
    without = Topology(replace(HEALTHY, gpudirect=GpuDirectFacts(peermem=False, dma_buf=False)))
    assert not any(far in (row.note or "") for row in pair_rows(without))


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        (GpuDirectFacts(peermem=False, dma_buf=False), "no GPUDirect RDMA: nvidia-peermem is not loaded"),
        (GpuDirectFacts(), "GPUDirect RDMA not known: nvidia-peermem was not checked"),
    ],
)
def test_a_nic_s_pair_says_what_gpudirect_makes_of_it(facts: GpuDirectFacts, note: str) -> None:
    nic = NicFacts(name="mlx5_0", kind=NicKind.INFINIBAND)
    topology = node(GpuFacts(index=0), nics=(nic,), gpudirect=facts)
    assert all((row.note or "").startswith(note) for row in pair_rows(topology))
    assert len(list(pair_rows(topology))) == 2


def test_a_row_a_kind_by_its_first_node() -> None:
    nodes = cluster("hgx-h100-8*4", "node0.gpu5:nvlink=9")
    (row,) = kind_rows(nodes, group_nodes(nodes))
    assert (row.node_kind, row.node, row.nodes, row.odd) == ("A", "node1", ["node1", "node2", "node3"], ["node0"])
    assert row.matrix == nodes[1].matrix
    assert row.limits["GPU5"]["nvlink"] == 450.0
    assert row.peer_access == peer_access(nodes[1])
    assert (row.limits["GPU5"]["network"], row.network_gb_s) == (50.0, 400.0), "one NIC a GPU, eight a node"


def test_a_row_a_rank() -> None:
    facts = RankFacts(rank=3, host="n2", node=1, local_rank=1, pid=99, shm_device=7, environment={"NCCL_ALGO": "Ring"})
    (row,) = rank_rows([facts])
    assert (row.rank, row.node, row.local_rank, row.shm_device) == (3, "n2", 1, 7)
    assert row.environment == {"NCCL_ALGO": "Ring"}
    assert set(row.to_record()) == set(RankRow.columns())


def placed(index: int, bridge: str, *switches: str, numa: int | None = 0, **facts: Any) -> GpuFacts:
    place = PciPlace(host_bridge=bridge, switches=switches, numa_node=numa)
    return GpuFacts(index=index, bus_id=f"0000:0{index}:00.0", name="L40S", pcie=GEN4_X16, place=place, **facts)


def test_a_tree_shows_a_generation_that_does_not_rise() -> None:
    low = PcieLink(generation=1, width=16, max_generation=4, max_width=16)
    gpus = [
        replace(placed(index, "a", "s1"), pcie=low, idle=idle, performance_state=state)
        for index, (idle, state) in enumerate(((True, None), (None, None), (False, 0)))
    ]
    nic = NicFacts(name="mlx5_0", kind=NicKind.ROCE, pcie=low, place=PciPlace(host_bridge="a", switches=("s1",)))
    topology = node(*gpus, nics=(nic,), switches=(PciSwitch(bus_id="s1", link=low),))
    rates = {row.element: row.gb_s for row in tree_rows(topology)}
    assert [rates[name] for name in ("GPU0", "GPU1", "GPU2", "mlx5_0", "s1")] == [31.508, 31.508, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("machine", ["hgx-h100-8", "hgx-a100-8", "hgx-h200-4", "rtx-4090-2"])
def test_every_placed_device_is_in_the_tree_once(machine: str) -> None:
    (topology,) = cluster(machine)
    elements = [row.element for row in tree_rows(topology)]
    for device in topology.devices:
        assert elements.count(device.device) == (1 if device.place.host_bridge else 0)
    for switch in topology.snapshot.switches:
        assert elements.count(switch.bus_id) <= 1
