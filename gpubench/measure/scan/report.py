"""Report on a scan: rows, exclude lists, the verdict and the findings."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.folding import add_ssh, cause_of
from gpubench.conditions.policy import drains
from gpubench.measure.scan import verdicts
from gpubench.measure.scan.judging import LEAST_FIGURES, smallest_sure_loss
from gpubench.measure.scan.leaves import LeafLevel
from gpubench.measure.scan.rounds import CollectiveOfNodes, ScanCourse
from gpubench.model.results import scan
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import compress_names, format_bandwidth, format_ranges, percent, plural, shorten
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Verdict, failing_hosts, worst_verdict

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d{1,9})", re.ASCII | re.DOTALL)


def exclusions(bad: Sequence[str], good: Sequence[str], ranks_per_node: int) -> Iterator[scan.ExclusionRow]:
    """Yield exclude lists for Slurm and Kubernetes. For mpirun, which cannot exclude hosts, yield the good hosts."""
    yield from (scan.ExclusionRow(tool=scan.Tool.MPIRUN, line=f"{host} slots={ranks_per_node}") for host in good)
    if not bad:
        return
    listed = slurm_hostlist(bad)
    yield scan.ExclusionRow(tool=scan.Tool.SLURM, line=shlex.join([f"--exclude={listed}"]))
    drain = ["scontrol", "update", f"nodename={listed}", "state=drain", "reason=gpubench scan"]
    yield scan.ExclusionRow(tool=scan.Tool.SLURM_DRAIN, line=shlex.join(drain))
    yield scan.ExclusionRow(tool=scan.Tool.KUBERNETES, line=shlex.join(["kubectl", "cordon", "--", *bad]))


def slurm_hostlist(hosts: Sequence[str]) -> str:
    """Return host names in Slurm's notation, for example 'node[3,17-19],login'. Numbers keep their leading zeros."""
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
    listed = format_ranges(numbers)
    if padded:
        listed = re.sub(r"\d+", lambda found: found[0].zfill(padded), listed)
    return f"{stem}[{listed}]"


_MOST_NAMES = 8

_MOST_SURE_LOSS_PERCENT = 50.0
"""If a scan can detect only larger losses than this, it is inconclusive."""

_OTHERS = "the same bandwidth as on the other nodes"

_ADVICE: dict[verdicts.PartKind, tuple[str, str, str, Cure]] = {
    verdicts.PartKind.NODE_GONE: (
        "node-gone",
        "a node that answers until the end",
        "the node lost power or its network, its kernel crashed, or the job was ended there",
        Cure.of("ping -c 3 {host}", "ssh {host} dmesg -T", comment="If it answers, its kernel log shows why."),
    ),
    verdicts.PartKind.NODE_HANGS: (
        "node-hangs",
        "every round finished within the deadline",
        "a hanging GPU or driver (Xid in the kernel's log), or a stopped process",
        Cure.of("ssh {host} gpubench check --quick"),
    ),
    verdicts.PartKind.RAIL_HANGS: (
        "rail-hangs",
        "every round finished within the deadline",
        "the GPU of this rail, or its NIC's port",
        Cure.of("ssh {host} gpubench check --quick"),
    ),
    verdicts.PartKind.NODE: (
        "node-slow",
        _OTHERS,
        "a cause shared by all its rails: CPU clock, memory, a PCIe switch, the IOMMU, another job, or its only NIC",
        Cure.of("ssh {host} gpubench check"),
    ),
    verdicts.PartKind.GPU: (
        "gpu-slow",
        _OTHERS,
        "lost PCIe lanes or NVLinks, low clocks, or another job on this GPU",
        Cure.of("ssh {host} gpubench check"),
    ),
    verdicts.PartKind.GPU_PAIR: (
        "gpu-pair-slow",
        _OTHERS,
        "copies go through host memory because peer access is refused, or links are lost",
        Cure.of("ssh {host} gpubench p2p"),
    ),
    verdicts.PartKind.NIC: (
        "nic-slow",
        _OTHERS,
        "the cable, transceiver, NIC or switch port of this rail (the GPU itself is as fast as the others)",
        Cure.of("ssh {host} ibstat", comment="`gpubench topo` on the node shows its links."),
    ),
    verdicts.PartKind.RAIL: (
        "rail-slow",
        "the same bandwidth as on the other rails",
        "the switches of this rail, or a setting of its NICs",
        Cure.of("ibdiagnet", comment="Also look at the NIC with `ssh {host} ibstat`."),
    ),
    verdicts.PartKind.LEAF: (
        "leaf-slow",
        "the same bandwidth as on other leaves",
        "the leaf switch (all its traffic is slow, inside the leaf and to other leaves)",
        Cure.of("ibdiagnet", comment="Look at the switch's counters."),
    ),
    verdicts.PartKind.LEAF_RAIL: (
        "leaf-slow",
        "the same bandwidth as on other leaves on this rail",
        "the leaf switch of this rail (all its traffic is slow, inside the leaf and to other leaves)",
        Cure.of("ibdiagnet", comment="Look at the switch's counters."),
    ),
    verdicts.PartKind.UPLINK: (
        "uplink-slow",
        "the same outgoing bandwidth as other leaves",
        "an uplink or spine port (traffic inside the leaf is fast, but traffic that leaves it is slow)",
        Cure.of("ibdiagnet", comment="Look at the counters of the leaf's uplinks."),
    ),
}
"""Finding id, expected value, likely cause and cure for each type of faulty component."""


