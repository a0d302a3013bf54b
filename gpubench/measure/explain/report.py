"""Report on a job from its log: every path, causes of host staging, failures, and gaps in the log."""

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpubench.conditions.circumstances import joined
from gpubench.conditions.logged import Complained
from gpubench.conditions.registry import CAUSES, CONDITIONS
from gpubench.measure.explain import ucx
from gpubench.measure.explain.hangs import find_hangs_in_log
from gpubench.measure.explain.pairs import (
    Examples,
    JobSummary,
    JudgedRoute,
    PairJudge,
    Part,
    Scope,
    StagedPaths,
    summarise,
)
from gpubench.model.paths.hang import Hang
from gpubench.model.paths.nccl_log import (
    SIGNS_OF_RDMA,
    Communicator,
    LogFacts,
    Member,
    Note,
    RemarkKind,
    summarize_by_size,
)
from gpubench.model.paths.transport import MULTICAST, Confidence
from gpubench.model.results import fallback
from gpubench.model.results.ending import EXCERPT, NOTHING_TO_CONNECT
from gpubench.model.results.report import FINDINGS_SECTION, CauseRow, Effect, Report, Table, make_record
from gpubench.model.terms.units import compress_names, plural, shorten
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Verdict, gravity, worst_verdict
from gpubench.readers.registry import OtherText


def find_failures(facts: LogFacts) -> tuple[Finding, ...]:
    """Return the reasons why the job failed: all specific ones, or else the first general one.

    All other general reasons become consequences of the first finding. A log line is used only for the first condition
    that matches it.
    """
    special, general = list[Finding](), list[Finding]()
    for condition in sorted(CONDITIONS, key=lambda condition: condition.general):
        found = list(condition.findings_in_log(facts))
        (general if condition.general else special).extend(found)
        if found and isinstance(condition.in_job, Complained):
            facts = condition.in_job.without(facts)
    reasons, others = (special, general) if special else (general[:1], general[1:])
    if not reasons:
        return ()
    lines = tuple(f"{other.id}: {other.seen}" for other in others)
    worst = min((finding.severity for finding in (*special, *general)), key=gravity)
    # If a WARN is the only known reason for a failed job, it gets the severity of the failure.
    return (replace(reasons[0], severity=worst, consequences=lines), *reasons[1:])


_DIRECT = "RDMA into GPU memory (GDRDMA)"
_RDMA_VARIABLES = ("NCCL_IB_HCA",)
"""Variables that have an effect only with an RDMA device."""


def _network_findings(facts: LogFacts) -> Iterator[Finding]:
    """Yield network problems that a log shows even if it has no lines about connections."""
    if facts.communicators and all(communicator.nodes == 1 for communicator in facts.communicators):
        return
    notes: dict[RemarkKind, list[Note]] = {}
    for remark in facts.remarks:
        notes.setdefault(remark.note.kind, []).append(remark.note)
    severity = Verdict.FAIL if facts.communicators else Verdict.WARN
    if refused := notes.get(RemarkKind.GDR_DISABLED):
        subjects = [note.about[1] for note in refused]
        yield _finding("gpudirect-refused", severity, subjects, f"NCCL's log: {refused[0].text}", _DIRECT)
    else:
        far = [*notes.get(RemarkKind.GDR_DISTANT, ()), *notes.get(RemarkKind.GDR_FAR, ())]
        if far and not notes.get(RemarkKind.GDR_NEAR):
            yield _finding("gpudirect-too-far", Verdict.WARN, [], f"NCCL's log: {far[0].text}", _DIRECT)
    signs = [note.text for kind in SIGNS_OF_RDMA for note in notes.get(kind, ())]
    signs += [f"{setting.name}={setting.value}" for setting in facts.settings if setting.name in _RDMA_VARIABLES]
    if notes.get(RemarkKind.NO_RDMA_DEVICE) and signs:
        seen = f"NCCL found no usable RDMA device, but the log has {signs[0]}"
        yield _finding("sockets-despite-rdma", severity, [], seen, "an RDMA device that NCCL can open")


