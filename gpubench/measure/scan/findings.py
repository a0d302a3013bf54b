"""The findings of a scan: a part that is bad, a suspect, a pair that did not end, a collective below its parts."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from gpubench.measure.scan.decoding import FaultyPart, PartKind
from gpubench.measure.scan.prediction import CollectiveOfNodes
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.rows.scan import OF_ONE_NODE
from gpubench.model.results.scan_rounds import WRONG_DATA_ARRIVED, NodeRail, ScanFabric
from gpubench.model.terms.units import compress_names, counted, some_of
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict

_MOST_NAMES = 8

_MOST_SURE_LOSS_PERCENT = 50.0
"""A scan that surely sees only larger losses answers nothing."""

_OTHERS = "what the same of the other nodes does"

_ADVICE: dict[PartKind, tuple[str, str, str, str]] = {
    PartKind.NODE_GONE: (
        "node-gone",
        "a node that answers until the end",
        "it lost power or its network, its kernel died, or somebody ended the job there",
        "ping -c 3 {host}; ssh {host} dmesg -T",
    ),
    PartKind.NODE_HANGS: (
        "node-hangs",
        "every round done within the deadline",
        "a GPU or driver that hangs (Xid in the kernel's log), or a process that was stopped",
        "ssh {host} gpubench check --quick",
    ),
    PartKind.RAIL_HANGS: (
        "rail-hangs",
        "every round done within the deadline",
        "the GPU, or the NIC's port, of that rail",
        "ssh {host} gpubench check --quick",
    ),
    PartKind.NODE: (
        "node-slow",
        _OTHERS,
        "what all its rails share: CPU clock, memory, a PCIe switch, IOMMU, another job; or its one NIC or cable",
        "ssh {host} gpubench check",
    ),
    PartKind.GPU: (
        "gpu-slow",
        _OTHERS,
        "the GPU's own links: lost PCIe lanes or NVLinks, clocks held down, or somebody who uses it",
        "ssh {host} gpubench check",
    ),
    PartKind.GPU_PAIR: (
        "gpu-pair-slow",
        _OTHERS,
        "copies between the two that go through host memory, for peer access is refused; or links that are lost",
        "ssh {host} gpubench p2p",
    ),
    PartKind.NIC: (
        "nic-slow",
        _OTHERS,
        "cable, transceiver, NIC or switch port of that rail: the GPU's own figures are as those of others",
        "ssh {host} ibstat; ssh {host} gpubench topo",
    ),
    PartKind.RAIL: (
        "rail-slow",
        "what the other rails do",
        "the switches of that rail, or how NICs are set",
        "ibdiagnet; ssh {host} ibstat",
    ),
    PartKind.LEAF: (
        "leaf-slow",
        "what other leaves do",
        "the leaf switch: everything behind it is slow, inside and across",
        "ibdiagnet; the counters of the switch",
    ),
    PartKind.LEAF_RAIL: (
        "leaf-slow",
        "what other leaves do on this rail",
        "the leaf switch of this rail: everything behind it is slow, inside and across",
        "ibdiagnet; the counters of the switch",
    ),
    PartKind.UPLINK: (
        "uplink-slow",
        "what leaves other leaves",
        "an uplink or spine port: inside the leaf all is well, what leaves it is slow",
        "ibdiagnet; the counters of the leaf's uplinks",
    ),
}
"""Id, what was expected, the likely reason, the next command."""


def part_name(fabric: ScanFabric, part: FaultyPart) -> str:
    """'node17 rail 3', 'node4 GPU5', 'leaf4 rail 2'."""
    if part.kind is PartKind.RAIL:
        return f"rail {part.rail} of all nodes"
    where = part.leaf if part.leaf is not None and part.kind not in OF_ONE_NODE else fabric.hosts[part.nodes[0]]
    rails = sorted({cell.rail for cell in part.cells})
    if part.gpu is not None:
        return f"{where} GPU{part.gpu}" + ("" if part.partner is None else f" and GPU{part.partner}")
    if part.kind is PartKind.NIC and len(rails) > 1:
        return f"{where} rails {', '.join(map(str, rails))}"
    return f"{where}" if part.rail is None or fabric.rails == 1 else f"{where} rail {part.rail}"


def part_seen(fabric: ScanFabric, part: FaultyPart) -> str:
    """What was seen of a part, in words."""
    if part.share is None:
        return part.seen
    share = f"{part.share:.0%} of {_of_what(part)}"
    nic = None if part.rail is None or part.kind is not PartKind.NIC else fabric.nic(part.rail)
    return "; ".join(filter(None, (part.seen, share, f"NIC {nic}" if nic else "")))


def _of_what(part: FaultyPart) -> str:
    return "what leaves other leaves" if part.kind is PartKind.UPLINK else "what the others deliver"


def part_findings(course: ScanCourse, parts: Sequence[FaultyPart]) -> Iterator[Finding]:
    """A finding a part."""
    fabric = course.fabric
    for part in parts:
        id_, expected, likely, command = _ADVICE[part.kind]
        yield Finding(
            id_,
            Verdict.FAIL,
            part_name(fabric, part),
            part_seen(fabric, part),
            expected,
            likely,
            command.format(host=shlex.quote(fabric.hosts[part.nodes[0]])),
            subjects=tuple(fabric.hosts[node] for node in part.nodes) if part.leaf is not None else (),
        )


def doubt_findings(
    course: ScanCourse, suspects: Sequence[NodeRail], unjudged: Sequence[NodeRail], leaves: Sequence[FaultyPart]
) -> Iterator[Finding]:
    """Suspects that nobody confirmed, leaves among them, and nodes of which nothing is known."""
    if suspects or leaves:
        names = [*_names(course.fabric, suspects), *(part_name(course.fabric, each) for each in leaves)]
        why = "too few good nodes were left to confirm it"
        if not course.has_confirmed:
            why = "--quick ends after the screening" if course.is_quick else "the job ended before the confirmation"
        yield Finding(
            "suspects-not-confirmed",
            Verdict.WARN,
            some_of(names, _MOST_NAMES),
            f"{counted(len(names), 'suspect')}: slower than others in three rounds",
            "five rounds with known good nodes, by which alone a part is named",
            why,
            "gpubench scan without --quick" if course.is_quick else "gpubench scan again, with more good nodes",
            subjects=tuple(names),
        )
    if unjudged:
        names = _names(course.fabric, unjudged)
        yield Finding(
            "cells-not-measured",
            Verdict.ERROR,
            some_of(names, _MOST_NAMES),
            f"{counted(len(names), 'rail')} of nodes without any figure",
            "at least one round in which it measured",
            "the job ended before, or its partners were gone in every round",
            "gpubench scan again",
            subjects=tuple(names),
        )


def wrong_data_findings(course: ScanCourse) -> Iterator[Finding]:
    """Pairs between which data arrived damaged, once or more: whose fault it is, others that they met may tell."""
    found = {
        (sample.first, sample.second, sample.rail): f"{sample.failure} in round {outcome.number}"
        for outcome in course.outcomes
        for sample in outcome.samples
        if sample.failure.startswith(WRONG_DATA_ARRIVED)
    }
    hosts = course.fabric.hosts
    for (first, second, rail), seen in found.items():
        yield Finding(
            WRONG_DATA,
            Verdict.FAIL,
            f"{hosts[first]} and {hosts[second]}, rail {rail}",
            seen,
            "every element exact",
            "data damaged on the way: a GPU, a link, a NIC, or ACS and IOMMU between peers",
            f"ssh {shlex.quote(hosts[first])} gpubench check, and the same on {hosts[second]}",
            subjects=(hosts[first], hosts[second]),
        )


def pair_findings(course: ScanCourse) -> Iterator[Finding]:
    """Pairs that failed once, of which neither side failed again: it is not known who is to blame."""
    retired = course.retired()
    once = {
        (each.first, each.second, number): each.failure
        for number, each in ((outcome.number, sample) for outcome in course.outcomes for sample in outcome.samples)
        if each.failure
        and not {NodeRail(each.first, each.rail), NodeRail(each.second, each.rail)} & retired.keys()
        and each.culprit is None
        and not each.failure.startswith(WRONG_DATA_ARRIVED)
        and not {each.first, each.second} & course.gone.keys()
    }
    last = course.outcomes[-1].number if course.outcomes else 0
    for (first, second, number), failure in once.items():
        hosts = course.fabric.hosts
        later = "both did well with others later" if number < last else "no round came after it"
        yield Finding(
            "pair-not-done",
            Verdict.WARN,
            f"{hosts[first]} and {hosts[second]}",
            f"{failure} in round {number}; {later}",
            "every round done within the deadline",
            "one of the two, or the path between them",
            "gpubench scan again",
            subjects=(hosts[first], hosts[second]),
        )


def is_too_noisy(sure_loss_percent: float) -> bool:
    """True where hardly any loss would have been seen, so that nothing can be said of what was not named."""
    return sure_loss_percent > _MOST_SURE_LOSS_PERCENT


def noise_findings(sure_loss_percent: float) -> Iterator[Finding]:
    """That figures were so noisy that hardly anything could have been seen."""
    if is_too_noisy(sure_loss_percent):
        yield Finding(
            "scan-too-noisy",
            Verdict.INCONCLUSIVE,
            "all figures",
            f"a loss of {min(sure_loss_percent, 100):.0f} % or more would be named for sure, and no smaller one",
            f"{_MOST_SURE_LOSS_PERCENT:.0f} % at most",
            "other jobs on the nodes or the network, cores shared by ranks, or too few nodes to know the noise by",
            "gpubench scan with more nodes, on a quiet network",
        )


def clock_findings(fabric: ScanFabric, offsets: Mapping[int, float]) -> Iterator[Finding]:
    """Wall clocks that differ from the first node's; no figure rests on them."""
    for node, seconds in sorted(offsets.items()):
        yield Finding(
            "clock-differs",
            Verdict.WARN,
            fabric.hosts[node],
            f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the first node's",
            "clocks that agree within a second",
            "NTP or chrony does not run there, or reaches no server; no figure here rests on clocks of two nodes",
            f"ssh {shlex.quote(fabric.hosts[node])} chronyc tracking",
        )


