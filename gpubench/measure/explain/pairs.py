"""Judge the path between each pair of ranks in a job's log as direct, host-staged or unknown, and count the paths."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.logged import ASK_FOR_MORE, ProcessLog, Staged
from gpubench.conditions.nccl_settings import NCCL_SETTINGS
from gpubench.conditions.ranking import explain
from gpubench.conditions.registry import CAUSES
from gpubench.model.paths import nccl_log
from gpubench.model.paths.transport import Route, TransportKind
from gpubench.model.results.fallback import Explanation, TransportRow
from gpubench.model.terms.verdict import Cure, Verdict, merge_cures

UNKNOWN = "unknown"

_CUDA_P2P_WITHOUT_NCCL = ("0", "1")
"""The fields of NCCL's P2P_TYPE line if CUDA grants peer access but NCCL does not use it."""

_ABOUT_TWO_INDICES = (nccl_log.RemarkKind.DRIVER_REFUSED, nccl_log.RemarkKind.NVLINK_REFUSED)
_ABOUT_TWO_BUS_IDS = (nccl_log.RemarkKind.PEER_ACCESS_REFUSED, nccl_log.RemarkKind.PEER_QUERY_FAILED)
_ABOUT_A_BUS_ID = (nccl_log.RemarkKind.GDR_FAR, nccl_log.RemarkKind.GDR_NEAR)
_ABOUT_DEVICES = (*_ABOUT_TWO_INDICES, *_ABOUT_TWO_BUS_IDS, *_ABOUT_A_BUS_ID)
_ABOUT_THE_JOB = (
    nccl_log.RemarkKind.BOOTSTRAP,
    nccl_log.RemarkKind.SOCKET_INTERFACES,
    nccl_log.RemarkKind.NETWORK_PLUGIN,
)
"""Every process logs these lines, but they describe the whole job."""

_NoteOfHosts = tuple[nccl_log.Note, frozenset[str] | None]
"""A line about GPUs, and the hosts that logged it. The hosts are None if another program printed it without a name."""

_Alike = tuple[nccl_log.PairRoutes, int | None, int | None]
"""Pairs on different hosts with the same key get the same verdict. The key has their routes and the ranks' kinds."""


class Scope(StrEnum):
    """Whether the two ranks of a pair run on the same node."""

    INSIDE = "node"
    ACROSS = "network"
    UNKNOWN = "unknown"


class JudgedRoute(Struct, frozen=True):
    """A route between two ranks with its verdict, and the explanation if it is host-staged."""

    route: Route
    family: str
    verdict: Verdict
    explanation: Explanation | None = None


class JudgedPair(Struct, frozen=True, eq=False):
    """The judged routes of a pair of ranks.

    Pairs with the same verdicts share one object, so it is compared by identity.
    """

    routes: tuple[JudgedRoute, ...]


class PairGroup(NamedTuple):
    """Destination ranks of one source rank that share a verdict."""

    destinations: list[int]
    scope: Scope
    judged: JudgedPair


