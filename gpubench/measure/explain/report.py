"""The report on a job from NCCL's log: every path, the causes of staging, the verdict."""

from collections.abc import Iterator, Sequence

from gpubench.conditions.definition.condition import joined
from gpubench.conditions.registry import CAUSES
from gpubench.measure.explain.findings import findings_of
from gpubench.measure.explain.pairs import JudgedRoute, PairJudge, Scope
from gpubench.measure.explain.summary import JobSummary, summarise
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import Communicator, LogFacts, Member
from gpubench.model.results.report import FINDINGS_SECTION, Report, Table
from gpubench.model.results.rows.causes import CAUSES_SECTION, CauseRow
from gpubench.model.results.rows.explain import PATHS_SECTION, CommunicatorRow, MemberRow, PathRow, TransportRow
from gpubench.model.terms.verdict import Verdict, overall

SECTIONS = (PATHS_SECTION, CAUSES_SECTION, "transports", "communicators", "members", FINDINGS_SECTION)


def explain(facts: LogFacts, logs: Sequence[str], tables: Sequence[str] = ()) -> Report:
    """The report on a job; `logs` are the names of the files that were read, `tables` those that hold results."""
    judge = PairJudge(facts)
    summary = summarise(facts, judge)
    findings = findings_of(facts, summary, logs, tables)
    sections = {
        PATHS_SECTION: Table(PathRow.columns(), lambda: path_rows(facts, judge)),
        CAUSES_SECTION: Table(CauseRow.columns(), lambda: cause_rows(summary)),
        "transports": Table(TransportRow.columns(), lambda: [row for each in summary.parts for row in each.transports]),
        "communicators": Table(CommunicatorRow.columns(), lambda: communicator_rows(summary)),
        "members": Table(MemberRow.columns(), lambda: member_rows(facts)),
    }
    heard = [Verdict.PASS] if any(part.pairs for part in summary.parts) else []
    verdict = overall([*heard, *(finding.severity for finding in findings)])
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=PATHS_SECTION)


def path_rows(facts: LogFacts, judge: PairJudge) -> Iterator[PathRow]:
    """A row for every route from one rank to another."""
    for communicator in facts.communicators:
        members = {member.rank: member for member in communicator.members}
        for src, groups in judge.groups(communicator):
            pairs = sorted((dst, place) for place, group in enumerate(groups) for dst in group.destinations)
            for dst, place in pairs:
                for judged in groups[place].judged.routes:
                    pair = communicator, (src, members.get(src)), (dst, members.get(dst))
                    yield _path_row(*pair, groups[place].scope, judged)


def _path_row(
    communicator: Communicator,
    source_end: tuple[int, Member | None],
    destination_end: tuple[int, Member | None],
    scope: Scope,
    judged: JudgedRoute,
) -> PathRow:
    (src, source), (dst, destination) = source_end, destination_end
    route = judged.route
    differs = route.sent is not None and route.received is not None and route.received.name != route.sent.name
    return PathRow(
        communicator=communicator.id,
        src=src,
        dst=dst,
        src_host=source.host if source else None,
        src_pid=source.pid if source else None,
        src_bus_id=source.bus_id if source else None,
        dst_host=destination.host if destination else None,
        dst_pid=destination.pid if destination else None,
        dst_bus_id=destination.bus_id if destination else None,
        scope=scope.value,
        transport=route.transport.name,
        transport_received=route.received.name if differs and route.received else None,
        host_staged=route.host_staged,
        channels=route.channels,
        peer_to_peer=route.peer_to_peer,
        proxy_rank=route.transport.proxy_rank,
        verdict=judged.verdict.value,
        cause=judged.explanation.id if judged.explanation else None,
    )


def cause_rows(summary: JobSummary) -> Iterator[CauseRow]:
    """The causes of staging, in the order in which to look at them."""
    catalogue = {cause.id: cause for cause in CAUSES}
    for explanation, staged in summary.staged.items():
        cause = catalogue.get(explanation.id)
        yield CauseRow(
            id=explanation.id,
            evidence=explanation.evidence,
            advice=explanation.advice,
            paths=staged.paths,
            verdict=staged.verdict.value,
            hosts=tuple(staged.hosts),
            title="nothing in the log explains it" if cause is None else cause.title,
            confidence=Confidence.NONE if cause is None else Confidence.LIKELY,
            effects=() if cause is None else tuple(cause.effects),
            subject=joined(list(staged.hosts)),
            implied_by=None,
            settles="" if cause is None else cause.settles,
            link="" if cause is None else cause.link,
        )


def communicator_rows(summary: JobSummary) -> Iterator[CommunicatorRow]:
    """The communicators in order of appearance."""
    for part in summary.parts:
        communicator = part.communicator
        yield CommunicatorRow(
            id=communicator.id,
            ranks=communicator.size,
            nodes=communicator.nodes,
            hosts=tuple(dict.fromkeys(member.host for member in communicator.members)),
            missing_ranks=communicator.missing_ranks,
            pairs=part.pairs,
            candidates=communicator.candidates,
        )


def member_rows(facts: LogFacts) -> Iterator[MemberRow]:
    """The ranks of every communicator."""
    for communicator in facts.communicators:
        for member in communicator.members:
            yield MemberRow(
                communicator=communicator.id,
                rank=member.rank,
                host=member.host,
                node=member.node,
                pid=member.pid,
                bus_id=member.bus_id,
                nvml_index=member.nvml_index,
            )
