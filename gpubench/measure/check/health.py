"""Judge the health of machines: run every check, group findings by root cause, and rate each node and device."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.checks import CHECKS, Check, Looked, look, merged
from gpubench.conditions.circumstances import Facts, joined
from gpubench.conditions.folding import fold
from gpubench.conditions.registry import CONDITIONS
from gpubench.measure.check.unread import unread_facts, why_no_pass
from gpubench.measure.topo import prospect_findings, prospects, survey
from gpubench.model.facts.health import describe_mig_split
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.copies import CopyJudge, judge_pattern
from gpubench.model.results import report
from gpubench.model.results.compare import HOST
from gpubench.model.results.fallback import PATH_DISPUTED, PATH_UNKNOWN
from gpubench.model.results.fallback import make_findings as path_findings
from gpubench.model.results.figures import FailedOnNode, Measurements, Need, Transferred, is_pinned
from gpubench.model.results.kv import KvRow
from gpubench.model.results.topo import TreeRow, tree_rows
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.ranks import RANKS_SHARE_A_GPU, DevicePlace, RankIdentity
from gpubench.model.terms.units import group_by
from gpubench.model.terms.verdict import (
    HOST_STAGED,
    SLOW_UNEXPLAINED,
    STRAGGLER,
    WRONG_DATA,
    Finding,
    Verdict,
    parse_doubt,
    worst_verdict,
)

R = TypeVar("R", bound=report.Record)

_FACT_CHECKS = {check.name for check in CHECKS if check.needs is Need.FACTS}
JUDGED_BY_CHECKS = frozenset(
    condition.id
    for condition in CONDITIONS
    if condition.check and condition.id != WRONG_DATA and (condition.check in _FACT_CHECKS or not condition.effects)
)
"""Ids of findings by other commands that the checks derive again from rows and facts."""


_PATH_FINDINGS = (HOST_STAGED, PATH_DISPUTED, PATH_UNKNOWN)


def p2p_measurements(document: Mapping[str, Any]) -> Measurements:
    """Return the rows and evidence in a report by `gpubench p2p`, and its findings that are not about speed."""
    evidence = _rows(document, report.EvidenceRow)
    return Measurements(
        pairs=_rows(document, report.PairRow),
        evidence=evidence,
        findings=p2p_findings(_findings(document), _rows(document, report.FallbackRow), evidence),
        patterns=_rows(document, report.PatternRow),
    )


def collective_measurements(document: Mapping[str, Any]) -> Measurements:
    """Return the rows and ranks in a collective's report, and its findings, except wrong data, which the rows show."""
    return Measurements(
        collectives=_rows(document, report.CollectiveRow),
        ranks=tuple(RankIdentity(**rank) for rank in document["metadata"]["ranks"]),
        collective_evidence=_rows(document, report.EvidenceRow),
        findings=drop_wrong_data(_findings(document)),
    )


def kv_measurements(document: Mapping[str, Any]) -> Measurements:
    """Return the rows, findings and verdict in a report by `gpubench kv`."""
    return Measurements(
        findings=_findings(document),
        transferred=Transferred(verdict=Verdict(document["verdict"]), rows=_rows(document, KvRow)),
    )


def add_host(measured: Measurements, host: str) -> Measurements:
    """Add the host name to all rows and findings that were measured on one node."""
    return replace(
        measured,
        pairs=tuple(replace(row, source_node=host, destination_node=host) for row in measured.pairs),
        evidence=tuple(replace(row, source_node=host, destination_node=host) for row in measured.evidence),
        patterns=tuple(replace(row, node=host) for row in measured.patterns),
        findings=tuple(
            replace(
                finding,
                subject=f"{host} {finding.subject}",
                subjects=tuple(f"{host} {subject}" for subject in finding.subjects),
            )
            for finding in measured.findings
        ),
    )


