import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.paths.nodes import compare_traits, node_traits
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.simulated.machine import parse_machine, snapshots

FAULTS = (
    "gpu5:nvlink=12",
    "gpu3:missing=yes",
    "gpu2:lost=yes",
    "gpu2:ecc=off",
    "gpu2:mig=on",
    "gpu2:rows=pending",
    "gpu2:rows=failure",
    "gpu2:fabric=in_progress",
    "gpu1:width=8",
    "nic2:rate=100",
    "nic2:state=down",
    "nic2:missing=yes",
    "node0:driver=570.1.1",
    "node0:peermem=no",
    "node0:silent=nvml",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_with_a_fault_has_less_of_a_healthy_machine(fault: str) -> None:
    where = fault if fault.startswith("node") else f"node0.{fault}"
    bad, good = (node_traits(Topology(node)) for node in snapshots(parse_machine("hgx-h100-8*2"), [parse_fault(where)]))
    assert compare_traits(bad, good) < 0 < compare_traits(good, bad)
    assert compare_traits(bad, bad) == 0


@given(st.dictionaries(st.sampled_from(("GPUs", "driver", "GPU0 ECC", "CPU", "silent")), st.none() | st.text()))
def test_no_value_is_better_than_itself_and_any_can_be_compared(traits: dict[str, object]) -> None:
    assert compare_traits(traits, traits) == 0
    other = dict.fromkeys(traits, "580.1")
    assert compare_traits(traits, other) == -compare_traits(other, traits)
