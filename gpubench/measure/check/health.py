"""Health of machines: every check judged, findings folded under their root cause, and one verdict per node and GPU."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeVar

from gpubench.conditions.checks import CHECKS, Check, Looked, look, merged
from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.definition.condition import joined
from gpubench.conditions.registry import CONDITIONS, FAMILIES
from gpubench.measure.check.unread import not_looked_at, unread_facts
from gpubench.measure.topo import prospect_findings, prospects, survey
from gpubench.model.facts.health import split_by_mig
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.copies import CopyJudge, judged_pattern
from gpubench.model.results.compare import HOST
from gpubench.model.results.figures import FailedOnNode, Measurements, Need, is_pinned
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    CheckRow,
    CollectiveRow,
    Effect,
    EvidenceRow,
    PairRow,
    PatternRow,
    Record,
    Report,
    Table,
    VerdictRow,
)
from gpubench.model.results.topo import TreeRow, tree_rows
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.ranks import RANKS_SHARE_A_GPU, RankIdentity
from gpubench.model.terms.units import grouped
from gpubench.model.terms.verdict import (
    FIGURES,
    HOST_STAGED,
    SLOW_UNEXPLAINED,
    STRAGGLER,
    WRONG_DATA,
    Finding,
    Verdict,
    doubt_in,
    gravity,
    overall,
)
from gpubench.records import dataclass

R = TypeVar("R", bound=Record)

_OF_FACTS = {each.name for each in CHECKS if each.needs is Need.FACTS}
JUDGED_BY_CHECKS = frozenset(
    each.id
    for each in CONDITIONS
    if each.check and each.id != WRONG_DATA and (each.check in _OF_FACTS or not each.effects)
)
"""Findings of the commands that checks make themselves, from rows and facts."""


def of_p2p(document: Mapping[str, Any]) -> Measurements:
    """The pairs of a `gpubench p2p`, what is known of their paths, and what it found out beside their speed."""
    return Measurements(
        pairs=_rows(document, PairRow),
        evidence=_rows(document, EvidenceRow),
        findings=_findings(document),
        patterns=_rows(document, PatternRow),
    )


def of_collective(document: Mapping[str, Any]) -> Measurements:
    """The rows of a collective and its ranks, and what it found out of paths; wrong elements stand in the rows."""
    return Measurements(
        collectives=_rows(document, CollectiveRow),
        ranks=tuple(RankIdentity(**rank) for rank in document["metadata"]["ranks"]),
        findings=without_wrong_data(_findings(document)),
    )


def of_node(measured: Measurements, host: str) -> Measurements:
    """The measurements of one of several nodes, by the name that the node has among them."""
    return replace(
        measured,
        pairs=tuple(replace(row, source_node=host, destination_node=host) for row in measured.pairs),
        evidence=tuple(replace(row, source_node=host, destination_node=host) for row in measured.evidence),
        patterns=tuple(replace(row, node=host) for row in measured.patterns),
        findings=tuple(
            replace(
                each,
                subject=f"{host} {each.subject}",
                subjects=tuple(f"{host} {subject}" for subject in each.subjects),
            )
            for each in measured.findings
        ),
    )


def together(parts: Sequence[Measurements]) -> Measurements:
    """Several measurements as one."""
    return Measurements(
        pairs=tuple(row for part in parts for row in part.pairs),
        collectives=tuple(row for part in parts for row in part.collectives),
        ranks=next((part.ranks for part in parts if part.ranks), ()),
        evidence=tuple(row for part in parts for row in part.evidence),
        patterns=tuple(row for part in parts for row in part.patterns),
        findings=tuple(dict.fromkeys(finding for part in parts for finding in part.findings)),
        left_out={need: reason for part in parts for need, reason in part.left_out.items()},
        failed={need: reason for part in parts for need, reason in part.failed.items()},
        failed_on=tuple(each for part in parts for each in part.failed_on),
    )


def accounted(measured: Measurements) -> Measurements:
    """The measurements, in which whatever has neither rows nor a reason why could not be measured."""
    ends = [{row.source, row.destination} for row in measured.pairs]
    there = {
        Need.PEER_COPIES: any(HOST not in each for each in ends) and bool(measured.evidence),
        Need.HOST_COPIES: any(HOST in each and len(each) > 1 for each in ends),
        Need.ALL_REDUCE: bool(measured.collectives),
    }
    excused = {*measured.left_out, *measured.failed}
    silent = {need: "nothing of it was found" for need, found in there.items() if not found and need not in excused}
    return replace(measured, failed={**measured.failed, **silent})


def of_nodes(parts: Mapping[str, Measurements]) -> Measurements:
    """The measurements of several nodes, by host: what some of them lack is missing there, and what all lack in all."""
    failed_on = [
        FailedOnNode(node=host, need=need, reason=reason)
        for host, part in parts.items()
        for need, reason in part.failed.items()
    ]
    nowhere = {need: found for need in Need if (found := [each for each in failed_on if each.need is need])}
    nowhere = {need: found for need, found in nowhere.items() if len(found) == len(parts)}
    measured = together(tuple(parts.values()))
    return replace(
        measured,
        left_out={
            need: reason
            for need, reason in measured.left_out.items()
            if all(need in part.left_out or need in part.failed for part in parts.values())
        },
        failed={need: "; ".join(dict.fromkeys(each.reason for each in found)) for need, found in nowhere.items()},
        failed_on=tuple(each for each in failed_on if each.need not in nowhere),
    )


def findings_beside_speed(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a command that no check makes from its rows."""
    return tuple(each for each in findings if each.id not in JUDGED_BY_CHECKS)


