"""What is to be expected of every pair before anything is sent: a direct path, or what stands in its way."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpubench.causes.path_types import is_within, level
from gpubench.checks.peer_access import cause_and_advice
from gpubench.model.evidence import Conclusion, Confidence
from gpubench.model.evidence_rows import FallbackRow
from gpubench.model.fallback import shown
from gpubench.model.nodes import Kind
from gpubench.model.peer_policy import NCCL_POLICY, nccl_keeps_off, refusal_of
from gpubench.model.rank_facts import RankFacts
from gpubench.model.snapshot import GpuFacts
from gpubench.model.staging_causes import Cause, places_of, removal
from gpubench.model.topology import Topology
from gpubench.model.verdict import Finding, Verdict

FALLBACK_EXPECTED = "fallback-expected"
BY_DESIGN, REFUSED, ENVIRONMENT, SHM_NOT_SHARED = "by-design", "refused", "environment", "shm-not-shared"

_NO_REPAIR = "nothing to repair"
_MOST_NAMED = 1000
_ORDER = (Conclusion.IMPOSSIBLE, Conclusion.UNKNOWN, Conclusion.POSSIBLE)


class _Prospect(NamedTuple):
    """What is to be expected of a pair, and why; what is seen of it is another thing."""

    conclusion: Conclusion
    verdict: Verdict
    cause: Cause | None = None


class _Pair(NamedTuple):
    """A pair by name, and what is seen of it."""

    name: str
    path: str
    access: str


def prospects(nodes: Sequence[Topology], kinds: Sequence[Kind], ranks: Sequence[RankFacts]) -> list[FallbackRow]:
    """The section `fallback` of what was only looked at, gravest first: pairs of which the same is to be expected.

    Of nodes of one kind, the pairs of the first; named with their node where there are several kinds.
    """
    groups: dict[_Prospect, list[_Pair]] = {}
    for kind in kinds:
        node = nodes[kind.representative]
        members = {*kind.alike, *kind.odd}
        around = _Around([facts for facts in ranks if facts.node in members])
        lead = f"{node.snapshot.host} " if len(kinds) > 1 else ""
        for source, destination in _pairs(node):
            path, access = node.path(source, destination), node.peer_access(source, destination).reason
            pair = _Pair(f"{lead}{source.device} → {lead}{destination.device}", path, access)
            groups.setdefault(around.prospect(node, source, destination), []).append(pair)
    origin = nodes[0].snapshot.origin if nodes else ""
    rows = [_row(prospect, pairs, origin) for prospect, pairs in groups.items()]
    return sorted(rows, key=lambda row: (_ORDER.index(Conclusion(row.conclusion)), row.verdict == Verdict.SKIP))


def findings(rows: Sequence[FallbackRow]) -> Iterator[Finding]:
    """What no check of the wiring or of the processes finds: settings that stand in the way."""
    for row in rows:
        if row.cause == ENVIRONMENT:
            yield Finding(
                id=FALLBACK_EXPECTED,
                severity=Verdict.FAIL,
                subject=shown(row),
                seen=str(row.cause_seen),
                expected=f"nothing in the way of a direct path: {row.how}",
                cause="NCCL will take host memory or sockets instead, and not say so",
                next_command=str(row.advice),
                subjects=row.pairs,
            )


def _pairs(node: Topology) -> Iterator[tuple[GpuFacts, GpuFacts]]:
    return ((one, other) for one in node.gpus for other in node.gpus if one is not other)


class _Around:
    """What the processes on some nodes are set to."""

    def __init__(self, facts: Sequence[RankFacts]) -> None:
        self._facts = facts
        self._settings = {(name, each.value) for known in facts for name, each in known.nccl_settings.items()}
        self._shares_memory = all(
            len({each.shm_device for each in facts if each.node == node}) == 1 for node in {each.node for each in facts}
        )

    def prospect(self, node: Topology, source: GpuFacts, destination: GpuFacts) -> _Prospect:
        """What is to be expected of a pair."""
        access, path = node.peer_access(source, destination), node.path(source, destination)
        if access.possible is None:
            return _Prospect(Conclusion.UNKNOWN, Verdict.ERROR)
        if not access.possible:
            refusal = refusal_of(node, source, destination, access)
            if refusal.by_design:
                return _staged(Cause(BY_DESIGN, refusal.reason, _NO_REPAIR))
            why, advice = cause_and_advice(refusal)
            return _staged(Cause(REFUSED, f"peer access {access.reason}: {why}", advice))
        blamed = sorted((name, value) for name, value in self._settings if _forbids(name, value, path))
        if blamed:
            names = list(dict.fromkeys(name for name, _ in blamed))
            places = places_of(names, self._facts)
            said = " ".join(f"{name}={value}" for name, value in blamed)
            return _staged(Cause(ENVIRONMENT, f"{said} in {' and '.join(places)}", removal(names, places)))
        if not self._shares_memory:
            apart = "ranks of one host have different /dev/shm, as in containers of their own: NCCL takes sockets"
            return _staged(Cause(SHM_NOT_SHARED, apart, "run them in one container, or docker run --ipc=host"))
        keeps_off = bool(nccl_keeps_off(node, source, destination))
        if keeps_off and not any(_allows(name, value, path) for name, value in self._settings):
            return _staged(Cause(BY_DESIGN, NCCL_POLICY, _NO_REPAIR))
        return _Prospect(Conclusion.POSSIBLE, Verdict.PASS)


def _forbids(name: str, value: str, path: str) -> bool:
    """Whether a variable keeps NCCL off peer access over a path that it takes by default."""
    if name == "NCCL_P2P_LEVEL":
        return level(value) is not None and is_within(_nccl_type(path)) and not _allows(name, value, path)
    return name == "NCCL_P2P_DISABLE" and value not in ("", "0")


def _allows(name: str, value: str, path: str) -> bool:
    limit = level(value) if name == "NCCL_P2P_LEVEL" else None
    return limit is not None and is_within(_nccl_type(path), limit)


def _nccl_type(path: str) -> str:
    """NCCL's type of a path class: it does not tell the host bridges of a NUMA node from each other."""
    return "NVL" if path.startswith("NV") else {"NODE": "PHB"}.get(path, path)


def _staged(cause: Cause) -> _Prospect:
    return _Prospect(Conclusion.IMPOSSIBLE, Verdict.SKIP if cause.id == BY_DESIGN else Verdict.FAIL, cause)


def _row(prospect: _Prospect, pairs: Sequence[_Pair], origin: str) -> FallbackRow:
    cause = prospect.cause
    paths, access = (", ".join(dict.fromkeys(seen)) for seen in zip(*(each[1:] for each in pairs), strict=True))
    return FallbackRow(
        conclusion=prospect.conclusion,
        verdict=prospect.verdict,
        confidence=Confidence.NONE if prospect.conclusion is Conclusion.UNKNOWN else Confidence.WEAK,
        origin=origin,
        count=len(pairs),
        pairs=tuple(each.name for each in pairs[:_MOST_NAMED]),
        transport=None,
        bandwidth_gb_s=None,
        limit_gb_s=None,
        times_slower=None,
        cause=None if cause is None else cause.id,
        cause_seen=None if cause is None else cause.seen,
        advice=None if cause is None else cause.advice,
        how=f"{paths}; peer access {access}",
    )
