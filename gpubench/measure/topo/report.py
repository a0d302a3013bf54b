"""The report on machines: snapshots in, matrices, limits and findings out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

from gpubench.conditions.checks import WIRING, merged, run
from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.profile import GPU_MISSING, SURPLUS
from gpubench.measure.topo.fallback import findings as prospect_findings
from gpubench.measure.topo.fallback import prospects, survey
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.report import PAIRS_SECTION, PairRow, Record, Report, Section, Table
from gpubench.model.results.report import Matrix as MatrixSection
from gpubench.model.results.rows.causes import CAUSES_SECTION, UNREAD_SECTION, CauseRow, UnreadRow
from gpubench.model.results.rows.evidence import FALLBACK_SECTION, FallbackRow
from gpubench.model.results.topo.devices import gpu_rows_of, link_rows, nic_rows, node_rows, rank_rows, rows_by_node
from gpubench.model.results.topo.pairs import kind_rows, limits, pair_rows_of, peer_access
from gpubench.model.results.topo.rows import GpuRow, KindRow, NicRow, NodeRow, NvlinkRow, RankRow, TreeRow
from gpubench.model.results.topo.tree import tree_rows
from gpubench.model.terms.verdict import Finding, Verdict, overall


def examine(
    nodes: Sequence[Topology],
    ranks: Sequence[RankFacts] = (),
    profiles: Sequence[Profile | None] = (),
    *,
    strict: bool = False,
    asked: bool = False,
    expected_gpus: int | None = None,
) -> Report:
    """The report on some nodes, each with the profile that it matches, or, where that was `asked` for, has to.

    Matrices are those of the largest kind of node; the section `kinds` has every kind's. With `strict`
    a node without GPUs is an error, else it is not judged.
    """
    kinds = group(nodes)
    explained = survey(nodes, kinds, ranks)
    expected = prospects(nodes, kinds, explained)
    facts = Facts(nodes, kinds, ranks, profiles, asked=asked, expected_gpus=expected_gpus)
    found = run(WIRING, facts)
    found += merged(SURPLUS.findings(facts.circumstances))
    found += tuple(prospect_findings(expected, explained, found))
    findings = found if strict else tuple(map(_without_gate, found))
    judged = Verdict.PASS if any(node.gpus for node in nodes) else Verdict.SKIP
    verdict = overall([judged, *(finding.severity for finding in findings)])
    first = nodes[kinds[0].representative]
    sections: dict[str, Section] = {
        "gpus": _table(GpuRow, cache(lambda: gpu_rows_of(nodes))),
        "nvlinks": Table.of_nodes(NvlinkRow.columns(), lambda: rows_by_node(nodes, link_rows)),
        "nics": Table.of_nodes(NicRow.columns(), lambda: rows_by_node(nodes, nic_rows)),
        "nodes": _table(NodeRow, lambda: node_rows(nodes, kinds)),
        "kinds": _table(KindRow, lambda: kind_rows(nodes, kinds)),
        "matrix": MatrixSection(first.matrix),
        "peer_access": MatrixSection(peer_access(first)),
        "limits": MatrixSection(limits(first)),
        PAIRS_SECTION: Table.of_nodes(PairRow.columns(), lambda: pair_rows_of(nodes)),
        "ranks": _table(RankRow, lambda: rank_rows(ranks)),
        "tree": _table(TreeRow, lambda: chain.from_iterable(tree_rows(nodes[kind.representative]) for kind in kinds)),
        FALLBACK_SECTION: _table(FallbackRow, lambda: expected),
        CAUSES_SECTION: _table(CauseRow, explained.conditions),
        UNREAD_SECTION: _table(UnreadRow, explained.unread),
    }
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=PAIRS_SECTION)


_NO_GATE = {GPU_MISSING: Verdict.SKIP, "driver-missing": Verdict.WARN}
"""Errors by id that are less where there is no gate."""


def _without_gate(finding: Finding) -> Finding:
    """A node without GPUs, or without their driver, is no error of a look at wiring where nobody asked for a gate."""
    softer = _NO_GATE.get(finding.id) if finding.severity is Verdict.ERROR else None
    return finding if softer is None else replace(finding, severity=softer)


def _table(row: type[Record], rows: Callable[[], Iterable[Record]]) -> Table:
    return Table(row.columns(), rows)