def _part_name(fabric: scan.ScanFabric, part: verdicts.FaultyPart) -> str:
    """Return the name of a faulty component, for example 'node17 rail 3', 'node4 GPU5' or 'leaf4 rail 2'."""
    if part.kind is verdicts.PartKind.RAIL:
        return f"rail {part.rail} of all nodes"
    where = part.leaf if part.leaf is not None and part.kind not in scan.OF_ONE_NODE else fabric.hosts[part.nodes[0]]
    rails = sorted({cell.rail for cell in part.cells})
    if part.gpu is not None:
        return f"{where} GPU{part.gpu}" + ("" if part.partner is None else f" and GPU{part.partner}")
    if part.kind is verdicts.PartKind.NIC and len(rails) > 1:
        return f"{where} rails {', '.join(map(str, rails))}"
    return f"{where}" if part.rail is None or fabric.rails == 1 else f"{where} rail {part.rail}"


def _part_seen(fabric: scan.ScanFabric, part: verdicts.FaultyPart) -> str:
    if part.share is None:
        return part.seen
    share = f"{part.share:.0%} of {_describe_part(part)}"
    nic = None if part.rail is None or part.kind is not verdicts.PartKind.NIC else fabric.nic(part.rail)
    return "; ".join(filter(None, (part.seen, share, f"NIC {nic}" if nic else "")))


def _describe_part(part: verdicts.FaultyPart) -> str:
    return "other leaves' outgoing bandwidth" if part.kind is verdicts.PartKind.UPLINK else "the others' bandwidth"


def severity_of(course: ScanCourse, part: verdicts.FaultyPart) -> Verdict:
    """Return the severity of a faulty component.

    It is WARN for a node or NIC whose loss is too small to be detected with certainty, and FAIL otherwise. Of 3,000
    simulated healthy scans of 3 to 5 nodes, 8 had such a component.
    """
    sure_share = 1 - smallest_sure_loss(course.yardstick.deviation)
    is_small = part.kind in verdicts.KINDS_OF_CELLS and part.share is not None and part.share > sure_share
    return Verdict.WARN if is_small else Verdict.FAIL


