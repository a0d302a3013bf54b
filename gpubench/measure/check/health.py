"""Every check on some machines and what was measured of them: findings, and a verdict by check, node, GPU and link."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gpubench.conditions.checks import CHECKS, Check, Looked, look, merged
from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.registry import CONDITIONS
from gpubench.measure.check.folding import folded
from gpubench.measure.check.unread import not_looked_at, unread_facts
from gpubench.measure.topo.fallback import findings as prospect_findings
from gpubench.measure.topo.fallback import prospects, survey
from gpubench.model.paths.peer_policy import split_by_mig
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import Need
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    PAIRS_SECTION,
    ROWS_SECTION,
    CollectiveRow,
    PairRow,
    Report,
    Section,
    Table,
)
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION, CheckRow, VerdictRow
from gpubench.model.results.topo.rows import TREE_SECTION, TreeRow
from gpubench.model.results.topo.tree import tree_rows
from gpubench.model.terms.rank_identity import RANKS_SHARE_A_GPU
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, STRAGGLER, Finding, Verdict, overall

_DRIVER_IDS = {each.id for each in CONDITIONS if each.check == "driver"}
_OF_SILENCE = ("driver", "measured")
"""Checks that say who did not answer."""

SECTIONS = (CHECKS_SECTION, VERDICTS_SECTION, PAIRS_SECTION, ROWS_SECTION, TREE_SECTION, FINDINGS_SECTION)

_MOST_TREES = 4
"""Nodes whose PCI tree a report holds: of a thousand that are alike one is enough, and those with findings."""

_OF_ALL_RANKS = (SLOW_UNEXPLAINED, STRAGGLER)
"""Findings on a whole job: what explains them says on which node it is."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The findings of one check, those on facts that could not be read included, and what its conditions saw."""

    check: Check
    findings: tuple[Finding, ...]
    looked: Looked

    @classmethod
    def of(cls, check: Check, facts: Facts) -> "_Outcome":
        """The outcome of a check."""
        looked = look(check, facts)
        return cls(check, (*looked.findings, *unread_facts(check, facts)), looked)


def judge(facts: Facts, *, checks: Sequence[Check] = CHECKS) -> Report:
    """The report of `gpubench check`: all checks judge always."""
    outcomes = [_Outcome.of(check, facts) for check in checks]
    every = [finding for outcome in outcomes for finding in outcome.findings]
    every += in_the_way(facts, every)
    hosts = [node.snapshot.host for node in facts.nodes]
    nvlinked = any(gpu.nvlinks for node in facts.nodes for gpu in node.gpus)
    found = _gravest_first(folded(merged(every), hosts, nvlinked=nvlinked))
    origin = facts.nodes[0].snapshot.origin if facts.nodes else ""
    check_rows = tuple(_check_row(facts, outcome, origin) for outcome in outcomes)
    passed = any(row.verdict is Verdict.PASS for row in check_rows if row.check != "measured")
    at_best = Verdict.PASS if passed else Verdict.SKIP
    verdict = overall([at_best, *(finding.severity for finding in found)])
    told = {each.id for each in found}
    own = [each for each in every if each.id not in _OF_ALL_RANKS or each.id in told]
    verdict_rows = tuple(_verdict_rows(facts, own))
    measured = facts.measurements
    sections: dict[str, Section] = {
        CHECKS_SECTION: Table(CheckRow.columns(), lambda: check_rows),
        VERDICTS_SECTION: Table(VerdictRow.columns(), lambda: verdict_rows),
        PAIRS_SECTION: Table(PairRow.columns(), lambda: measured.pairs),
        ROWS_SECTION: Table(CollectiveRow.columns(), lambda: measured.collectives),
        TREE_SECTION: Table(TreeRow.columns(), lambda: chain.from_iterable(map(tree_rows, _shown(facts, found)))),
    }
    return Report(verdict=verdict, complete=True, findings=found, sections=sections, main=FINDINGS_SECTION)


