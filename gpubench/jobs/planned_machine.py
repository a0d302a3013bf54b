"""The machine that a plan is for, and the cost of a fault on it."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError, GpubenchError, UsageError
from gpubench.formats.presentation import Presentation
from gpubench.measure.plan.program import CommunicatorRanks
from gpubench.measure.plan.report import FaultCase
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.profiles.fault import COLLECTIVES, Fault, Subject, parse_fault, parse_faults
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.scan import PartKind as PartKind
from gpubench.model.results.scan import ScanPartRow
from gpubench.model.terms.verdict import HOST_STAGED, Finding, Origin
from gpubench.model.workload import TransformerModel
from gpubench.readers.results.gpubench_json import read_stored
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.hardware.simulated.times import CollectiveTimes
    from gpubench.model.profiles.profile import Profile

NAME = "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The model, the machine, and where times come from.

    `simulate` is a profile with a number of nodes, None for the GPUs at hand or those of the results. `gpus` are those
    that take part, None for all; `global_batch` are a step's sequences over all GPUs, `microbatches` a data-parallel
    rank's. A measured step took `step_seconds` or trained on `tokens_per_second`, on `measured_on` GPUs (None: on those
    of the plan).
    """

    model: TransformerModel
    notes: tuple[str, ...]
    simulate: str | None
    profile: str | None
    nodes: int | None
    gpus: int | None
    layouts: tuple[str, ...]
    global_batch: int | None
    microbatches: int | None
    bucket_mb: float | None
    imbalance: float
    results: tuple[Path, ...]
    overlap: tuple[Path, ...]
    other_machine: bool
    measure: bool
    tflops: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    measured_on: int | None
    gpu_memory_bytes: int | None
    with_optimizer: bool
    faults: tuple[str, ...]
    faults_from: Path | None
    timeout_s: float
    presentation: Presentation

    @property
    def measured_text(self) -> str:
        """The measured step as it was given; empty: none was."""
        if self.step_seconds is not None:
            return f"--step {self.step_seconds * 1e3:g} ms"
        return "" if self.tokens_per_second is None else f"--tokens-per-second {self.tokens_per_second:g}"


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


def machine_of(plan: TrainingPlan, files: Sequence[ResultFile], beside: Sequence[str] = ()) -> PlannedMachine:
    """The machine of a plan; `beside` are the GPUs that results of overlap are of.

    Raises:
        UsageError: there is no such profile, or the results are of several machines, or of another one.
        CouldNotMeasureError: there is no GPU, no result and no profile to plan for.
    """
    machine = _of_sources(plan, files)
    if machine.gpu != _UNKNOWN:
        _check_same(machine, [name for name in beside if name != machine.gpu], plan, "the machine planned for")
    return machine


def _of_sources(plan: TrainingPlan, files: Sequence[ResultFile]) -> PlannedMachine:
    models = _models_of(files)
    if plan.simulate is not None:
        machine = _of_profile(plan.simulate, plan.nodes)
        _check_same(machine, models, plan, f"--simulate {plan.simulate}")
        return machine
    here = _gpus_here(plan)
    if here is not None:
        _check_same(here, models, plan, "this machine")
        return here
    if files:
        return _of_results(plan, files, models)
    if plan.profile is not None:
        return _of_profile(plan.profile, plan.nodes)
    raise CouldNotMeasureError(
        "there is no GPU here to plan for",
        expected="a GPU, stored results (--results), or a machine by its profile (--simulate)",
        next_step="--simulate hgx-h200-8, or another of gpubench profiles list",
    )


def _models_of(files: Sequence[ResultFile]) -> list[str]:
    models = dict.fromkeys(name for file in files for name in file.circumstances.gpus)
    if len(models) > 1:
        raise UsageError(
            f"results of several machines: {', '.join(models)}",
            expected="results of one kind of GPU",
            next_step="name the files of one machine: --results a.json --results b.json",
        )
    return list(models)


def _check_same(machine: PlannedMachine, models: Sequence[str], plan: TrainingPlan, where: str) -> None:
    if models and machine.gpu not in models and not plan.other_machine:
        raise UsageError(
            f"results of another machine: they are of {models[0]}, and {where} has {machine.gpu}",
            expected="curves that were measured on the machine that is planned for",
            reason="the folder holds results that were copied from elsewhere",
            next_step="measure here (without --results), or --other-machine",
        )


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


_FAR_MORE = 2.0
_GONE = ("missing", "lost")
_SLOT = ("width", "generation")
_OF_PORT = ("state", "rate", "missing", *_SLOT)
"""What NCCL knows of a NIC, and takes fewer channels over it for."""