def _finding(id_: str, severity: Verdict, subjects: Sequence[str], seen: str, expected: str) -> Finding:
    condition = next(cause for cause in CAUSES if cause.id == id_)
    return Finding(
        id=id_,
        severity=severity,
        subject=joined(subjects) or "the network between nodes",
        seen=seen,
        expected=expected,
        cause=condition.title,
        cure=condition.cure,
    )


PATH_UNKNOWN = "path-unknown"
NO_CONNECTIONS = "no-connections"
RANKS_MISSING = "ranks-missing"

_RELEASE = re.compile(r"(\d+)\.(\d+)")
_LAZY_SINCE = (2, 22)
_MOST_SUBJECTS = 4
_MOST_NUMBERS = 12
_LOG_FILES = "NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log"
_RUN_AGAIN = "Between the two commands, run the job again with these variables in every rank's environment."
_LOG_EVERY_RANK, _LOG_CONNECTIONS = (
    Cure.of(f"export NCCL_DEBUG=INFO {subsystems}{_LOG_FILES}", "gpubench explain /tmp/nccl.*.log", comment=_RUN_AGAIN)
    for subsystems in ("", "NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING ")
)
_DIRECT_BY_SCOPE = {
    Scope.INSIDE: "peer access (P2P)",
    Scope.ACROSS: "RDMA into GPU memory (GDRDMA)",
    Scope.UNKNOWN: "P2P",
}
_WITH_CONNECTIONS = ("RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "PAT")


def _findings(
    facts: LogFacts, summary: JobSummary, logs: Sequence[str], others: Sequence[OtherText] = ()
) -> tuple[Finding, ...]:
    """Return the reasons why the job failed, host-staged paths (root causes first), then gaps in the log.

    The log of a failed job may lack connections. `others` are files by other programs, without NCCL lines.
    """
    failures = find_failures(facts)
    staged = tuple(_staged_finding(summary, explanation, paths) for explanation, paths in summary.staged.items())
    failed = tuple(failure for failure in failures if failure.severity is Verdict.FAIL)
    doubted = tuple(failure for failure in failures if failure.severity is not Verdict.FAIL)
    unread = [
        _doubt(
            "log-limit",
            _join_names(logs),
            f"{limit.seen}{f' ({limit.times} times)' if limit.times > 1 else ''}: the report covers the text before it",
            f"at most {limit.most}",
            "logs of several jobs in one file, a damaged log, or a log made to slow down its reader",
            Cure(comment="Pass only the logs of one job, or of fewer ranks, to `gpubench explain`."),
        )
        for limit in facts.limits
    ]
    by_ucx = sorted(ucx.findings(facts.ucx), key=lambda finding: gravity(finding.severity))
    gaps = () if failed else _gap_findings(facts, summary, logs, others)
    return (*failed, *staged, *by_ucx, *doubted, *gaps, *unread)


def _staged_finding(summary: JobSummary, explanation: fallback.Explanation, staged: StagedPaths) -> Finding:
    subjects = [
        f"{_pair_names(examples)} of {_communicator_name(summary.parts[number].communicator)}"
        for number, examples in staged.pairs.items()
    ]
    is_direct = all(transport.endswith("/GDRDMA") for transport in staged.transports)
    path = "over the network inside a node" if is_direct and Scope.INSIDE in staged.scopes else "through host memory"
    return Finding(
        id=explanation.id if is_direct else HOST_STAGED,
        severity=staged.verdict,
        subject=shorten(subjects),
        seen=f"{path} ({_join_names(list(staged.transports))}) on {compress_names(sorted(staged.hosts))}",
        expected=_expected(explanation, staged),
        cause=f"{explanation.id}: {explanation.evidence}",
        cure=explanation.cure,
        subjects=tuple(subjects),
    )


def _expected(explanation: fallback.Explanation, staged: StagedPaths) -> str:
    if staged.verdict is Verdict.SKIP:
        return "host memory, by design"
    effects = next((cause.effects for cause in CAUSES if cause.id == explanation.id), ())
    scopes = [Scope.INSIDE] if Effect.NETWORK_INSIDE in effects else list(staged.scopes)
    unless = ", unless this is by design" if staged.verdict is Verdict.WARN else ""
    return shorten([_DIRECT_BY_SCOPE[scope] for scope in scopes]) + unless


def _gap_findings(
    facts: LogFacts, summary: JobSummary, logs: Sequence[str], others: Sequence[OtherText]
) -> Iterator[Finding]:
    if not any(part.pairs for part in summary.parts):
        yield from _network_findings(facts)
        yield from _unconnected(facts, logs, others)
        if len(facts.records) == 1 and not facts.ras:
            yield _doubt(
                RANKS_MISSING,
                _join_names(logs),
                f"only the dump of rank {facts.records[0].rank}",
                "a dump of every rank",
                "the other ranks write their dumps on their own nodes, or died before",
                Cure(comment="Collect the dumps of all ranks in one folder, and pass it to `gpubench explain`."),
            )
    else:
        yield from _unknown_transports(summary.parts)
        yield from _missing_line_findings(facts, summary.parts)
    yield from _dump_findings(facts)
    if facts.unreadable:
        yield _doubt(
            "lines-unreadable",
            _join_names(logs),
            f"{plural(facts.unreadable, 'line')} of connections, truncated or garbled",
            "complete lines",
            "several processes writing to one file, or a truncated log",
            _LOG_EVERY_RANK,
        )
    if facts.left_out:
        yield _doubt(
            "lines-left-out",
            _join_names(logs),
            f"Ray left out {plural(facts.left_out, 'line')} as repetitions, including lines of other ranks",
            "every rank's lines",
            "Ray's log collector shows only one of several lines that differ only by numbers",
            Cure.of("export RAY_DEDUP_LOGS=0", comment="Set it for the Ray driver and run the job again."),
        )
    if facts.cut_files:
        yield _doubt(
            "log-cut-off",
            _join_names(facts.cut_files),
            "a truncated or damaged gzip file",
            "a complete gzip file",
            "the file was truncated while it was written or copied",
            Cure.of(f"gzip -t {facts.cut_files[0]}"),
        )


def _unconnected(facts: LogFacts, logs: Sequence[str], others: Sequence[OtherText]) -> Iterator[Finding]:
    """Report a log without any connection of NCCL, unless it shows something else."""
    has_other_evidence = _has_other_evidence(facts)
    programs = {other.what.partition("'")[0] for other in others}
    kv_gap = ucx.missing_payload(facts.ucx, _join_names(logs))
    is_other = bool(programs & {"ucx_info", "a Markdown document"}) and not facts.ucx.tables
    if kv_gap is not None and not (facts.nccl_lines or has_other_evidence or is_other):
        yield kv_gap
    elif others and (facts.nccl_lines or not has_other_evidence):
        yield _error(
            NO_CONNECTIONS,
            _join_names([other.name for other in others]),
            f"{others[0].what} in {plural(facts.lines, 'line')}, without NCCL lines",
            "NCCL's log with connection lines, such as ... via P2P/CUMEM",
            "the output of another program, or of a benchmark without NCCL_DEBUG=INFO",
            others[0].cure,
        )
    elif facts.communicators or not has_other_evidence or (facts.nccl_lines and not ucx.is_judged(facts.ucx)):
        yield _no_connections(facts, logs)


def _no_connections(facts: LogFacts, logs: Sequence[str]) -> Finding:
    if not facts.nccl_lines:
        seen, cause = f"{plural(facts.lines, 'line')}, none from NCCL", "NCCL logs only if NCCL_DEBUG is set"
    elif not facts.communicators:
        seen = f"{plural(facts.nccl_lines, 'NCCL line')}, but no connection line"
        cause = "NCCL_DEBUG is VERSION or WARN, NCCL_DEBUG_SUBSYS does not include INIT, or the job ended too early"
    elif all(communicator.size == 1 for communicator in facts.communicators):
        return Finding(
            id=NOTHING_TO_CONNECT,
            severity=Verdict.SKIP,
            subject=_join_names(logs),
            seen=f"{plural(len(facts.communicators), 'communicator')} of one rank each",
            expected="two or more ranks",
            cause="a single rank has no connections",
            cure=Cure.of("gpubench allreduce", comment="It measures all GPUs of a node."),
        )
    else:
        seen = f"{plural(len(facts.communicators), 'communicator')}, none of them connected"
        cause = "the job or this log ended before ranks first communicated, which is when NCCL connects them"
    return _error(
        NO_CONNECTIONS, _join_names(logs), seen, "connection lines, such as ... via P2P/CUMEM", cause, _LOG_CONNECTIONS
    )


def _unknown_transports(parts: Sequence[Part]) -> Iterator[Finding]:
    names = dict.fromkeys(name for part in parts for name in part.unknown)
    for name in list(names)[:_MOST_SUBJECTS]:
        subjects = [
            f"{_pair_names(part.unknown[name])} of {_communicator_name(part.communicator)}"
            for part in parts
            if name in part.unknown
        ]
        yield _doubt(
            PATH_UNKNOWN,
            shorten(subjects),
            f"unknown transport {name!r}",
            "a transport of NCCL 2.10 to 2.32",
            "a newer NCCL, or a damaged line",
            Cure.of("gpubench p2p", comment="Compare its paths, and report this line to gpubench."),
        )
    if len(names) > _MOST_SUBJECTS:
        yield _doubt(
            PATH_UNKNOWN,
            "more",
            f"{len(names) - _MOST_SUBJECTS} more unknown transports",
            "transports of NCCL 2.10 to 2.32",
            "a newer NCCL, or damaged lines",
            Cure(comment="`gpubench explain --format csv --section transports` lists them."),
        )


def _missing_line_findings(facts: LogFacts, parts: Sequence[Part]) -> Iterator[Finding]:
    missing = {
        _communicator_name(part.communicator): f"no log of rank {_numbers(part.communicator.missing_ranks)}"
        for part in parts
        if part.communicator.missing_ranks
    }
    yield from _merged_finding(
        RANKS_MISSING, missing, "a log of every rank", "these ranks write their logs to another place"
    )
    quiet = {
        _communicator_name(part.communicator): f"a log without connections of rank {_numbers(part.unconnected_ranks)}"
        for part in parts
        if part.unconnected_ranks
    }
    yield from _merged_finding("ranks-silent", quiet, "connections of every rank", "the log is truncated")
    halves = {
        _communicator_name(part.communicator): f"a line from only one end of {_pair_names(part.one_ended)}"
        for part in parts
        if part.one_ended.count
    }
    yield from _merged_finding(
        "ends-missing", halves, "both ends of a network connection", "a truncated or damaged log"
    )
    unused = {
        _communicator_name(part.communicator): "operations without a connection"
        for part in parts
        if not part.pairs and any(tuning.algorithm in _WITH_CONNECTIONS for tuning in part.communicator.tunings)
    }
    yield from _merged_finding(NO_CONNECTIONS, unused, "connections", "truncated logs")
    numbers = [tuple(map(int, found.groups())) for version in facts.versions if (found := _RELEASE.match(version))]
    is_eager = bool(numbers) and max(numbers) < _LAZY_SINCE
    unheard = {
        _communicator_name(part.communicator): "no connection of any rank"
        for part in parts
        if not part.pairs and (part.communicator.size or 0) > 1 and is_eager
    }
    cause = "lost lines, because NCCL before 2.22 connects ranks when it creates a communicator"
    yield from _merged_finding("ranks-silent", unheard, "connections of every rank", cause)
    apart = {
        _communicator_name(
            part.communicator
        ): f"NVLS inside {part.communicator.nodes} nodes, but no connection between them"
        for part in parts
        if (part.communicator.nodes or 0) > 1 and {row.transport for row in part.transports} == {MULTICAST.name}
    }
    yield from _merged_finding("ranks-silent", apart, "connections between nodes", "the log is truncated")
    ambiguous = {
        _communicator_name(part.communicator): f"{plural(part.pairs, 'pair')} of ranks that may belong to each of these"
        for part in parts
        if part.pairs and part.communicator.candidates
    }
    cause = "several communicators of one process have these ranks, and NCCL's lines do not name the communicator"
    yield from _merged_finding("communicator-ambiguous", ambiguous, "connections of one communicator", cause)
    has_beginning = any(remark.note.kind is RemarkKind.BOOTSTRAP for remark in facts.remarks) and bool(facts.versions)
    yield from _nameless_findings(parts, has_beginning=has_beginning)


def _nameless_findings(parts: Sequence[Part], *, has_beginning: bool) -> Iterator[Finding]:
    nameless = [
        part for part in parts if part.pairs and part.communicator.id is None and not part.communicator.candidates
    ]
    if not nameless:
        return
    seen = {_communicator_name(part.communicator): f"{plural(part.pairs, 'pair')} of ranks" for part in nameless}
    if len(nameless) == len(parts) and has_beginning:
        yield from _merged_finding(
            "nccl-init-unfinished",
            seen,
            "a line that ends the initialization of a communicator",
            "the job hangs or ended during initialization, or lines are missing",
        )
    elif len(nameless) == len(parts):
        yield Finding(
            id=EXCERPT,
            severity=Verdict.SKIP,
            subject=shorten(list(seen)),
            seen=f"{'; '.join(dict.fromkeys(seen.values()))}, out of an unknown total, because the log has no "
            "line that begins a communicator",
            expected="the log from its beginning",
            cause="an excerpt of a log, or NCCL_DEBUG_SUBSYS without INIT (the result covers only the pairs in it)",
            cure=_LOG_EVERY_RANK,
            subjects=tuple(seen),
        )
    else:
        cause = "the beginning of the logs is missing, or NCCL_DEBUG_SUBSYS does not include INIT"
        yield from _merged_finding("communicator-unknown", seen, "lines that name the communicator", cause)


def _merged_finding(id_: str, seen_by_subject: Mapping[str, str], expected: str, cause: str) -> Iterator[Finding]:
    same: dict[str, list[str]] = {}
    for subject, seen in seen_by_subject.items():
        same.setdefault(seen, []).append(subject)
    for seen, subjects in same.items():
        doubt = _doubt(id_, shorten(subjects), seen, expected, cause, _LOG_EVERY_RANK)
        yield replace(doubt, subjects=tuple(subjects))


def _error(id_: str, subject: str, seen: str, expected: str, cause: str, cure: Cure) -> Finding:
    return Finding(id_, Verdict.ERROR, subject, seen, expected, cause, cure)


def _dump_findings(facts: LogFacts) -> Iterator[Finding]:
    """Yield warnings about dumps without a collective, and about sends and receives that did not finish."""
    waiting = [f"rank {record.rank}" for record in facts.records if record.unfinished_sends]
    if waiting:
        yield _doubt(
            "sends-unfinished",
            shorten(waiting, _MOST_SUBJECTS),
            f"sends or receives that did not end: {sum(record.unfinished_sends for record in facts.records)}",
            "sends and receives that end",
            "a pipeline stage that waits for another one, or a dump of a running job (only collectives are "
            "judged here)",
            Cure(comment="`py-spy dump` with the process ids of these ranks shows the lines where they are."),
        )
    empty = [f"rank {record.rank}" for record in facts.records if not record.calls and not record.unfinished_sends]
    if empty:
        yield _doubt(
            "dumps-empty",
            shorten(empty, _MOST_SUBJECTS),
            "dumps without a collective",
            "the collectives of every rank",
            "the recorder was off, or the rank had not called any yet",
            Cure.of(
                "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
                comment="Run the job again with this variable in every rank's environment.",
            ),
        )


def _doubt(id_: str, subject: str, seen: str, expected: str, cause: str, cure: Cure) -> Finding:
    return Finding(id_, Verdict.WARN, subject, seen, expected, cause, cure)


def _communicator_name(communicator: Communicator) -> str:
    if communicator.id is None:
        candidates = fallback.name_candidates(communicator.candidates)
        return f"communicator {candidates}" if candidates else "a communicator without a name"
    return f"communicator {communicator.id}"


def _pair_names(examples: Examples) -> str:
    return shorten([f"{src} → {dst}" for src, dst in examples.first], _MOST_SUBJECTS, examples.count)


def _join_names(names: Sequence[str]) -> str:
    return shorten(names) or "nothing"


def _numbers(numbers: Sequence[int]) -> str:
    """Return rank numbers as ranges, for example '0, 2-5'."""
    ranges = compress_names([str(number) for number in numbers]).split(", ")
    return shorten(ranges, _MOST_NUMBERS) + (" ranges" if len(ranges) > _MOST_NUMBERS else "")


SECTIONS = ("paths", "kv_paths", "causes", "transports", "communicators", "members", "hangs", "operations", "findings")


def explain(facts: LogFacts, logs: Sequence[str], others: Sequence[OtherText] = ()) -> Report:
    """Return the report on a job.

    `logs` are the names of the parsed files, and `others` are files by other programs.
    """
    facts = replace(facts, hangs=find_hangs_in_log(facts))
    judge = PairJudge(facts)
    summary = summarise(facts, judge)
    findings = _findings(facts, summary, logs, others)
    sections = Table.group_by_section(
        {
            fallback.PathRow: lambda: _path_rows(facts, judge),
            fallback.KvPathRow: lambda: ucx.rows(facts.ucx),
            CauseRow: lambda: _cause_rows(summary),
            fallback.TransportRow: lambda: [row for part in summary.parts for row in part.transports],
            fallback.CommunicatorRow: lambda: _communicator_rows(summary),
            fallback.MemberRow: lambda: [
                make_record(fallback.MemberRow, member, communicator=communicator.id)
                for communicator in facts.communicators
                for member in communicator.members
            ],
            fallback.HangRow: lambda: _hang_rows(facts),
            fallback.OperationRow: lambda: [
                make_record(fallback.OperationRow, operation) for operation in summarize_by_size(facts.inspected)
            ],
        }
    )
    has_evidence = _has_other_evidence(facts) or any(part.pairs for part in summary.parts)
    verdict = worst_verdict([*([Verdict.PASS] if has_evidence else []), *(finding.severity for finding in findings)])
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=fallback.PathRow.section)


