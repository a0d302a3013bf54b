"""Rows and findings about paths that fall back to host memory, with slowdown and cause, and the rows of `explain`."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.paths.transport import (
    Conclusion,
    Confidence,
    Judgement,
    PathEvidence,
    Transport,
    decide,
    join_names,
    judge,
)
from gpubench.model.results import report
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import format_bandwidth, group_by, shorten
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Verdict


class Explanation(Struct, frozen=True):
    """The cause of host-staged paths. `by_design` means that nothing needs repair. `in_doubt` means that this is
    likely.
    """

    id: str
    evidence: str
    cure: Cure
    by_design: bool = False
    in_doubt: bool = False


def read_cure(row: Any) -> Cure:
    """Return the cure from the columns `advice`, `commands` and `comment`. Rows from earlier versions only have
    `advice`.
    """
    has_cure = row.commands or row.comment
    return Cure(row.commands, row.comment or "") if has_cure else Cure(comment=row.advice or "")


def cure_columns(cure: Cure | None) -> dict[str, Any]:
    """Return a cure as the columns `advice`, `commands` and `comment`."""
    return {} if cure is None else {"advice": cure.text, "commands": cure.commands, "comment": cure.comment or None}


PATH_UNKNOWN = "path-unknown"
PATH_DISPUTED = "path-disputed"  # IDs of two findings
_MOST_PAIRS = 4
_MOST_NAMED = 1000
MOST_ROWS = 10_000
_KINDS = ("capability", "selection", "measurement", "correctness")
_LEAST_SURE_FIRST = (Confidence.NONE, Confidence.WEAK, Confidence.LIKELY, Confidence.PROVEN)
_GRAVEST_FIRST = (Conclusion.WRONG, Conclusion.STAGED, Conclusion.DISPUTED, Conclusion.UNKNOWN, Conclusion.DIRECT)


class End(Struct, frozen=True):
    """One end of a path: a rank or a GPU. `name` is for example 'rank 0', and `short` is its name in pairs: '0'."""

    name: str
    short: str
    node: str
    bus_id: str | None
    device: str | None = None

    @property
    def place(self) -> DevicePlace:
        return DevicePlace(self.node, self.device, self.bus_id)


class KnownPath(Struct, frozen=True, kw_only=True):
    """A path with its evidence. `bandwidth_gb_s` is measured, and `limit_gb_s` is per direction.

    `cause` is the ID of the most likely cause if the path is host-staged. It is empty if no cause is known.
    """

    source: End
    destination: End
    evidence: PathEvidence
    transports: tuple[Transport, ...] = ()
    path_class: str | None = None
    bandwidth_gb_s: float | None = None
    limit_gb_s: float | None = None
    cause: str = ""

    @property
    def judgement(self) -> Judgement:
        return judge(self.evidence)

    @property
    def pair(self) -> str:
        """The short names of both ends: '0 → 1'."""
        return f"{self.source.short} → {self.destination.short}"


def evidence_rows(paths: Sequence[KnownPath], origin: str) -> list[report.EvidenceRow]:
    """Return one row per path. If there are more than 10,000 paths, omit the direct ones."""
    shown = paths
    if len(paths) > MOST_ROWS:
        shown = [path for path in paths if path.judgement.conclusion is not Conclusion.DIRECT]
    return [_make_evidence_row(path, origin) for path in shown]


def _make_evidence_row(path: KnownPath, origin: str) -> report.EvidenceRow:
    evidence, judgement = path.evidence, path.judgement
    staged = {Conclusion.STAGED: True, Conclusion.DIRECT: False}.get(judgement.conclusion)
    return report.make_record(
        report.EvidenceRow,
        path,
        judgement,
        source=path.source.name,
        destination=path.destination.name,
        source_node=path.source.node,
        destination_node=path.destination.node,
        source_bus_id=path.source.bus_id,
        destination_bus_id=path.destination.bus_id,
        origin=origin,
        transport=join_names(path.transports),
        host_staged=staged,
        **{kind: getattr(evidence, kind).state for kind in _KINDS},
        **{f"{kind}_seen": getattr(evidence, kind).seen for kind in _KINDS},
        by_design=evidence.by_design or None,
        meaning=decide(evidence).meaning,
    )


def fallback_rows(
    paths: Sequence[KnownPath],
    origin: str,
    cause_of: Callable[[Sequence[KnownPath]], Explanation],
    not_observed: str = "",
    without_paths: Sequence[str] = (),
) -> list[report.FallbackRow]:
    """Return one row per group of similar paths, with the confidence of its least certain path. The worst group
    comes first.

    `cause_of` returns the main cause for staged paths. `not_observed` explains why transports are unknown.
    `without_paths` are ends that should have paths but have none.
    """
    groups = group_by(
        paths,
        lambda path: (
            path.judgement.conclusion,
            path.judgement.verdict,
            join_names(path.transports),
            path.limit_gb_s,
            path.cause,
        ),
    )
    rows = [_make_fallback_row(members, origin, cause_of, not_observed) for members in groups.values()]
    if without_paths:
        rows.append(unknown_row(origin, "no log names their connections", [f"{end} → ?" for end in without_paths]))
    if not_observed and not paths:
        rows.append(unknown_row(origin, not_observed))
    return sorted(rows, key=lambda row: (_GRAVEST_FIRST.index(Conclusion(row.conclusion)), row.verdict == Verdict.SKIP))


def _make_fallback_row(
    members: Sequence[KnownPath], origin: str, cause_of: Callable[[Sequence[KnownPath]], Explanation], not_observed: str
) -> report.FallbackRow:
    first = min(members, key=lambda path: _LEAST_SURE_FIRST.index(path.judgement.confidence))
    judgement = first.judgement
    cause = cause_of(members) if judgement.conclusion is Conclusion.STAGED else None
    slowest = min((path.bandwidth_gb_s for path in members if path.bandwidth_gb_s), default=None)
    limit = first.limit_gb_s
    seen = [getattr(first.evidence, kind).seen for kind in _KINDS]
    unknown_because = not_observed if judgement.conclusion is Conclusion.UNKNOWN or not first.transports else ""
    return report.make_record(
        report.FallbackRow,
        judgement,
        origin=origin,
        count=len(members),
        pairs=tuple(path.pair for path in members[:_MOST_NAMED]),
        transport=join_names(first.transports),
        bandwidth_gb_s=slowest,
        limit_gb_s=limit,
        times_slower=limit / slowest if limit and slowest else None,
        cause=None if cause is None else cause.id,
        cause_seen=None if cause is None else cause.evidence,
        **cure_columns(None if cause is None else cause.cure),
        how="; ".join(dict.fromkeys(filter(None, (decide(first.evidence).meaning, *seen, unknown_because)))),
    )


def unknown_row(origin: str, why: str, pairs: Sequence[str] = ()) -> report.FallbackRow:
    """Return a row for paths without evidence, or for a report without any paths."""
    named = tuple(pairs[:_MOST_NAMED])
    return report.make_record(
        report.FallbackRow, judge(PathEvidence()), origin=origin, count=len(pairs), pairs=named, how=why
    )


def make_findings(rows: Sequence[report.FallbackRow], paths: Sequence[KnownPath] = ()) -> tuple[Finding, ...]:
    """Return the findings for fallback rows. Another module makes the finding for wrong data."""
    by_pair = {path.pair: path for path in paths}
    members = ([by_pair[pair] for pair in row.pairs if pair in by_pair] for row in rows)
    places = (
        tuple(dict.fromkeys(end.place for path in own for end in (path.source, path.destination))) for own in members
    )
    return _joined(
        replace(finding, places=at) for row, at in zip(rows, places, strict=True) for finding in _make_row_findings(row)
    )


def _joined(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ only in their paths. Rows with different limits cause such findings."""
    alike = group_by(found, lambda finding: replace(finding, subject="", subjects=(), places=()))
    merged = []
    for same in alike.values():
        pairs = tuple(chain.from_iterable(finding.subjects for finding in same))
        places = tuple(dict.fromkeys(chain.from_iterable(finding.places for finding in same)))
        subject = same[0].subject if len(same) == 1 else _lead(pairs) + shorten(pairs)
        merged.append(replace(same[0], subject=subject, subjects=pairs, places=places))
    return tuple(merged)