_BITS_PER_BYTE = 8


@dataclass(slots=True)
class FaultModel:
    """What faults make of a collective: its time on a simulated machine with them over that without."""

    machine: PlannedMachine
    faults: tuple[Fault, ...]
    _times: "dict[CommunicatorRanks, tuple[CollectiveTimes, CollectiveTimes]]" = field(default_factory=dict)
    _known: dict[tuple[str, CommunicatorRanks, int], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, collective: str, group: CommunicatorRanks, size_bytes: float, own: float) -> float:
        """What a collective takes with the faults that takes `own` seconds without.

        Where that is far more than on the healthy machine something slows it already: then what the simulated machine
        takes with the faults, if that is more; two faults of one path do not multiply.
        """
        size = 1 << max(10, round(size_bytes).bit_length() - 1)
        key = (collective, group, size)
        if key not in self._known:
            healthy, faulty = self._both(group)
            local = min(max(1, group.ranks // group.nodes), healthy.gpus)
            slow = max(faulty.seconds(collective, size, row=0, ranks_per_node=local))
            well = max(healthy.seconds(collective, size, row=0, ranks_per_node=local))
            self._known[key] = (well, max(well, slow))
        well, slow = self._known[key]
        larger = max(1.0, size_bytes / size)
        if group.sharing > 1 or own <= _FAR_MORE * well * larger:
            return own * slow / well
        return max(own, slow * larger)

    def _both(self, group: CommunicatorRanks) -> "tuple[CollectiveTimes, CollectiveTimes]":
        from gpubench.hardware.simulated.machine import SimulatedMachine
        from gpubench.hardware.simulated.times import CollectiveTimes

        if group not in self._times:
            assert self.machine.profile is not None
            machine = SimulatedMachine(self.machine.profile, group.nodes)
            local = max(1, min(group.ranks // group.nodes, machine.profile.match.visible))
            reached = [found for each in self.faults if (found := _within(each, group.nodes, local)) is not None]
            self._times[group] = (
                CollectiveTimes(machine, noise=0.0, whole_nodes=True),
                CollectiveTimes(machine, reached, noise=0.0, whole_nodes=True),
            )
        return self._times[group]


def _within(fault: Fault, nodes: int, gpus: int) -> Fault | None:
    """The fault in that one of many alike groups which it is in, counted from its first node and GPU; None: in none.

    A step is as slow as its slowest group, so a fault of the fourth node slows what runs within nodes too. A pair of
    GPUs that no group has in common is taken for one that it has: the worst that it can be.
    """
    from gpubench.hardware.simulated.machine import OF_DOMAINS

    if nodes == 1 and _fault_has(fault, OF_DOMAINS):
        return None
    node = None if fault.node is None else fault.node % nodes
    if fault.index is None or fault.subject not in (Subject.GPU, Subject.LINK):
        return replace(fault, node=node)
    first = fault.index % gpus
    if fault.second is None:
        return replace(fault, node=node, index=first)
    if gpus == 1:
        return None
    second = fault.second % gpus
    return replace(fault, node=node, index=first, second=(first + 1) % gpus if first == second else second)


def _not_modelled(fault: Fault, machine: PlannedMachine) -> str:
    """Why nothing follows from a fault for the times of collectives, though on a machine something may; else empty."""
    assert machine.profile is not None
    if fault.command and fault.subject is not Subject.NIC:
        return f"only {fault.command} knows of it"
    if key := fault.unmodelled(COLLECTIVES):
        return f"what {key} does to {COLLECTIVES} is not modelled"
    keys = ", ".join(key for key, _ in fault.settings)
    if fault.subject is Subject.NIC and fault.get("bandwidth") and _fault_has(fault, _OF_PORT):
        return f"what {keys} of one NIC do together is not modelled"
    domain = machine.profile.domain
    if fault.subject is Subject.NIC and domain is not None and machine.nodes <= domain.nodes:
        return "no NIC carries anything inside an NVLink domain"
    if machine.nodes > 1 and fault.subject is Subject.GPU and machine.profile.nvlink and _fault_has(fault, _SLOT):
        return f"what {keys} of a GPU does to its traffic between nodes is not modelled"
    if not _changes_links(fault, machine.profile):
        return f"no time of a collective follows from {keys}"
    return ""


def _fault_has(fault: Fault, keys: Sequence[str]) -> bool:
    return any(fault.get(key) for key in keys)


def _changes_links(fault: Fault, profile: "Profile") -> bool:
    from gpubench.hardware.simulated.links import node_links
    from gpubench.hardware.simulated.machine import OF_DOMAINS

    own = _as_rates(fault, profile)
    return _fault_has(fault, OF_DOMAINS) or node_links(profile, own) != node_links(profile, ())


def _check_reachable(model: FaultModel, text: str) -> None:
    """Raise UsageError for a fault that the machine cannot have, or that leaves GPUs which no other one reaches."""
    machine = model.machine
    if any(each.subject is Subject.GPU and _fault_has(each, _GONE) for each in model.faults):
        raise UsageError(
            f"--fault {text}: the job has no such GPU then",
            expected="a fault that all GPUs of the job outlive",
            next_step=f"--gpus {machine.gpus - 1}" if machine.gpus > 2 else "another fault",
        )
    groups = [CommunicatorRanks(machine.gpus_per_node)] if machine.gpus_per_node > 1 else []
    groups += [CommunicatorRanks(machine.gpus, machine.nodes)] if machine.nodes > 1 else []
    try:
        for each in groups:
            model.seconds("allreduce", each, 2**26, 0.0)
    except UsageError:
        raise
    except GpubenchError as error:
        raise UsageError(
            f"--fault {text}: {error.seen}", expected="a fault that leaves a way to the other GPUs"
        ) from None


def _as_rates(fault: Fault, profile: "Profile") -> tuple[Fault, ...]:
    """A share of a NIC that nothing tells of as rates, which the model knows: those of the NICs beside it on the node.

    NCCL gives every channel the same share of the bytes, and so a rail of which it does not know that it is slow
    makes all others wait.
    """
    from gpubench.hardware.simulated.links import nic_gb_s

    share = fault.get("bandwidth")
    if fault.subject is not Subject.NIC or share is None:
        return (fault,)
    index = fault.index or 0
    if index >= len(profile.nic):
        raise UsageError(f"--fault {fault}: there is no NIC {index}", expected=f"an index below {len(profile.nic)}")
    gb_s = nic_gb_s(profile.nic[index], ())
    if gb_s is None:
        raise UsageError(
            f"--fault {fault}: {profile.name} does not know the rate of NIC {index}",
            expected="a rate of its own",
            next_step=f"nic{index}:rate=200",
        )
    slowed = gb_s * _BITS_PER_BYTE * float(share)
    is_ethernet = profile.nic[index].kind is NicKind.ETHERNET
    return tuple(
        parse_fault(f"node{fault.node_number}.nic{number}:rate={min(slowed, each.rate_gbit_s):g}")
        for number, each in enumerate(profile.nic)
        if each.rate_gbit_s is not None and (each.kind is NicKind.ETHERNET) == is_ethernet
    )


_GPU = re.compile(r"\bGPU(\d{1,4})\b", re.ASCII)
_PAIR = re.compile(r"\bGPU(\d{1,4}) → GPU(\d{1,4})\b", re.ASCII)
_ACTIVE = re.compile(r"\b(\d{1,3}) NVLinks? active", re.ASCII)
_DOWN = re.compile(r"\b(\d{1,3}) of (\d{1,3}) NVLinks down", re.ASCII)
_NVLINKS = ("nvlink-down", "nvlinks-all-down", "nvlink-disabled")
_MOST = 16


def _faults_told(path: Path) -> list[str]:
    """Each once; of very many the first. Raises UsageError: the file cannot be read, or is no result of gpubench."""
    report = read_stored(path).report
    found = [each for finding in report.findings for each in _of_finding(finding)]
    found += [each for row in report.rows(ScanPartRow) for each in _of_part(row)]
    return list(dict.fromkeys(found))[:_MOST]


def _of_finding(finding: Finding) -> Iterator[str]:
    words = " ".join((finding.subject, *finding.subjects))
    if finding.id == HOST_STAGED:
        for first, second in _PAIR.findall(words):
            low, high = sorted((int(first), int(second)))
            yield f"link{low}-{high}:staged=yes"
    if finding.id not in _NVLINKS:
        return
    active, down = _ACTIVE.search(finding.seen), _DOWN.search(finding.seen)
    left = None if down is None else int(down[2]) - int(down[1])
    left = int(active[1]) if active is not None else left
    if left is not None and left >= 0:
        for gpu in _GPU.findall(words):
            yield f"gpu{gpu}:nvlink={left}"


def _of_part(row: ScanPartRow) -> Iterator[str]:
    """What a part still delivers, on node 0: a plan's nodes are all alike, and one slow one slows every collective."""
    share = None if row.percent is None else round(min(0.99, max(0.01, row.percent / 100)), 2)
    if share is None:
        return
    if row.kind in (PartKind.NIC, PartKind.RAIL, PartKind.LEAF_RAIL) and row.rail is not None:
        yield f"nic{row.rail}:bandwidth={share:g}"
    elif row.kind == PartKind.GPU and row.gpu is not None:
        yield f"gpu{row.gpu}:speed={share:g}"


ASKED, USUAL = "asked for", "usual"

_SLOW_RAIL = 0.5


def fault_cases(
    machine: PlannedMachine, asked: Sequence[str], file: Path | None, notes: list[str], *, with_usual: bool = True
) -> list[FaultCase]:
    """The faults of a plan; `notes` gathers why some cannot be predicted.

    Raises UsageError for a fault that is none, that the machine cannot have, or a file that tells of none.
    """
    if machine.profile is None:
        if asked or file is not None:
            raise UsageError(
                "what a fault costs is modelled from a profile, and none knows this machine",
                expected="--profile NAME",
                next_step="gpubench profiles list",
            )
        return []
    texts = [(text, ASKED) for text in asked]
    if file is not None:
        texts += [(text, file.name) for text in _of_file(file, machine)]
    if not texts and with_usual:
        texts = [(text, USUAL) for text in _usual(machine)]
    cases = []
    for text, source in texts:
        # Of what plan models, a fault of all nodes costs what it costs on one: the whole domain falls back.
        fault = parse_faults(text, machine.nodes)[0]
        _check_subject(machine, fault)
        if why := _not_modelled(fault, machine):
            if source == ASKED:
                raise UsageError(
                    f"--fault {text} with plan",
                    expected="a fault that changes the time of a collective",
                    reason=f"{why}; the step would pass as healthy",
                    next_step="--fault link0-1:staged=yes, gpu0:nvlink=9 or nic0:bandwidth=0.5",
                )
            notes.append(f"{text}: {why}")
            continue
        cases.append(_case(machine, text, fault, source))
    return cases


def _check_subject(machine: PlannedMachine, fault: Fault) -> None:
    """Raise UsageError for a node, GPU or NIC that the machine does not have."""
    from gpubench.hardware.simulated.links import node_links
    from gpubench.hardware.simulated.machine import SimulatedMachine, check_nodes

    assert machine.profile is not None
    check_nodes(SimulatedMachine(machine.profile, machine.nodes), [fault])
    node_links(machine.profile, [fault])


def _case(machine: PlannedMachine, text: str, fault: Fault, source: str) -> FaultCase:
    assert machine.profile is not None
    model = FaultModel(machine, _as_rates(fault, machine.profile))
    _check_reachable(model, text)
    return FaultCase(
        text=text,
        what=_words(fault),
        source=source,
        seconds=model.seconds,
        how=f"times × what {machine.profile.name} simulated with this fault takes over without",
    )


def _words(fault: Fault) -> str:
    from gpubench.hardware.simulated.links import STAGING
    from gpubench.hardware.simulated.machine import OF_DOMAINS

    if _fault_has(fault, OF_DOMAINS):
        return "an NVLink domain that uses its NICs"
    whose = "a pair" if fault.subject is Subject.LINK else "a GPU"
    if _fault_has(fault, STAGING):
        return f"{whose} that goes through host memory"
    if links := fault.get("nvlink"):
        return f"{whose} with {links} NVLinks"
    if fault.subject is Subject.NIC:
        return "a node without a rail" if _fault_has(fault, ("missing", "state")) else "a slow rail"
    if speed := fault.get("speed"):
        return f"{whose} at {float(speed):.0%} of its links' speed"
    return f"{whose} with a slower PCIe link"


def _usual(machine: PlannedMachine) -> Iterator[str]:
    profile = machine.profile
    if profile is None:
        return
    if machine.gpus_per_node > 1:
        yield "link0-1:staged=yes"
    if profile.nvlink is not None and machine.gpus_per_node > 1:
        yield f"gpu0:nvlink={profile.nvlink.links // 2}"
    rails = [number for number, each in enumerate(profile.nic) if each.rate_gbit_s]
    if machine.nodes > 1 and rails:
        yield f"nic{rails[0]}:bandwidth={_SLOW_RAIL:g}"


def _of_file(path: Path, machine: PlannedMachine) -> list[str]:
    """The faults that a stored check or scan tells of, as --fault writes them."""
    found = _faults_told(path)
    if not found:
        raise UsageError(
            f"{path} tells of no fault whose cost can be predicted",
            expected="a check or scan that found staged pairs, missing NVLinks or slow NICs",
            reason=f"{machine.gpu}: all of it was well, or what was wrong is of another kind",
            next_step="leave --faults-from out: usual faults are tried",
        )
    return found
