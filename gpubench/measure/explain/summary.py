"""The paths of a job's log in a few lines: of a million pairs, their transports, causes and first examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.conditions.registry import CAUSES
from gpubench.measure.explain.pairs import JudgedPair, JudgedRoute, PairGroup, PairJudge, Scope, is_one_ended
from gpubench.model.paths.nccl_log import Communicator, LogFacts
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.rows.explain import TransportRow
from gpubench.model.terms.verdict import Verdict

_MOST_EXAMPLES = 8


@dataclass(slots=True, eq=False)
class Examples:
    """A number of pairs, and the first of them."""

    count: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)

    def add(self, src: int, destinations: Sequence[int]) -> None:
        """Count pairs."""
        self.count += len(destinations)
        self.first += [(src, dst) for dst in destinations[: max(_MOST_EXAMPLES - len(self.first), 0)]]


@dataclass(slots=True)
class StagedPaths:
    """Paths through host memory with one explanation: how many, the hosts, and pairs by communicator."""

    verdict: Verdict
    paths: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    transports: dict[str, None] = field(default_factory=dict)
    scopes: dict[Scope, None] = field(default_factory=dict)
    pairs: dict[int, Examples] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One communicator: its pairs by transport, those of unknown transports by name, those with a line of one end only.

    `unconnected_ranks` log no connection of their own although collectives are connected.
    """

    communicator: Communicator
    pairs: int
    transports: Sequence[TransportRow]
    unknown: Mapping[str, Examples]
    one_ended: Examples
    unconnected_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """All communicators, and the explanations of staging, first causes first."""

    parts: Sequence[Part]
    staged: Mapping[Explanation, StagedPaths]


def summarise(facts: LogFacts, judge: PairJudge) -> JobSummary:
    """Count all pairs once."""
    staged: dict[Explanation, StagedPaths] = {}
    parts = [
        _PairCounts(number, communicator, staged).counted(judge)
        for number, communicator in enumerate(facts.communicators)
    ]
    order = {cause.id: (cause.general, place) for place, cause in enumerate(CAUSES)}
    last = True, len(order)
    return JobSummary(parts, dict(sorted(staged.items(), key=lambda item: order.get(item[0].id, last))))


@dataclass(slots=True)
class _TransportCounts:
    """Pairs of one communicator with the same transport, and the least and most channels of one."""

    examples: Examples
    least: int
    most: int


class _PairCounts:
    def __init__(self, number: int, communicator: Communicator, staged: dict[Explanation, StagedPaths]) -> None:
        self._number = number
        self._communicator = communicator
        self._hosts = {member.rank: member.host for member in communicator.members}
        self._staged = staged
        self._transports: dict[tuple[Scope, str, bool | None, Verdict], _TransportCounts] = {}
        self._unknown: dict[str, Examples] = {}
        self._one_ended = Examples()
        self._counts: dict[tuple[Scope, JudgedPair], tuple[list[Examples], list[StagedPaths]]] = {}

    def counted(self, judge: PairJudge) -> Part:
        """The communicator with all its pairs counted."""
        pairs = 0
        for src, groups in judge.groups(self._communicator):
            for group in groups:
                pairs += len(group.destinations)
                self._count(src, group)
        return Part(
            communicator=self._communicator,
            pairs=pairs,
            transports=[_transport_row(self._communicator.id, *each) for each in self._transports.items()],
            unknown=self._unknown,
            one_ended=self._one_ended,
            unconnected_ranks=_unconnected_ranks(self._communicator),
        )

    def _count(self, src: int, group: PairGroup) -> None:
        key = group.scope, group.judged
        if key not in self._counts:
            self._counts[key] = self._counts_of(*key)
        examples, staged = self._counts[key]
        for each in examples:
            each.add(src, group.destinations)
        for paths in staged:
            paths.paths += len(group.destinations)
            paths.hosts |= {self._hosts[rank]: None for rank in (src, *group.destinations) if rank in self._hosts}

    def _counts_of(self, scope: Scope, judged: JudgedPair) -> tuple[list[Examples], list[StagedPaths]]:
        """The counts that such pairs are added to, each once."""
        examples: dict[Examples, None] = {}
        staged: list[StagedPaths] = []
        for each in judged.routes:
            examples[self._of_transport(scope, each)] = None
            if each.verdict is Verdict.ERROR:
                examples[self._unknown.setdefault(each.family, Examples())] = None
            if is_one_ended(each.route) and scope is not Scope.UNKNOWN:
                examples[self._one_ended] = None
            if each.explanation is not None:
                paths = self._staged.setdefault(each.explanation, StagedPaths(each.verdict))
                paths.transports[each.family] = None
                paths.scopes[scope] = None
                examples[paths.pairs.setdefault(self._number, Examples())] = None
                staged.append(paths)
        return list(examples), staged

    def _of_transport(self, scope: Scope, judged: JudgedRoute) -> Examples:
        channels = judged.route.channels
        key = scope, judged.family, judged.route.host_staged, judged.verdict
        counts = self._transports.setdefault(key, _TransportCounts(Examples(), channels, channels))
        counts.least, counts.most = min(counts.least, channels), max(counts.most, channels)
        return counts.examples


def _transport_row(
    communicator: str | None, key: tuple[Scope, str, bool | None, Verdict], counts: _TransportCounts
) -> TransportRow:
    scope, name, host_staged, verdict = key
    return TransportRow(
        communicator=communicator,
        scope=scope.value,
        transport=name,
        pairs=counts.examples.count,
        channels_least=counts.least,
        channels_most=counts.most,
        host_staged=host_staged,
        verdict=verdict.value,
        first=tuple(counts.examples.first),
    )


def _unconnected_ranks(communicator: Communicator) -> tuple[int, ...]:
    """Ranks without a line of their own where there are collectives: in rings and trees every rank sends."""
    by_rank = communicator.connections.by_rank
    has_collectives = any(
        not logged.peer_to_peer
        for channels in {channels for peers in by_rank.values() for channels in peers.values()}
        for logged in channels.logged
    )
    return tuple(member.rank for member in communicator.members if has_collectives and not by_rank.get(member.rank))