def _shown(facts: Facts, found: Sequence[Finding]) -> list[Topology]:
    """The first node, after those that findings name."""
    told = [
        node
        for node in facts.nodes
        if len(facts.nodes) > 1 and any(node.snapshot.host in each.subject.split() for each in found)
    ]
    return list(dict.fromkeys((*told[: _MOST_TREES - 1], *facts.nodes[:1])))


def in_the_way(facts: Facts, told: Sequence[Finding]) -> list[Finding]:
    """Findings of what keeps NCCL off direct paths that no check reports."""
    explained = survey(facts.nodes, facts.kinds, facts.ranks)
    return list(prospect_findings(prospects(facts.nodes, facts.kinds, explained), explained, told))


_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.SKIP, Verdict.PASS)


def _gravest_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def _check_row(facts: Facts, outcome: _Outcome, origin: str) -> CheckRow:
    check = outcome.check
    missing = facts.measurements.left_out.get(check.needs)
    failed = facts.measurements.failed.get(check.needs)
    in_error = _nodes_in_error(facts, check)
    if outcome.findings:
        verdict, note = overall(finding.severity for finding in outcome.findings), None
    elif failed is not None:
        verdict, note = Verdict.ERROR, failed
    elif missing is not None:
        verdict, note = Verdict.SKIP, missing
    elif not check.without_gpus and not any(node.gpus for node in facts.nodes):
        verdict, note = Verdict.SKIP, "no GPU"
    elif in_error and len(in_error) == len(facts.nodes):
        verdict, note = Verdict.ERROR, "the driver did not tell"
    elif not _is_judged(facts, check):
        verdict, note = Verdict.SKIP, f"speed not judged: {_why_not_judged(facts, check)}"
    elif unseen := not_looked_at(check, outcome.looked, facts, in_error):
        verdict, note = Verdict.SKIP, unseen
    else:
        verdict, note = Verdict.PASS, check.in_part(facts) or None
    return CheckRow(
        check=check.name,
        verdict=verdict,
        findings=len(outcome.findings),
        looks_for=check.summary,
        note=note,
        origin=origin,
        nodes_in_error=in_error,
    )


def _why_not_judged(facts: Facts, check: Check) -> str:
    rows = facts.measurements.collectives
    if check.name == "collective_bandwidth" and rows and all((row.ranks_per_gpu or 1) > 1 for row in rows):
        return RANKS_SHARE_A_GPU
    return split_by_mig(facts.nodes) or "no profile, no past results, and no limit that is known"


def _is_judged(facts: Facts, check: Check) -> bool:
    """False for a check of speed whose rows nobody could judge."""
    if check.name == "collective_bandwidth" and facts.measurements.collectives:
        return any(row.expected_us and row.verdict is not None for row in facts.measurements.collectives)
    if check.name == "p2p_bandwidth":
        rows = [row for row in facts.measurements.pairs if row.peer == "on" and row.verdict is not None]
        return not rows or any(row.verdict != Verdict.SKIP for row in rows)
    return True


def _nodes_in_error(facts: Facts, check: Check) -> tuple[str, ...]:
    """The hosts that a check could not look at: those whose driver did not tell, or that could not be measured."""
    if check.needs is not Need.FACTS:
        return tuple(each.node for each in facts.measurements.failed_on if each.need is check.needs)
    if check.name in _OF_SILENCE:
        return ()
    return tuple(node.snapshot.host for node in facts.nodes if _is_silent(node))


def _is_silent(node: Topology) -> bool:
    """True if the driver, or another source of facts, tells nothing of GPUs that are there."""
    return bool(node.snapshot.failures or (node.gpus and node.snapshot.driver.absent))