def _part_findings(course: ScanCourse, parts: Sequence[verdicts.FaultyPart]) -> Iterator[Finding]:
    """Yield one finding per faulty component. Wrong data inside a node have a separate finding."""
    fabric = course.fabric
    for part in parts:
        if scan.WRONG_DATA_ARRIVED in part.seen:
            continue
        id_, expected, likely, cure = _ADVICE[part.kind]
        host = scan.login_name(fabric.hosts[part.nodes[0]])
        yield Finding(
            id_,
            severity_of(course, part),
            _part_name(fabric, part),
            _part_seen(fabric, part),
            expected,
            likely,
            Cure(tuple(command.format(host=host) for command in cure.commands), cure.comment.format(host=host)),
            places=_part_places(fabric, part),
            subjects=tuple(fabric.hosts[node] for node in part.nodes) if part.leaf is not None else (),
            expected_percent=0.0 if part.kind in _SILENT else percent(part.share, 1.0),
        )


def _part_places(fabric: scan.ScanFabric, part: verdicts.FaultyPart) -> tuple[DevicePlace, ...]:
    """Return the GPUs or NIC of a faulty component, its node, or all nodes behind a leaf. A rail has none."""
    if part.kind not in scan.OF_ONE_NODE and part.leaf is None:
        return ()
    nic = fabric.nic(part.rail) if part.kind is verdicts.PartKind.NIC and part.rail is not None else None
    gpus = [f"GPU{gpu}" for gpu in (part.gpu, part.partner) if gpu is not None]
    devices: Sequence[str | None] = gpus or [nic]
    return tuple(DevicePlace(fabric.hosts[node], device) for node in part.nodes for device in devices)


def _fold_below_facts(parts: Sequence[Finding], facts: Sequence[Finding], hosts: Sequence[str]) -> list[Finding]:
    """Return all findings. A slow GPU or pair becomes a consequence of the fact that explains it."""
    kept, roots = list[Finding](), list(facts)
    for part in parts:
        copies = replace(part, id="p2p-slow")
        number = cause_of(copies, facts, hosts, nvlinked=True) if part.id in _INSIDE_A_NODE else None
        if number is None:
            kept.append(part)
            continue
        line = f"{part.id}: {part.subject}: {part.seen}"
        roots[number] = replace(roots[number], consequences=(*roots[number].consequences, line))
    return [*kept, *roots]


_SILENT = (
    verdicts.PartKind.NODE_GONE,
    verdicts.PartKind.NODE_HANGS,
    verdicts.PartKind.RAIL_HANGS,
)  # These components have no bandwidth left
_INSIDE_A_NODE = ("gpu-slow", "gpu-pair-slow")


def _doubt_findings(
    course: ScanCourse,
    suspects: Sequence[scan.NodeRail],
    unjudged: Sequence[scan.NodeRail],
    leaves: Sequence[verdicts.FaultyPart],
) -> Iterator[Finding]:
    """Yield findings for suspects and leaves that were not confirmed, and for rails without any measurement."""
    if suspects or leaves:
        names = [*_names(course.fabric, suspects), *(_part_name(course.fabric, leaf) for leaf in leaves)]
        why = "too few healthy nodes were left for the confirmation"
        if not course.has_confirmed:
            why = "--quick ends after the screening" if course.is_quick else "the job ended before the confirmation"
        yield Finding(
            "suspects-not-confirmed",
            Verdict.WARN,
            shorten(names, _MOST_NAMES),
            f"{plural(len(names), 'suspect')}: slower than others in three rounds",
            "confirmation in five rounds with healthy nodes",
            why,
            Cure.of("gpubench scan", comment="" if course.is_quick else "Run it with more healthy nodes."),
            subjects=tuple(names),
            places=_nodes_of(course.fabric, suspects),
        )
    if unjudged:
        names = _names(course.fabric, unjudged)
        yield Finding(
            "cells-not-measured",
            Verdict.ERROR,
            shorten(names, _MOST_NAMES),
            f"{plural(len(names), 'rail')} without any measurement",
            "at least one measured round for every rail",
            "the job ended too early, or all partners of the rail were gone",
            Cure.of("gpubench scan"),
            subjects=tuple(names),
            places=_nodes_of(course.fabric, unjudged),
        )