def merge(parts: Sequence[Measurements]) -> Measurements:
    return Measurements(
        pairs=tuple(row for part in parts for row in part.pairs),
        collectives=tuple(row for part in parts for row in part.collectives),
        ranks=next((part.ranks for part in parts if part.ranks), ()),
        evidence=tuple(row for part in parts for row in part.evidence),
        collective_evidence=tuple(row for part in parts for row in part.collective_evidence),
        patterns=tuple(row for part in parts for row in part.patterns),
        transferred=next((part.transferred for part in parts if part.transferred is not None), None),
        findings=tuple(dict.fromkeys(finding for part in parts for finding in part.findings)),
        left_out={need: reason for part in parts for need, reason in part.left_out.items()},
        failed={need: reason for part in parts for need, reason in part.failed.items()},
        failed_on=tuple(failure for part in parts for failure in part.failed_on),
    )


def mark_missing(measured: Measurements) -> Measurements:
    """Mark measurements as failed if they have neither rows nor a reason why they were left out."""
    ends = [{row.source, row.destination} for row in measured.pairs]
    measured_needs = {
        Need.PEER_COPIES: any(HOST not in end for end in ends) and bool(measured.evidence),
        Need.HOST_COPIES: any(HOST in end and len(end) > 1 for end in ends),
        Need.ALL_REDUCE: bool(measured.collectives),
    }
    excused = {*measured.left_out, *measured.failed}
    missing = [need for need, found in measured_needs.items() if not found and need not in excused]
    return replace(measured, failed={**measured.failed, **dict.fromkeys(missing, "there are no results")})


def merge_nodes(parts: Mapping[str, Measurements]) -> Measurements:
    """Merge the measurements of several nodes, by host.

    A measurement that failed on all nodes counts as one failure.
    """
    failed_on = [
        FailedOnNode(node=host, need=need, reason=reason)
        for host, part in parts.items()
        for need, reason in part.failed.items()
    ]
    nowhere = {need: found for need in Need if (found := [failure for failure in failed_on if failure.need is need])}
    nowhere = {need: found for need, found in nowhere.items() if len(found) == len(parts)}
    measured = merge(tuple(parts.values()))
    return replace(
        measured,
        left_out={
            need: reason
            for need, reason in measured.left_out.items()
            if all(need in part.left_out or need in part.failed for part in parts.values())
        },
        failed={need: "; ".join(dict.fromkeys(failure.reason for failure in found)) for need, found in nowhere.items()},
        failed_on=tuple(failure for failure in failed_on if failure.need not in nowhere),
    )


def findings_beside_speed(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that no check derives from rows."""
    return tuple(finding for finding in findings if finding.id not in JUDGED_BY_CHECKS)


def drop_wrong_data(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Drop findings on wrong data, because the rows already show it."""
    return tuple(finding for finding in findings if finding.id != WRONG_DATA)


def drop_path_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.id not in _PATH_FINDINGS)


def p2p_findings(
    findings: Sequence[Finding], fallback: Sequence[report.FallbackRow], evidence: Sequence[report.EvidenceRow]
) -> tuple[Finding, ...]:
    """Return the findings by `gpubench p2p` that no check derives.

    Findings on paths are made again from the fallback rows, because they then name the GPUs' nodes and bus IDs.
    """
    ends = {f"{row.source} → {row.destination}": row for row in evidence}
    on_paths = (
        replace(
            finding,
            places=tuple(dict.fromkeys(place for pair in finding.subjects for place in _places(ends.get(pair)))),
        )
        for finding in path_findings(fallback)
    )
    return (*drop_path_findings(findings_beside_speed(findings)), *on_paths)


def _places(row: report.EvidenceRow | None) -> tuple[DevicePlace, ...]:
    if row is None:
        return ()
    return (
        DevicePlace(row.source_node, row.source, row.source_bus_id),
        DevicePlace(row.destination_node, row.destination, row.destination_bus_id),
    )


def _findings(document: Mapping[str, Any]) -> tuple[Finding, ...]:
    return findings_beside_speed(report.Report.from_record({"complete": True, **document}).findings)


def _rows(document: Mapping[str, Any], kind: type[R]) -> tuple[R, ...]:
    return tuple(from_plain(kind, row) for row in document.get(kind.section) or ())