def without_wrong_data(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a collective without wrong data, which stand in its rows."""
    return tuple(each for each in findings if each.id != WRONG_DATA)


def _findings(document: Mapping[str, Any]) -> tuple[Finding, ...]:
    return findings_beside_speed(Report.from_record({"complete": True, **document}).findings)


def _rows(document: Mapping[str, Any], kind: type[R]) -> tuple[R, ...]:
    return tuple(from_plain(kind, row) for row in document.get(kind.section) or ())


_OF_NCCL = (HOST_STAGED, SLOW_UNEXPLAINED, STRAGGLER)  # Figures of what NCCL does; its settings explain no others
_SLOWING = ("gpu-in-use", "clock-limited", "gpu-hot", "below-profile")
"""Conditions of a GPU that make it slow; they are causes of no path."""

_WEAK = ("row-remap-pending", "row-remap-failed")  # Conditions that may be, and seldom are, why something is slow
_NCCL_SETTINGS, _PCIE = ("nccl_settings", "nccl_tuning"), "pcie"
_BETWEEN_NODES = ("network", "rdma_ports", "gpudirect", "mnnvl")
_ROOT_VERDICTS = (Verdict.FAIL, Verdict.WARN)
_DEVICE = re.compile(r"\bGPU\d+\b|\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_BY_ID = {each.id: each for each in CONDITIONS}
_FAMILY: Mapping[str, str] = {each.id: family.name for family in FAMILIES for each in family.conditions}


@dataclass(frozen=True)
class _FindingPlace:
    """The hosts and GPUs that a finding names; none of a kind stands for all."""

    finding: Finding
    all_hosts: tuple[str, ...]

    @cached_property
    def hosts(self) -> frozenset[str]:
        words = frozenset(re.split(r"[\s,]+", self._text))
        return frozenset(host for host in self.all_hosts if host in words) or frozenset(self.all_hosts)

    @cached_property
    def devices(self) -> frozenset[str]:
        return frozenset(_DEVICE.findall(self._text))

    @property
    def _text(self) -> str:
        return ", ".join((self.finding.subject, *self.finding.subjects))

    def touches(self, other: "_FindingPlace") -> bool:
        shared = not self.devices or not other.devices or bool(self.devices & other.devices)
        return shared and bool(self.hosts & other.hosts)


def folded(findings: Sequence[Finding], hosts: Sequence[str], *, nvlinked: bool) -> tuple[Finding, ...]:
    """The findings without consequences of others; a root cause is as grave as its gravest consequence."""
    places = {number: _FindingPlace(each, tuple(hosts)) for number, each in enumerate(findings)}
    root_of = {number: _root(number, places, nvlinked=nvlinked) for number in places}
    below: dict[int, list[Finding]] = {}
    for number, each in enumerate(findings):
        top = _topmost(number, root_of)
        if top != number:
            below.setdefault(top, []).append(each)
    return tuple(_with(each, below.get(number, ())) for number, each in enumerate(findings) if root_of[number] is None)


def _topmost(number: int, root_of: Mapping[int, int | None]) -> int:
    seen = {number}
    while (above := root_of[number]) is not None and above not in seen:
        number = above
        seen.add(number)
    return number


def _root(number: int, places: Mapping[int, _FindingPlace], *, nvlinked: bool) -> int | None:
    place = places[number]
    roots = [
        other
        for other, above in places.items()
        if other != number and _explains(above, place, nvlinked=nvlinked) and above.touches(place)
    ]
    return min(roots, key=lambda each: _first_choice(places[each], place), default=None)


def _first_choice(root: _FindingPlace, place: _FindingPlace) -> tuple[bool, int, bool]:
    is_figure = root.finding.id in FIGURES
    return is_figure, gravity(root.finding.severity), not (root.devices & place.devices)


def _explains(root: _FindingPlace, place: _FindingPlace, *, nvlinked: bool) -> bool:
    cause, effect = root.finding, place.finding
    if cause.severity not in _ROOT_VERDICTS or effect.severity in (Verdict.SKIP, Verdict.ERROR):
        return False
    condition = _BY_ID.get(cause.id)
    if condition is not None and effect.id in condition.implies:
        return True
    if effect.id not in FIGURES or cause.id == effect.id:
        return False
    if cause.id == "p2p-slow" and effect.id in (SLOW_UNEXPLAINED, STRAGGLER):
        return True
    if cause.id in FIGURES:
        return cause.id == HOST_STAGED and _is_nccl_s(cause) == (effect.id in _OF_NCCL) and effect.id != HOST_STAGED
    return _does(cause.id, place, nvlinked=nvlinked)


def _does(id_: str, place: _FindingPlace, *, nvlinked: bool) -> bool:
    effect, family = place.finding, _FAMILY.get(id_, "")
    effects = frozenset(_BY_ID[id_].effects) if id_ in _BY_ID else frozenset()
    if effect.id == HOST_STAGED:
        of_nccl = family not in _NCCL_SETTINGS or _is_nccl_s(effect)
        return of_nccl and bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE})
    slows = id_ in _SLOWING or bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE, Effect.SLOW})
    if not slows or id_ in _WEAK:
        return False
    if family in _NCCL_SETTINGS:
        return effect.id in _OF_NCCL
    if family == _PCIE and nvlinked:
        return effect.id == "host-copies-slow"
    if family in _BETWEEN_NODES:
        return effect.id in _OF_NCCL and len(place.hosts) > 1
    return effect.id != "host-copies-slow" or family in (_PCIE, "gpu")


def _is_nccl_s(staged: Finding) -> bool:
    """True if it is NCCL that goes through host memory, between ranks, and not a copy between GPUs."""
    return "GPU" not in staged.subject


def _with(root: Finding, below: Sequence[Finding]) -> Finding:
    if not below:
        return root
    lines = [line for each in below for line in _lines(each, root)]
    severity = overall([root.severity, *(each.severity for each in below)])
    return replace(root, severity=severity, consequences=tuple(dict.fromkeys((*root.consequences, *lines))))


def _lines(below: Finding, root: Finding) -> tuple[str, ...]:
    """A finding below another in words: what is slow is explained by now, and said once."""
    if below.id != SLOW_UNEXPLAINED:
        return f"{below.id}: {below.subject}: {below.seen}", *below.consequences
    return () if root.consequences else (f"{below.subject}: {below.seen}", *below.consequences)


_DRIVER_IDS = {each.id for each in CONDITIONS if each.check == "driver"}
_OF_SILENCE = ("driver", "measured")  # Checks that say who did not answer
SECTIONS = ("checks", "verdicts", "pairs", "rows", "tree", FINDINGS_SECTION)

_MOST_TREES = 4  # Nodes whose PCI tree a report holds, and those with findings: many are alike
_OF_ALL_RANKS = (SLOW_UNEXPLAINED, STRAGGLER)  # Findings on a whole job: what explains them says on which node it is


@dataclass(frozen=True, slots=True)
class _Outcome:
    check: Check
    findings: tuple[Finding, ...]
    looked: Looked

    @classmethod
    def of(cls, check: Check, facts: Facts) -> "_Outcome":
        looked = look(check, facts)
        return cls(check, (*looked.findings, *unread_facts(check, facts)), looked)


def judge(facts: Facts, *, checks: Sequence[Check] = CHECKS) -> Report:
    """The report of `gpubench check`: all checks judge always."""
    facts = replace(facts, measurements=_with_judged_copies(facts))
    outcomes = [_Outcome.of(check, facts) for check in checks]
    every = [finding for outcome in outcomes for finding in outcome.findings]
    explained = survey(facts.nodes, facts.kinds, facts.ranks)
    every += list(prospect_findings(prospects(facts.nodes, facts.kinds, explained), explained, every))
    hosts = [node.snapshot.host for node in facts.nodes]
    nvlinked = any(gpu.nvlinks for node in facts.nodes for gpu in node.gpus)
    findings = folded(merged(every), hosts, nvlinked=nvlinked)
    found = tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))
    origin = facts.nodes[0].snapshot.origin if facts.nodes else ""
    check_rows = tuple(_check_row(facts, outcome, origin) for outcome in outcomes)
    passed = any(row.verdict is Verdict.PASS for row in check_rows if row.check != "measured")
    at_best = Verdict.PASS if passed else Verdict.SKIP
    verdict = overall([at_best, *(finding.severity for finding in found)])
    ids = {each.id for each in found}
    own = [each for each in every if each.id not in _OF_ALL_RANKS or each.id in ids]
    verdict_rows = tuple(_verdict_rows(facts, own))
    measured = facts.measurements
    sections = Table.by_section(
        {
            CheckRow: check_rows,
            VerdictRow: verdict_rows,
            PairRow: measured.pairs,
            CollectiveRow: measured.collectives,
            TreeRow: lambda: chain.from_iterable(map(tree_rows, _shown(facts, found))),
        }
    )
    return Report(verdict=verdict, complete=True, findings=found, sections=sections, main=FINDINGS_SECTION)


def _with_judged_copies(facts: Facts) -> Measurements:
    """The measurements with copies judged as `gpubench p2p` does, on each node: a recording may have been edited."""
    measured = facts.measurements
    rows: dict[int, PairRow] = dict(enumerate(measured.pairs))
    profiles = chain(facts.profiles, repeat(None))
    by_host = grouped(rows, lambda number: rows[number].source_node)
    for node, profile in zip(facts.nodes, profiles, strict=False):
        host = node.snapshot.host
        own = by_host.get(host, [])
        copies = CopyJudge(profile, {host: node})
        judged = copies.judged(copies.without_busy(rows[number] for number in own))
        rows |= zip(own, judged, strict=True)
    return replace(measured, pairs=tuple(rows.values()), patterns=tuple(map(judged_pattern, measured.patterns)))


def _shown(facts: Facts, found: Sequence[Finding]) -> list[Topology]:
    named = [
        node
        for node in facts.nodes
        if len(facts.nodes) > 1 and any(node.snapshot.host in each.subject.split() for each in found)
    ]
    return list(dict.fromkeys((*named[: _MOST_TREES - 1], *facts.nodes[:1])))


_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.SKIP, Verdict.PASS)


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
    measured = rows if check.name == "collective_bandwidth" else facts.measurements.pairs
    doubted = next(filter(None, (doubt_in(row.note) for row in measured)), "")
    if doubted:
        return doubted
    if check.name == "collective_bandwidth" and rows and all((row.ranks_per_gpu or 1) > 1 for row in rows):
        return RANKS_SHARE_A_GPU
    split = split_by_mig(gpu for node in facts.nodes for gpu in node.gpus)
    known = [profile.name for profile in facts.profiles if profile is not None]
    own = f"profile {joined(known)} has no value for it" if known else "no profile"
    return split or f"{own}, no past results, and no limit that is known"


def _is_judged(facts: Facts, check: Check) -> bool:
    if check.name == "collective_bandwidth" and facts.measurements.collectives:
        return any(row.expected_us and row.verdict is not None for row in facts.measurements.collectives)
    rows = _copies_of(facts, check)
    return not rows or any(row.verdict != Verdict.SKIP for row in rows)


def _copies_of(facts: Facts, check: Check) -> list[PairRow]:
    """The rows with a verdict that a check of bandwidths judges: between GPUs, or with pinned host memory."""
    if check.name not in ("p2p_bandwidth", "host_bandwidth"):
        return []
    with_host = check.name == "host_bandwidth"
    rows = (row for row in facts.measurements.pairs if row.verdict is not None)
    return [row for row in rows if (is_pinned(row) if with_host else HOST not in (row.source, row.destination))]


def _nodes_in_error(facts: Facts, check: Check) -> tuple[str, ...]:
    if check.needs is not Need.FACTS:
        return tuple(each.node for each in facts.measurements.failed_on if each.need is check.needs)
    if check.name in _OF_SILENCE:
        return ()
    return tuple(node.snapshot.host for node in facts.nodes if _is_silent(node))


def _is_silent(node: Topology) -> bool:
    return bool(node.snapshot.failures or (node.gpus and node.snapshot.driver.absent))


def _verdict_rows(facts: Facts, findings: Sequence[Finding]) -> Iterator[VerdictRow]:
    by_subject: dict[str, list[Finding]] = {}
    for finding in findings:
        for subject in finding.subjects or (finding.subject,):
            by_subject.setdefault(subject, []).append(finding)
    for number, node in enumerate(facts.nodes):
        own: list[Finding] = []
        rows = []
        unanswered = _unanswered_findings(node, by_subject) if _is_silent(node) else []
        slow = _slow_links(facts, number, node)
        for scope, subject, names in _subjects(facts, number, node):
            found = [finding for name in names for finding in by_subject.get(name, ())]
            found += unanswered if scope == "gpu" else ()
            own += found
            verdict, ends = slow.get(subject, (Verdict.PASS, ()))
            found = found or [each for end in ends for each in by_subject.get(end, ())]
            rows.append(_row(node, scope, subject, found, verdict))
        own += _node_findings(facts, node, by_subject)
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


def _unanswered_findings(node: Topology, by_subject: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    host = node.snapshot.host
    found = [each for subject in by_subject if subject.startswith(host) for each in by_subject[subject]]
    return [each for each in found if each.id in _DRIVER_IDS and each.subject.partition(",")[0] == host]


def _node_findings(facts: Facts, node: Topology, by_subject: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    host = node.snapshot.host
    is_only = len(facts.nodes) == 1
    return [
        finding
        for subject, found in by_subject.items()
        for finding in found
        if is_only or subject == host or subject.startswith((f"{host} ", f"{host},")) or f" on {host}" in subject
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