def _nodes_of(fabric: scan.ScanFabric, cells: Iterable[scan.NodeRail]) -> tuple[DevicePlace, ...]:
    return tuple(DevicePlace(fabric.hosts[node]) for node in sorted({cell.node for cell in cells}))


def _doubtful_leaf_findings(fabric: scan.ScanFabric, cells: Mapping[scan.NodeRail, LeafLevel]) -> Iterator[Finding]:
    """Yield a finding for each leaf that may be slow if it is unclear whether only its nodes are."""
    by_leaf: dict[str, dict[scan.NodeRail, LeafLevel]] = {}
    for cell, level in cells.items():
        by_leaf.setdefault(level.leaf, {})[cell] = level
    for leaf, levels in by_leaf.items():
        rails = sorted({cell.rail for cell in levels})
        nodes = [fabric.hosts[node] for node in sorted({cell.node for cell in levels})]
        yield Finding(
            "leaf-or-nodes",
            Verdict.INCONCLUSIVE,
            f"{leaf} on {verdicts.rail_names(rails, fabric.rails)}",
            f"{plural(len(levels), 'rail')} of {shorten(nodes, _MOST_NAMES)} slower than others, so the leaf may "
            f"be slow too: {min(level.share for level in levels.values()):.0%} of the other leaves' bandwidth",
            "a difference larger than the noise of a leaf's bandwidth",
            "the leaf switch or these nodes (the loss is too small to decide with so few nodes)",
            Cure.of("gpubench scan", comment="Repeat it with another --seed."),
            subjects=(leaf,),
            places=_nodes_of(fabric, levels),
        )


def _wrong_data_findings(course: ScanCourse) -> Iterator[Finding]:
    found = {
        (sample.first, sample.second, sample.rail): f"{sample.failure} in round {outcome.number}"
        for outcome in course.outcomes
        for sample in outcome.samples
        if sample.failure.startswith(scan.WRONG_DATA_ARRIVED)
    }
    hosts = course.fabric.hosts
    for (first, second, rail), seen in found.items():
        yield Finding(
            WRONG_DATA,
            Verdict.FAIL,
            f"{hosts[first]} and {hosts[second]}, rail {rail}",
            seen,
            "every element correct",
            "data corrupted by a GPU, a link, a NIC, or ACS and IOMMU between peers",
            Cure.of(f"ssh {scan.login_name(hosts[first])} gpubench check", comment=f"Run it on {hosts[second]} too."),
            subjects=(hosts[first], hosts[second]),
            places=(DevicePlace(hosts[first]), DevicePlace(hosts[second])),
        )


def _pair_findings(course: ScanCourse) -> Iterator[Finding]:
    """Yield findings for pairs that failed once, so that it is unknown which of the two nodes is faulty."""
    retired = course.retired()
    once = {
        (sample.first, sample.second, number): sample.failure
        for number, sample in ((outcome.number, sample) for outcome in course.outcomes for sample in outcome.samples)
        if sample.failure
        and not {scan.NodeRail(sample.first, sample.rail), scan.NodeRail(sample.second, sample.rail)} & retired.keys()
        and sample.culprit is None
        and not sample.failure.startswith(scan.WRONG_DATA_ARRIVED)
        and not {sample.first, sample.second} & course.gone.keys()
    }
    last = course.outcomes[-1].number if course.outcomes else 0
    for (first, second, number), failure in once.items():
        hosts = course.fabric.hosts
        later = "both nodes worked with other partners later" if number < last else "it was the last round"
        yield Finding(
            "pair-not-done",
            Verdict.WARN,
            f"{hosts[first]} and {hosts[second]}",
            f"{failure} in round {number}; {later}",
            "every round finished within the deadline",
            "one of the two nodes, or the path between them",
            Cure.of("gpubench scan"),
            subjects=(hosts[first], hosts[second]),
            places=(DevicePlace(hosts[first]), DevicePlace(hosts[second])),
        )


