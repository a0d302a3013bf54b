"""The machine that a plan is for."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.training import TrainingPlan
from gpubench.measure.plan.program import CommunicatorRanks
from gpubench.model.profiles.fault import Fault
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.verdict import Origin
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.model.profiles.profile import Profile

_UNKNOWN = "unknown GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """So many nodes of so many GPUs of one model; `profile` of None: nobody knows what it should reach.

    `is_here` is whether its GPUs can be measured on. `origin` is simulated where a profile stands for it.
    """

    gpu: str
    gpus_per_node: int
    nodes: int
    profile: "Profile | None"
    hosts: tuple[str, ...]
    origin: Origin
    memory_bytes: int | None
    is_here: bool = False

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.gpus_per_node * self.nodes

    def collectives(self, group: CommunicatorRanks, faults: Sequence[Fault] = ()) -> Callable[[str, int], float]:
        """Seconds of collectives by their bytes among a group, as its profile expects them on a machine with faults."""
        from gpubench.hardware.simulated.machine import SimulatedMachine
        from gpubench.hardware.simulated.times import CollectiveTimes

        assert self.profile is not None
        times = CollectiveTimes(SimulatedMachine(self.profile, group.nodes), faults, noise=0.0, whole_nodes=True)
        local = min(group.on_a_node, times.gpus)
        return lambda collective, size: max(times.seconds(collective, size, row=0, ranks_per_node=local))


def machine_of(plan: TrainingPlan, files: Sequence[ResultFile], beside: Sequence[str] = ()) -> PlannedMachine:
    """The machine of a plan; `beside` are the GPUs that results of overlap are of.

    Raises:
        UsageError: there is no such profile, or the results are of several machines, or of another one.
        CouldNotMeasureError: there is no GPU, no result and no profile to plan for.
    """
    models = list(dict.fromkeys(name for file in files for name in file.circumstances.gpus))
    if len(models) > 1:
        raise UsageError(
            f"results of several machines: {', '.join(models)}",
            expected="results of one kind of GPU",
            next_step="name the files of one machine: --results a.json --results b.json",
        )
    machine = _of_profile(plan.simulate, plan.nodes) if plan.simulate is not None else _gpus_here(plan)
    if machine is None and files:
        machine = _of_results(plan, files, models)
    if machine is None and plan.profile is not None:
        machine = _of_profile(plan.profile, plan.nodes)
    if machine is None:
        raise CouldNotMeasureError(
            "there is no GPU here to plan for",
            expected="a GPU, stored results (--results), or a machine by its profile (--simulate)",
            next_step="--simulate hgx-h200-8, or another of gpubench profiles list",
        )
    others = [name for name in (*models, *beside) if name != machine.gpu]
    if others and machine.gpu != _UNKNOWN and not plan.other_machine:
        raise UsageError(
            f"results of another machine: they are of {others[0]}, and the machine planned for has {machine.gpu}",
            expected="curves that were measured on the machine that is planned for",
            reason="the folder holds results that were copied from elsewhere",
            next_step="measure here (without --results), or --other-machine",
        )
    return machine


def _of_profile(name: str, nodes: int | None) -> PlannedMachine:
    from gpubench.hardware.simulated.machine import parse_machine

    parsed = parse_machine(name)
    profile = parsed.profile
    if not profile.match.visible or not profile.gpu.name:
        raise UsageError(
            f"--simulate {name} has no GPUs", expected="a machine with GPUs", next_step="gpubench profiles list"
        )
    if nodes is not None and parsed.nodes > 1 and nodes != parsed.nodes:
        raise UsageError(f"--simulate {name} and --nodes {nodes} differ", expected="one of them")
    count = nodes or parsed.nodes
    return PlannedMachine(
        gpu=profile.gpu.name,
        gpus_per_node=profile.match.visible,
        nodes=count,
        profile=profile,
        hosts=tuple(f"node{number}" for number in range(count)),
        origin=Origin.SIMULATED,
        memory_bytes=profile.gpu.memory_bytes,
    )


def _gpus_here(plan: TrainingPlan) -> PlannedMachine | None:
    from gpubench.jobs.sources import Here
    from gpubench.profiles import profile_for

    node = Here(plan.timeout_s).machines().nodes[0]
    names = [gpu.name for gpu in node.gpus if gpu.name]
    if not names:
        return None
    matched = profile_for(node, os.environ, plan.profile)
    memory = min((gpu.memory_bytes for gpu in node.gpus if gpu.memory_bytes), default=None)
    return PlannedMachine(
        gpu=names[0],
        gpus_per_node=len(node.gpus),
        nodes=plan.nodes or 1,
        profile=_own_kind(None if matched is None else matched.profile, plan),
        hosts=(node.snapshot.host,),
        origin=Origin.MEASURED if not plan.nodes or plan.nodes == 1 else Origin.SIMULATED,
        memory_bytes=memory,
        is_here=True,
    )


def _own_kind(profile: "Profile | None", plan: TrainingPlan) -> "Profile | None":
    """No profile for any machine, unless it was asked for: its figures are an example."""
    is_example = profile is not None and profile.match.generic is not None and plan.profile is None
    return None if is_example else profile


def _of_results(plan: TrainingPlan, files: Sequence[ResultFile], models: Sequence[str]) -> PlannedMachine:
    from gpubench.profiles import profile_of_gpus

    rows = [row for file in files for row in file.rows]
    if not rows:
        raise UsageError(
            f"{files[0].name} has no rows of a collective",
            expected="results of gpubench allreduce, allgather, reducescatter, ...",
            next_step="gpubench allreduce --output results/",
        )
    largest = max(rows, key=lambda row: row.ranks)
    per_node = largest.ranks // largest.nodes
    known = profile_of_gpus(models, per_node, None, os.environ, plan.profile) if models or plan.profile else None
    profile = _own_kind(known, plan)
    simulated = any(row.origin == Origin.SIMULATED for row in rows)
    return PlannedMachine(
        gpu=models[0] if models else profile.gpu.name if profile else _UNKNOWN,
        gpus_per_node=per_node,
        nodes=plan.nodes or largest.nodes,
        profile=profile,
        hosts=tuple(dict.fromkeys(host for file in files for host in file.circumstances.hosts)) or ("unknown",),
        origin=Origin.SIMULATED if simulated else Origin.RECORDED,
        memory_bytes=profile.gpu.memory_bytes if profile else None,
    )