def _make_row_findings(row: report.FallbackRow) -> tuple[Finding, ...]:
    match Conclusion(row.conclusion):
        case Conclusion.STAGED:
            return (_staged(row),)
        case Conclusion.DISPUTED:
            return (_finding(PATH_DISPUTED, row, "evidence that agrees", "a counter, a driver or a log is wrong"),)
        case Conclusion.UNKNOWN:
            return (_finding(PATH_UNKNOWN, row, "evidence of the path", "the needed evidence was not available"),)
        case _:
            return ()


def _staged(row: report.FallbackRow) -> Finding:
    return Finding(
        id=HOST_STAGED,
        severity=Verdict(row.verdict),
        subject=describe_pairs(row),
        seen=f"{row.transport or 'data go'} through host memory{describe_slowdown(row)}",
        expected="a direct path from GPU to GPU" if row.verdict != Verdict.SKIP else "host memory, by design",
        cause=row.cause_seen or "not known",
        cure=read_cure(row) or Cure.of("gpubench topo"),
        subjects=row.pairs,
        expected_percent=100 / row.times_slower if row.times_slower else None,
    )


def _finding(name: str, row: report.FallbackRow, expected: str, cause: str) -> Finding:
    return Finding(
        id=name,
        severity=Verdict(row.verdict),
        subject=describe_pairs(row) or "all paths",
        seen=row.how,
        expected=expected,
        cause=cause,
        cure=Cure.of(
            "gpubench p2p", comment="It checks each pair separately. `--evidence` shows everything that is known."
        ),
        subjects=row.pairs,
    )