def _is_too_noisy(sure_loss_percent: float) -> bool:
    """True if noise hides all but very large losses, so that the scan is inconclusive."""
    return sure_loss_percent > _MOST_SURE_LOSS_PERCENT


def _noise_findings(sure_loss_percent: float) -> Iterator[Finding]:
    if _is_too_noisy(sure_loss_percent):
        yield Finding(
            "scan-too-noisy",
            Verdict.INCONCLUSIVE,
            "all measurements",
            f"measurements vary too much: only a slowdown of {min(sure_loss_percent, 100):.0f} % or more is detected",
            f"a slowdown of {_MOST_SURE_LOSS_PERCENT:.0f} % is detected",
            "other jobs on the nodes or the network, cores shared by ranks, or too few nodes to estimate the noise",
            Cure.of("gpubench scan", comment="Run it with more nodes, on a quiet network."),
        )


def clock_findings(fabric: scan.ScanFabric, offsets: Mapping[int, float]) -> Iterator[Finding]:
    """Yield findings for wall clocks that differ from the first node's. No measurement depends on these clocks."""
    for node, seconds in sorted(offsets.items()):
        yield Finding(
            "clock-differs",
            Verdict.WARN,
            fabric.hosts[node],
            f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the first node's",
            "clocks that agree within a second",
            "NTP or chrony is not running there, or reaches no server (no measurement here depends on it)",
            Cure.of(f"ssh {scan.login_name(fabric.hosts[node])} chronyc tracking"),
            places=(DevicePlace(fabric.hosts[node]),),
        )


def _collective_findings(fabric: scan.ScanFabric, groups: Sequence[CollectiveOfNodes]) -> Iterator[Finding]:
    if not groups or not groups[0].falls_short:
        return
    whole = groups[0]
    reached = [f"{group.name} {_reached(group)}" for group in groups]
    halves = [group for group in groups[1:] if group.falls_short]
    where = (
        "in " + " and ".join(f"{halve.name} ({_hosts(fabric, halve)})" for halve in halves)
        if halves
        else "it appears only with all nodes, because of their number or a part that they share"
    )
    yield Finding(
        "collective-below-parts",
        Verdict.ERROR if whole.gb_s is None else Verdict.WARN,
        f"a collective of {len(whole.nodes)} nodes",
        "; ".join(reached),
        f"{whole.least_share:.0%} of the bandwidth that the slowest part allows",
        f"a fault that pairs do not show: {where}",
        Cure.of("gpubench allreduce", comment="Run it on these nodes."),
    )


def _reached(group: CollectiveOfNodes) -> str:
    return group.failure or (
        f"{format_bandwidth(group.gb_s or 0, 4).removesuffix(' GB/s')} of "
        f"{format_bandwidth(group.predicted_gb_s, 4)} ({group.share:.0%})"
    )


def _hosts(fabric: scan.ScanFabric, group: CollectiveOfNodes) -> str:
    names = compress_names([fabric.hosts[node] for node in group.nodes]).split(", ")
    return shorten(names, _MOST_NAMES)


def _names(fabric: scan.ScanFabric, cells: Sequence[scan.NodeRail]) -> list[str]:
    """Return the names of cells, grouped by node, for example 'node3 rail 1', 'node4 rails 0,2'."""
    found = []
    for node, node_cells in groupby(sorted(cells), key=lambda cell: cell.node):
        rails = [cell.rail for cell in node_cells]
        all_of_it = len(rails) == fabric.rails
        found.append(
            fabric.hosts[node]
            if all_of_it
            else f"{fabric.hosts[node]} rail{'s' if len(rails) > 1 else ''} {','.join(map(str, rails))}"
        )
    return found


SECTIONS = ("parts", "cells", "rounds", "scan_collectives", "exclusions", "findings")


