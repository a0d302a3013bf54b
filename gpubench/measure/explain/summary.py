"""What a job's paths have in common: of a million pairs, a few lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.conditions.registry import CAUSES
from gpubench.measure.explain.pairs import JudgedPair, PairGroup, PairJudge, Scope, is_half_heard
from gpubench.model.paths.nccl_log import Communicator, LogFacts
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.rows.explain import TransportRow
from gpubench.model.terms.verdict import Verdict

_MOST_EXAMPLES = 8


@dataclass(slots=True)
class Examples:
    """How many pairs, and the first of them."""

    count: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)

    def add(self, src: int, destinations: Sequence[int]) -> None:
        """Count pairs."""
        self.count += len(destinations)
        for dst in destinations[: max(_MOST_EXAMPLES - len(self.first), 0)]:
            self.first.append((src, dst))


@dataclass(slots=True)
class StagedPaths:
    """Paths through host memory that one thing explains: how many, the hosts, and pairs by communicator."""

    verdict: Verdict
    paths: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    transports: dict[str, None] = field(default_factory=dict)
    scopes: dict[Scope, None] = field(default_factory=dict)
    pairs: dict[int, Examples] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One communicator: its pairs by way, those of unknown transports by name, those of which an end's line is lost.

    `silent_ranks` are in the log without any connection of their own although collectives are connected.
    """

    communicator: Communicator
    pairs: int
    transports: Sequence[TransportRow]
    unknown: Mapping[str, Examples]
    half_heard: Examples
    silent_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """All communicators, and what explains staging, first causes first."""

    parts: Sequence[Part]
    staged: Mapping[Explanation, StagedPaths]


def summarise(facts: LogFacts, judge: PairJudge) -> JobSummary:
    """Go through all pairs once."""
    staged: dict[Explanation, StagedPaths] = {}
    parts = [_part(number, communicator, judge, staged) for number, communicator in enumerate(facts.communicators)]
    order = {cause.id: (cause.general, place) for place, cause in enumerate(CAUSES)}
    last = True, len(order)
    return JobSummary(parts, dict(sorted(staged.items(), key=lambda item: order.get(item[0].id, last))))


@dataclass(slots=True)
class _Alike:
    """Pairs of one communicator whose channels travel alike."""

    examples: Examples
    least: int
    most: int


class _PairCounts:
    """Counts the pairs of one communicator; what is to be counted of pairs that are judged alike is found once."""

    def __init__(self, number: int, staged: dict[Explanation, StagedPaths]) -> None:
        self.pairs = 0
        self.alike: dict[tuple[Scope, str, bool | None, Verdict], _Alike] = {}
        self.unknown: dict[str, Examples] = {}
        self.half_heard = Examples()
        self._number = number
        self._staged = staged
        self._known: dict[tuple[Scope, int], tuple[PairGroup, list[Examples], list[StagedPaths]]] = {}

    def count(self, src: int, group: PairGroup, hosts: Mapping[int, str]) -> None:
        """Take the pairs of a source and of destinations that are alike."""
        key = group.scope, id(group.ways)
        known = self._known.get(key)
        if known is None:
            # Held on to, so that no other object gets its id.
            known = self._known[key] = group, *self._places(group)
        self.pairs += len(group.destinations)
        for examples in known[1]:
            examples.add(src, group.destinations)
        for paths in known[2]:
            paths.paths += len(group.destinations)
            paths.hosts |= {hosts[rank]: None for rank in (src, *group.destinations) if rank in hosts}

    def _places(self, group: PairGroup) -> tuple[list[Examples], list[StagedPaths]]:
        """Where such pairs are counted, each of them once."""
        examples: dict[int, Examples] = {}
        paths: list[StagedPaths] = []

        def keep(place: Examples) -> None:
            examples[id(place)] = place

        for judged in group.ways:
            keep(self._place(group.scope, judged))
            if judged.verdict is Verdict.ERROR:
                keep(self.unknown.setdefault(judged.family, Examples()))
            if is_half_heard(judged.way) and group.scope is not Scope.UNKNOWN:
                keep(self.half_heard)
            if judged.explanation is not None:
                found = self._staged.setdefault(judged.explanation, StagedPaths(judged.verdict))
                found.transports[judged.family] = None
                found.scopes[group.scope] = None
                keep(found.pairs.setdefault(self._number, Examples()))
                paths.append(found)
        return list(examples.values()), paths

    def _place(self, scope: Scope, judged: JudgedPair) -> Examples:
        channels = judged.way.channels
        key = scope, judged.family, judged.way.host_staged, judged.verdict
        found = self.alike.setdefault(key, _Alike(Examples(), channels, channels))
        found.least, found.most = min(found.least, channels), max(found.most, channels)
        return found.examples


def _part(number: int, communicator: Communicator, judge: PairJudge, staged: dict[Explanation, StagedPaths]) -> Part:
    hosts = {member.rank: member.host for member in communicator.members}
    tally = _PairCounts(number, staged)
    for src, groups in judge.groups(communicator):
        for group in groups:
            tally.count(src, group, hosts)
    return Part(
        communicator=communicator,
        pairs=tally.pairs,
        transports=[_transport_row(communicator.id, key, found) for key, found in tally.alike.items()],
        unknown=tally.unknown,
        half_heard=tally.half_heard,
        silent_ranks=_silent_ranks(communicator),
    )


def _transport_row(
    communicator: str | None, key: tuple[Scope, str, bool | None, Verdict], found: _Alike
) -> TransportRow:
    scope, name, host_staged, verdict = key
    return TransportRow(
        communicator=communicator,
        scope=scope.value,
        transport=name,
        pairs=found.examples.count,
        channels_least=found.least,
        channels_most=found.most,
        host_staged=host_staged,
        verdict=verdict.value,
        first=tuple(found.examples.first),
    )


def _silent_ranks(communicator: Communicator) -> tuple[int, ...]:
    """Ranks without a line of their own: in rings and trees every rank sends."""
    rows = communicator.connections.rows
    connects = any(
        not said.peer_to_peer
        for row in rows.values()
        for bundle in {id(each): each for each in row.values()}.values()
        for said in bundle.said
    )
    if not connects:
        return ()
    return tuple(member.rank for member in communicator.members if not rows.get(member.rank))