class PairJudge:
    """Judges pairs of ranks. A job with 1,000 ranks has a million pairs, so equivalent pairs are judged once."""

    def __init__(self, facts: nccl_log.LogFacts) -> None:
        self._facts = facts
        self._process_logs = _process_logs(facts)
        self._device_notes = _device_notes(facts.remarks)
        kinds = {remark.note.kind for remark in facts.remarks}
        self._has_rdma = not kinds.isdisjoint(nccl_log.SIGNS_OF_RDMA)
        self._has_plugin = nccl_log.RemarkKind.NETWORK_PLUGIN in kinds
        self._interfaces = _interfaces(facts.remarks)
        ranks = {
            (member.host, member.process) for communicator in facts.communicators for member in communicator.members
        }
        self._one_per_host = len(ranks) == len({host for host, _ in ranks})
        self._gpus: dict[str, set[str]] = {}
        for host, source, _ in facts.paths:
            self._gpus.setdefault(host, set()).add(source)
        self._refused = _refused(facts.remarks)
        self._with_peers: frozenset[int] = frozenset()
        self._explanations: dict[Staged, Explanation] = {}

    def groups(self, communicator: nccl_log.Communicator) -> Iterator[tuple[int, list[PairGroup]]]:
        """Yield each source rank of a communicator with its destinations, grouped by verdict."""
        members = {member.rank: member for member in communicator.members}
        kinds = self._kinds(communicator.members)
        near = _near_ranks(communicator.members)
        self._with_peers = _ranks_with_peers(communicator)
        known: dict[_Alike, JudgedPair] = {}
        for src, by_destination in communicator.connections.routes_by_source():
            on_machine, on_node = near.get(src, (frozenset(), frozenset()))
            groups: dict[tuple[int | None, nccl_log.PairRoutes], list[int]] = {}
            for dst, pair in by_destination.items():
                # On one machine the verdict may depend on both GPUs, so use the rank as the key. Kinds are negative
                # numbers.
                is_near = dst in on_machine or dst in on_node
                groups.setdefault((dst if is_near else kinds.get(dst), pair), []).append(dst)
            yield (
                src,
                [
                    self._group(
                        (pair, kinds.get(src), kind),
                        destinations,
                        members.get(src),
                        members.get(destinations[0]),
                        known,
                    )
                    for (kind, pair), destinations in groups.items()
                ],
            )

    def _group(
        self,
        alike: _Alike,
        destinations: list[int],
        source: nccl_log.Member | None,
        destination: nccl_log.Member | None,
        known: dict[_Alike, JudgedPair],
    ) -> PairGroup:
        """Judge a group of destinations, or reuse a known verdict.

        On one machine, only verdicts on direct paths are reused.
        """
        pair = alike[0]
        if not any(route.host_staged for route in pair.routes):
            if _is_inside(source, destination) and any(map(_uses_network, pair.routes)):
                known = {}
            alike = pair, None, None
        elif source is None or destination is None or source.machine == destination.machine:
            known = {}
        if alike not in known:
            known[alike] = JudgedPair(tuple(self._judge(route, pair, source, destination) for route in pair.routes))
        is_multicast = any(route.transport.kind is TransportKind.NVLS for route in pair.routes)
        return PairGroup(destinations, Scope.INSIDE if is_multicast else _scope(source, destination), known[alike])

    def _kinds(self, members: Iterable[nccl_log.Member]) -> dict[int, int]:
        """Map each rank to a negative number, its kind.

        Ranks share a kind if their paths to other machines get equal verdicts.
        """
        numbers: dict[object, int] = {}
        kinds = {}
        for member in members:
            gpu = (member.host, member.bus_id) if member.bus_id in self._device_notes else None
            kinds[member.rank] = numbers.setdefault((gpu, self._process_logs.get(member.process)), -1 - len(numbers))
        return kinds

    def _judge(
        self,
        route: Route,
        pair: nccl_log.PairRoutes,
        source: nccl_log.Member | None,
        destination: nccl_log.Member | None,
    ) -> JudgedRoute:
        if route.host_staged is None:
            return JudgedRoute(route, route.family, Verdict.ERROR)
        if not route.host_staged:
            found = None
            if _uses_network(route) and _is_inside(source, destination):
                # A network between GPUs on one machine is a fault if a variable makes NCCL use it.
                found = explain(NCCL_SETTINGS.conditions, self._staging_evidence(pair, source, destination))
                if found is not None and (found.id == UNKNOWN or found.by_design or found.in_doubt):
                    found = None
            return JudgedRoute(route, route.family, Verdict.FAIL if found else Verdict.PASS, found)
        staged = self._staging_evidence(pair, source, destination)
        if staged not in self._explanations:
            is_known = source is not None and destination is not None
            found = explain(CAUSES, staged) if is_known or staged.network is None else _explain_network(staged)
            self._explanations[staged] = found or _no_explanation(staged)
        found = self._explanations[staged]
        verdict = Verdict.SKIP if found.by_design else Verdict.WARN if found.in_doubt else Verdict.FAIL
        return JudgedRoute(route, route.family, verdict, found)

    def _staging_evidence(
        self, pair: nccl_log.PairRoutes, source: nccl_log.Member | None, destination: nccl_log.Member | None
    ) -> Staged:
        every_end = [end for route in pair.routes for end in (route.sent, route.received) if end]
        used = [end for end in every_end if end.host_staged] or every_end
        networks = {end.network for end in used if end.network is not None}
        network = "Socket" if "Socket" in networks else min(networks, default=None)
        ends = [end for end in (source, destination) if end is not None]
        processes = [self._process_logs.get(end.process, ProcessLog()) for end in ends]
        in_job = Staged(
            one_node=network is None,
            same_machine=False,
            network=network,
            source=processes[0] if processes else ProcessLog(),
            bus_ids=tuple(end.bus_id for end in ends if end.bus_id is not None),
            nvlinks=any(end.host in self._facts.nvlink_hosts for end in ends),
            models=self._facts.gpu_models,
            listed_models=self._facts.listed_models,
            interfaces=self._interfaces,
            one_per_host=self._one_per_host,
            rdma=self._has_rdma,
            plugin=self._has_plugin,
        )
        if source is None or destination is None:
            return in_job
        same_machine = source.machine == destination.machine and source is not destination
        path = self._facts.paths.get((source.host, source.bus_id or "", destination.bus_id or ""))
        return replace(
            in_job,
            one_node=_scope(source, destination) is Scope.INSIDE,
            same_machine=same_machine,
            path=path if same_machine else None,
            gpus=len(self._gpus.get(source.host, ())) if same_machine else 0,
            notes=tuple(dict.fromkeys(self._notes(source, destination, path if same_machine else None))),
            destination=processes[1],
            peers_elsewhere=same_machine and {source.rank, destination.rank} <= self._with_peers,
        )

    def _notes(self, one: nccl_log.Member, other: nccl_log.Member, path: str | None) -> Iterator[nccl_log.Note]:
        if one.host == other.host and None not in (one.nvml_index, other.nvml_index):
            indices = str(one.nvml_index), str(other.nvml_index)
            for key in (indices, indices[::-1], ()):
                yield from self._notes_of_host(one.host, self._device_notes.get(key, ()))
            # For path SYS, NCCL does not log that peer access is refused, because it would not use peer access anyway.
            refused = [self._refused.get((one.host, index)) for index in indices]
            if path in (None, "SYS") and None not in refused:
                yield from filter(None, refused)
        for first, second in ((one, other), (other, one)):
            yield from self._notes_of_host(
                one.host, self._device_notes.get((first.bus_id or "", second.bus_id or ""), ())
            )
            yield from self._notes_of_host(first.host, self._device_notes.get(first.bus_id or "", ()))

    def _notes_of_host(self, host: str, found: Iterable[_NoteOfHosts]) -> Iterator[nccl_log.Note]:
        return (note for note, hosts in found if hosts is None or host in hosts)


