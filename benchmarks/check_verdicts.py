"""How often `gpubench check` raises a false alarm on healthy simulated machines, and finds what was planted.

    python benchmarks/check_verdicts.py --seeds 1000

Every profile is simulated with noise of 2 % on every sample and judged as if somebody had asked for its profile. A
false alarm is any finding but one that says 'by design'. A fault is found when one of the findings is there that the
table below has for it. Simulated machines are a model: this measures the judgement, not the hardware.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from gpubench.checks import Facts
from gpubench.cli.check_plan import CheckPlan, Depth
from gpubench.cli.check_simulated import measured
from gpubench.hardware.simulated.machine import parse_machine, snapshots
from gpubench.measure.health import judge
from gpubench.model.fault import parse_fault
from gpubench.model.nodes import group
from gpubench.model.topology import Topology
from gpubench.model.verdict import Finding, Verdict
from gpubench.profiles import names

NOISE = 0.02

PLANTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("hgx-h100-8", "gpu5:nvlink=12", ("nvlink-down",)),
    ("hgx-h100-8", "gpu5:nvlink=17", ("nvlink-down",)),
    ("hgx-h100-8", "gpu2:width=8", ("pcie-width", "host-copies-slow")),
    ("hgx-h100-8", "gpu2:generation=3", ("pcie-generation", "host-copies-slow")),
    ("hgx-h100-8", "gpu1:p2p=CNS", ("peer-access-refused",)),
    ("hgx-h100-8", "gpu1:cuda_peer=no", ("peer-access-contradiction",)),
    ("hgx-h100-8", "gpu6:lost=yes", ("gpu-lost",)),
    ("hgx-h100-8", "gpu6:missing=yes", ("gpu-missing", "gpu-model")),
    ("l4-8", "gpu6:missing=yes", ("gpu-model",)),
    ("hgx-h100-8", "gpu6:mig=on", ("mig-on",)),
    ("hgx-h100-8", "gpu6:ecc=off", ("ecc-off",)),
    ("hgx-h100-8", "gpu3:throttle=hw_thermal_slowdown", ("gpu-throttled",)),
    ("hgx-h100-8", "gpu3:rows=pending", ("row-remap-pending",)),
    ("hgx-h100-8", "gpu3:rows=failure", ("row-remap-failed",)),
    ("hgx-h100-8", "gpu3:fabric=not_started", ("fabric-not-ready",)),
    ("hgx-h100-8", "gpu3:health=degraded_bandwidth", ("fabric-not-ready",)),
    ("hgx-h100-8", "gpu3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8", "gpu3:speed=0.5", ("p2p-slow",)),
    ("l40s-8", "gpu3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8", "gpu3:errors=2", ("memory-errors",)),
    ("hgx-h100-8", "gpu3:temperature=75", ("gpu-hot",)),
    ("hgx-h100-8", "gpu3:replays=5000", ("pcie-errors",)),
    ("hgx-h100-8", "gpu3:busy=4711", ("gpu-in-use",)),
    ("hgx-h100-8", "nic2:state=down", ("nic-down",)),
    ("hgx-h100-8", "nic2:rate=200", ("nic-rate", "nic-below-profile")),
    ("hgx-h100-8", "nic2:width=8", ("pcie-width",)),
    ("hgx-h100-8", "nic2:generation=4", ("pcie-generation",)),
    ("hgx-h100-8", "nic2:errors=5000", ("nic-errors",)),
    ("hgx-h100-8", "nic2:missing=yes", ("nic-below-profile",)),
    ("hgx-a100-4", "link0-1:nvlink=2", ("nvlink-down",)),
    ("hgx-h100-8", "link0-3:p2p=CNS", ("peer-access-refused",)),
    ("hgx-h100-8", "link0-3:staged=yes", ("host-staged",)),
    ("rtx-pro-6000-8", "link0-3:staged=yes", ("host-staged",)),
    ("hgx-h200-4", "link0-3:staged=yes", ("host-staged",)),
    ("hgx-h100-8", "link0-3:speed=0.8", ("p2p-slow",)),
    ("hgx-h100-8*4", "node2:driver=570.1", ("driver-differs",)),
    ("hgx-h100-8*4", "node2:cuda=12.8", ("node-differs",)),
    ("hgx-h100-8*4", "node2:peermem=no", ("node-differs",)),
    ("hgx-h100-8", "node0:acs=on", ("acs-redirects",)),
    ("hgx-h100-8", "node0:iommu=on", ("iommu-translates",)),
    ("hgx-h100-8", "node0:silent=nvml", ("driver-silent",)),
    ("hgx-h100-8", "node0:silent=cuda", ("driver-silent",)),
    ("hgx-h100-8", "node0:silent=sysfs", ("driver-silent",)),
    ("hgx-h100-8", "node0:driver_missing=yes", ("driver-missing",)),
    ("hgx-h100-8*4", "node3.gpu5:speed=0.8", ("p2p-slow",)),
)
"""Machine, fault, and the findings of which one has to be there."""


def findings(machine_text: str, faults: Sequence[str], seed: int) -> tuple[Finding, ...]:
    """What check finds on a simulated machine, quiet findings ('by design') left out."""
    machine, planted = parse_machine(machine_text), [parse_fault(fault) for fault in faults]
    nodes = snapshots(machine, planted, seed)
    plan = CheckPlan(Depth.DEFAULT)
    taken = measured(machine, planted, seed, nodes, plan, noise=NOISE, profile=machine.profile)
    shown = [Topology(node) for node in nodes]
    report = judge(Facts(shown, group(shown), (), [machine.profile] * len(nodes), taken, asked=True))
    return tuple(each for each in report.findings if each.severity is not Verdict.SKIP)


def _alarms(task: tuple[str, int]) -> tuple[str, list[str]]:
    name, seed = task
    return name, [each.id for each in findings(name, (), seed)]


def _is_found(task: tuple[int, int]) -> tuple[int, bool]:
    number, seed = task
    machine, fault, expected = PLANTED[number]
    return number, any(each.id in expected for each in findings(machine, (fault,), seed))


def main() -> int:
    """Run both counts; 1 where there is a false alarm, or a fault is found in less than 99 of 100 runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--fault-seeds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    started = time.monotonic()
    with ProcessPoolExecutor(given.workers) as pool:
        alarms: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        healthy = [(name, seed) for name in names() for seed in range(given.seeds)]
        for name, ids in pool.map(_alarms, healthy, chunksize=20):
            alarms[name] += bool(ids)
            kinds.update(f"{name}: {each}" for each in ids)
        print(f"healthy: {len(healthy)} runs of {len(names())} profiles, {sum(alarms.values())} with an alarm")
        for kind, count in kinds.most_common():
            print(f"  {kind} {count}")
        planted = [(number, seed) for number in range(len(PLANTED)) for seed in range(given.fault_seeds)]
        found = Counter(number for number, is_found in pool.map(_is_found, planted, chunksize=5) if is_found)
    missed = list(_shown(found, given.fault_seeds))
    print(f"{len(PLANTED)} faults, {given.fault_seeds} seeds each: {len(PLANTED) - len(missed)} found in all of them")
    for line in missed:
        print(f"  {line}")
    print(f"{time.monotonic() - started:.0f} s")
    rare = any(found[number] < 0.99 * given.fault_seeds for number in range(len(PLANTED)))
    return int(bool(sum(alarms.values())) or rare)


def _shown(found: Counter[int], seeds: int) -> Iterator[str]:
    for number, (machine, fault, _) in enumerate(PLANTED):
        if found[number] < seeds:
            yield f"{machine} {fault}: {found[number]} of {seeds}"


if __name__ == "__main__":
    sys.exit(main())
