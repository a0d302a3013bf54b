"""Predicts how faults slow collectives, by comparing the simulated machine with and without the faults."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from gpubench.errors import GpubenchError, UsageError
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.profiles.fault import Fault, Subject, parse_fault, parse_faults
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.scan import PartKind, ScanPartRow
from gpubench.model.terms.verdict import HOST_STAGED, Finding
from gpubench.readers.results.gpubench_json import read_stored
from gpubench.simulated.links import STAGING, nic_gb_s, node_links
from gpubench.simulated.machine import OF_DOMAINS, SimulatedMachine, check_nodes
from gpubench.simulated.settings import nccl_links
from gpubench.training.cluster import PlannedMachine
from gpubench.training.program import CommunicatorRanks, FaultSeconds
from gpubench.training.report import FaultCase

ASKED, USUAL = "asked for", "usual"
_SLOW_RAIL = 0.5


def fault_cases(
    machine: PlannedMachine, asked: Sequence[str], file: Path | None, notes: list[str], *, with_usual: bool = True
) -> list[FaultCase]:
    """Return the faults whose cost to predict. `notes` collects the reasons why some faults cannot be predicted.

    Raises UsageError for an invalid fault, a fault that the machine cannot have, or a file without faults.
    """
    profile = machine.profile
    if profile is None:
        if asked or file is not None:
            raise UsageError(
                "the cost of a fault is modelled from a profile, and none matches this machine",
                expected="--profile NAME",
                next_step="gpubench profiles list",
            )
        return []
    texts = [(text, ASKED) for text in asked]
    if file is not None:
        texts += [(text, file.name) for text in _faults_found(file, machine)]
    if not texts and with_usual:
        texts = [(text, USUAL) for text in _usual(machine, profile)]
    cases = []
    for text, source in texts:
        # In this model, a fault on all nodes costs as much as on one node, because the whole domain uses the fallback.
        fault = parse_faults(text, machine.nodes)[0]
        check_nodes(SimulatedMachine(profile, machine.nodes), [fault])
        node_links(profile, [fault])
        if why := _not_modelled(fault, machine, profile):
            if source == ASKED:
                raise UsageError(
                    f"--fault {text} with plan",
                    expected="a fault that changes the time of a collective",
                    reason=f"{why}, so the step would pass as healthy",
                    next_step="--fault link0-1:staged=yes, gpu0:nvlink=9 or nic0:bandwidth=0.5",
                )
            notes.append(f"{text}: {why}")
            continue
        seconds = _seconds_under_faults(_convert_to_rates(fault, profile), machine, profile.match.visible)
        _check_reachable(fault, machine, seconds)
        cases.append(FaultCase(text=text, what=_words(fault), source=source, seconds=seconds))
    return cases


_FAR_MORE = 2.0


def _seconds_under_faults(faults: Sequence[Fault], machine: PlannedMachine, gpus: int) -> FaultSeconds:
    """Return a function that computes the time of a collective with the faults from its time without them.

    Usually both times have the same ratio as in the simulation. If a collective already takes far longer than
    simulated, something else slows it. Two faults of one path do not multiply, so the function then returns the longer
    of this time and the simulated time with the faults.
    """

    @cache
    def both(group: CommunicatorRanks) -> tuple[Callable[[str, int], float], Callable[[str, int], float]]:
        local = min(group.on_a_node, gpus)
        reached = [found for fault in faults if (found := _within(fault, group.nodes, local)) is not None]
        return machine.collectives(group), machine.collectives(group, reached)

    @cache
    def known(collective: str, group: CommunicatorRanks, size: int) -> tuple[float, float]:
        well, slow = (times(collective, size) for times in both(group))
        return well, max(well, slow)

    def seconds(collective: str, group: CommunicatorRanks, size_bytes: float, own: float) -> float:
        size = 1 << max(10, round(size_bytes).bit_length() - 1)
        well, slow = known(collective, group, size)
        larger = max(1.0, size_bytes / size)
        if group.sharing > 1 or own <= _FAR_MORE * well * larger:
            return own * slow / well
        return max(own, slow * larger)

    return seconds


def _within(fault: Fault, nodes: int, gpus: int) -> Fault | None:
    """Return the fault with node and GPU numbers relative to a group of ranks, or None if it does not affect the
    group.

    The slowest group determines the step time, so a fault on the fourth node also slows groups within a node. A pair of
    GPUs that is in no group is mapped to a pair in one group, which is the worst case.
    """
    if nodes == 1 and _has(fault, OF_DOMAINS):
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


_GONE = ("missing", "lost")
_SLOT = ("width", "generation")
_OF_PORT = ("state", "rate", "missing", *_SLOT)
"""Fault keys of a NIC that NCCL can detect. It reacts with fewer channels."""


def _not_modelled(fault: Fault, machine: PlannedMachine, profile: Profile) -> str:
    """Return why the model ignores a fault that may slow a real machine. Empty if the model covers the fault."""
    if fault.command and fault.subject is not Subject.NIC:
        return f"only {fault.command} simulates it"
    keys = ", ".join(key for key, _ in fault.settings)
    if fault.subject is Subject.NIC and fault.get("bandwidth") and _has(fault, _OF_PORT):
        return f"the combined effect of {keys} on one NIC is not modelled"
    domain = profile.domain
    if fault.subject is Subject.NIC and domain is not None and machine.nodes <= domain.nodes:
        return "NICs are not used inside an NVLink domain"
    if machine.nodes > 1 and fault.subject is Subject.GPU and profile.nvlink and _has(fault, _SLOT):
        return f"the effect of {keys} on a GPU's traffic between nodes is not modelled"
    is_felt = _has(fault, OF_DOMAINS) or nccl_links(profile, _convert_to_rates(fault, profile)) != node_links(
        profile, ()
    )
    if not is_felt:
        return f"{keys} has no effect on the time of a collective"
    return ""


def _has(fault: Fault, keys: Sequence[str]) -> bool:
    return any(fault.get(key) for key in keys)


def _check_reachable(fault: Fault, machine: PlannedMachine, seconds: FaultSeconds) -> None:
    """Raise UsageError if the fault removes a GPU of the job, or makes GPUs unreachable."""
    if fault.subject is Subject.GPU and _has(fault, _GONE):
        raise UsageError(
            f"--fault {fault}: the job then lacks this GPU",
            expected="a fault that leaves all GPUs in the job",
            next_step=f"--gpus {machine.gpus - 1}" if machine.gpus > 2 else "another fault",
        )
    groups = [CommunicatorRanks(machine.gpus_per_node)] if machine.gpus_per_node > 1 else []
    groups += [CommunicatorRanks(machine.gpus, machine.nodes)] if machine.nodes > 1 else []
    try:
        for group in groups:
            seconds("allreduce", group, 2**26, 0.0)
    except UsageError:
        raise
    except GpubenchError as error:
        raise UsageError(
            f"--fault {fault}: {error.seen}", expected="a fault that leaves a path to the other GPUs"
        ) from None


_BITS_PER_BYTE = 8


def _convert_to_rates(fault: Fault, profile: Profile) -> tuple[Fault, ...]:
    """Convert a NIC slowdown that NCCL cannot detect to reduced rates of all NICs in the node, which the model
    supports.

    NCCL gives every channel an equal share of the bytes, so all channels wait for the slow rail.
    """
    share = fault.get("bandwidth")
    if fault.subject is not Subject.NIC or share is None:
        return (fault,)
    index = fault.index or 0
    gb_s = nic_gb_s(profile.nic[index], ())
    if gb_s is None:
        raise UsageError(
            f"--fault {fault}: {profile.name} has no rate for NIC {index}",
            expected="a rate for this NIC",
            next_step=f"nic{index}:rate=200",
        )
    slowed = gb_s * _BITS_PER_BYTE * float(share)
    is_ethernet = profile.nic[index].kind is NicKind.ETHERNET
    return tuple(
        parse_fault(f"node{fault.node_number}.nic{number}:rate={min(slowed, each.rate_gbit_s):g}")
        for number, each in enumerate(profile.nic)
        if each.rate_gbit_s is not None and (each.kind is NicKind.ETHERNET) == is_ethernet
    )


def _words(fault: Fault) -> str:
    if _has(fault, OF_DOMAINS):
        return "an NVLink domain that uses its NICs"
    whose = "a pair" if fault.subject is Subject.LINK else "a GPU"
    if _has(fault, STAGING):
        return f"{whose} that goes through host memory"
    if links := fault.get("nvlink"):
        return f"{whose} with {links} NVLinks"
    if fault.subject is Subject.NIC:
        return "a node without a rail" if _has(fault, ("missing", "state")) else "a slow rail"
    if speed := fault.get("speed"):
        return f"{whose} at {float(speed):.0%} of its links' speed"
    return f"{whose} with a slower PCIe link"


def _usual(machine: PlannedMachine, profile: Profile) -> Iterator[str]:
    if machine.gpus_per_node > 1:
        yield "link0-1:staged=yes"
    if profile.nvlink is not None and machine.gpus_per_node > 1:
        yield f"gpu0:nvlink={profile.nvlink.links // 2}"
    rails = [number for number, each in enumerate(profile.nic) if each.rate_gbit_s]
    if machine.nodes > 1 and rails:
        yield f"nic{rails[0]}:bandwidth={_SLOW_RAIL:g}"


_GPU = re.compile(r"\bGPU(\d{1,4})\b", re.ASCII)
_PAIR = re.compile(r"\bGPU(\d{1,4}) → GPU(\d{1,4})\b", re.ASCII)
_ACTIVE = re.compile(r"\b(\d{1,3}) NVLinks? active", re.ASCII)
_DOWN = re.compile(r"\b(\d{1,3}) of (\d{1,3}) NVLinks down", re.ASCII)
_NVLINKS = ("nvlink-down", "nvlinks-all-down", "nvlink-disabled")
_MOST = 16


def _faults_found(path: Path, machine: PlannedMachine) -> list[str]:
    """Return the distinct faults that a stored check or scan found, up to a maximum number.

    Raises UsageError if there are none.
    """
    report = read_stored(path).report
    found = [each for finding in report.findings for each in _parse_finding(finding)]
    found += [each for row in report.rows(ScanPartRow) for each in _parse_scan_part(row)]
    if not found:
        raise UsageError(
            f"{path} has no fault whose cost can be predicted",
            expected="a check or scan that found staged pairs, missing NVLinks or slow NICs",
            reason=f"{machine.gpu}: everything was healthy, or its faults are of another kind",
            next_step="leave --faults-from out, to predict the usual faults",
        )
    return list(dict.fromkeys(found))[:_MOST]


def _parse_finding(finding: Finding) -> Iterator[str]:
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


def _parse_scan_part(row: ScanPartRow) -> Iterator[str]:
    """Yield the remaining bandwidth of a slow part as a fault on node 0.

    All nodes of a plan are alike, and one slow node slows every collective.
    """
    share = None if row.percent is None else round(min(0.99, max(0.01, row.percent / 100)), 2)
    if share is None:
        return
    if row.part_kind in (PartKind.NIC, PartKind.RAIL, PartKind.LEAF_RAIL) and row.rail is not None:
        yield f"nic{row.rail}:bandwidth={share:g}"
    elif row.part_kind == PartKind.GPU and row.gpu is not None:
        yield f"gpu{row.gpu}:speed={share:g}"