def _scope(one: nccl_log.Member | None, other: nccl_log.Member | None) -> Scope:
    """Return whether two ranks are on one node. A rank that is connected to itself uses a network switch (CollNet)."""
    if one is None or other is None:
        return Scope.UNKNOWN
    return Scope.INSIDE if one.node == other.node and one is not other else Scope.ACROSS


def _is_inside(one: nccl_log.Member | None, other: nccl_log.Member | None) -> bool:
    return _scope(one, other) is Scope.INSIDE


def _uses_network(route: Route) -> bool:
    return route.transport.kind is TransportKind.NET


def _explain_network(staged: Staged) -> Explanation | None:
    """Explain why two ranks use a network if one of them has no log, so that their machines are unknown.

    NCCL uses a network inside a machine only if a variable is set. If none is set, the ranks must be on different
    machines. Otherwise, report the variable together with the cause for a network between machines.
    """
    inside = explain(NCCL_SETTINGS.conditions, replace(staged, one_node=True, same_machine=True))
    across = explain(CAUSES, staged)
    if inside is None or inside.id == UNKNOWN:
        return across
    if across is None or across.by_design or across.in_doubt:
        return None
    evidence = " and ".join(dict.fromkeys((inside.evidence, across.evidence)))
    return replace(inside, evidence=evidence, cure=merge_cures((inside.cure, across.cure)))


def _interfaces(remarks: Iterable[nccl_log.Remark]) -> tuple[str, ...]:
    names = [
        name
        for remark in remarks
        for name in (remark.note.about[:1] if remark.note.kind is nccl_log.RemarkKind.BOOTSTRAP else remark.note.about)
        if remark.note.kind in (nccl_log.RemarkKind.BOOTSTRAP, nccl_log.RemarkKind.SOCKET_INTERFACES)
    ]
    return tuple(sorted(set(names)))