def _verdict_rows(facts: Facts, findings: Sequence[Finding]) -> Iterator[VerdictRow]:
    """A row a node, GPU, NIC and measured link; a finding counts for what its subjects name, and for its node."""
    by_subject: dict[str, list[Finding]] = {}
    for finding in findings:
        for subject in finding.subjects or (finding.subject,):
            by_subject.setdefault(subject, []).append(finding)
    for number, node in enumerate(facts.nodes):
        own: list[Finding] = []
        rows = []
        unanswered = _unanswered(node, by_subject) if _is_silent(node) else []
        slow = _slow_links(facts, number, node)
        for scope, subject, names in _subjects(facts, number, node):
            found = [finding for name in names for finding in by_subject.get(name, ())]
            found += unanswered if scope == "gpu" else ()
            own += found
            verdict, ends = slow.get(subject, (Verdict.PASS, ()))
            found = found or [each for end in ends for each in by_subject.get(end, ())]
            rows.append(_row(node, scope, subject, found, verdict))
        own += _of_whole(facts, node, by_subject)
        yield _row(node, "node", node.snapshot.host, own)
        yield from rows


def _subjects(facts: Facts, number: int, node: Topology) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The devices of a node: scope, name in rows, and the names that findings have for it."""
    circumstances = facts.circumstances
    for gpu in node.gpus:
        name = circumstances.named(number, gpu)
        yield "gpu", name, (name,)
    for nic in node.nics:
        name = circumstances.named(number, nic)
        yield "nic", name, (name, circumstances.on(number, nic.name))
    by_bus_id = {gpu.bus_id: gpu for gpu in node.gpus}
    measured = {
        (row.source_bus_id, row.destination_bus_id)
        for row in facts.measurements.pairs_from(node.snapshot.host)
        if row.destination_node == node.snapshot.host
    }
    for source, destination in sorted(measured, key=str):
        if source in by_bus_id and destination in by_bus_id:
            one, other = by_bus_id[source], by_bus_id[destination]
            name, bare = circumstances.named(number, one, other), f"{one.device} → {other.device}"
            yield "link", name, (name, circumstances.on(number, bare), bare)


def _slow_links(facts: Facts, number: int, node: Topology) -> dict[str, tuple[Verdict, tuple[str, str]]]:
    """The links of a node whose own figures do not pass, by name: how they fare, and the GPUs at both ends.

    What makes several links slow is told of the GPU that they have in common. A link of which no figure was judged is
    no PASS either.
    """
    named, host = facts.circumstances.named, node.snapshot.host
    by_bus_id = {gpu.bus_id: gpu for gpu in node.gpus}
    fare: dict[str, list[Verdict]] = {}
    ends: dict[str, tuple[str, str]] = {}
    for row in facts.measurements.pairs_from(host):
        one, other = by_bus_id.get(row.source_bus_id), by_bus_id.get(row.destination_bus_id)
        is_here = row.destination_node == host
        if is_here and one is not None and other is not None and row.verdict is not None:
            name = named(number, one, other)
            ends[name] = named(number, one), named(number, other)
            fare.setdefault(name, []).append(Verdict(row.verdict))
    found = {name: overall(own) for name, own in fare.items()}
    return {name: (verdict, ends[name]) for name, verdict in found.items() if verdict is not Verdict.PASS}


def _unanswered(node: Topology, by_subject: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Findings of a driver that tells nothing of a node's GPUs."""
    host = node.snapshot.host
    found = [each for subject in by_subject if subject.startswith(host) for each in by_subject[subject]]
    return [each for each in found if each.id in _DRIVER_IDS and each.subject.partition(",")[0] == host]


def _of_whole(facts: Facts, node: Topology, by_subject: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Findings that name the node itself, or something on it that has no row, or, of a single node, nothing else."""
    host = node.snapshot.host
    alone = len(facts.nodes) == 1
    return [
        finding
        for subject, found in by_subject.items()
        for finding in found
        if alone or subject == host or subject.startswith((f"{host} ", f"{host},")) or f" on {host}" in subject
    ]


def _row(
    node: Topology, scope: str, subject: str, findings: Sequence[Finding], figures: Verdict = Verdict.PASS
) -> VerdictRow:
    return VerdictRow(
        scope=scope,
        node=node.snapshot.host,
        subject=subject,
        verdict=overall([figures, *(finding.severity for finding in findings)]),
        findings=tuple(dict.fromkeys(finding.id for finding in findings)),
        origin=node.snapshot.origin,
    )
