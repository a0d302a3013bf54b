"""The findings of `gpubench check` on simulated machines with noise and planted faults."""

from collections.abc import Sequence

from gpubench.conditions.circumstances import Facts
from gpubench.jobs.check import SimulatedMeasurer, measured
from gpubench.jobs.plans import Depth
from gpubench.jobs.sources import parse_simulation
from gpubench.measure.check.health import judge
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.simulated.machine import parse_machine, snapshots

NOISE = 0.02
"""Of every sample"""

PLANTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("hgx-h100-8", "gpu5:nvlink=12", ("nvlink-down",)),
    ("hgx-h100-8", "gpu5:nvlink=17", ("nvlink-down",)),
    ("hgx-h100-8", "gpu2:width=8", ("pcie-width", "host-copies-slow")),
    ("hgx-h100-8", "gpu2:generation=3", ("pcie-generation", "host-copies-slow")),
    ("hgx-h100-8", "gpu1:p2p=CNS", ("peer-access-refused",)),
    ("hgx-h100-8", "gpu1:cuda_peer=no", ("cuda-nvml-disagree",)),
    ("hgx-h100-8", "gpu6:lost=yes", ("gpu-lost",)),
    ("hgx-h100-8", "gpu6:missing=yes", ("gpu-missing",)),
    ("hgx-a100-4", "gpu1:missing=yes", ("gpu-missing",)),
    ("l4-8", "gpu6:missing=yes", ("gpu-missing",)),
    ("hgx-h100-8", "gpu6:mig=on", ("mig-on",)),
    ("hgx-h100-8", "gpu6:ecc=off", ("ecc-off",)),
    ("hgx-h100-8", "gpu3:throttle=hw_thermal_slowdown", ("gpu-hw-slowdown",)),
    ("hgx-h100-8", "gpu3:rows=pending", ("row-remap-pending",)),
    ("hgx-h100-8", "gpu3:rows=failure", ("row-remap-failed",)),
    ("hgx-h100-8", "gpu3:fabric=not_started", ("fabric-not-ready",)),
    ("hgx-h100-8", "gpu3:health=degraded_bandwidth", ("fabric-unhealthy",)),
    ("hgx-h100-8", "gpu3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8", "gpu3:speed=0.5", ("p2p-slow",)),
    ("l40s-8", "gpu3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8", "gpu3:errors=2", ("memory-errors",)),
    ("hgx-h100-8", "gpu3:temperature=88", ("gpu-hot",)),
    ("hgx-h100-8", "gpu3:replays=5000", ("pcie-errors",)),
    ("hgx-h100-8", "gpu3:busy=4711", ("gpu-in-use",)),
    ("hgx-h100-8", "nic2:state=down", ("rdma-port-down",)),
    ("hgx-h100-8", "nic2:rate=200", ("rdma-port-slow", "nic-below-profile")),
    ("hgx-h100-8", "nic2:width=8", ("pcie-width",)),
    ("hgx-h100-8", "nic2:generation=4", ("pcie-generation",)),
    ("hgx-h100-8", "nic2:errors=5000", ("rdma-port-errors",)),
    ("hgx-h100-8", "nic2:missing=yes", ("nic-absent", "nic-below-profile")),
    ("hgx-a100-4", "link0-1:nvlink=2", ("nvlink-down",)),
    ("hgx-h100-8", "link0-3:p2p=CNS", ("peer-access-refused",)),
    ("hgx-h100-8", "link0-3:staged=yes", ("host-staged",)),
    ("rtx-pro-6000-8", "link0-3:staged=yes", ("host-staged",)),
    ("hgx-h200-4", "link0-3:staged=yes", ("host-staged",)),
    ("hgx-h200-4", "link0-3:corrupts=yes", ("wrong-data",)),
    ("hgx-h100-8", "link0-3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8*4", "node2:driver=570.1", ("driver-differs",)),
    ("hgx-h100-8*4", "node2:cuda=12.8", ("node-differs",)),
    ("hgx-h100-8*4", "node2:peermem=no", ("node-differs",)),
    ("hgx-h100-8", "node0:acs=on", ("acs-nic-redirect",)),
    ("hgx-h100-8", "node0:iommu=on", ("iommu-translating",)),
    ("hgx-h100-8", "node0:silent=nvml", ("driver-silent",)),
    ("hgx-h100-8", "node0:silent=cuda", ("driver-silent",)),
    ("hgx-h100-8", "node0:silent=sysfs", ("driver-silent",)),
    ("hgx-h100-8", "node0:driver_missing=yes", ("driver-missing",)),
    ("hgx-h100-8*4", "node3.gpu5:speed=0.8", ("p2p-slow",)),
)
"""Machine, fault, and findings of which at least one is required"""


def findings(machine_text: str, faults: Sequence[str], seed: int, depth: Depth = Depth.DEFAULT) -> tuple[Finding, ...]:
    """Return the findings of check on a simulated machine, without those 'by design'."""
    machine, planted = parse_machine(machine_text), [parse_fault(fault) for fault in faults]
    nodes = snapshots(machine, planted, seed)
    shown = [Topology(node) for node in nodes]
    simulation = parse_simulation(machine_text, faults, seed)
    by = SimulatedMeasurer(simulation, shown, depth, noise=NOISE)
    taken = measured(depth, shown, by)
    report = judge(Facts(shown, group_nodes(shown), (), [machine.profile] * len(nodes), taken, asked=True))
    return tuple(each for each in report.findings if each.severity is not Verdict.SKIP)