_DRIVER_IDS = {condition.id for condition in CONDITIONS if condition.check == "driver"}
_SILENCE_CHECKS = ("driver", "measured")  # These checks report nodes whose driver did not answer
SECTIONS = ("checks", "verdicts", "pairs", "rows", KvRow.section, "tree", report.FINDINGS_SECTION)

_MOST_TREES = 4  # Limit on PCI trees per report, because most nodes are alike. Nodes with findings come first
# A finding with a known cause replaces these, and that cause names the node
_JOB_FINDINGS = (SLOW_UNEXPLAINED, STRAGGLER)


class _Outcome(Struct, frozen=True):
    check: Check
    findings: tuple[Finding, ...]
    looked: Looked

    @classmethod
    def of(cls, check: Check, facts: Facts) -> "_Outcome":
        looked = look(check, facts)
        return cls(check, (*looked.findings, *unread_facts(check, facts)), looked)


def judge(facts: Facts, *, checks: Sequence[Check] = CHECKS) -> report.Report:
    """Return the report of `gpubench check`."""
    facts = replace(facts, measurements=_judge_copies(facts))
    outcomes = [_Outcome.of(check, facts) for check in checks]
    every = [finding for outcome in outcomes for finding in outcome.findings]
    explained = survey(facts.nodes, facts.kinds, facts.ranks)
    every += list(prospect_findings(prospects(facts.nodes, facts.kinds, explained), explained, every))
    findings = fold(merged(every), facts.nodes)
    found = tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))
    origin = facts.nodes[0].snapshot.origin if facts.nodes else ""
    check_rows = tuple(_judge_check(facts, outcome, origin) for outcome in outcomes)
    passed = any(row.verdict is Verdict.PASS for row in check_rows if row.check != "measured")
    best = Verdict.PASS if passed else Verdict.SKIP
    transfers = tuple(_transfer_checks(facts.measurements, origin))
    severities = [finding.severity for finding in found]
    verdict = worst_verdict([best, *(Verdict(row.verdict) for row in transfers), *severities])
    ids = {finding.id for finding in found}
    on_devices = [finding for finding in every if finding.id not in _JOB_FINDINGS or finding.id in ids]
    verdict_rows = tuple(_verdict_rows(facts, on_devices))
    measured = facts.measurements
    sections = report.Table.group_by_section(
        {
            report.CheckRow: (*check_rows, *transfers),
            report.VerdictRow: verdict_rows,
            report.PairRow: measured.pairs,
            report.CollectiveRow: measured.collectives,
            **({KvRow: measured.transferred.rows} if measured.transferred is not None else {}),
            TreeRow: lambda: chain.from_iterable(map(tree_rows, _nodes_with_trees(facts, found))),
        }
    )
    return report.Report(
        verdict=verdict, complete=True, findings=found, sections=sections, main=report.FINDINGS_SECTION
    )


def _transfer_checks(measured: Measurements, origin: str) -> Iterator[report.CheckRow]:
    """Yield the check of --kv, if it was asked for. Its rows count too, because a recording may have been edited."""
    found = measured.transferred
    if found is not None:
        own = [finding for finding in measured.findings if finding.id.startswith((KvRow.section, "ucx-"))]
        verdicts = [Verdict(row.verdict) for row in found.rows if row.verdict]
        verdicts += [finding.severity for finding in own]
        yield report.CheckRow(
            check=KvRow.section,
            verdict=worst_verdict(verdicts or [found.verdict]),
            findings=len(own),
            looks_for="a KV transfer between two processes takes a direct path",
            note=found.note or None,
            origin=origin,
        )


def _judge_copies(facts: Facts) -> Measurements:
    """Judge the copies on each node again, as `gpubench p2p` does, because a recording may have been edited."""
    measured = facts.measurements
    rows: dict[int, report.PairRow] = dict(enumerate(measured.pairs))
    profiles = chain(facts.profiles, repeat(None))
    numbers_by_host = group_by(rows, lambda number: rows[number].source_node)
    for node, profile in zip(facts.nodes, profiles, strict=False):
        host = node.snapshot.host
        numbers = numbers_by_host.get(host, [])
        copies = CopyJudge(profile, {host: node})
        judged = copies.judge(copies.skip_busy_gpus(rows[number] for number in numbers))
        rows |= zip(numbers, judged, strict=True)
    return replace(measured, pairs=tuple(rows.values()), patterns=tuple(map(judge_pattern, measured.patterns)))