def collective_findings(fabric: ScanFabric, groups: Sequence[CollectiveOfNodes]) -> Iterator[Finding]:
    """A collective of all that falls short of its parts, and which halves do."""
    if not groups or not groups[0].falls_short:
        return
    whole = groups[0]
    said = [f"{each.name} {_reached(each)}" for each in groups]
    halves = [each for each in groups[1:] if each.falls_short]
    where = (
        "in " + " and ".join(f"{each.name} ({_hosts(fabric, each)})" for each in halves)
        if halves
        else "only with all together: their number, or what all of them share"
    )
    yield Finding(
        "collective-below-parts",
        Verdict.ERROR if whole.gb_s is None else Verdict.WARN,
        f"a collective of {len(whole.nodes)} nodes",
        "; ".join(said),
        f"{whole.least_share:.0%} of what the slowest of the parts allows",
        f"what pairs do not show: {where}",
        "gpubench allreduce on these nodes",
    )


def _reached(group: CollectiveOfNodes) -> str:
    return group.failure or f"{group.gb_s or 0:.4g} of {group.predicted_gb_s:.4g} GB/s ({group.share:.0%})"


def _hosts(fabric: ScanFabric, group: CollectiveOfNodes) -> str:
    names = compress_names([fabric.hosts[node] for node in group.nodes]).split(", ")
    return some_of(names, _MOST_NAMES)


def _names(fabric: ScanFabric, cells: Sequence[NodeRail]) -> list[str]:
    """Rails by node: 'node3 rail 1', 'node4 rails 0,2'."""
    found = []
    for node, own in groupby(sorted(cells), key=lambda cell: cell.node):
        rails = [cell.rail for cell in own]
        all_of_it = len(rails) == fabric.rails
        found.append(
            fabric.hosts[node]
            if all_of_it
            else f"{fabric.hosts[node]} rail{'s' if len(rails) > 1 else ''} {','.join(map(str, rails))}"
        )
    return found
