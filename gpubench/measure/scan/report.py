"""The report of a scan: parts, cells, rounds, collectives, exclude lists, findings, verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from gpubench.measure.scan.decoding import FaultyPart, leaf_parts
from gpubench.measure.scan.exclusions import exclusions
from gpubench.measure.scan.findings import (
    collective_findings,
    doubt_findings,
    is_too_noisy,
    noise_findings,
    pair_findings,
    part_findings,
    part_name,
    part_seen,
    wrong_data_findings,
)
from gpubench.measure.scan.judging import smallest_sure_loss
from gpubench.measure.scan.leaf_findings import between_leaves, leaf_pair_findings
from gpubench.measure.scan.leaves import LeafLevel
from gpubench.measure.scan.levels import level_findings, rails_without_level
from gpubench.measure.scan.prediction import CollectiveOfNodes
from gpubench.measure.scan.rates import rate_findings, slow_levels
from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.report import Report, Table
from gpubench.model.results.rows.scan import (
    CELLS_SECTION,
    EXCLUSIONS_SECTION,
    OF_ONE_NODE,
    PARTS_SECTION,
    ROUNDS_SECTION,
    SCAN_COLLECTIVES_SECTION,
    ExclusionRow,
    PartKind,
    ScanCellRow,
    ScanCollectiveRow,
    ScanPartRow,
    ScanRoundRow,
)
from gpubench.model.results.scan_rounds import NodeRail
from gpubench.model.terms.units import percent
from gpubench.model.terms.verdict import Finding, Verdict, drained_hosts, overall

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
