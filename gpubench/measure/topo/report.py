"""The report on machines: snapshots in, matrices, limits and findings out."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from gpubench.conditions.checks import WIRING, run
from gpubench.conditions.definition.circumstances import Facts
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
from gpubench.model.results.topo.devices import gpu_rows, link_rows, nic_rows, node_rows, rank_rows
from gpubench.model.results.topo.pairs import kind_rows, limits, pair_rows_of, peer_access
from gpubench.model.results.topo.rows import GpuRow, KindRow, NicRow, NodeRow, NvlinkRow, RankRow, TreeRow
from gpubench.model.results.topo.tree import tree_rows
from gpubench.model.terms.verdict import Verdict, overall

SECTIONS = (
    *("gpus", "nvlinks", "nics", "nodes", "kinds", "matrix", "peer_access", "limits", PAIRS_SECTION, "ranks", "tree"),
    *(FALLBACK_SECTION, CAUSES_SECTION, UNREAD_SECTION, "findings"),
)


def examine(
    nodes: Sequence[Topology],
    ranks: Sequence[RankFacts] = (),
    profiles: Sequence[Profile | None] = (),
) -> Report:
    """The report on some nodes, each with the profile that it matches.

    Matrices are those of the largest kind of node; the section `kinds` has every kind's.
    """
    kinds = group(nodes)
    explained = survey(nodes, kinds, ranks)
    expected = prospects(nodes, kinds, explained)
    findings = run(WIRING, Facts(nodes, kinds, ranks, profiles))
    findings += tuple(prospect_findings(expected, explained, findings))
    verdict = overall([Verdict.PASS, *(finding.severity for finding in findings)])
    first = nodes[kinds[0].representative]
    sections: dict[str, Section] = {
        "gpus": _table(GpuRow, lambda: _each(nodes, gpu_rows)),
        "nvlinks": _table(NvlinkRow, lambda: _each(nodes, link_rows)),
        "nics": _table(NicRow, lambda: _each(nodes, nic_rows)),
        "nodes": _table(NodeRow, lambda: node_rows(nodes, kinds)),
        "kinds": _table(KindRow, lambda: kind_rows(nodes, kinds)),
        "matrix": MatrixSection(first.matrix),
        "peer_access": MatrixSection(peer_access(first)),
        "limits": MatrixSection(limits(first)),
        PAIRS_SECTION: _table(PairRow, lambda: pair_rows_of(nodes)),
        "ranks": _table(RankRow, lambda: rank_rows(ranks)),
        "tree": _table(TreeRow, lambda: _each([nodes[kind.representative] for kind in kinds], tree_rows)),
        FALLBACK_SECTION: _table(FallbackRow, lambda: expected),
        CAUSES_SECTION: _table(CauseRow, explained.conditions),
        UNREAD_SECTION: _table(UnreadRow, explained.unread),
    }
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=PAIRS_SECTION)


def _table(row: type[Record], rows: Callable[[], Iterable[Record]]) -> Table:
    return Table(row.columns(), rows)


def _each(nodes: Sequence[Topology], rows: Callable[[Topology], Iterable[Record]]) -> Iterator[Record]:
    for node in nodes:
        yield from rows(node)
