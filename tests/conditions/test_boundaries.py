"""Values just inside and just outside the limits of conditions, and harmless neighbours of faults."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.conditions.circumstances import Facts, Sighting, Unread
from gpubench.conditions.logged import ProcessLog, Staged
from gpubench.conditions.policy import Medium, PathKind, Relation
from gpubench.conditions.ranking import _covered, explain
from gpubench.conditions.registry import CAUSES
from gpubench.measure.check.health import judge
from gpubench.measure.topo import examine
from gpubench.model.facts.process import MpiFacts
from gpubench.model.facts.snapshot import NicKind, Snapshot
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Pair
from gpubench.model.results.report import CheckRow
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.planted import CHECKED, PLANTS, Job, below_a_switch, job_of, simulated, with_nodes, with_ranks

MIB = 2**20
SHM, SOCKETS = (PathKind(Relation.ONE_NODE, each) for each in (Medium.SHM, Medium.SOCKET))


def board() -> Job:
    return simulated("hgx-h200-4")


def two() -> Job:
    return simulated("hgx-h100-8*2")


def planted(id_: str) -> Job:
    return next(plant for plant in (*PLANTS, *CHECKED) if plant.id == id_).make()


def with_variables(job: Job, **values: str) -> Job:
    return with_ranks(job, lambda facts: replace(facts, environment={**facts.environment, **values}))


def on_roce(mtu: int) -> Job:
    def edit(node: Snapshot) -> Snapshot:
        return replace(node, nics=tuple(replace(nic, kind=NicKind.ROCE, mtu=mtu) for nic in node.nics))

    return with_nodes(two(), edit)


def in_state(node: Snapshot, state: str) -> Snapshot:
    """Set the state of the node's first NIC."""
    return replace(node, nics=(replace(node.nics[0], state=state), *node.nics[1:]))


def with_files(state: str) -> Job:
    """Give ranks only the device file of the first port, in this state."""

    file = two().nodes[0].rdma_ports[0].device_file
    job = with_nodes(two(), lambda node: in_state(node, state))
    return with_ranks(job, lambda facts: replace(facts, device_files=("/dev/nvidia0", file or "")))


def expanding(**facts: Any) -> Job:
    """Ranks that use expandable segments and may pass file descriptors."""
    return with_ranks(planted("ptrace-blocked"), lambda rank: replace(rank, pidfd_getfd=True, **facts))


def beside_ethernet() -> Job:
    """The planted redirection, with a NIC that cannot do RDMA."""

    def edit(node: Snapshot) -> Snapshot:
        return replace(node, nics=tuple(replace(nic, kind=NicKind.ETHERNET) for nic in node.nics))

    return with_nodes(planted("acs-nic-redirect"), edit)


def without_bridges() -> Job:
    """The planted write collapse, with unknown host bridges."""

    def edit(node: Snapshot) -> Snapshot:
        gpus = (replace(gpu, place=replace(gpu.place, host_bridge=None)) for gpu in node.gpus)
        return replace(node, gpus=tuple(gpus))

    return with_nodes(planted("posted-write-collapse"), edit)