WATCHED_SECTIONS = (fallback.HangRow.section, FINDINGS_SECTION)


def report_on_hangs(hangs: Sequence[Hang], *, is_judged: bool) -> Report:
    """Return the report on hangs of running jobs. The verdict is SKIP at best if no job was seen to make progress."""
    facts = LogFacts(hangs=tuple(hangs))
    findings = find_failures(facts)
    verdict = worst_verdict([Verdict.PASS if is_judged else Verdict.SKIP, *(finding.severity for finding in findings)])
    sections = Table.group_by_section({fallback.HangRow: lambda: _hang_rows(facts)})
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=fallback.HangRow.section)


def _has_other_evidence(facts: LogFacts) -> bool:
    """True if dumps, RAS answers, operation times or UCX's choice of a path were read."""
    return bool(facts.records or facts.ras or facts.inspected) or ucx.is_judged(facts.ucx)


def _path_rows(facts: LogFacts, judge: PairJudge) -> Iterator[fallback.PathRow]:
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
) -> fallback.PathRow:
    (src, source), (dst, destination) = source_end, destination_end
    route = judged.route
    differs = route.sent is not None and route.received is not None and route.received.name != route.sent.name
    return fallback.PathRow(
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


def _cause_rows(summary: JobSummary) -> Iterator[CauseRow]:
    catalogue = {cause.id: cause for cause in CAUSES}
    for explanation, staged in summary.staged.items():
        cause = catalogue.get(explanation.id)
        yield CauseRow(
            id=explanation.id,
            evidence=explanation.evidence,
            **fallback.cure_columns(explanation.cure),
            paths=staged.paths,
            verdict=staged.verdict.value,
            hosts=tuple(staged.hosts),
            title="the log does not explain it" if cause is None else cause.title,
            confidence=Confidence.NONE if cause is None else Confidence.LIKELY,
            effects=() if cause is None else tuple(cause.effects),
            subject=joined(list(staged.hosts)),
            implied_by=None,
            settles="" if cause is None else cause.settles,
            link="" if cause is None else cause.link,
        )


def _communicator_rows(summary: JobSummary) -> Iterator[fallback.CommunicatorRow]:
    for part in summary.parts:
        communicator = part.communicator
        yield fallback.CommunicatorRow(
            id=communicator.id,
            ranks=communicator.size,
            nodes=communicator.nodes,
            hosts=tuple(dict.fromkeys(member.host for member in communicator.members)),
            missing_ranks=communicator.missing_ranks,
            pairs=part.pairs,
            candidates=communicator.candidates,
        )


def _hang_rows(facts: LogFacts) -> Iterator[fallback.HangRow]:
    for hang in facts.hangs:
        yield make_record(fallback.HangRow, hang, reason=hang.reason.value)
