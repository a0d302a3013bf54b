"""Report of a scan: rows, exclude lists, the verdict, and findings on bad parts, pairs of nodes and collectives."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

from gpubench.measure.scan.judging import LeafLevel, smallest_sure_loss
from gpubench.measure.scan.rounds import CollectiveOfNodes, ScanCourse
from gpubench.measure.scan.verdicts import (
    FaultyPart,
    PartKind,
    between_leaves,
    leaf_pair_findings,
    leaf_parts,
    level_findings,
    rails_without_level,
    rate_findings,
    slow_levels,
)
from gpubench.model.results.report import Report, Table
from gpubench.model.results.rounds import WRONG_DATA_ARRIVED, NodeRail, ScanFabric
from gpubench.model.results.scan import (
    CELLS_SECTION,
    EXCLUSIONS_SECTION,
    OF_ONE_NODE,
    PARTS_SECTION,
    ROUNDS_SECTION,
    SCAN_COLLECTIVES_SECTION,
    ExclusionRow,
    ScanCellRow,
    ScanCollectiveRow,
    ScanPartRow,
    ScanRoundRow,
    Tool,
)
from gpubench.model.terms.units import compress_names, counted, percent, some_of, spans
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict, drained_hosts, overall

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d{1,9})", re.ASCII | re.DOTALL)


def exclusions(bad: Sequence[str], good: Sequence[str], ranks_per_node: int) -> Iterator[ExclusionRow]:
    """The bad hosts for Slurm and Kubernetes; for mpirun the good ones, as it has no list of hosts to leave out."""
    yield from (ExclusionRow(tool=Tool.MPIRUN, line=f"{host} slots={ranks_per_node}") for host in good)
    if not bad:
        return
    listed = slurm_hostlist(bad)
    yield ExclusionRow(tool=Tool.SLURM, line=shlex.join([f"--exclude={listed}"]))
    drain = ["scontrol", "update", f"nodename={listed}", "state=drain", "reason=gpubench scan"]
    yield ExclusionRow(tool=Tool.SLURM_DRAIN, line=shlex.join(drain))
    yield ExclusionRow(tool=Tool.KUBERNETES, line=shlex.join(["kubectl", "cordon", "--", *bad]))


def slurm_hostlist(hosts: Sequence[str]) -> str:
    """Host names in Slurm's brackets: 'node[3,17-19],login'; numbers keep their leading zeros."""
    stems: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for host in sorted(set(hosts)):
        match = _NUMBERED.fullmatch(host)
        if match is None:
            plain.append(host)
        else:
            padded = len(match["number"]) if match["number"].startswith("0") else 0
            stems.setdefault((match["stem"], padded), []).append(int(match["number"]))
    parts = [_bracketed(stem, padded, sorted(numbers)) for (stem, padded), numbers in stems.items()]
    return ",".join([*parts, *plain])