def describe_slowdown(row: report.FallbackRow) -> str:
    """Return the known part of ': 28.9 of 450 GB/s, 15.6 times slower than the limit'."""
    if row.bandwidth_gb_s is None:
        return ""
    if row.limit_gb_s is None or row.times_slower is None:
        return f": {format_bandwidth(row.bandwidth_gb_s, 3)}"
    slower = f", {row.times_slower:.1f} times slower than the limit" if row.times_slower > 1 else ""
    return (
        f": {format_bandwidth(row.bandwidth_gb_s, 3).removesuffix(' GB/s')} of "
        f"{format_bandwidth(row.limit_gb_s, 4)}{slower}"
    )


def describe_pairs(row: report.FallbackRow, most: int = _MOST_PAIRS) -> str:
    """Return the first pairs of a row: 'GPU0 → GPU1', or 'ranks 0 → 1, 1 → 0 and 10 more'."""
    return _lead(row.pairs) + shorten(row.pairs, most, row.count)


def _lead(pairs: Sequence[str]) -> str:
    return "ranks " if pairs and pairs[0][0].isdigit() else ""


NOT_JUDGED = "not-judged"  # ID of the finding that a pasted text does not name the machine that it is of
NO_PAYLOAD_TABLES = "no-payload-tables"  # ID of the finding that a log of UCX does not show how GPU memory moves
_MOST_CANDIDATES = 3
_SCOPES = ("node", "network", "unknown")
_VERDICTS = ("PASS", "WARN", "FAIL", "SKIP", "ERROR")


def name_candidates(candidates: Sequence[str]) -> str:
    """Return the communicators to which ambiguous log lines may belong: '0xa or 0xb'. Empty if there are none."""
    more = len(candidates) - _MOST_CANDIDATES
    shown = candidates[: _MOST_CANDIDATES if more > 0 else None]
    return " or ".join((*shown, f"one of {more} more")) if more > 0 else " or ".join(shown)


class PathRow(report.Record, frozen=True, kw_only=True):
    """The channels with the same transport between two ranks of a communicator."""

    section = "paths"
    on_page = report.HIDDEN

    communicator: str | None  #: NCCL's commId (null if log lines are ambiguous)
    src: int  #: sending rank
    dst: int  #: receiving rank
    src_host: str | None  #: host of the sending rank
    src_pid: int | None  #: process ID of the sending rank
    src_bus_id: str | None  #: PCI address of the sending rank's GPU
    dst_host: str | None  #: host of the receiving rank
    dst_pid: int | None  #: process ID of the receiving rank
    dst_bus_id: str | None  #: PCI address of the receiving rank's GPU
    scope: Annotated[str, _SCOPES]  #: node (NCCL sees both ranks on one machine) or network (on different machines)
    transport: str  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    transport_received: str | None  #: transport in the receiver's log lines, if it differs
    host_staged: bool | None  #: whether data went through host memory
    channels: int  #: number of channels
    peer_to_peer: bool  #: whether the channels are for send and receive (otherwise for collectives)
    proxy_rank: int | None  #: rank whose NIC is used (PXN) (null for the rank's own NIC or no NIC)
    #: verdict on the path: SKIP: host memory by design; WARN: host memory, perhaps by design; ERROR: unknown
    verdict: Annotated[str, _VERDICTS]
    cause: str | None  #: ID of the cause of host staging