def _no_explanation(staged: Staged) -> Explanation:
    export = f"export {ASK_FOR_MORE}"
    if staged.is_local and any(
        note.about == _CUDA_P2P_WITHOUT_NCCL for note in staged.find_notes(nccl_log.RemarkKind.P2P_TYPE)
    ):
        seen = "isAllCudaP2p 1: CUDA grants these GPUs peer access, but the log does not show why NCCL does not use it"
        return Explanation(
            UNKNOWN, seen, Cure.of(export, comment="Run the job again with it. `gpubench topo` shows the paths.")
        )
    seen = "nothing in the log explains it"
    shows = "paths and peer access" if staged.is_local else "the NICs of a node"
    return Explanation(
        UNKNOWN, seen, Cure.of(export, comment=f"Run the job again with it. `gpubench topo` shows {shows}.")
    )


def _ranks_with_peers(communicator: nccl_log.Communicator) -> frozenset[int]:
    by_rank = communicator.connections.ranks
    different = {channels for peers in by_rank.values() for channels in peers.values()}
    p2p = {pair for pair in different if any(logged.transport.kind is TransportKind.P2P for logged in pair.logged)}
    if not p2p or p2p == different:
        return frozenset()
    return frozenset(
        end
        for rank, peers in by_rank.items()
        for peer, channels in peers.items()
        if channels in p2p
        for end in (rank, peer)
    )


def _near_ranks(members: Sequence[nccl_log.Member]) -> dict[int, tuple[Set[int], Set[int]]]:
    """Return, for each rank, the ranks on its machine and the ranks on its node.

    Ranks on one machine share one set object.
    """
    machines: dict[str, set[int]] = {}
    nodes: dict[str, set[int]] = {}
    for member in members:
        machines.setdefault(member.machine, set()).add(member.rank)
        nodes.setdefault(member.node, set()).add(member.rank)
    return {member.rank: (machines[member.machine], nodes[member.node]) for member in members}


def _process_logs(facts: nccl_log.LogFacts) -> Mapping[str, ProcessLog]:
    settings: dict[str, list[tuple[str, str]]] = {}
    notes: dict[str, list[nccl_log.Note]] = {}
    every_process = [member.process for communicator in facts.communicators for member in communicator.members]
    # Values from a process's log come last, so that they override values from the command line.
    for setting in sorted(facts.settings, key=lambda setting: not setting.is_from_command):
        for process in every_process if setting.is_from_command else setting.processes:
            settings.setdefault(process, []).append((setting.name, setting.value))
    for remark in facts.remarks:
        if remark.note.kind not in (*_ABOUT_DEVICES, *_ABOUT_THE_JOB):
            for process in remark.processes:
                notes.setdefault(process, []).append(remark.note)
    return {
        process: ProcessLog(tuple(settings.get(process, ())), tuple(notes.get(process, ())))
        for process in settings.keys() | notes.keys()
    }


def _refused(remarks: Iterable[nccl_log.Remark]) -> Mapping[tuple[str, str], nccl_log.Note]:
    return {
        (process.rpartition(":")[0], index): remark.note
        for remark in remarks
        if remark.note.kind is nccl_log.RemarkKind.DRIVER_REFUSED
        for process in remark.processes
        for index in remark.note.about
    }


def _device_notes(remarks: Iterable[nccl_log.Remark]) -> Mapping[object, list[_NoteOfHosts]]:
    found: dict[object, list[_NoteOfHosts]] = {}
    for remark in remarks:
        if remark.note.kind in _ABOUT_DEVICES:
            key = remark.note.about[0] if remark.note.kind in _ABOUT_A_BUS_ID else remark.note.about
            hosts = frozenset(process.rpartition(":")[0] for process in remark.processes)
            found.setdefault(key, []).append((remark.note, hosts or None))
    return found


_MOST_EXAMPLES = 8


class Examples(Struct, eq=False):
    """The number of pairs, and the first few of them."""

    count: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)

    def add(self, src: int, destinations: Sequence[int]) -> None:
        self.count += len(destinations)
        self.first += [(src, dst) for dst in destinations[: max(_MOST_EXAMPLES - len(self.first), 0)]]


class StagedPaths(Struct):
    """The host-staged paths with one explanation: their number, hosts, and example pairs by communicator."""

    verdict: Verdict
    paths: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    transports: dict[str, None] = field(default_factory=dict)
    scopes: dict[Scope, None] = field(default_factory=dict)
    pairs: dict[int, Examples] = field(default_factory=dict)


class Part(Struct, frozen=True, kw_only=True):
    """The counts of one communicator: pairs by transport, and pairs whose transport is unknown.

    `one_ended` are network connections that only one end logged. `unconnected_ranks` logged no connection although the
    communicator ran collectives.
    """

    communicator: nccl_log.Communicator
    pairs: int
    transports: Sequence[TransportRow]
    unknown: Mapping[str, Examples]
    one_ended: Examples
    unconnected_ranks: tuple[int, ...]