def _nodes_with_trees(facts: Facts, found: Sequence[Finding]) -> list[Topology]:
    named = [
        node
        for node in facts.nodes
        if len(facts.nodes) > 1 and any(node.snapshot.host in finding.subject.split() for finding in found)
    ]
    return list(dict.fromkeys((*named[: _MOST_TREES - 1], *facts.nodes[:1])))


_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.SKIP, Verdict.PASS)


def _judge_check(facts: Facts, outcome: _Outcome, origin: str) -> report.CheckRow:
    check = outcome.check
    missing = facts.measurements.left_out.get(check.needs)
    failed = facts.measurements.failed.get(check.needs)
    nodes_in_error = _nodes_in_error(facts, check)
    if outcome.findings:
        verdict, note = worst_verdict(finding.severity for finding in outcome.findings), None
    elif failed is not None:
        verdict, note = Verdict.ERROR, failed
    elif missing is not None:
        verdict, note = Verdict.SKIP, missing
    elif not check.without_gpus and not any(node.gpus for node in facts.nodes):
        verdict, note = Verdict.SKIP, "no GPU"
    elif nodes_in_error and len(nodes_in_error) == len(facts.nodes):
        verdict, note = Verdict.ERROR, "the driver did not report it"
    elif not _is_judged(facts, check):
        verdict, note = Verdict.SKIP, f"speed not judged: {_why_not_judged(facts, check)}"
    elif reason := why_no_pass(check, outcome.looked, facts, nodes_in_error):
        verdict, note = Verdict.SKIP, reason
    else:
        verdict, note = Verdict.PASS, check.in_part(facts) or None
    return report.CheckRow(
        check=check.name,
        verdict=verdict,
        findings=len(outcome.findings),
        looks_for=check.summary,
        note=note,
        origin=origin,
        nodes_in_error=nodes_in_error,
    )


def _why_not_judged(facts: Facts, check: Check) -> str:
    rows = facts.measurements.collectives
    measured = rows if check.name == "collective_bandwidth" else facts.measurements.pairs
    doubted = next(filter(None, (parse_doubt(row.note) for row in measured)), "")
    if doubted:
        return doubted
    if check.name == "collective_bandwidth" and rows and all((row.ranks_per_gpu or 1) > 1 for row in rows):
        return RANKS_SHARE_A_GPU
    split = describe_mig_split(gpu for node in facts.nodes for gpu in node.gpus)
    known = [profile.name for profile in facts.profiles if profile is not None]
    lack = f"profile {joined(known)} has no value for it" if known else "no profile"
    return split or f"{lack}, no past results, and no known limit"


def _is_judged(facts: Facts, check: Check) -> bool:
    if check.name == "collective_bandwidth" and facts.measurements.collectives:
        return any(row.expected_us and row.verdict is not None for row in facts.measurements.collectives)
    rows = [row for row in facts.measurements.pairs if row.verdict is not None]
    if check.name == "host_bandwidth":
        rows = [row for row in rows if is_pinned(row)]
    elif check.name == "p2p_bandwidth":
        rows = [row for row in rows if HOST not in (row.source, row.destination)]
    else:
        return True
    return not rows or any(row.verdict != Verdict.SKIP for row in rows)


def _nodes_in_error(facts: Facts, check: Check) -> tuple[str, ...]:
    if check.needs is not Need.FACTS:
        return tuple(failure.node for failure in facts.measurements.failed_on if failure.need is check.needs)
    if check.name in _SILENCE_CHECKS:
        return ()
    return tuple(node.snapshot.host for node in facts.nodes if _is_silent(node))


def _is_silent(node: Topology) -> bool:
    return bool(node.snapshot.failures or (node.gpus and node.snapshot.driver.absent))