class KvPathRow(report.Record, frozen=True, kw_only=True):
    """A protocol that UCX selects for GPU memory of two processes, for a range of sizes."""

    section = "kv_paths"

    process: str  #: host and process ID; empty: the log does not name them
    scope: Annotated[str, _SCOPES]  #: node (UCX sees both processes on one machine) or network (on different machines)
    operation: str  #: put, get, message, or one side of a rendezvous: fetch, send
    source: str  #: memory that is read, as UCX names it: cuda/GPU0, cuda/dev[2]
    destination: str  #: memory that is written; empty: the receiver's memory is unknown to the sender
    first_bytes: int  #: smallest size in bytes
    last_bytes: int | None  #: largest size in bytes (null if unlimited)
    protocol: str  #: UCX's description: zero-copy, software emulation, ...; (?) marks an estimate
    transport: str  #: transports and devices that carry the data: cuda_ipc/cuda, rc_mlx5/mlx5_0:1, tcp/lo
    route: str  #: direct, GPUDirect RDMA, host-staged, host-staged by software emulation, or unknown
    host_staged: bool | None  #: whether data went through host memory
    #: verdict on the path for large sizes; SKIP for small sizes, or if the row does not show the path
    verdict: Annotated[str, _VERDICTS]


class HangRow(report.Record, frozen=True, kw_only=True):
    """A collective that did not finish, and the ranks that keep the others waiting."""

    section = "hangs"

    group: str  #: process group, or hash of the communicator
    ranks: tuple[str, ...]  #: ranks that keep the others waiting, with host and process if known
    reason: str  #: problem of these ranks: did not join, called something else, left early, is dead, is slow, ...
    operation: str  #: call in which the others wait: number in the group, size and data type
    theirs: str  #: last call of these ranks, with its line in the program
    place: str  #: line of the program in which the waiting ranks made the call
    since: str  #: UTC time at which the waiting ranks made the call; empty: unknown
    waiting: int  #: number of waiting ranks


class OperationRow(report.Record, frozen=True, kw_only=True):
    """The times of a job's collectives with the same size, from NCCL's Inspector."""

    section = "operations"

    collective: str  #: name of the collective: allreduce, allgather, reducescatter, broadcast or reduce
    ranks: int  #: number of ranks in the communicator
    nodes: int  #: number of hosts in the communicator
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank
    operations: int  #: number of operations
    time_us: float  #: median time in microseconds from the arrival of the last rank until the operation ends
    algbw_gb_s: float  #: algorithm bandwidth in GB/s (1e9 bytes): the size divided by the time
    busbw_gb_s: float | None  #: bus bandwidth in GB/s: algbw times the collective's factor (null for one rank)


class TransportRow(report.Record, frozen=True, kw_only=True):
    """Pairs in a communicator that use the same transport."""

    section = "transports"

    communicator: str | None  #: ID of the communicator (null if log lines are ambiguous)
    scope: Annotated[str, _SCOPES]  #: node (NCCL sees both ranks on one machine) or network (on different machines)
    transport: str  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    pairs: Annotated[int, {"minimum": 1}]  #: number of ordered pairs
    channels_least: int  #: smallest number of channels of a pair
    channels_most: int  #: largest number of channels of a pair
    host_staged: bool | None  #: whether data went through host memory
    #: verdict on the path: SKIP: host memory by design; WARN: host memory, perhaps by design; ERROR: unknown
    verdict: Annotated[str, _VERDICTS]
    first: tuple[tuple[int, int], ...]  #: examples of pairs, as rank numbers


class CommunicatorRow(report.Record, frozen=True, kw_only=True):
    """A communicator, merged from the logs of all its ranks."""

    section = "communicators"

    id: str | None  #: ID of the communicator, as NCCL prints it
    ranks: int | None  #: number of ranks
    nodes: int | None  #: number of machines, as NCCL counts them
    hosts: tuple[str, ...]  #: host names of the communicator's ranks
    missing_ranks: tuple[int, ...]  #: ranks without a log
    pairs: int  #: number of connected pairs
    candidates: tuple[str, ...]  #: communicators to which the log lines may belong, if id is null


class MemberRow(report.Record, frozen=True, kw_only=True):
    """A rank of a communicator."""

    section = "members"
    on_page = report.HIDDEN

    communicator: str | None  #: ID of the communicator
    rank: int  #: number of the rank in the communicator
    host: str  #: host name of the node
    node: str  #: machine of the rank, as NCCL identifies it
    pid: int  #: process ID of the rank
    bus_id: str | None  #: PCI address of the rank's GPU
    nvml_index: int | None  #: index of the rank's GPU in nvidia-smi
