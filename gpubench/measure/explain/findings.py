"""The findings on a job's log: what is staged and why, and what the log does not say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpubench.measure.explain.pairs import Scope
from gpubench.measure.explain.summary import Examples, JobSummary, Part, StagedPaths
from gpubench.model.paths.nccl_log import Communicator, LogFacts, RemarkKind
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.rows.explain import either
from gpubench.model.terms.units import compress_names, counted, some_of
from gpubench.model.terms.verdict import HOST_STAGED, Finding, Verdict

PATH_UNKNOWN = "path-unknown"
NO_CONNECTIONS = "no-connections"

_MOST_SUBJECTS = 4
_MOST_NUMBERS = 12
_TO_READ_THEM = "NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log in every rank's environment; gpubench explain /tmp/nccl.*.log"
_LOGS_OF_ALL = f"NCCL_DEBUG=INFO {_TO_READ_THEM}"
_CONNECTIONS_TOO = f"NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING {_TO_READ_THEM}"
_DIRECT = {Scope.INSIDE: "peer access (P2P)", Scope.ACROSS: "RDMA into GPU memory (GDRDMA)", Scope.UNKNOWN: "P2P"}
_WITH_CONNECTIONS = ("RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "PAT")


def findings_of(facts: LogFacts, summary: JobSummary, logs: Sequence[str]) -> tuple[Finding, ...]:
    """The findings: what is staged, first causes first, then what is not known."""
    staged = (_staged(summary, explanation, paths) for explanation, paths in summary.staged.items())
    return (*staged, *_not_known(facts, summary, logs))


def _staged(summary: JobSummary, explanation: Explanation, staged: StagedPaths) -> Finding:
    subjects = [
        f"{_pairs(examples)} of {name_of(summary.parts[number].communicator)}"
        for number, examples in staged.pairs.items()
    ]
    return Finding(
        id=HOST_STAGED,
        severity=staged.verdict,
        subject=some_of(subjects),
        seen=f"through host memory: {_listed(list(staged.transports))}; on {compress_names(sorted(staged.hosts))}",
        expected="this, by design"
        if staged.verdict is Verdict.SKIP
        else some_of([_DIRECT[each] for each in staged.scopes]),
        cause=f"{explanation.id}: {explanation.evidence}",
        next_command=explanation.advice,
        subjects=tuple(subjects),
    )


def _not_known(facts: LogFacts, summary: JobSummary, logs: Sequence[str]) -> Iterator[Finding]:
    if not any(part.pairs for part in summary.parts):
        yield _no_connections(facts, logs)
    else:
        yield from _unknown_transports(summary.parts)
        yield from _missing(summary.parts)
    refused = [remark.note for remark in facts.remarks if remark.note.kind is RemarkKind.NO_TRANSPORT]
    if refused:
        yield _error(
            "no-transport",
            some_of([" → ".join(filter(None, note.about)) or "ranks" for note in refused]),
            f"NCCL gave up: {refused[0].text}",
            "a transport for every pair",
            "every transport was refused or switched off: NCCL_SHM_DISABLE, NCCL_NET_DISABLE_INTRA, NCCL_P2P_DISABLE",
            "gpubench topo shows peer access; with fewer such variables NCCL falls back",
        )
    if facts.unreadable:
        yield _error(
            "lines-unreadable",
            _listed(logs),
            f"{counted(facts.unreadable, 'line')} of connections, cut off or garbled",
            "whole lines",
            "processes that write into one file at a time, or a log that ends in the middle",
            _LOGS_OF_ALL,
        )


def _no_connections(facts: LogFacts, logs: Sequence[str]) -> Finding:
    if not facts.nccl_lines:
        seen, cause = f"{counted(facts.lines, 'line')}, none of them NCCL's", "NCCL logs nothing unless it is asked to"
    elif not facts.communicators:
        seen = f"{counted(facts.nccl_lines, 'line')} of NCCL's, none of a connection"
        cause = "NCCL_DEBUG was VERSION or WARN, NCCL_DEBUG_SUBSYS left INIT out, or the job ended too early"
    else:
        seen = f"{counted(len(facts.communicators), 'communicator')}, none of them connected"
        cause = "NCCL connects ranks when they first communicate, and the job did not get there; or there is one rank"
    return _error(
        NO_CONNECTIONS, _listed(logs), seen, "lines of connections: ... via P2P/CUMEM", cause, _CONNECTIONS_TOO
    )


def _unknown_transports(parts: Sequence[Part]) -> Iterator[Finding]:
    names = dict.fromkeys(name for part in parts for name in part.unknown)
    for name in list(names)[:_MOST_SUBJECTS]:
        subjects = [
            f"{_pairs(part.unknown[name])} of {name_of(part.communicator)}" for part in parts if name in part.unknown
        ]
        yield _error(
            PATH_UNKNOWN,
            some_of(subjects),
            f"the transport {name!r}, which gpubench does not know",
            "a transport of NCCL 2.10 to 2.32",
            "a newer NCCL, or a damaged line",
            "compare with gpubench p2p, and report the line",
        )
    if len(names) > _MOST_SUBJECTS:
        yield _error(
            PATH_UNKNOWN,
            "more",
            f"{len(names) - _MOST_SUBJECTS} more transports that gpubench does not know",
            "transports of NCCL 2.10 to 2.32",
            "a newer NCCL, or damaged lines",
            "gpubench explain --format csv --section transports lists them",
        )


def _missing(parts: Sequence[Part]) -> Iterator[Finding]:
    """Ranks, ends and communicators whose lines are missing."""
    missing = {
        name_of(part.communicator): f"no log of rank {_numbers(part.communicator.missing_ranks)}"
        for part in parts
        if part.communicator.missing_ranks
    }
    yield from _merged("ranks-missing", missing, "a log of every rank", "these ranks write elsewhere")
    quiet = {
        name_of(part.communicator): f"no connection of rank {_numbers(part.unconnected_ranks)}, of which there is a log"
        for part in parts
        if part.unconnected_ranks
    }
    yield from _merged("ranks-silent", quiet, "connections of every rank", "its log is cut off")
    halves = {
        name_of(part.communicator): f"one end's line alone of {_pairs(part.one_ended)}"
        for part in parts
        if part.one_ended.count
    }
    yield from _merged("ends-missing", halves, "both ends of a network connection", "a log is cut off or was damaged")
    unused = {
        name_of(part.communicator): "operations, and no connection that carries them"
        for part in parts
        if not part.pairs and any(each.algorithm in _WITH_CONNECTIONS for each in part.communicator.tunings)
    }
    yield from _merged(NO_CONNECTIONS, unused, "connections", "logs are cut off")
    strange = {
        name_of(part.communicator): f"{counted(part.pairs, 'pair')} of ranks, of how many the log does not say"
        for part in parts
        if part.pairs and part.communicator.id is None and not part.communicator.candidates
    }
    cause = "the beginning of the logs is missing, or NCCL_DEBUG_SUBSYS left INIT out"
    yield from _merged("communicator-unknown", strange, "lines that name the communicator", cause)


def _merged(id_: str, seen_by_subject: Mapping[str, str], expected: str, cause: str) -> Iterator[Finding]:
    """One finding for all subjects of which the same was seen."""
    same: dict[str, list[str]] = {}
    for subject, seen in seen_by_subject.items():
        same.setdefault(seen, []).append(subject)
    for seen, subjects in same.items():
        error = _error(id_, some_of(subjects), seen, expected, cause, f"give the logs of all ranks: {_LOGS_OF_ALL}")
        yield replace(error, subjects=tuple(subjects))


def _error(id_: str, subject: str, seen: str, expected: str, cause: str, next_command: str) -> Finding:
    return Finding(id_, Verdict.ERROR, subject, seen, expected, cause, next_command)


def name_of(communicator: Communicator) -> str:
    """A communicator as people tell it from others."""
    if communicator.id is None:
        named = either(communicator.candidates)
        return f"communicator {named}" if named else "a communicator without a name"
    return f"communicator {communicator.id}"


def _pairs(examples: Examples) -> str:
    return some_of([f"{src} → {dst}" for src, dst in examples.first], _MOST_SUBJECTS, examples.count)


def _listed(names: Sequence[str]) -> str:
    return some_of(names) or "nothing"


def _numbers(numbers: Sequence[int]) -> str:
    """Ranks in ranges: '0, 2-5'."""
    ranges = compress_names([str(number) for number in numbers]).split(", ")
    return some_of(ranges, _MOST_NUMBERS) + (" ranges" if len(ranges) > _MOST_NUMBERS else "")
