"""What a scan knows of real nodes before it measures them: findings of facts, and the NICs of rails."""

from dataclasses import replace

from gpubench.measure.scan.facts import fact_findings, nic_names
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import topologies
from tests.conditions.test_checks import machine


def nodes(*faults: str) -> list[Snapshot]:
    return machine("hgx-h100-8*4", *faults)


def test_what_a_check_says_of_facts_is_said_of_the_node() -> None:
    assert fact_findings(topologies(nodes())) == ()
    found = fact_findings(topologies(nodes("node2.gpu5:nvlink=12")))
    assert {"nvlink-down", "node-differs"} <= {each.id for each in found}
    assert all("node2" in each.subject for each in found)


def test_nodes_without_gpus_are_not_asked_for_a_driver() -> None:
    bare = [replace(each, gpus=(), pairs=()) for each in nodes()]
    assert fact_findings(topologies(bare)) == ()
    assert nic_names(topologies(bare), 2) == (None, None)


def test_a_rail_has_the_nic_below_the_switch_of_its_gpu_where_all_nodes_agree() -> None:
    snapshots = nodes()
    names = nic_names(topologies(snapshots), 8)
    assert len(set(names)) == 8
    assert None not in names
    other = replace(snapshots[1], nics=tuple(replace(nic, name=f"{nic.name}x") for nic in snapshots[1].nics))
    assert nic_names(topologies([snapshots[0], other]), 8) == (None,) * 8
    assert nic_names(topologies(snapshots), 9)[8] is None
