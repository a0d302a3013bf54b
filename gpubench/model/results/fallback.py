"""The verdict on fallback to host memory: which paths, how much slower, and why; and the rows of `explain`."""

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
from gpubench.model.terms.units import group_by, shorten
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Verdict


class Explanation(Struct, frozen=True):
    """The cause's id, evidence and cure; `by_design`: nothing to repair; `in_doubt`: perhaps nothing."""

    id: str
    evidence: str
    cure: Cure
    by_design: bool = False
    in_doubt: bool = False


def cure_of(row: Any) -> Cure:
    """What a row with `advice`, `commands` and `comment` says to do; those of earlier versions have `advice` alone."""
    is_told = row.commands or row.comment
    return Cure(row.commands, row.comment or "") if is_told else Cure(comment=row.advice or "")


def cure_columns(cure: Cure | None) -> dict[str, Any]:
    """The columns of a row that say what to do."""
    return {} if cure is None else {"advice": cure.text, "commands": cure.commands, "comment": cure.comment or None}


PATH_UNKNOWN = "path-unknown"
PATH_DISPUTED = "path-disputed"  # Ids of findings that `findings` makes beside HOST_STAGED
_MOST_PAIRS = 4
_MOST_NAMED = 1000
MOST_ROWS = 10_000
_KINDS = ("capability", "selection", "measurement", "correctness")
_LEAST_SURE_FIRST = (Confidence.NONE, Confidence.WEAK, Confidence.LIKELY, Confidence.PROVEN)
_GRAVEST_FIRST = (Conclusion.WRONG, Conclusion.STAGED, Conclusion.DISPUTED, Conclusion.UNKNOWN, Conclusion.DIRECT)


class End(Struct, frozen=True):
    """One end of a path: its name ('rank 0', 'GPU0'), the short one for pairs ('0'), its node and its GPU."""

    name: str
    short: str
    node: str
    bus_id: str | None
    device: str | None = None

    @property
    def place(self) -> DevicePlace:
        """The GPU of this end."""
        return DevicePlace(self.node, self.device, self.bus_id)


class KnownPath(Struct, frozen=True, kw_only=True):
    """A path with all that is known of it. `bandwidth_gb_s` is what it delivered, the limit is per direction.

    `cause` is the id of the likeliest cause if it goes through host memory; '' if none is known.
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
        """The conclusion from the evidence, with its confidence and verdict."""
        return judge(self.evidence)

    @property
    def pair(self) -> str:
        """Both ends in short: '0 → 1'."""
        return f"{self.source.short} → {self.destination.short}"


def evidence_rows(paths: Sequence[KnownPath], origin: str) -> list[report.EvidenceRow]:
    """The section `evidence`: a line a path; of more than ten thousand, those that are not direct."""
    shown = paths
    if len(paths) > MOST_ROWS:
        shown = [path for path in paths if path.judgement.conclusion is not Conclusion.DIRECT]
    return [_evidence_row(path, origin) for path in shown]


def _evidence_row(path: KnownPath, origin: str) -> report.EvidenceRow:
    evidence, judgement = path.evidence, path.judgement
    staged = {Conclusion.STAGED: True, Conclusion.DIRECT: False}.get(judgement.conclusion)
    return report.made_of(
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
    """The section `fallback`, gravest first: a line for paths that fare and travel alike, as sure as the least.

    `cause_of` finds the first cause of staged paths; `not_observed` why transports are unknown; `without_paths` are
    ends that must have paths.
    """
    rows = [_row(members, origin, cause_of, not_observed) for members in group_by(paths, _fare_and_travel).values()]
    if without_paths:
        rows.append(unknown_row(origin, "nothing named their connections", [f"{end} → ?" for end in without_paths]))
    if not_observed and not paths:
        rows.append(unknown_row(origin, not_observed))
    return sorted(rows, key=lambda row: (_GRAVEST_FIRST.index(Conclusion(row.conclusion)), row.verdict == Verdict.SKIP))


def _fare_and_travel(path: KnownPath) -> tuple[Conclusion, Verdict, str | None, float | None, str]:
    """Conclusion, verdict, transport, limit and cause: the same for all paths of one line."""
    judgement = path.judgement
    return judgement.conclusion, judgement.verdict, join_names(path.transports), path.limit_gb_s, path.cause


def _row(
    members: Sequence[KnownPath], origin: str, cause_of: Callable[[Sequence[KnownPath]], Explanation], not_observed: str
) -> report.FallbackRow:
    first = min(members, key=lambda path: _LEAST_SURE_FIRST.index(path.judgement.confidence))
    judgement = first.judgement
    cause = cause_of(members) if judgement.conclusion is Conclusion.STAGED else None
    slowest = min((path.bandwidth_gb_s for path in members if path.bandwidth_gb_s), default=None)
    limit = first.limit_gb_s
    return report.made_of(
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
        how=_how(first, not_observed if judgement.conclusion is Conclusion.UNKNOWN or not first.transports else ""),
    )


def _how(path: KnownPath, not_observed: str) -> str:
    seen = [getattr(path.evidence, kind).seen for kind in _KINDS]
    return "; ".join(dict.fromkeys(filter(None, [decide(path.evidence).meaning, *seen, not_observed])))


def unknown_row(origin: str, why: str, pairs: Sequence[str] = ()) -> report.FallbackRow:
    """That nothing is known of some paths, or of any."""
    named = tuple(pairs[:_MOST_NAMED])
    return report.made_of(
        report.FallbackRow, judge(PathEvidence()), origin=origin, count=len(pairs), pairs=named, how=why
    )


def findings(rows: Sequence[report.FallbackRow], paths: Sequence[KnownPath] = ()) -> tuple[Finding, ...]:
    """The findings on fallback; wrong data have a finding of their own."""
    by_pair = {path.pair: path for path in paths}
    members = ([by_pair[pair] for pair in row.pairs if pair in by_pair] for row in rows)
    places = (
        tuple(dict.fromkeys(end.place for path in own for end in (path.source, path.destination))) for own in members
    )
    return _joined(replace(each, places=at) for row, at in zip(rows, places, strict=True) for each in _findings_of(row))


def _joined(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, of which those that say the same of other paths are one: lines differ by limits, too."""
    alike = group_by(found, lambda each: replace(each, subject="", subjects=(), places=()))
    return tuple(each[0] if len(each) == 1 else _merge_equal(each) for each in alike.values())