class ScanResult(Struct, frozen=True):
    """A finished scan and the faulty components that it found. `origin` is the origin of the measurements."""

    course: ScanCourse
    parts: Sequence[verdicts.FaultyPart]
    collectives: Sequence[CollectiveOfNodes] = ()
    origin: str = "measured"
    other_findings: Sequence[Finding] = field(default=())

    @property
    def sure_loss_percent(self) -> float:
        """The slowdown in percent that this scan detects with 99 % probability."""
        return 100 * smallest_sure_loss(self.course.yardstick.deviation)

    def slow_rails(self) -> frozenset[int]:
        """Return the rails that are slow on all nodes."""
        return frozenset(
            part.rail for part in self.parts if part.kind is verdicts.PartKind.RAIL and part.rail is not None
        )

    def rails_without_level(self) -> frozenset[int]:
        """Return the rails whose healthy bandwidth is unknown. If the measurements are too noisy, return all rails."""
        if _is_too_noisy(self.sure_loss_percent):
            return frozenset(range(self.course.fabric.rails))
        return verdicts.rails_without_level(self.course, self.slow_rails(), explained=bool(self.parts))

    def rails_told(self) -> frozenset[int]:
        """Return the rails whose normal bandwidth is unknown, or that already have a finding."""
        return self.slow_rails() | self.rails_without_level() | verdicts.unknown_between_leaves(self.course)

    def doubtful(self) -> Mapping[scan.NodeRail, LeafLevel]:
        """Return the slow cells for which it is unclear whether the cell or its leaf is slow. Skip explained cells."""
        explained = {cell for part in self.parts for cell in part.cells}
        return {cell: level for cell, level in verdicts.doubtful_cells(self.course).items() if cell not in explained}

    def suspects(self) -> list[scan.NodeRail]:
        """Return bad cells that were not confirmed. After --quick, skip cells that a full scan might not confirm."""
        course = self.course
        explained = {cell for part in self.parts for cell in part.cells}
        if not course.has_confirmed:
            least = 1 - smallest_sure_loss(course.yardstick.deviation)
            looks_bad = {cell for cell, score in course.screened.items() if score.score < least and not score.failures}
            return sorted((looks_bad & course.suspects) - explained)
        unconfirmed = [
            cell
            for cell in course.suspects - course.confirmed.keys() - explained
            if course.confirmation_figures(cell) < LEAST_FIGURES and cell.node not in course.gone
        ]
        return sorted(unconfirmed)

    def suspect_leaves(self) -> Sequence[LeafLevel]:
        """Return the slow leaves in a scan without a confirmation, such as with --quick."""
        return () if self.course.has_confirmed else self.course.suspect_leaves

    def unmeasured(self) -> list[scan.NodeRail]:
        """Return the cells without any measurement, except on nodes that are reported as gone or hanging."""
        explained = {cell for part in self.parts for cell in part.cells}
        measured = {
            scan.NodeRail(node, sample.rail)
            for outcome in self.course.outcomes
            for sample in outcome.samples
            if not sample.failure
            for node in (sample.first, sample.second)
        }
        everything = (
            scan.NodeRail(node, rail)
            for node in range(len(self.course.fabric.hosts))
            for rail in range(self.course.fabric.rails)
        )
        return [cell for cell in everything if cell not in measured and cell not in explained]