def _verdict_rows(facts: Facts, findings: Sequence[Finding]) -> Iterator[report.VerdictRow]:
    by_subject: dict[str, list[Finding]] = {}
    for finding in findings:
        for subject in finding.subjects or (finding.subject,):
            by_subject.setdefault(subject, []).append(finding)
    for number, node in enumerate(facts.nodes):
        host = node.snapshot.host
        on_node: list[Finding] = []
        rows = []
        on_driver = [
            finding
            for subject, found in by_subject.items()
            if _is_silent(node) and subject.startswith(host)
            for finding in found
            if finding.id in _DRIVER_IDS and finding.subject.partition(",")[0] == host
        ]
        slow = _slow_links(facts, number, node)
        for scope, subject, names in _subjects(facts, number, node):
            on_device = [finding for name in names for finding in by_subject.get(name, ())]
            on_device += on_driver if scope == "gpu" else ()
            on_node += on_device
            verdict, ends = slow.get(subject, (Verdict.PASS, ()))
            on_device = on_device or [finding for end in ends for finding in by_subject.get(end, ())]
            rows.append(_verdict_row(node, scope, subject, on_device, verdict))
        on_node += [
            finding
            for subject, found in by_subject.items()
            if len(facts.nodes) == 1
            or subject == host
            or subject.startswith((f"{host} ", f"{host},"))
            or f" on {host}" in subject
            for finding in found
        ]
        yield _verdict_row(node, "node", host, on_node)
        yield from rows


def _subjects(facts: Facts, number: int, node: Topology) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the scope of each device on a node, its name in rows, and the names that findings use for it."""
    circumstances = facts.circumstances
    for gpu in node.gpus:
        name = circumstances.names_with_ids(number, gpu)
        yield "gpu", name, (name,)
    for nic in node.nics:
        name = circumstances.names_with_ids(number, nic)
        yield "nic", name, (name, circumstances.subject(number, nic.name))
    by_bus_id = {gpu.bus_id: gpu for gpu in node.gpus}
    measured = {
        (row.source_bus_id, row.destination_bus_id)
        for row in facts.measurements.pairs_from(node.snapshot.host)
        if row.destination_node == node.snapshot.host
    }
    for source, destination in sorted(measured, key=str):
        if source in by_bus_id and destination in by_bus_id:
            one, other = by_bus_id[source], by_bus_id[destination]
            name, bare = circumstances.names_with_ids(number, one, other), f"{one.device} → {other.device}"
            yield "link", name, (name, circumstances.subject(number, bare), bare)


def _slow_links(facts: Facts, number: int, node: Topology) -> dict[str, tuple[Verdict, tuple[str, str]]]:
    """Return the links on a node that do not pass, by name, with their verdict and both GPUs.

    The GPUs are needed because, if several links of a GPU are slow, the finding names the GPU.
    """
    named, host = facts.circumstances.names_with_ids, node.snapshot.host
    by_bus_id = {gpu.bus_id: gpu for gpu in node.gpus}
    verdicts: dict[str, list[Verdict]] = {}
    ends: dict[str, tuple[str, str]] = {}
    for row in facts.measurements.pairs_from(host):
        one, other = by_bus_id.get(row.source_bus_id), by_bus_id.get(row.destination_bus_id)
        is_here = row.destination_node == host
        if is_here and one is not None and other is not None and row.verdict is not None:
            name = named(number, one, other)
            ends[name] = named(number, one), named(number, other)
            verdicts.setdefault(name, []).append(Verdict(row.verdict))
    worst = {name: worst_verdict(found) for name, found in verdicts.items()}
    return {name: (verdict, ends[name]) for name, verdict in worst.items() if verdict is not Verdict.PASS}


def _verdict_row(
    node: Topology, scope: str, subject: str, findings: Sequence[Finding], figures: Verdict = Verdict.PASS
) -> report.VerdictRow:
    return report.VerdictRow(
        scope=scope,
        node=node.snapshot.host,
        subject=subject,
        verdict=worst_verdict([figures, *(finding.severity for finding in findings)]),
        findings=tuple(dict.fromkeys(finding.id for finding in findings)),
        origin=node.snapshot.origin,
    )