def _merge_equal(same: Sequence[Finding]) -> Finding:
    pairs = tuple(chain.from_iterable(each.subjects for each in same))
    places = tuple(dict.fromkeys(chain.from_iterable(each.places for each in same)))
    return replace(same[0], subject=_lead(pairs) + shorten(pairs), subjects=pairs, places=places)


def _findings_of(row: report.FallbackRow) -> tuple[Finding, ...]:
    match Conclusion(row.conclusion):
        case Conclusion.STAGED:
            return (_staged(row),)
        case Conclusion.DISPUTED:
            return (_finding(PATH_DISPUTED, row, "evidence that agrees", "a counter, a driver or a log is wrong"),)
        case Conclusion.UNKNOWN:
            return (_finding(PATH_UNKNOWN, row, "to know which way the bytes go", "what is needed was not said"),)
        case _:
            return ()


def _staged(row: report.FallbackRow) -> Finding:
    return Finding(
        id=HOST_STAGED,
        severity=Verdict(row.verdict),
        subject=shown(row),
        seen=f"{row.transport or 'data go'} through host memory{slowdown(row)}",
        expected="paths from GPU to GPU" if row.verdict != Verdict.SKIP else "host memory, by design",
        cause=row.cause_seen or "not known",
        cure=cure_of(row) or Cure.of("gpubench topo"),
        subjects=row.pairs,
        expected_percent=100 / row.times_slower if row.times_slower else None,
    )


def _finding(name: str, row: report.FallbackRow, expected: str, cause: str) -> Finding:
    return Finding(
        id=name,
        severity=Verdict(row.verdict),
        subject=shown(row) or "all paths",
        seen=row.how,
        expected=expected,
        cause=cause,
        cure=Cure.of("gpubench p2p", comment="It proves each pair by itself; --evidence shows all that is known."),
        subjects=row.pairs,
    )


def slowdown(row: report.FallbackRow) -> str:
    """': 28.9 of 450 GB/s, 15.6 times slower than the limit', as far as it is known; else ''."""
    if row.bandwidth_gb_s is None:
        return ""
    if row.limit_gb_s is None or row.times_slower is None:
        return f": {row.bandwidth_gb_s:.3g} GB/s"
    slower = f", {row.times_slower:.1f} times slower than the limit" if row.times_slower > 1 else ""
    return f": {row.bandwidth_gb_s:.3g} of {row.limit_gb_s:.4g} GB/s{slower}"


def shown(row: report.FallbackRow, most: int = _MOST_PAIRS) -> str:
    """The first pairs of a line in words: 'GPU0 → GPU1', 'ranks 0 → 1, 1 → 0 and 10 more'."""
    return _lead(row.pairs) + shorten(row.pairs, most, row.count)


def _lead(pairs: Sequence[str]) -> str:
    return "ranks " if pairs and pairs[0][0].isdigit() else ""


