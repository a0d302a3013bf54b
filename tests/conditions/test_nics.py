"""NICs that are missing, down or slow, compared with other nodes of the job or with a named profile."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench import profiles
from gpubench.model.results.report import CheckRow
from gpubench.model.terms.verdict import Verdict
from tests.conditions.test_checks import machine
from tests.conditions.test_health import ids, report


@pytest.mark.parametrize("how", ["missing=yes", "state=down"])
@pytest.mark.parametrize(("broken", "nodes"), [(1, 2), (1, 4), (3, 2), (4, 2), (5, 4), (7, 2), (8, 2), (8, 4)])
def test_however_many_nics_of_a_node_are_gone_or_down_a_gate_drains_that_node_alone(
    broken: int, nodes: int, how: str
) -> None:
    """Regression: one missing NIC was a FAIL, but four or all eight only a WARN."""
    faults = [f"node1.nic{number}:{how}" for number in range(broken)]
    found = report(machine(f"hgx-h100-8*{nodes}", *faults))
    assert found.verdict is Verdict.FAIL
    assert {finding.subject.split()[0].rstrip(",") for finding in found.findings} == {"node1"}


@pytest.mark.parametrize("other", [{"product": "another"}, {"cpu": "another"}])
def test_a_node_that_is_another_machine_may_have_been_built_with_fewer_nics(other: dict[str, Any]) -> None:
    nodes = machine("hgx-h100-8*4", *(f"node1.nic{number}:missing=yes" for number in range(4)))
    nodes[1] = replace(nodes[1], machine=replace(nodes[1].machine, **other))
    assert ids(report(nodes)) == [("node-differs", "WARN")]


def test_virtual_functions_are_as_many_as_a_hypervisor_handed_out() -> None:
    nodes = machine("hgx-h100-8*4", *(f"node1.nic{number}:missing=yes" for number in range(4)))
    virtual = [replace(nic, model="ConnectX Family mlx5Gen Virtual Function") for nic in nodes[0].nics]
    nodes = [replace(node, nics=tuple(virtual[: len(node.nics)])) for node in nodes]
    assert "nics-differ" not in [finding.id for finding in report(nodes).findings]


@pytest.mark.parametrize(
    ("name", "faults", "severity"),
    [
        ("a10-4", ["nic0:state=down"], "SKIP"),
        ("a10-4*2", ["node1.nic0:state=down"], "FAIL"),
        ("l40s-8*4", ["node1.nic0:state=down"], "FAIL"),
        ("l40s-8*2", ["nic0:state=down", "node1.nic0:state=down"], "WARN"),
    ],
)
def test_a_network_that_is_down_drains_a_node_of_a_job_that_has_one(
    name: str, faults: list[str], severity: str
) -> None:
    assert ("network-down", severity) in ids(report(machine(name, *faults), profiles.load(name.partition("*")[0])))


NIC_PROFILES = ["hgx-h100-8", "a10-4", "h100-nvl-2", "hgx-h200-4"]


@pytest.mark.parametrize("name", NIC_PROFILES)
def test_a_profile_that_was_asked_for_has_its_nics_and_their_rates(name: str) -> None:
    """Regression: Ethernet NICs were not compared, so that a tenth of the rate passed."""
    assert ids(report(machine(name), profiles.load(name), asked=True)) == []
    assert ("nic-below-profile", "FAIL") in ids(
        report(machine(name, "nic0:missing=yes"), profiles.load(name), asked=True)
    )
    if profiles.load(name).nic[0].rate_gbit_s:
        assert ("nic-below-profile", "FAIL") in ids(
            report(machine(name, "nic0:rate=2.5"), profiles.load(name), asked=True)
        )


def test_a_rate_that_no_driver_tells_is_below_no_profile() -> None:
    """Drivers such as virtio's do not report a rate."""
    (node,) = machine("a10-4")
    node = replace(node, nics=tuple(replace(nic, rate_gbit_s=None) for nic in node.nics))
    found = report([node], profiles.load("a10-4"), asked=True)
    assert ids(found) == []
    checks = {row.check: row for row in found.rows(CheckRow)}
    assert (checks["nic_profile"].verdict, "unknown rate of eth0" in (checks["nic_profile"].note or "")) == (
        "SKIP",
        True,
    )


def test_ports_whose_cards_no_bus_tells_apart_are_cards_of_their_own() -> None:
    (node,) = machine("hgx-h100-8", "nic3:state=down")
    nameless = replace(node, nics=tuple(replace(nic, bus_id=None) for nic in node.nics))
    assert ids(report([nameless])) == [("rdma-port-down", "FAIL")]