class JobSummary(Struct, frozen=True):
    """The counts of all communicators, and the explanations of host-staged paths, root causes first."""

    parts: Sequence[Part]
    staged: Mapping[Explanation, StagedPaths]


def summarise(facts: nccl_log.LogFacts, judge: PairJudge) -> JobSummary:
    """Judge and count all pairs in all communicators."""
    staged: dict[Explanation, StagedPaths] = {}
    parts = [
        _PairCounts(number, communicator, staged).count(judge)
        for number, communicator in enumerate(facts.communicators)
    ]
    order = {cause.id: (cause.general, place) for place, cause in enumerate(CAUSES)}
    last = True, len(order)
    return JobSummary(parts, dict(sorted(staged.items(), key=lambda item: order.get(item[0].id, last))))


class _TransportCounts(Struct):
    examples: Examples
    least: int
    most: int


class _PairCounts:
    def __init__(
        self, number: int, communicator: nccl_log.Communicator, staged: dict[Explanation, StagedPaths]
    ) -> None:
        self._number = number
        self._communicator = communicator
        self._hosts = {member.rank: member.host for member in communicator.members}
        self._staged = staged
        self._transports: dict[tuple[Scope, str, bool | None, Verdict], _TransportCounts] = {}
        self._unknown: dict[str, Examples] = {}
        self._one_ended = Examples()
        self._counts: dict[tuple[Scope, JudgedPair], tuple[list[Examples], list[StagedPaths]]] = {}

    def count(self, judge: PairJudge) -> Part:
        pairs = 0
        for src, groups in judge.groups(self._communicator):
            for group in groups:
                pairs += len(group.destinations)
                self._count_group(src, group)
        return Part(
            communicator=self._communicator,
            pairs=pairs,
            transports=[_transport_row(self._communicator.id, *transport) for transport in self._transports.items()],
            unknown=self._unknown,
            one_ended=self._one_ended,
            unconnected_ranks=_unconnected_ranks(self._communicator),
        )

    def _count_group(self, src: int, group: PairGroup) -> None:
        key = group.scope, group.judged
        if key not in self._counts:
            self._counts[key] = self._find_counts(*key)
        examples, staged = self._counts[key]
        for example in examples:
            example.add(src, group.destinations)
        for paths in staged:
            paths.paths += len(group.destinations)
            paths.hosts |= {self._hosts[rank]: None for rank in (src, *group.destinations) if rank in self._hosts}

    def _find_counts(self, scope: Scope, judged: JudgedPair) -> tuple[list[Examples], list[StagedPaths]]:
        """Return the counters to increase for each pair with these verdicts."""
        examples: dict[Examples, None] = {}
        staged: list[StagedPaths] = []
        for route in judged.routes:
            channels = route.route.channels
            key = scope, route.family, route.route.host_staged, route.verdict
            counts = self._transports.setdefault(key, _TransportCounts(Examples(), channels, channels))
            counts.least, counts.most = min(counts.least, channels), max(counts.most, channels)
            examples[counts.examples] = None
            if route.verdict is Verdict.ERROR:
                examples[self._unknown.setdefault(route.family, Examples())] = None
            if _uses_network(route.route) and None in (route.route.sent, route.route.received):
                examples |= {self._one_ended: None} if scope is not Scope.UNKNOWN else {}
            if route.explanation is not None:
                paths = self._staged.setdefault(route.explanation, StagedPaths(route.verdict))
                paths.transports[route.family] = None
                paths.scopes[scope] = None
                examples[paths.pairs.setdefault(self._number, Examples())] = None
                staged.append(paths)
        return list(examples), staged


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


def _unconnected_ranks(communicator: nccl_log.Communicator) -> tuple[int, ...]:
    """Return the ranks without a logged connection, if the communicator ran collectives.

    In a collective every rank sends, so such a rank's log must be incomplete.
    """
    by_rank = communicator.connections.ranks
    has_collectives = any(
        not logged.peer_to_peer
        for channels in {channels for peers in by_rank.values() for channels in peers.values()}
        for logged in channels.logged
    )
    return tuple(member.rank for member in communicator.members if has_collectives and not by_rank.get(member.rank))
