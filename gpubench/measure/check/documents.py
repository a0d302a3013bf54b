"""The JSON of gpubench's own commands as measurements for checks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gpubench.conditions.registry import CONDITIONS
from gpubench.model.results.curves import HOST
from gpubench.model.results.ending import TOO_NOISY
from gpubench.model.results.measurements import FailedOnNode, Measurements, Need
from gpubench.model.results.report import PAIRS_SECTION, ROWS_SECTION, CollectiveRow, PairRow, Report
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.verdict import WRONG_DATA, Finding

T = TypeVar("T")

JUDGED_BY_CHECKS = frozenset(each.id for each in CONDITIONS if each.check and not each.effects) - {WRONG_DATA}
JUDGED_BY_CHECKS |= {
    TOO_NOISY,
    "gpu-lost",
    "gpu-in-use",
    *(each.id for each in CONDITIONS if each.check == "nvlink_active"),
}
"""Findings of the commands that checks make themselves, from rows and facts."""


def of_p2p(document: Mapping[str, Any]) -> Measurements:
    """The pairs of a `gpubench p2p`, what is known of their paths, and what it found out beside their speed."""
    return Measurements(
        pairs=_rows(document, PAIRS_SECTION, PairRow),
        evidence=_rows(document, EVIDENCE_SECTION, EvidenceRow),
        findings=_findings(document),
    )


def of_collective(document: Mapping[str, Any]) -> Measurements:
    """The rows of a collective and its ranks, and what it found out of paths; wrong elements stand in the rows."""
    return Measurements(
        collectives=_rows(document, ROWS_SECTION, CollectiveRow),
        ranks=tuple(RankIdentity(**rank) for rank in document["metadata"]["ranks"]),
        findings=without_wrong_data(_findings(document)),
    )


def of_node(measured: Measurements, host: str) -> Measurements:
    """The measurements of one of several nodes, by the name that the node has among them."""
    return replace(
        measured,
        pairs=tuple(replace(row, source_node=host, destination_node=host) for row in measured.pairs),
        evidence=tuple(replace(row, source_node=host, destination_node=host) for row in measured.evidence),
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
    told = {*measured.left_out, *measured.failed}
    silent = {need: "nothing of it was found" for need, found in there.items() if not found and need not in told}
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
    """The findings of a collective without wrong data, which stand in its rows.

    The collective itself is not run with --strict, by which NCCL refuses to fall back: a job that NCCL refuses is cut
    short, and has neither pairs nor figures.
    """
    return tuple(each for each in findings if each.id != WRONG_DATA)


def _findings(document: Mapping[str, Any]) -> tuple[Finding, ...]:
    return findings_beside_speed(Report.from_record({"complete": True, **document}).findings)


def _rows(document: Mapping[str, Any], section: str, kind: type[T]) -> tuple[T, ...]:
    return tuple(from_plain(kind, row) for row in document.get(section) or ())
