"""What machines allow between the GPUs of ranks, and the first cause of a fallback that all facts show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from gpubench.hardware.simulated.machine import parse_machine, snapshots
from gpubench.model.evidence import State
from gpubench.model.fault import parse_fault
from gpubench.model.rank_facts import RankFacts
from gpubench.model.report import RankIdentity
from gpubench.model.selection import Pair
from gpubench.model.snapshot import Snapshot
from gpubench.model.staging_causes import Cause, Circumstances, first_cause, users_settings
from gpubench.model.topology import Topology
from gpubench.model.transport import parse_transport
from gpubench.model.wiring import Wiring

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


def around(
    wires: Wiring, settings: Mapping[str, Sequence[str]] | None = None, shm_devices: Sequence[int | None] = ()
) -> Circumstances:
    facts = [
        RankFacts(rank=rank, host="n0", node=0, local_rank=rank, pid=rank, shm_device=device)
        for rank, device in enumerate(shm_devices)
    ]
    return Circumstances(wiring=wires, facts=facts, settings=settings or {})


def cause(wires: Wiring, pair: Pair, via: str = "SHM/direct", **settings: str) -> Cause:
    found = {name: (value,) for name, value in settings.items()}
    return first_cause({pair: (parse_transport(via),)}, around(wires, found))


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
    assert cause(wires, (0, 1)).id == "by-design"
    assert cause(wires, (0, 1), NCCL_P2P_DISABLE="1").id == "by-design"
    assert cause(wires, (0, 1), "NET/Socket/0").id == "refused", "shared memory is the design, not sockets"
    assert not wires.has_nvlinks((0, 1))


def test_a_refusal_that_is_no_design_is_a_cause() -> None:
    wires = wiring(nodes_of("hgx-h200-4", "link0-1:p2p=NS"), 4)
    assert wires.capability((0, 1)).state is State.CONTRADICTING
    assert wires.by_design((0, 1)) == ""
    found = cause(wires, (0, 1))
    assert found.id == "refused"
    assert "not supported" in found.seen


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
    assert wires.limit((0, 2)).gb_s is None
    assert wires.capability((0, 2)).state is State.PRESENT
    assert cause(wires, (0, 2), "NET/Socket/0").id == "sockets"
    assert cause(wires, (0, 2), "NET/IB/0").id == "unknown"
    bare = wiring([replace(node, nics=()) for node in both])
    assert bare.capability((0, 2)).state is State.CONTRADICTING
    assert "no RDMA NIC is active on" in bare.by_design((0, 2))
    assert cause(bare, (0, 2), "NET/Socket/0").id == "by-design"
    closed = [
        replace(node, gpudirect=replace(node.gpudirect, peermem=False, dma_buf=False), nics=tuple(
            replace(nic, gpudirect=None) for nic in node.nics
        ))
        for node in both
    ]  # fmt: skip
    refused = wiring(closed)
    assert refused.capability((0, 2)).state is State.CONTRADICTING
    assert cause(refused, (0, 2), "NET/IB/0").id == "refused"


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
    assert wires.through_host_gb_s((0, 1)) is None
    assert wires.capability((0, 1)).state is State.ABSENT
    assert not wires.has_nvlinks((0, 1))
    assert wires.by_design((0, 1)) == ""
    assert wires.rdma_nics(0) == []
    across = Wiring(wiring(nodes_of("hgx-h100-8*2")).gpus, {})
    assert across.capability((0, 2)).state is State.ABSENT
    assert cause(wires, (0, 1)).id == "unknown"


@pytest.mark.parametrize(
    ("settings", "via", "blamed"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "SHM/direct", "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "0"}, "SHM/direct", ""),
        (
            {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            "NET/Socket/0",
            "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
        ),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "SHM/direct", "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "SHM/direct", "NCCL_P2P_LEVEL=LOC"),
        ({"NCCL_P2P_LEVEL": "PIX"}, "SHM/direct", ""),
        ({"NCCL_HOSTID": "node0"}, "NET/Socket/0", "NCCL_HOSTID=node0"),
        ({"NCCL_HOSTID": "node0"}, "SHM/direct", ""),
        ({"NCCL_IB_DISABLE": "1"}, "NET/Socket/0", ""),
        ({"NCCL_DEBUG": "INFO"}, "SHM/direct", ""),
    ],
)
def test_variables_that_keep_gpus_of_a_node_apart(settings: dict[str, str], via: str, blamed: str) -> None:
    found = cause(wiring(nodes_of("hgx-h200-4"), 4), (0, 1), via, **settings)
    if not blamed:
        assert found.id == "unknown"
        return
    assert (found.id, found.seen) == ("environment", f"{blamed} in the environment")
    assert found.advice.startswith("unset ")


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"), ("NCCL_NET_GDR_LEVEL", "LOC")]
)
def test_variables_that_keep_nodes_off_rdma(name: str, value: str) -> None:
    wires = wiring(nodes_of("hgx-h100-8*2"))
    assert cause(wires, (0, 2), "NET/Socket/0", **{name: value}).seen == f"{name}={value} in the environment"
    assert cause(wires, (0, 2), "NET/Socket/0", NCCL_P2P_DISABLE="1").id == "sockets"


def test_a_dev_shm_of_its_own_is_seen_before_any_policy() -> None:
    wires = wiring(nodes_of("hgx-h200-4"), 4)
    staged = {(0, 1): (SOCKET,), (1, 0): (SOCKET,)}
    found = first_cause(staged, around(wires, shm_devices=(41, 42, 43, 44)))
    assert (found.id, "ranks 0 and 1" in found.seen) == ("shm-not-shared", True)
    assert first_cause(staged, around(wires, shm_devices=(41, 41, 41, 41))).id == "unknown"
    assert first_cause(staged, around(wires, shm_devices=(41, None, 41, 41))).id == "unknown"
    blamed = around(wires, {"NCCL_P2P_DISABLE": ("1",)}, shm_devices=(41, 42))
    assert first_cause(staged, blamed).id == "environment"


def test_a_variable_that_differs_between_ranks_is_shown_with_all_its_values() -> None:
    circumstances = around(wiring(nodes_of("hgx-h200-4"), 4), {"NCCL_HOSTID": ("node0", "node1")})
    assert first_cause({(1, 2): (SOCKET,)}, circumstances).seen == "NCCL_HOSTID=node0,node1 in the environment"


def test_settings_are_the_values_of_all_ranks() -> None:
    facts = [
        RankFacts(
            rank=rank, host="n", node=0, local_rank=rank, pid=1, environment={"NCCL_HOSTID": f"n{rank}", "X": "1"}
        )
        for rank in range(2)
    ]
    assert users_settings(facts, [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1"}]) == {
        "NCCL_HOSTID": ("n0", "n1"),
        "NCCL_P2P_DISABLE": ("1",),
    }
