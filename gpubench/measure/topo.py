"""Report on machines: their matrices, limits and findings, and the expected path between every pair of GPUs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, permutations
from typing import NamedTuple

from gpubench.conditions.checks import WIRING, merged, run
from gpubench.conditions.circumstances import Circumstances, Facts, user_settings
from gpubench.conditions.condition import NONE_EXPECTED
from gpubench.conditions.folding import fold
from gpubench.conditions.policy import Medium, PathKind, Relation
from gpubench.conditions.profile import SURPLUS
from gpubench.conditions.ranking import UNKNOWN
from gpubench.conditions.registry import CAUSES
from gpubench.measure.paths import Explained
from gpubench.model.facts.process import RankFacts
from gpubench.model.paths.nodes import MachineKind, group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Conclusion, Confidence, Pair
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import Profile
from gpubench.model.results import report, topo
from gpubench.model.results.fallback import Explanation, cure_columns, describe_pairs, read_cure
from gpubench.model.results.report import Matrix as MatrixSection
from gpubench.model.terms.verdict import Finding, Verdict, worst_verdict

_EXPECTED = PathKind(Relation.ONE_NODE, Medium.HOST_MEMORY)
_BETWEEN_NODES = (report.Effect.SOCKETS, report.Effect.NO_GPUDIRECT)
_BY_ID = {cause.id: cause for cause in CAUSES}
_MOST_NAMED = 1000
_MOST_SURVEYED = 64
_ORDER = (Conclusion.IMPOSSIBLE, Conclusion.UNKNOWN, Conclusion.POSSIBLE)


class _Prospect(NamedTuple):
    """The expected path between two GPUs, and its cause. A measurement may show another path."""

    conclusion: Conclusion
    verdict: Verdict
    cause: Explanation | None = None
    confidence: Confidence = Confidence.WEAK


class _Pair(NamedTuple):
    name: tuple[str, str]
    path_class: str
    access: str


def survey(nodes: Sequence[Topology], kinds: Sequence[MachineKind], ranks: Sequence[RankFacts]) -> Explained:
    """Return the causes of the expected paths.

    To stay fast on large clusters, examine one node of each kind, and nodes that differ from the rest.
    """
    other_settings = [rank.node for rank in ranks if rank.nccl_settings != ranks[0].nccl_settings]
    examined = {kind.representative for kind in kinds}
    examined.update([node for kind in kinds for node in kind.odd][:_MOST_SURVEYED])
    examined.update([rank.node for rank in ranks if rank.local_rank][:_MOST_SURVEYED])
    examined.update(other_settings[:_MOST_SURVEYED])
    examined.update(range(min(len(nodes), 2)))
    places = [
        GpuPlace(nodes[node].snapshot.host, node, gpu.bus_id or gpu.device)
        for node in sorted(examined)
        if node < len(nodes)
        for gpu in nodes[node].gpus
    ]
    wiring = Wiring(places, dict(enumerate(nodes)))
    return Explained(Circumstances(wiring=wiring, facts=ranks, settings=user_settings(ranks)))


def prospects(
    nodes: Sequence[Topology], kinds: Sequence[MachineKind], explained: Explained
) -> list[report.FallbackRow]:
    """Return one row for each expected path and cause, with its pairs, most severe first."""
    groups: dict[_Prospect, list[tuple[str, _Pair]]] = {}
    for kind in kinds:
        usual: dict[tuple[str, str], _Prospect] = {}
        others = sorted({*kind.alike, *kind.odd} - {kind.representative})
        for number in (
            kind.representative,
            *(number for number in others if explained.circumstances.node_gpus(number)),
        ):
            first = number == kind.representative
            lead = "" if first and len(kinds) == 1 else f"{nodes[number].snapshot.host} "
            for pair, prospect in _node_prospects(nodes, number, explained):
                if first or not _is_alike(prospect, usual.get(pair.name)):
                    groups.setdefault(prospect, []).append((lead, pair))
                if first:
                    usual[pair.name] = prospect
    origin = nodes[0].snapshot.origin if nodes else ""
    rows = [_fallback_row(prospect, pairs, origin, explained) for prospect, pairs in groups.items()]
    return sorted(rows, key=lambda row: (_ORDER.index(Conclusion(row.conclusion)), row.verdict == Verdict.SKIP))


def prospect_findings(
    rows: Sequence[report.FallbackRow], explained: Explained, others: Iterable[Finding]
) -> Iterator[Finding]:
    """Yield conditions that affect paths, unless a check already reported them or one of their consequences.

    With one node, ignore network conditions, because a container for one node needs no RDMA.
    """
    known = {other.id for other in others}
    for row in rows:
        cause = _BY_ID.get(row.cause or "")
        if cause is not None and row.verdict == Verdict.FAIL and known.isdisjoint((cause.id, *cause.implies)):
            yield Finding(
                id=cause.id,
                severity=Verdict.FAIL,
                subject=describe_pairs(row),
                seen=str(row.cause_seen),
                expected=f"a direct path: {row.how}",
                cause="NCCL uses host memory or sockets instead, without a warning",
                cure=read_cure(row),
                subjects=row.pairs,
            )
    several = len(explained.circumstances.nodes) > 1
    for named in explained.diagnosis.of_effect(*_BETWEEN_NODES) if several else ():
        healthy = "" if named.cause.expected == NONE_EXPECTED else named.cause.expected
        is_doubt = named.gravity is Verdict.WARN and healthy
        is_new = named.cause.id not in known
        if is_new and (named.gravity is Verdict.FAIL or is_doubt) and named.effects[0] in _BETWEEN_NODES:
            yield Finding(
                id=named.cause.id,
                severity=named.gravity,
                subject=f"{named.subject} → other nodes",
                seen=named.seen,
                expected=healthy or "RDMA from GPU to GPU",
                cause=f"NCCL uses {' or '.join(named.effects)} instead, without a warning",
                cure=named.cure,
                places=named.places,
                subjects=tuple(named.names),
            )


def _expected_path(explained: Explained, pair: Pair) -> _Prospect:
    possible = explained.circumstances.wiring.peer_access(pair).possible
    found = explained.diagnosis.explaining({pair: _EXPECTED})
    sure = [named for named in found if named.confidence in (Confidence.PROVEN, Confidence.LIKELY)]
    if possible is None:
        # If peer access is unknown, accept only causes that hold by design.
        sure = [named for named in sure if named.explanation.by_design]
    if possible is None and not sure:
        return _Prospect(Conclusion.UNKNOWN, Verdict.WARN, None, Confidence.NONE)
    if possible and not sure:
        return _Prospect(Conclusion.POSSIBLE, Verdict.PASS)
    cause = sure[0].explanation if sure else UNKNOWN
    node, ends = explained.circumstances.pair_node(pair), [explained.circumstances.wiring.gpu(end) for end in pair]
    unread = possible and None not in ends and node.nvlinks(*filter(None, ends)) is None
    if cause.by_design and (node.snapshot.failures or unread):
        # NVLinks that could not be read may connect these GPUs, so do not conclude "by design".
        return _Prospect(Conclusion.UNKNOWN, Verdict.WARN, None, Confidence.NONE)
    in_doubt = explained.circumstances.wiring.is_refusal_doubtful(pair)
    verdict = Verdict.SKIP if cause.by_design else Verdict.WARN if in_doubt else Verdict.FAIL
    return _Prospect(Conclusion.IMPOSSIBLE, verdict, cause)


def _node_prospects(nodes: Sequence[Topology], number: int, explained: Explained) -> Iterator[tuple[_Pair, _Prospect]]:
    wiring = explained.circumstances.wiring
    positions = zip(sorted(explained.circumstances.node_gpus(number)), nodes[number].gpus, strict=True)
    for (one, source), (other, destination) in permutations(positions, 2):
        access = wiring.peer_access((one, other))
        reason = f"not known: {access.reason}" if access.possible is None else access.reason
        pair = _Pair((source.device, destination.device), wiring.path((one, other)), reason)
        yield pair, _expected_path(explained, (one, other))


def _is_alike(prospect: _Prospect, usual: _Prospect | None) -> bool:
    """True if the pair has the same expected path and cause as on the first node of its kind."""
    if usual is None:
        return prospect.conclusion is Conclusion.POSSIBLE
    causes = [None if explanation.cause is None else explanation.cause.id for explanation in (prospect, usual)]
    return prospect.conclusion is usual.conclusion and causes[0] == causes[1]


def _fallback_row(
    prospect: _Prospect, pairs: Sequence[tuple[str, _Pair]], origin: str, explained: Explained
) -> report.FallbackRow:
    cause = None if prospect.cause is None else explained.diagnosis.fill_ids(prospect.cause)
    path_classes = ", ".join(dict.fromkeys(pair.path_class for _, pair in pairs))
    access = ", ".join(dict.fromkeys(pair.access for _, pair in pairs))
    return report.FallbackRow(
        conclusion=prospect.conclusion,
        verdict=prospect.verdict,
        confidence=prospect.confidence,
        origin=origin,
        count=len(pairs),
        pairs=tuple(" → ".join(f"{lead}{end}" for end in pair.name) for lead, pair in pairs[:_MOST_NAMED]),
        cause=None if cause is None else cause.id,
        cause_seen=None if cause is None else cause.evidence,
        **cure_columns(None if cause is None else cause.cure),
        how=f"{path_classes}; peer access {access}",
    )


def examine(
    nodes: Sequence[Topology],
    ranks: Sequence[RankFacts] = (),
    profiles: Sequence[Profile | None] = (),
    *,
    asked: bool = False,
    expected_gpus: int | None = None,
) -> report.Report:
    """Return the report on these nodes. `profiles` has one profile, or None, for each node."""
    kinds = group_nodes(nodes)
    explained = survey(nodes, kinds, ranks)
    expected = prospects(nodes, kinds, explained)
    facts = Facts(nodes, kinds, ranks, profiles, asked=asked, expected_gpus=expected_gpus)
    findings = run(WIRING, facts)
    findings += merged(SURPLUS.findings(facts.circumstances))
    findings += tuple(prospect_findings(expected, explained, findings))
    findings = fold(findings, nodes)
    judged = Verdict.PASS if any(node.gpus for node in nodes) else Verdict.SKIP
    verdict = worst_verdict([judged, *(finding.severity for finding in findings)])
    first = nodes[kinds[0].representative]
    sections: dict[str, report.Section] = {
        "gpus": _table(topo.GpuRow, cache(lambda: topo.all_gpu_rows(nodes))),
        "nvlinks": report.Table.of_nodes(topo.NvlinkRow.columns(), lambda: topo.rows_by_node(nodes, topo.link_rows)),
        "nics": report.Table.of_nodes(topo.NicRow.columns(), lambda: topo.rows_by_node(nodes, topo.nic_rows)),
        "nodes": _table(topo.NodeRow, lambda: topo.node_rows(nodes, kinds)),
        "kinds": _table(topo.KindRow, lambda: topo.kind_rows(nodes, kinds)),
        "matrix": MatrixSection(first.matrix),
        "peer_access": MatrixSection(topo.peer_access(first)),
        "limits": MatrixSection(topo.limits(first)),
        report.PairRow.section: report.Table.of_nodes(report.PairRow.columns(), lambda: topo.all_pair_rows(nodes)),
        "ranks": _table(topo.RankRow, lambda: topo.rank_rows(ranks)),
        "tree": _table(
            topo.TreeRow, lambda: chain.from_iterable(topo.tree_rows(nodes[kind.representative]) for kind in kinds)
        ),
        report.FallbackRow.section: _table(report.FallbackRow, lambda: expected),
        report.CauseRow.section: _table(report.CauseRow, explained.conditions),
        report.UnreadRow.section: _table(report.UnreadRow, explained.unread),
    }
    return report.Report(
        verdict=verdict, complete=True, findings=findings, sections=sections, main=report.PairRow.section
    )


def _table(row: type[report.Record], rows: Callable[[], Iterable[report.Record]]) -> report.Table:
    return report.Table(row.columns(), rows)
