"""The table of what causes explain, row by row, against what NCCL does and what hardware has."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from gpubench.conditions.circumstances import Sighting
from gpubench.conditions.condition import Condition
from gpubench.conditions.logged import LoggedReason, Staged
from gpubench.conditions.policy import EXPLAINS, Medium, PathKind, Relation, Slowed
from gpubench.conditions.ranking import Diagnosis, Named, explain, path_kinds
from gpubench.conditions.registry import CAUSES, CONDITIONS, FAMILIES
from gpubench.model.facts.snapshot import Fabric
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import parse_transport
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.report import Effect
from gpubench.model.terms.verdict import Cure
from tests.fakes.planted import PLANTS, Plant, simulated

KINDS = [PathKind(relation, medium) for relation in Relation for medium in Medium]
FAMILY = {condition.id: family.name for family in FAMILIES for condition in family.conditions}


def test_every_cause_has_a_row_and_every_row_a_cause() -> None:
    assert (
        set(EXPLAINS)
        == {condition.id for condition in CONDITIONS if condition.settles}
        == {cause.id for cause in CAUSES}
    )
    assert all(row.effects for row in EXPLAINS.values())


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.id)
def test_a_cause_is_named_for_the_paths_of_its_row_alone(cause: Condition) -> None:
    """Facts or a log may prove other causes at the same time."""
    found = Diagnosis((Named(cause, (Sighting(subject="here", seen="it is there"),)),), {})
    logged = replace(cause, in_log=lambda _staged: LoggedReason("it is there", Cure(comment="Repair it.")))
    for kind in KINDS:
        assert [each.cause for each in found.explaining({(0, 1): kind})] == [cause] * (kind in EXPLAINS[cause.id].paths)
    for staged in logs():
        able = not EXPLAINS[cause.id].paths.isdisjoint(staged.kinds)
        assert (explain([logged], staged) is not None) is able


def logs() -> Iterator[Staged]:
    for network in (None, "Socket", "IB", "AWS Libfabric"):
        for bus_ids in (("0000:06:00.0",) * 2, ("0000:06:00.0", "0000:07:00.0")):
            yield Staged(one_node=network is None, same_machine=True, network=network, bus_ids=bus_ids)
        if network is not None:
            yield Staged(one_node=False, same_machine=False, network=network, bus_ids=("0000:06:00.0",) * 2)


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant.make().staged], ids=lambda plant: plant.id)
def test_no_cause_is_named_first_for_a_path_that_it_cannot_explain(plant: Plant) -> None:
    job = plant.job
    run = job.circumstances()
    for pair, kind in path_kinds(run.wiring, run.staged or {}).items():
        for named in job.diagnosis().explaining({pair: kind}):
            assert kind in EXPLAINS[named.cause.id].paths


def place(node: int, gpu: int) -> GpuPlace:
    return GpuPlace(f"n{node}", node, f"0000:{gpu:02x}:00.0")


@pytest.mark.parametrize(
    ("transport", "medium"),
    [
        ("SHM/direct/direct", Medium.SHM),
        ("NET/Socket/0", Medium.SOCKET),
        ("NET/IB/0", Medium.RDMA),
        ("NET/AWS Libfabric/1", Medium.RDMA),
        (None, Medium.HOST_MEMORY),
    ],
)
@pytest.mark.parametrize(
    ("places", "relation"),
    [
        ((place(0, 6), place(0, 6)), Relation.ONE_GPU),
        ((place(0, 6), place(0, 7)), Relation.ONE_NODE),
        ((place(0, 6), place(1, 6)), Relation.TWO_NODES),
    ],
)
def test_the_kind_of_a_path_is_that_of_its_ends_and_transport(
    transport: str | None, medium: Medium, places: tuple[GpuPlace, GpuPlace], relation: Relation
) -> None:
    staged = {(0, 1): () if transport is None else (parse_transport(transport),)}
    assert path_kinds(Wiring(places, {}), staged) == {(0, 1): PathKind(relation, medium)}


def test_nodes_of_one_nvlink_domain_are_a_relation_of_their_own() -> None:
    (node,) = simulated("hgx-h100-8").nodes
    fabric = Fabric(state="completed", cluster_uuid="c1", clique=1)
    gpus = tuple(replace(each, fabric=fabric) for each in node.gpus)
    places = [GpuPlace(f"n{number}", number, gpus[0].bus_id) for number in (0, 1)]
    nodes = {number: Topology(replace(node, gpus=gpus)) for number in (0, 1)}
    staged = {(0, 1): (parse_transport("NET/IB/0"),)}
    assert path_kinds(Wiring(places, nodes), staged) == {(0, 1): PathKind(Relation.ONE_DOMAIN, Medium.RDMA)}


def explaining(relation: Relation, medium: Medium) -> set[str]:
    return {id_ for id_, row in EXPLAINS.items() if PathKind(relation, medium) in row.paths}


def on_any_path(*relations: Relation) -> set[str]:
    return {id_ for relation in relations for medium in Medium for id_ in explaining(relation, medium)}


def test_sockets_inside_a_node_need_that_shared_memory_is_gone() -> None:
    """NCCL tries P2P, SHM and NET in this order (src/transport.cc): without P2P alone it takes SHM."""
    without = {"nccl-shm-disabled", "shm-too-small", "nccl-net-in-node", "nccl-hostid", "shm-not-shared"}
    assert explaining(Relation.ONE_NODE, Medium.SOCKET) == explaining(Relation.ONE_GPU, Medium.SOCKET) == without


def test_no_link_and_no_refusal_between_gpus_explains_anything_of_ranks_of_one_gpu() -> None:
    of_links = {"nvlink", "pcie", "redirection", "mnnvl", "network", "rdma_ports", "gpudirect"}
    one_gpu = on_any_path(Relation.ONE_GPU)
    assert {id_ for id_ in one_gpu if FAMILY[id_] in of_links} == set()
    assert one_gpu.isdisjoint({"nccl-p2p-disabled", "nccl-default-level", "peer-access-refused", "bar1-small"})


def test_what_is_of_nodes_apart_explains_nothing_inside_one_and_the_other_way_round() -> None:
    inside = on_any_path(Relation.ONE_GPU, Relation.ONE_NODE)
    outside = on_any_path(Relation.ONE_DOMAIN, Relation.TWO_NODES)
    assert inside.isdisjoint(outside)
    assert {FAMILY[id_] for id_ in outside} == {"network", "rdma_ports", "gpudirect", "mnnvl", "container", "node"}


def test_nvlinks_between_nodes_explain_a_network_inside_one_domain_alone() -> None:
    mnnvl = {id_ for id_, row in EXPLAINS.items() if FAMILY[id_] == "mnnvl" and row.paths} - {"mnnvl-clique-differs"}
    assert mnnvl <= explaining(Relation.ONE_DOMAIN, Medium.RDMA)
    assert mnnvl.isdisjoint(explaining(Relation.TWO_NODES, Medium.RDMA))


def test_gpudirect_explains_no_sockets_and_what_keeps_off_rdma_nothing_that_took_it() -> None:
    """A path over NET/IB has verbs and a port, so a missing NIC belongs to another network."""
    assert {FAMILY[id_] for id_ in explaining(Relation.TWO_NODES, Medium.SOCKET)}.isdisjoint({"gpudirect", "node"})
    rdma = explaining(Relation.TWO_NODES, Medium.RDMA)
    assert rdma.isdisjoint({"nccl-ib-disabled", "libibverbs-missing", "verbs-provider-missing", "memlock-limited"})


def test_what_slows_is_said_of_slow_causes_alone() -> None:
    assert all(Effect.SLOW in row.effects for row in EXPLAINS.values() if row.slows)
    assert all(set(row.slows) <= {Slowed.NVLINK} for id_, row in EXPLAINS.items() if FAMILY[id_] == "nvlink")