def report_of(result: ScanResult, ranks_per_node: int) -> Report:
    """Return the report on a scan. If `ranks_per_node` is 0, it has no exclude lists, because each node is one rank."""
    course = result.course
    suspects, unmeasured = result.suspects(), result.unmeasured()
    facts = add_ssh(result.other_findings) if len(course.fabric.hosts) > 1 else result.other_findings
    findings = [
        *_fold_below_facts(list(_part_findings(course, result.parts)), facts, course.fabric.hosts),
        *_doubt_findings(
            course, suspects, unmeasured, list(verdicts.leaf_parts(course.fabric, result.suspect_leaves()))
        ),
        *_wrong_data_findings(course),
        *_pair_findings(course),
        *verdicts.find_slow_uplinks(course),
        *verdicts.leaf_pair_findings(course, result.parts),
        *_noise_findings(result.sure_loss_percent),
        *verdicts.level_findings(course, result.slow_rails(), explained=bool(result.parts)),
        *_doubtful_leaf_findings(course.fabric, result.doubtful()),
        *verdicts.rate_findings(course, result.rails_told()),
        *_collective_findings(course.fabric, result.collectives),
    ]
    parts = [*(_part_row(result, part) for part in result.parts), *_suspect_rows(result, suspects)]
    cells = list(_cell_rows(result, set(suspects)))
    verdict = worst_verdict([*(finding.severity for finding in findings), *(Verdict(cell.verdict) for cell in cells)])
    return Report(
        verdict=verdict,
        complete=True,
        findings=findings,
        sections=Table.group_by_section(
            {
                scan.ScanPartRow: parts,
                scan.ScanCellRow: cells,
                scan.ScanRoundRow: lambda: _round_rows(result),
                scan.ScanCollectiveRow: lambda: _collective_rows(result),
                scan.ExclusionRow: lambda: _exclusion_rows(result, cells, ranks_per_node),
            }
        ),
        main=scan.ScanCellRow.section,
    )


def _part_row(result: ScanResult, part: verdicts.FaultyPart) -> scan.ScanPartRow:
    fabric = result.course.fabric
    return scan.ScanPartRow(
        part_kind=part.kind,
        subject=_part_name(fabric, part),
        nodes=tuple(fabric.hosts[node] for node in part.nodes),
        rail=part.rail,
        leaf=part.leaf,
        gpu=part.gpu,
        partner_gpu=part.partner,
        nic=fabric.nic(part.rail) if part.kind is verdicts.PartKind.NIC and part.rail is not None else None,
        percent=None if part.share is None else 100 * part.share,
        seen=_part_seen(fabric, part),
        verdict=severity_of(result.course, part),
        origin=result.origin,
    )


def _suspect_rows(result: ScanResult, suspects: Sequence[scan.NodeRail]) -> Iterator[scan.ScanPartRow]:
    fabric = result.course.fabric
    for part in verdicts.leaf_parts(fabric, result.suspect_leaves()):
        yield replace(_part_row(result, part), verdict=Verdict.WARN)
    for node, rail in suspects:
        score = result.course.judged[scan.NodeRail(node, rail)].score
        yield scan.ScanPartRow(
            part_kind=verdicts.PartKind.NODE if fabric.rails == 1 else verdicts.PartKind.NIC,
            subject=fabric.hosts[node] if fabric.rails == 1 else f"{fabric.hosts[node]} rail {rail}",
            nodes=(fabric.hosts[node],),
            rail=rail,
            leaf=None,
            gpu=None,
            nic=fabric.nic(rail),
            percent=100 * score,
            seen="slower than the others in the screening; not confirmed",
            verdict=Verdict.WARN,
            origin=result.origin,
        )


def _cell_rows(result: ScanResult, suspects: set[scan.NodeRail]) -> Iterator[scan.ScanCellRow]:
    course, fabric = result.course, result.course.fabric
    part_by_cell = {cell: part for part in result.parts for cell in part.cells}
    of_leaf = {(part.leaf, part.rail): part for part in result.parts if part.kind not in scan.OF_ONE_NODE}
    measured = {
        scan.NodeRail(node, sample.rail)
        for outcome in course.outcomes
        for sample in outcome.samples
        if not sample.failure
        for node in (sample.first, sample.second)
    }
    failures = course.failures()
    unknown = result.rails_without_level()
    below, doubtful = verdicts.slow_levels(course, result.rails_told()).keys(), result.doubtful()
    for node, host in enumerate(fabric.hosts):
        leaf = fabric.leaves[node]
        for rail in range(fabric.rails):
            cell = scan.NodeRail(node, rail)
            score = course.judged.get(cell) if cell in measured else None
            behind = _leaf_part(of_leaf, leaf, rail)
            part = part_by_cell.get(cell) or behind
            share = 1.0 if behind is None or cell in behind.cells else behind.share or 1.0
            yield scan.ScanCellRow(
                node=host,
                subject=f"rail {rail}",
                rail=rail,
                leaf=leaf,
                nic=fabric.nic(rail),
                score_percent=None if score is None else 100 * score.score * share,
                both_ways_gb_s=None if score is None else score.gb_s,
                figures=0 if score is None else score.figures,
                failures=len(failures.get(cell, ())),
                phase=course.phase_of(cell),
                verdict=_verdict(
                    None if part is None else severity_of(course, part),
                    is_suspect=cell in suspects or rail in below,
                    has_figures=cell in measured,
                    has_level=rail not in unknown and cell not in doubtful,
                ),
                part=None if part is None else _part_name(fabric, part),
                origin=result.origin,
            )


