"""What machines allow between the GPUs of ranks, and what of it is by design."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import State
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.ranks import RankIdentity
from gpubench.simulated.machine import parse_machine, snapshots


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


def test_pcie_gpus_are_staged_by_design() -> None:
    wires = wiring(nodes_of("rtx-4090-2"))
    assert wires.capability((0, 1)).state is State.CONTRADICTING
    assert wires.why_staged((0, 1))
    assert not wires.has_nvlinks((0, 1))


def test_a_refusal_that_is_no_design_is_a_cause() -> None:
    wires = wiring(nodes_of("hgx-h200-4", "link0-1:p2p=NS"), 4)
    assert wires.capability((0, 1)).state is State.CONTRADICTING
    assert wires.why_staged((0, 1)) == ""


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
    assert "no RDMA NIC is active on" in bare.why_staged((0, 2))
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


def test_gpus_that_nobody_described_are_unknown() -> None:
    known = wiring(nodes_of("hgx-h200-4"), 4)
    wires = Wiring(known.gpus, {})
    assert wires.path((0, 1)) == "?"
    assert wires.limit((0, 1)).gb_s is None
    assert wires.staged_gb_s((0, 1)) is None
    assert wires.capability((0, 1)).state is State.ABSENT
    assert not wires.has_nvlinks((0, 1))
    assert wires.why_staged((0, 1)) == ""
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


def test_the_uplink_of_a_switch_that_gpu_and_nic_share_is_no_limit_between_nodes() -> None:
    """HGX B300: NICs of 100 GB/s beside their GPUs, behind an uplink of 63; two ranks a node."""
    found = wiring(nodes_of("hgx-b300-8*2")).networks
    assert found is not None
    assert (found[0].node_gb_s, found[0].nic_gb_s) == (200.0, 100.0)