@pytest.mark.parametrize(
    ("make", "id_", "holds"),
    [
        (lambda: with_ranks(board(), lambda facts: replace(facts, shm_bytes=64 * MIB)), "shm-too-small", True),
        (lambda: with_ranks(board(), lambda facts: replace(facts, shm_bytes=64 * MIB + 1)), "shm-too-small", False),
        (lambda: with_variables(two(), NCCL_IB_HCA=""), "nccl-ib-hca", False),
        (lambda: on_roce(4200), "roce-mtu-small", False),
        (lambda: on_roce(3000), "roce-mtu-small", True),
        (lambda: with_files("active"), "infiniband-files-missing", False),
        (lambda: with_files("down"), "infiniband-files-missing", True),
        (lambda: planted("acs-nic-redirect"), "acs-nic-redirect", True),
        (beside_ethernet, "acs-nic-redirect", False),
        (lambda: planted("posted-write-collapse"), "posted-write-collapse", True),
        (without_bridges, "posted-write-collapse", False),
        (expanding, "ptrace-blocked", False),
        (lambda: expanding(ptrace_scope=2), "ptrace-blocked", True),
        (lambda: expanding(ptrace_scope=1), "ptrace-blocked", False),
        (lambda: expanding(ptrace_scope=2, capabilities=None), "ptrace-blocked", False),
        (lambda: expanding(ptrace_scope=2, capabilities=("SYS_PTRACE",)), "ptrace-blocked", False),
        (
            lambda: with_ranks(planted("imex-channel-missing"), lambda facts: replace(facts, imex_channels=None)),
            "imex-channel-missing",
            False,
        ),
        (
            lambda: with_ranks(
                planted("imex-channel-missing"),
                lambda facts: replace(facts, imex_channels=None, unknown={"imex_channels": "no such folder"}),
            ),
            "imex-channel-missing",
            True,
        ),
    ],
)
def test_a_limit_is_where_it_is(make: Callable[[], Job], id_: str, *, holds: bool) -> None:
    assert (id_ in {each.cause.id for each in make().diagnosis().named}) is holds


def test_why_something_is_not_known_is_the_reason_that_is_known() -> None:
    blind = with_ranks(two(), lambda facts: replace(facts, loadable={}, unknown={"loadable": "no loader"}), 0, 1)
    assert blind.diagnosis().unread["libibverbs-missing"] == (Unread("node0", "no loader"),)
    lost = with_ranks(two(), lambda facts: replace(facts, verbs_providers=None, unknown={"verbs_providers": "gone"}), 0)
    assert lost.diagnosis().unread["verbs-provider-missing"] == (Unread("node0 rank 0", "gone"),)
    nobody = replace(two(), ranks=two().ranks[:2])
    assert nobody.diagnosis().unread["libibverbs-missing"] == (Unread("node1", "no process of this node was examined"),)
    assert "iommu-translating" not in job_of(below_a_switch()).diagnosis().unread


def test_a_policy_comes_first_where_it_explains_all_and_else_last() -> None:
    job = with_variables(planted("nccl-default-level"), NCCL_SHM_DISABLE="1", NCCL_PROTO="LL")
    diagnosis = with_ranks(job, lambda facts: replace(facts, shm_device=facts.rank)).diagnosis()
    staged = dict.fromkeys(((0, 1), (1, 0)), SHM)
    assert [each.cause.id for each in diagnosis.explaining(staged)][0] == "nccl-default-level"  # noqa: RUF015
    network = {**staged, (0, 1): SOCKETS}
    assert [each.cause.id for each in diagnosis.explaining(network)][-1] == "nccl-default-level"


def test_checks_that_say_something_of_machines_without_gpus() -> None:
    node = Topology(replace(snapshots(parse_machine("hgx-h100-8"))[0], gpus=(), pairs=(), nvswitches=()))
    report = judge(Facts([node], group_nodes([node])))
    verdicts = {row.check: row.verdict for row in report.sections[CheckRow.section].rows()}  # type: ignore[union-attr]
    judged = {name for name, verdict in verdicts.items() if verdict is not Verdict.SKIP}
    assert judged == {"driver", "nic_state", "nic_errors"}
    assert {row.origin for row in report.sections[CheckRow.section].rows()} == {"simulated"}  # type: ignore[union-attr]


def explained(job: Job, *pairs: Pair, by: PathKind = SHM) -> list[tuple[str, list[str]]]:
    found = job.diagnosis().explaining(dict.fromkeys(pairs, by))
    return [(each.cause.id, [below.cause.id for below in each.implied]) for each in found]


def test_a_cause_explains_the_pairs_that_it_touches_and_what_follows_from_it_stays_below() -> None:
    job = simulated("hgx-h200-4*2", "node0.gpu0:fabric=in_progress")
    assert explained(job, (0, 1)) == [("fabric-not-ready", ["peer-access-refused"])]
    assert explained(job, (2, 3)) == []