def _leaf_part(
    of_leaf: Mapping[tuple[str | None, int | None], verdicts.FaultyPart], leaf: str | None, rail: int
) -> verdicts.FaultyPart | None:
    """Return the network component that slows down a cell: its leaf, its rail on all nodes, or None."""
    keys = ((leaf, rail), (leaf, None)) if leaf is not None else ()
    return next((of_leaf[key] for key in (*keys, (None, rail)) if key in of_leaf), None)


def _verdict(part: Verdict | None, *, is_suspect: bool, has_figures: bool, has_level: bool) -> Verdict:
    if part is not None:
        return part
    if not has_figures:
        return Verdict.ERROR
    if is_suspect:
        return Verdict.WARN
    return Verdict.PASS if has_level else Verdict.INCONCLUSIVE


def _round_rows(result: ScanResult) -> Iterator[scan.ScanRoundRow]:
    for outcome in result.course.outcomes:
        yield scan.ScanRoundRow(
            number=outcome.number,
            phase=outcome.phase,
            pairs=len({sample[:2] for sample in outcome.samples}),
            figures=sum(not sample.failure for sample in outcome.samples),
            failures=sum(bool(sample.failure) for sample in outcome.samples),
            gone=tuple(result.course.fabric.hosts[node] for node in outcome.gone),
            seconds=outcome.seconds,
            origin=result.origin,
        )


def _collective_rows(result: ScanResult) -> Iterator[scan.ScanCollectiveRow]:
    healthy = Verdict.INCONCLUSIVE if _is_too_noisy(result.sure_loss_percent) else Verdict.PASS
    for group in result.collectives:
        yield scan.ScanCollectiveRow(
            subject=group.name,
            nodes=tuple(result.course.fabric.hosts[node] for node in group.nodes),
            measured_gb_s=group.gb_s,
            predicted_gb_s=group.predicted_gb_s,
            percent=percent(group.gb_s, group.predicted_gb_s),
            note=group.failure or None,
            verdict=Verdict.ERROR if group.gb_s is None else Verdict.WARN if group.falls_short else healthy,
            origin=result.origin,
        )


def _exclusion_rows(
    result: ScanResult, cells: Sequence[scan.ScanCellRow], ranks_per_node: int
) -> Iterator[scan.ExclusionRow]:
    """Yield exclude lists of nodes that are faulty or should be drained, and lists of nodes that passed."""
    hosts = result.course.fabric.hosts
    if not ranks_per_node:
        return
    drained = failing_hosts(filter(drains, result.other_findings), hosts)
    named = (part for part in result.parts if severity_of(result.course, part) is Verdict.FAIL)
    bad = {node for part in named if part.kind in scan.OF_ONE_NODE for node in part.nodes}
    bad |= {node for node, host in enumerate(hosts) if host in drained}
    doubtful = {row.node for row in cells if row.verdict not in (Verdict.PASS, Verdict.FAIL)}
    doubtful |= failing_hosts(result.other_findings, hosts)
    good = [host for node, host in enumerate(hosts) if node not in bad and host not in doubtful]
    yield from exclusions([hosts[node] for node in sorted(bad)], good, ranks_per_node)
