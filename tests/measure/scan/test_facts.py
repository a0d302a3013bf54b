"""Findings from the facts of nodes, and the NICs of rails."""

import pytest
from msgspec.structs import replace

from gpubench.jobs.rounds import fact_findings, whole_node_environment
from gpubench.measure.scan.verdicts import nic_names, rail_rates
from gpubench.model.facts.snapshot import PcieLink, Snapshot
from gpubench.model.paths.nodes import build_topologies
from gpubench.profiles import find_node_profiles
from tests.conditions.test_checks import machine


def nodes(*faults: str) -> list[Snapshot]:
    return machine("hgx-h100-8*4", *faults)


def test_findings_of_checks_name_the_node() -> None:
    healthy = build_topologies(nodes())
    profiles = find_node_profiles(healthy, {})
    assert None not in profiles
    assert fact_findings(healthy, profiles) == []
    (found,) = fact_findings(build_topologies(nodes("node2.gpu5:nvlink=12")), profiles)
    assert (found.id, found.subject) == ("nvlink-down", "node2 GPU5 (0000:1b:00.0)")
    assert "node-differs: GPU5 NVLinks active 12 (others 18)" in found.consequences


def test_findings_that_need_a_profile_are_included() -> None:
    everywhere = build_topologies(
        nodes(*(f"node{number}.gpu{gpu}:nvlink=12" for number in range(4) for gpu in range(8)))
    )
    assert {finding.id for finding in fact_findings(everywhere, find_node_profiles(everywhere, {}))} >= {
        "below-profile"
    }


def test_nodes_without_gpus_need_no_driver() -> None:
    bare = [replace(node, gpus=(), pairs=()) for node in nodes()]
    assert fact_findings(build_topologies(bare), [None] * len(bare)) == []
    assert nic_names(build_topologies(bare), 2) == (None, None)


def test_a_rail_has_the_nearest_nic_if_all_nodes_agree() -> None:
    snapshots = nodes()
    names = nic_names(build_topologies(snapshots), 8)
    assert len(set(names)) == 8
    assert None not in names
    other = replace(snapshots[1], nics=tuple(replace(nic, name=f"{nic.name}x") for nic in snapshots[1].nics))
    assert nic_names(build_topologies([snapshots[0], other]), 8) == (None,) * 8
    assert nic_names(build_topologies(snapshots), 9)[8] is None


def test_the_rate_of_a_rail_is_that_of_its_nic_on_most_nodes() -> None:
    snapshots = nodes()
    assert rail_rates(build_topologies(snapshots), 8) == (50.0,) * 8
    slow = tuple(replace(nic, rate_gbit_s=100.0) for nic in snapshots[1].nics)
    other = replace(snapshots[1], nics=slow)
    assert rail_rates(build_topologies([*snapshots[:3], other]), 8) == (50.0,) * 8
    assert rail_rates(build_topologies([other]), 8) == (12.5,) * 8


def test_rails_share_a_nic_and_one_rail_has_all_that_are_nearest() -> None:
    (one, *_) = nodes()
    first = replace(one, nics=one.nics[:1])
    rates = rail_rates(build_topologies([first]), 8)
    assert sum(rate or 0.0 for rate in rates) == pytest.approx(50.0)
    twin = replace(one.nics[0], name="twin", rate_gbit_s=40.0, bus_id="0000:99:00.0")
    assert rail_rates(build_topologies([replace(one, nics=(*one.nics, twin))]), 1) == (55.0,)


def test_ports_of_one_nic_carry_no_more_than_its_slot() -> None:
    (one, *_) = nodes()
    bus_id = one.nics[0].bus_id
    assert bus_id is not None
    port = replace(one.nics[0], name="second", bus_id=f"{bus_id[:-1]}1")
    (rate,) = rail_rates(build_topologies([replace(one, nics=(*one.nics, port))]), 1)
    assert rate is not None
    assert 50.0 < rate < 64.0, "PCIe 5 x16"


def test_the_rate_of_a_rail_is_unknown_if_one_of_its_facts_is() -> None:
    (one, *_) = nodes()
    for nic in (
        replace(one.nics[0], rate_gbit_s=None),
        replace(one.nics[0], state="down"),
        replace(one.nics[0], pcie=PcieLink()),
    ):
        assert rail_rates(build_topologies([replace(one, nics=(nic, *one.nics[1:]))]), 2) == (None, 50.0)
    gpu = replace(one.gpus[0], pcie=PcieLink())
    assert rail_rates(build_topologies([replace(one, gpus=(gpu, *one.gpus[1:]))]), 2) == (None, 50.0)
    assert rail_rates(build_topologies([replace(one, nics=())]), 2) == (None, None)
    assert rail_rates([], 1) == (None,)


def test_a_rank_that_is_shown_one_gpu_reads_the_facts_of_its_whole_node() -> None:
    assert whole_node_environment({"CUDA_VISIBLE_DEVICES": "3", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