_MOST_CANDIDATES = 3
_SCOPES = ("node", "network", "unknown")
_VERDICTS = ("PASS", "WARN", "FAIL", "SKIP", "ERROR")


def either(candidates: Sequence[str]) -> str:
    """The communicators that lines may be of which fit several: '0xa or 0xb'; empty where there are none."""
    more = len(candidates) - _MOST_CANDIDATES
    shown = candidates[: _MOST_CANDIDATES if more > 0 else None]
    return " or ".join((*shown, f"one of {more} more")) if more > 0 else " or ".join(shown)


class PathRow(report.Record, frozen=True, kw_only=True):
    """Channels from one rank of a communicator to another that travel alike."""

    section = "paths"
    on_page = report.HIDDEN

    communicator: str | None  #: NCCL's commId; null where lines could not be told
    src: int  #: sending rank
    dst: int  #: receiving rank
    src_host: str | None  #: its host
    src_pid: int | None  #: its process
    src_bus_id: str | None  #: its GPU
    dst_host: str | None  #: its host
    dst_pid: int | None  #: its process
    dst_bus_id: str | None  #: its GPU
    scope: Annotated[str, _SCOPES]  #: whether NCCL takes both ranks for those of one machine
    transport: str  #: as NCCL names it; the sender's word, else the receiver's
    transport_received: str | None  #: the receiver's word where it is another
    host_staged: bool | None  #: whether the bytes pass through host memory
    channels: int  #: channels that travel alike
    peer_to_peer: bool  #: for send and receive; else for collectives
    proxy_rank: int | None  #: the rank whose NIC is used (PXN)
    verdict: Annotated[str, _VERDICTS]  #: through host memory SKIP by design, WARN perhaps so; ERROR: not known
    cause: str | None  #: id of the cause where host_staged


class HangRow(report.Record, frozen=True, kw_only=True):
    """A collective that did not end, and the ranks that keep the others waiting."""

    section = "hangs"

    group: str  #: the process group, or the communicator's hash
    ranks: tuple[str, ...]  #: the ranks to blame; host and process where they are known
    reason: str  #: what is wrong with them: did not join, called something else, left early, is dead, is slow, ...
    operation: str  #: what the others called: its number in the group, size and data type
    theirs: str  #: what the ranks to blame called instead or last, with its line
    place: str  #: the line of the program where the others called it
    since: str  #: when the others called it, UTC; empty where it is not known
    waiting: int  #: ranks that wait


class OperationRow(report.Record, frozen=True, kw_only=True):
    """What the collectives of one size took in a job, by NCCL's Inspector."""

    section = "operations"

    collective: str  #: allreduce, allgather, reducescatter, broadcast or reduce
    ranks: int  #: ranks of the communicator
    nodes: int  #: its hosts
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank
    operations: int  #: how many there were
    time_us: float  #: median of their times, each from the arrival of its last rank
    algbw_gb_s: float  #: size over time, GB/s of 1e9 bytes
    busbw_gb_s: float | None  #: algbw times the collective's factor; null: one rank, which has no bus


class TransportRow(report.Record, frozen=True, kw_only=True):
    """Pairs of a communicator that are connected alike."""

    section = "transports"

    communicator: str | None  #: its id; null where lines could not be told
    scope: Annotated[str, _SCOPES]  #: inside a node, or between nodes
    transport: str  #: what carries it, as NCCL prints it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    pairs: Annotated[int, {"minimum": 1}]  #: ordered pairs connected alike
    channels_least: int  #: of a pair
    channels_most: int  #: of a pair
    host_staged: bool | None  #: whether bytes pass through host memory
    verdict: Annotated[str, _VERDICTS]  #: through host memory SKIP by design, WARN perhaps so; ERROR: not known
    first: tuple[tuple[int, int], ...]  #: the first of the pairs


class CommunicatorRow(report.Record, frozen=True, kw_only=True):
    """A communicator as all logs together show it."""

    section = "communicators"

    id: str | None  #: as NCCL prints it
    ranks: int | None  #: ranks it has
    nodes: int | None  #: as NCCL counts machines
    hosts: tuple[str, ...]  #: where they are
    missing_ranks: tuple[int, ...]  #: those without a log
    pairs: int  #: that are connected
    candidates: tuple[str, ...]  #: where id is null: the communicators that the lines may be of


class MemberRow(report.Record, frozen=True, kw_only=True):
    """A rank of a communicator."""

    section = "members"
    on_page = report.HIDDEN

    communicator: str | None  #: its id
    rank: int  #: number in the job
    host: str  #: host name
    node: str  #: what NCCL takes for its machine
    pid: int  #: process id
    bus_id: str | None  #: PCI address of its GPU
    nvml_index: int | None  #: as nvidia-smi counts
