"""Simulated traffic: counters move by what the links of such a job carry, the same for the same seed."""

import pytest

from gpubench.model.facts.traffic import NodeRates, NodeReading, compute_rates
from gpubench.model.profiles.fault import TRAFFIC, parse_fault
from gpubench.simulated.machine import parse_machine, snapshots
from gpubench.simulated.traffic import SimulatedTraffic


def readings(machine: str, *faults: str, seed: int = 0) -> list[NodeReading]:
    parsed = parse_machine(machine)
    broken = [parse_fault(each) for each in faults]
    node = snapshots(parsed, broken)[0]
    now = [0.0]
    traffic = SimulatedTraffic(node, parsed.profile, broken, seed, lambda: now[0], several=parsed.nodes > 1)
    found = []
    for _ in range(3):
        found.append(traffic.read())
        now[0] += 2.0
    assert traffic.look_closely([1]) is None
    traffic.close()
    return found


def over(machine: str, *faults: str) -> NodeRates:
    _, before, after = readings(machine, *faults)
    return compute_rates(before, after)


@pytest.mark.parametrize("kind", TRAFFIC)
def test_every_kind_of_job_moves_something_else(kind: str) -> None:
    found = over("hgx-h200-4", f"node0:traffic={kind}")
    nvlink = all((gpu.nvlink_sent or 0) > 1 for gpu in found.gpus)
    out, into = (all((getattr(gpu, f"pcie_{way}") or 0) > 1 for gpu in found.gpus) for way in ("sent", "received"))
    expected = {
        "training": (True, False, False),
        "staged": (False, True, True),
        "sockets": (False, True, True),
        "inference": (False, True, True),
        "loading": (False, False, True),
        "checkpoint": (False, True, False),
    }
    assert (nvlink, out, into) == expected.get(kind, (False, False, False))
    loopback = next(each for each in found.nics if each.name == "lo")
    assert ((loopback.sent or 0) > 1) is (kind == "sockets")
    assert any(gpu.utilization_percent == 0 for gpu in found.gpus) is (kind in ("waiting", "idle"))
    assert {task.communicators for task in found.tasks} == {kind != "inference"}


def test_a_staged_link_stages_one_hop_of_the_ring() -> None:
    found = over("hgx-h200-4", "link0-1:staged=yes")
    assert [round(gpu.nvlink_sent or 0) > 0 for gpu in found.gpus] == [False, True, True, True]
    assert [(gpu.pcie_received or 0) > 1 for gpu in found.gpus] == [False, True, False, False]


def test_machines_without_nvlinks_train_over_pcie() -> None:
    found = over("l40s-8")
    assert {gpu.nvlink_sent for gpu in found.gpus} == {None}
    assert {gpu.unknown["nvlink_sent"] for gpu in found.gpus} == {"the GPU has no NVLinks"}
    assert all((gpu.pcie_sent or 0) > 1 for gpu in found.gpus)


def test_a_driver_that_is_silent_or_missing_says_so() -> None:
    assert readings("hgx-h200-4", "node0:silent=nvml")[0].driver_silent
    assert readings("hgx-h200-4", "node0:driver_missing=yes")[0].driver_silent
