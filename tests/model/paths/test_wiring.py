"""What machines allow between the GPUs of ranks, and what of it is by design."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import topologies
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import State, parse_transport
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.ranks import RankIdentity
from gpubench.simulated.machine import parse_machine, snapshots

SHM, SOCKET = parse_transport("SHM/direct"), parse_transport("NET/Socket/0")


def nodes_of(name: str, *faults: str) -> list[Snapshot]:
    return snapshots(parse_machine(name), [parse_fault(fault) for fault in faults])


def wiring(nodes: Sequence[Snapshot], per_node: int = 2) -> Wiring:
    ranks = [
        RankIdentity(
            rank=number * per_node + local,
            host=node.host,
            node=number,
            local_rank=local,
            pid=1,
            gpu_index=0,
            gpu_bus_id=(gpu.bus_id or "").upper(),
        )
        for number, node in enumerate(nodes)
        for local, gpu in enumerate(node.gpus[:per_node])
    ]
    return Wiring(ranks, {number: Topology(node) for number, node in enumerate(nodes)})


def test_gpus_on_nvswitch_could_be_direct() -> None:
    wires = wiring(nodes_of("hgx-h200-4"), 4)
    assert wires.path((0, 3)) == "NV18"
    assert wires.limit((0, 3)).gb_s == 450
    assert wires.has_nvlinks((3, 0))
    assert wires.capability((0, 1)).state is State.PRESENT
    assert wires.by_design((0, 1)) == ""
    assert wires.through_host_gb_s((0, 1)) == pytest.approx(63.0, abs=0.1)


def test_pcie_gpus_are_staged_by_design() -> None:
    wires = wiring(nodes_of("rtx-4090-2"))
    assert wires.capability((0, 1)).state is State.CONTRADICTING
    assert wires.by_design((0, 1))
    assert not wires.has_nvlinks((0, 1))


def test_a_refusal_that_is_no_design_is_a_cause() -> None:
    wires = wiring(nodes_of("hgx-h200-4", "link0-1:p2p=NS"), 4)
    assert wires.capability((0, 1)).state is State.CONTRADICTING
    assert wires.by_design((0, 1)) == ""


def test_pairs_beyond_pxb_are_kept_off_by_nccl() -> None:
    (node,) = nodes_of("hgx-h200-2")
    gpus = tuple(replace(gpu, nvlinks=(), fabric=None) for gpu in node.gpus)
    bare = replace(node, gpus=gpus)
    intel, amd = (
        wiring([replace(bare, machine=replace(bare.machine, cpu=cpu))]) for cpu in ("Intel(R) Xeon(R)", "AMD EPYC 9654")
    )
    assert intel.path((0, 1)) in ("PHB", "NODE", "SYS")
    assert "up to path class PXB" in intel.by_design((0, 1))
    assert amd.by_design((0, 1)) == "", "NCCL lets two GPUs on AMD use any path"


def test_between_nodes_it_is_the_nics_that_count() -> None:
    both = nodes_of("hgx-h100-8*2")
    wires = wiring(both)
    assert wires.path((0, 2)) == "NET"
    assert wires.limit((0, 2)).gb_s == 50
    assert wires.limit((0, 2)).note == "node0: mlx5_0"
    slow = wiring(nodes_of("hgx-h100-8*2", "node1.nic0:rate=100"))
    assert slow.limit((0, 2)).gb_s == 12.5
    narrow = wiring(nodes_of("hgx-h100-8*2", "node1.nic0:generation=3,width=8"))
    assert narrow.limit((0, 2)).gb_s == pytest.approx(7.88, abs=0.01)
    assert wires.capability((0, 2)).state is State.PRESENT
    bare = wiring([replace(node, nics=()) for node in both])
    assert bare.limit((0, 2)).gb_s is None
    assert bare.capability((0, 2)).state is State.CONTRADICTING
    assert "no RDMA NIC is active on" in bare.by_design((0, 2))
    closed = [
        replace(node, gpudirect=replace(node.gpudirect, peermem=False, dma_buf=False), nics=tuple(
            replace(nic, gpudirect=None) for nic in node.nics
        ))
        for node in both
    ]  # fmt: skip
    refused = wiring(closed)
    assert refused.capability((0, 2)).state is State.CONTRADICTING


def test_peer_access_of_which_nobody_said_anything_is_unknown() -> None:
    (node,) = nodes_of("hgx-h200-2")
    capability = wiring([replace(node, pairs=())]).capability((0, 1))
    assert capability.state is State.ABSENT
    assert capability.seen


def test_each_direction_of_a_pair_has_an_answer_of_its_own() -> None:
    (node,) = nodes_of("hgx-h200-2")
    there, back = (next(each for each in node.pairs if each.source == name) for name in ("GPU0", "GPU1"))
    wires = wiring([replace(node, pairs=(there, replace(back, read="CNS", write="CNS")))])
    for _ in range(2):
        assert [wires.peer_access(pair).nvml for pair in ((0, 1), (1, 0))] == ["OK", "CNS"]


def test_gpus_that_nobody_described_are_unknown() -> None:
    known = wiring(nodes_of("hgx-h200-4"), 4)
    wires = Wiring(known.gpus, {})
    assert wires.path((0, 1)) == "?"
    assert wires.limit((0, 1)).gb_s is None
    assert wires.through_host_gb_s((0, 1)) is None
    assert wires.capability((0, 1)).state is State.ABSENT
    assert not wires.has_nvlinks((0, 1))
    assert wires.by_design((0, 1)) == ""
    assert wires.rdma_nics(0) == []
    across = Wiring(wiring(nodes_of("hgx-h100-8*2")).gpus, {})
    assert across.capability((0, 2)).state is State.ABSENT


def test_nodes_of_one_clique_are_joined_by_nvlink() -> None:
    rack = wiring(nodes_of("gb200-nvl72"))
    assert (rack.path((0, 2)), rack.limit((0, 2)).gb_s) == ("P2P/MNNVL", 900)
    assert rack.has_nvlinks((0, 2))
    assert rack.capability((0, 2)).state is State.PRESENT
    split = wiring(nodes_of("gb200-nvl72", "node1:clique=1"))
    assert (split.path((0, 2)), split.path((0, 4))) == ("NET", "P2P/MNNVL")


def test_devices_that_share_a_port_carry_no_more_than_it() -> None:
    """Two slots of PCIe 5 x4 carry 31.5 GB/s, the port 25; with one device down the other's slot decides."""
    assert wiring(nodes_of("dgx-spark*2"), 1).limit((0, 1)).gb_s == 25
    alone = wiring(nodes_of("dgx-spark*2", "node0.nic1:state=down"), 1)
    assert alone.limit((0, 1)).gb_s == pytest.approx(15.75, abs=0.01)


def test_the_uplink_of_a_switch_that_gpu_and_nic_share_is_no_limit_between_nodes() -> None:
    """HGX B300: NICs of 100 GB/s beside their GPUs, behind an uplink of 63; two ranks a node."""
    found = wiring(nodes_of("hgx-b300-8*2")).networks
    assert found is not None
    assert (found[0].node_gb_s, found[0].nic_gb_s) == (200.0, 100.0)


def test_of_nodes_with_the_same_facts_ranks_on_other_gpus_have_other_nics() -> None:
    nodes = topologies(nodes_of("hgx-h100-8*2", "node0.nic7:rate=200", "node1.nic7:rate=200"))
    assert nodes[1].like is nodes[0]
    places = [GpuPlace("node", number, nodes[number].gpus[gpu].bus_id) for number, gpu in ((0, 0), (1, 7))]
    found = Wiring(places, dict(enumerate(nodes))).networks
    assert found is not None
    assert [each.nic_gb_s for each in found] == [25.0, 50.0]