def _bracketed(stem: str, padded: int, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{stem}{numbers[0]:0{padded}d}" if padded else f"{stem}{numbers[0]}"
    listed = spans(numbers)
    if padded:
        listed = re.sub(r"\d+", lambda found: found[0].zfill(padded), listed)
    return f"{stem}[{listed}]"


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


SECTIONS = (
    PARTS_SECTION,
    CELLS_SECTION,
    ROUNDS_SECTION,
    SCAN_COLLECTIVES_SECTION,
    EXCLUSIONS_SECTION,
    "findings",
)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """A scan that is over, and what was made of it; `origin` is that of its figures."""

    course: ScanCourse
    parts: Sequence[FaultyPart]
    collectives: Sequence[CollectiveOfNodes] = ()
    origin: str = "measured"
    other_findings: Sequence[Finding] = field(default=())

    @property
    def sure_loss_percent(self) -> float:
        """The loss that this scan finds 99 times of 100."""
        return 100 * smallest_sure_loss(self.course.yardstick.deviation)

    def slow_rails(self) -> frozenset[int]:
        """The rails that are named for being slow on all nodes."""
        return frozenset(part.rail for part in self.parts if part.kind is PartKind.RAIL and part.rail is not None)

    def rails_without_level(self) -> frozenset[int]:
        """The rails of which nobody knows what a healthy cell delivers: all of them where the figures are too noisy."""
        if is_too_noisy(self.sure_loss_percent):
            return frozenset(range(self.course.fabric.rails))
        return rails_without_level(self.course, self.slow_rails(), explained=bool(self.parts))

    def suspects(self) -> list[NodeRail]:
        """Cells that look bad and that nobody confirmed: after --quick those that a whole scan would surely name."""
        course = self.course
        explained = {cell for part in self.parts for cell in part.cells}
        if not course.has_confirmed:
            least = 1 - smallest_sure_loss(course.yardstick.deviation)
            looks_bad = {cell for cell, each in course.screened.items() if each.score < least and not each.failures}
            return sorted((looks_bad & course.suspects) - explained)
        unconfirmed = [
            cell
            for cell in course.suspects - course.confirmed.keys() - explained
            if course.confirmation_figures(cell) < LEAST_CONFIRMING and cell.node not in course.gone
        ]
        return sorted(unconfirmed)

    def suspect_leaves(self) -> Sequence[LeafLevel]:
        """Leaves that look slow after --quick; a whole scan has confirmed them, or not."""
        return () if self.course.has_confirmed else self.course.suspect_leaves

    def unmeasured(self) -> list[NodeRail]:
        """Cells without any figure, of nodes that are not known to be gone or to hang."""
        explained = {cell for part in self.parts for cell in part.cells}
        measured = {
            NodeRail(node, sample.rail)
            for outcome in self.course.outcomes
            for sample in outcome.samples
            if not sample.failure
            for node in (sample.first, sample.second)
        }
        everything = (
            NodeRail(node, rail)
            for node in range(len(self.course.fabric.hosts))
            for rail in range(self.course.fabric.rails)
        )
        return [cell for cell in everything if cell not in measured and cell not in explained]


LEAST_CONFIRMING = 3
"""Figures with good nodes below which a suspect stays a suspect."""


def report_of(result: ScanResult, ranks_per_node: int) -> Report:
    """The whole report; without exclude lists where nodes have no ranks, as they are ranks themselves."""
    course = result.course
    suspects, unmeasured = result.suspects(), result.unmeasured()
    findings = [
        *part_findings(course, result.parts),
        *doubt_findings(course, suspects, unmeasured, list(leaf_parts(course.fabric, result.suspect_leaves()))),
        *wrong_data_findings(course),
        *pair_findings(course),
        *between_leaves(course),
        *leaf_pair_findings(course, result.parts),
        *noise_findings(result.sure_loss_percent),
        *level_findings(course, result.slow_rails(), explained=bool(result.parts)),
        *rate_findings(course, result.slow_rails() | result.rails_without_level()),
        *collective_findings(course.fabric, result.collectives),
        *result.other_findings,
    ]
    parts = [*_part_rows(result), *_suspect_rows(result, suspects)]
    cells = list(_cell_rows(result, set(suspects)))
    verdict = overall([*(each.severity for each in findings), *(Verdict(each.verdict) for each in cells)])
    return Report(
        verdict=verdict,
        complete=True,
        findings=findings,
        sections={
            PARTS_SECTION: Table(ScanPartRow.columns(), lambda: parts),
            CELLS_SECTION: Table(ScanCellRow.columns(), lambda: cells),
            ROUNDS_SECTION: Table(ScanRoundRow.columns(), lambda: _round_rows(result)),
            SCAN_COLLECTIVES_SECTION: Table(ScanCollectiveRow.columns(), lambda: _collective_rows(result)),
            EXCLUSIONS_SECTION: Table(ExclusionRow.columns(), lambda: _exclusion_rows(result, cells, ranks_per_node)),
        },
        main=CELLS_SECTION,
    )


def _part_rows(result: ScanResult) -> Iterator[ScanPartRow]:
    return (_part_row(result, part) for part in result.parts)


def _part_row(result: ScanResult, part: FaultyPart) -> ScanPartRow:
    fabric = result.course.fabric
    return ScanPartRow(
        kind=part.kind,
        subject=part_name(fabric, part),
        nodes=tuple(fabric.hosts[node] for node in part.nodes),
        rail=part.rail,
        leaf=part.leaf,
        gpu=part.gpu,
        partner_gpu=part.partner,
        nic=fabric.nic(part.rail) if part.kind is PartKind.NIC and part.rail is not None else None,
        percent=None if part.share is None else 100 * part.share,
        seen=part_seen(fabric, part),
        verdict=Verdict.FAIL,
        origin=result.origin,
    )


def _suspect_rows(result: ScanResult, suspects: Sequence[NodeRail]) -> Iterator[ScanPartRow]:
    fabric = result.course.fabric
    for part in leaf_parts(fabric, result.suspect_leaves()):
        yield replace(_part_row(result, part), verdict=Verdict.WARN)
    for node, rail in suspects:
        score = result.course.judged[NodeRail(node, rail)].score
        yield ScanPartRow(
            kind=PartKind.NODE if fabric.rails == 1 else PartKind.NIC,
            subject=fabric.hosts[node] if fabric.rails == 1 else f"{fabric.hosts[node]} rail {rail}",
            nodes=(fabric.hosts[node],),
            rail=rail,
            leaf=None,
            gpu=None,
            nic=fabric.nic(rail),
            percent=100 * score,
            seen="slower than others in the screening; not confirmed",
            verdict=Verdict.WARN,
            origin=result.origin,
        )


def _cell_rows(result: ScanResult, suspects: set[NodeRail]) -> Iterator[ScanCellRow]:
    course, fabric = result.course, result.course.fabric
    part_by_cell = {cell: part_name(fabric, part) for part in result.parts for cell in part.cells}
    of_leaf = {(part.leaf, part.rail): part for part in result.parts if part.kind not in OF_ONE_NODE}
    figures: dict[NodeRail, list[float]] = {}
    for outcome in course.outcomes:
        for sample in outcome.samples:
            if not sample.failure:
                for node in (sample.first, sample.second):
                    figures.setdefault(NodeRail(node, sample.rail), []).append(sample.gb_s)
    failures = course.failures()
    unknown = result.rails_without_level()
    below = slow_levels(course, result.slow_rails() | unknown).keys()
    for node, host in enumerate(fabric.hosts):
        leaf = fabric.leaves[node]
        for rail in range(fabric.rails):
            cell = NodeRail(node, rail)
            score, own = course.judged.get(cell), figures.get(cell, [])
            behind = _leaf_part(of_leaf, leaf, rail)
            part = part_by_cell.get(cell) or (None if behind is None else part_name(fabric, behind))
            share = 1.0 if behind is None or cell in behind.cells else behind.share or 1.0
            yield ScanCellRow(
                node=host,
                subject=f"rail {rail}",
                rail=rail,
                leaf=leaf,
                nic=fabric.nic(rail),
                score_percent=100 * score.score * share if score is not None and own else None,
                median_gb_s=median(own) if own else None,
                figures=score.figures if score is not None else 0,
                failures=len(failures.get(cell, ())),
                phase=course.phase_of(cell),
                verdict=_verdict(
                    part,
                    is_suspect=cell in suspects or rail in below,
                    has_figures=bool(own),
                    has_level=rail not in unknown,
                ),
                part=part,
                origin=result.origin,
            )


def _leaf_part(
    of_leaf: Mapping[tuple[str | None, int | None], FaultyPart], leaf: str | None, rail: int
) -> FaultyPart | None:
    """The part of the network that slows a cell: of its leaf, or its rail everywhere."""
    keys = ((leaf, rail), (leaf, None)) if leaf is not None else ()
    return next((of_leaf[key] for key in (*keys, (None, rail)) if key in of_leaf), None)


def _verdict(part: str | None, *, is_suspect: bool, has_figures: bool, has_level: bool) -> Verdict:
    if part is not None:
        return Verdict.FAIL
    if not has_figures:
        return Verdict.ERROR
    if is_suspect:
        return Verdict.WARN
    return Verdict.PASS if has_level else Verdict.INCONCLUSIVE


def _round_rows(result: ScanResult) -> Iterator[ScanRoundRow]:
    for outcome in result.course.outcomes:
        yield ScanRoundRow(
            number=outcome.number,
            phase=outcome.phase,
            pairs=len({each[:2] for each in outcome.samples}),
            figures=sum(not each.failure for each in outcome.samples),
            failures=sum(bool(each.failure) for each in outcome.samples),
            gone=tuple(result.course.fabric.hosts[node] for node in outcome.gone),
            seconds=outcome.seconds,
            origin=result.origin,
        )


def _collective_rows(result: ScanResult) -> Iterator[ScanCollectiveRow]:
    well = Verdict.INCONCLUSIVE if is_too_noisy(result.sure_loss_percent) else Verdict.PASS
    for group in result.collectives:
        yield ScanCollectiveRow(
            subject=group.name,
            nodes=tuple(result.course.fabric.hosts[node] for node in group.nodes),
            measured_gb_s=group.gb_s,
            predicted_gb_s=group.predicted_gb_s,
            percent=percent(group.gb_s, group.predicted_gb_s),
            note=group.failure or None,
            verdict=Verdict.ERROR if group.gb_s is None else Verdict.WARN if group.falls_short else well,
            origin=result.origin,
        )


def _exclusion_rows(result: ScanResult, cells: Sequence[ScanCellRow], ranks_per_node: int) -> Iterator[ExclusionRow]:
    """The bad nodes, also those whose facts fail or are not known, and the good ones: measured, and no suspects."""
    hosts = result.course.fabric.hosts
    if not ranks_per_node:
        return
    failing = drained_hosts(result.other_findings, hosts)
    bad = {node for part in result.parts if part.kind in OF_ONE_NODE for node in part.nodes}
    bad |= {node for node, host in enumerate(hosts) if host in failing}
    doubtful = {row.node for row in cells if row.verdict not in (Verdict.PASS, Verdict.FAIL)}
    good = [host for node, host in enumerate(hosts) if node not in bad and host not in doubtful]
    yield from exclusions([hosts[node] for node in sorted(bad)], good, ranks_per_node)
