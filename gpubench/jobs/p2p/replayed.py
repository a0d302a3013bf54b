"""A recorded run of copies, in the place of one that is measured now."""

import os
from dataclasses import replace
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.hardware import recorded
from gpubench.jobs.machines import Machines
from gpubench.jobs.p2p.plan import NAME, P2pPlan
from gpubench.jobs.p2p.setup import CopySetup
from gpubench.jobs.sources import Replayed
from gpubench.measure.p2p.machine import CopyMachine, machine_of_ranks, wiring_of_process
from gpubench.measure.p2p.recording import FILE, RecordedP2p, ReplayedBench, read_samples
from gpubench.model.terms.origin import Origin
from gpubench.profiles.nodes import profile_for


def replayed(plan: P2pPlan, source: Replayed) -> CopySetup:
    """A recorded run, judged as strictly as it was then, or as the plan says.

    Raises:
        UsageError: there is no recording of p2p, or its parts do not belong together.
    """
    machines = source.machines()
    found, samples = read_samples(recorded.read_samples(source.directory, FILE, NAME), source.text)
    machines = _of_samples(machines, found, source.directory)
    matched = profile_for(machines.nodes[0], os.environ, plan.profile)
    origin = Origin.RECORDED if found.origin is Origin.MEASURED else found.origin
    if found.ranks:
        machine = machine_of_ranks(machines.nodes, found.ranks, machines.processes, matched, origin)
    else:
        wiring, apart = wiring_of_process(machines.nodes[0], found.gpus), frozenset(found.unreachable)
        machine = CopyMachine(wiring, found.gpus, machines.processes, matched, origin, apart)
    machine = replace(machine, profile_asked_for=plan.profile is not None, expected_gpus=plan.expected_gpus)
    return CopySetup(
        plan=replace(plan, strict=plan.strict or found.strict, like=found.like),
        machines=machines,
        machine=machine,
        request=found.request,
        bench=ReplayedBench(found, samples),
        libraries=found.libraries,
        ranks=found.ranks,
    )


def _of_samples(machines: Machines, found: RecordedP2p, directory: Path) -> Machines:
    """The nodes that samples are of, in their order, with the settings of then.

    Raises:
        UsageError: samples and nodes do not belong together.
    """
    by_host = {node.snapshot.host: node for node in machines.nodes}
    missing = [host for host in found.hosts if host not in by_host]
    if not missing and not found.ranks:
        known = {gpu.device for gpu in by_host[found.hosts[0]].gpus}
        missing = [gpu.device for gpu in found.gpus if gpu.device not in known]
    if missing:
        raise UsageError(
            f"--replay {directory}: samples of {', '.join(missing)}, which no node of the recording has",
            expected="nodes and samples of one run",
            reason="the folder was put together from several recordings",
        )
    return replace(machines, nodes=[by_host[host] for host in found.hosts], environment=found.environment)