def test_rdma_inside_a_node_is_explained_by_what_takes_peer_access_away_and_by_no_policy() -> None:
    rdma = PathKind(Relation.ONE_NODE, Medium.RDMA)
    assert explained(planted("nccl-p2p-disabled"), (0, 1), by=rdma) == [("nccl-p2p-disabled", [])]
    assert explained(planted("nccl-p2p-disabled"), (0, 1), by=SOCKETS) == [], "shared memory would be left"
    assert explained(planted("nccl-default-level"), (0, 1), by=rdma) == []


def test_what_keeps_nodes_apart_is_found_between_two() -> None:
    job = with_variables(two(), NCCL_IB_DISABLE="1")
    nodes = [Topology(node) for node in job.nodes]
    assert [finding.id for finding in examine(nodes, job.ranks).findings] == ["nccl-ib-disabled"]
    assert [finding.id for finding in examine(nodes[:1], job.ranks[:2]).findings] == []


def test_mpi_that_is_built_for_cuda_and_uses_it_is_well() -> None:
    def named(*, aware: bool) -> set[str]:
        mpi = MpiFacts(version="Open MPI 5.0.8", cuda_built=True, cuda_aware=aware)
        job = with_ranks(board(), lambda facts: replace(facts, mpi=mpi))
        return {each.cause.id for each in job.diagnosis().named}

    assert "mpi-cuda-off" in named(aware=False)
    assert "mpi-cuda-off" not in named(aware=True)


def test_a_port_in_a_state_that_nobody_knows_is_not_known() -> None:
    def unread(state: str) -> tuple[Unread, ...]:
        return with_nodes(two(), lambda node: in_state(node, state), 1).diagnosis().unread.get("rdma-port-down", ())

    assert unread("weird") == (Unread("node1", f"unknown port state: {two().nodes[1].nics[0].name} is 'weird'"),)
    assert unread("active") == ()


def test_variables_that_a_log_shows_count_where_they_matter() -> None:
    process = ProcessLog((("NCCL_SHM_DISABLE", "1"),))

    def told(network: str | None, *, one_node: bool) -> str | None:
        found = explain(CAUSES, Staged(one_node=one_node, same_machine=one_node, network=network, source=process))
        return None if found is None else found.id

    assert told("Socket", one_node=True) == "nccl-shm-disabled"
    assert told(None, one_node=True) != "nccl-shm-disabled"
    assert told("Socket", one_node=False) != "nccl-shm-disabled"


@pytest.mark.parametrize(
    ("nodes", "expected"), [(2, "the same as the other node"), (3, "the same as 2 other nodes of kind A")]
)
def test_the_odd_node_is_compared_with_as_many_as_there_are(nodes: int, expected: str) -> None:
    found = simulated(f"hgx-h100-8*{nodes}", "node1.gpu0:ecc=off").findings()
    assert [each.expected for each in found if each.id == "node-differs"] == [expected]


def test_ports_of_which_none_is_left_say_so_where_there_are_several() -> None:
    def seen(job: Job) -> set[str]:
        return {finding.seen for finding in job.findings() if finding.id == "rdma-port-down"}

    def all_down(node: Snapshot) -> Snapshot:
        return replace(node, nics=tuple(replace(nic, state="down") for nic in node.nics))

    assert seen(with_nodes(two(), all_down)) == {"port is down, like all ports of the node"}
    assert seen(with_nodes(two(), lambda node: in_state(node, "down"))) == {"port is down"}
    assert seen(with_nodes(job_of(below_a_switch()), all_down)) == {"port is down"}


def test_a_cause_of_all_gpus_covers_what_it_implies_anywhere_and_one_of_some_gpus_only_theirs() -> None:
    places = (None, frozenset({0, 1}), frozenset({2}))
    everywhere, here, there = (Sighting(subject="x", seen="y", gpus=gpus) for gpus in places)
    assert _covered(here, [everywhere])
    assert _covered(everywhere, [there, everywhere])
    assert _covered(replace(here, gpus=frozenset({1})), [here])
    assert not _covered(there, [here])
    assert not _covered(everywhere, [here])
