"""Every pair of a job's log judged: direct, through host memory and why, or not known."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpubench.conditions.log_evidence import ASK_FOR_MORE, Staged, Teller
from gpubench.conditions.ranking import explain
from gpubench.conditions.registry import CAUSES
from gpubench.model.paths.nccl_log import Communicator, LogFacts, Member, Note, Remark, RemarkKind
from gpubench.model.paths.transport import Route, TransportKind
from gpubench.model.results.explanation import Explanation
from gpubench.model.terms.verdict import Verdict

UNKNOWN = "unknown"

_POLICY = ("0", "1")
_ABOUT_TWO_INDICES = (RemarkKind.DRIVER_REFUSED, RemarkKind.NVLINK_REFUSED)
_ABOUT_TWO_BUS_IDS = (RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
_ABOUT_A_BUS_ID = (RemarkKind.GDR_FAR, RemarkKind.GDR_NEAR)
_ABOUT_DEVICES = (*_ABOUT_TWO_INDICES, *_ABOUT_TWO_BUS_IDS, *_ABOUT_A_BUS_ID)

_NoteOfHosts = tuple[Note, frozenset[str]]


class Scope(StrEnum):
    """Whether two ranks run on one machine."""

    INSIDE = "node"
    ACROSS = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """The channels of a pair that travel alike: the verdict, and what explains it where they are staged."""

    way: Route
    family: str
    verdict: Verdict
    explanation: Explanation | None = None


class PairGroup(NamedTuple):
    """Destinations of one source of which the same is to be said. `ways` is one object for all groups alike."""

    destinations: list[int]
    scope: Scope
    ways: tuple[JudgedPair, ...]


class PairJudge:
    """Judges pairs; what is alike is judged once, for a job of a thousand ranks has a million pairs."""

    def __init__(self, facts: LogFacts) -> None:
        self._facts = facts
        self._tellers = _tellers(facts)
        self._about = _about_devices(facts.remarks)
        self._rdma = any(remark.note.kind is RemarkKind.RDMA_DEVICES for remark in facts.remarks)
        self._gpus: dict[str, set[str]] = {}
        for host, source, _ in facts.paths:
            self._gpus.setdefault(host, set()).add(source)
        self._refused = _refused(facts.remarks)
        self._explained: dict[Staged, Explanation] = {}

    def groups(self, communicator: Communicator) -> Iterator[tuple[int, list[PairGroup]]]:
        """All pairs of a communicator: every source in order, with its destinations, those alike together."""
        members = {member.rank: member for member in communicator.members}
        numbers: dict[object, str] = {}
        kinds = {
            rank: numbers.setdefault(self._kind(member), f"kind {len(numbers)}") for rank, member in members.items()
        }
        near = _neighbours(members.values())
        known: dict[object, tuple[JudgedPair, ...]] = {}
        for src, destinations, travel in communicator.connections.by_source():
            one = members.get(src)
            beside = near.get(src, frozenset())
            groups: dict[tuple[object, int], tuple[tuple[Route, ...], list[int]]] = {}
            # What is to be said of two ranks on one host may depend on their GPUs.
            of_whom = [dst if dst in beside else kinds.get(dst) for dst in destinations]
            for key, dst, ways in zip(zip(of_whom, map(id, travel), strict=True), destinations, travel, strict=True):
                found = groups.get(key)
                if found is None:
                    groups[key] = ways, [dst]
                else:
                    found[1].append(dst)
            yield src, [self._group(one, members.get(alike[0]), ways, alike, known) for ways, alike in groups.values()]

    def _group(
        self,
        one: Member | None,
        other: Member | None,
        ways: tuple[Route, ...],
        destinations: list[int],
        known: dict[object, tuple[JudgedPair, ...]],
    ) -> PairGroup:
        judged = known.get(id(ways))
        if judged is None and one and other and one.host != other.host:
            judged = known.get((id(ways), self._kind(one), self._kind(other)))
        if judged is None:
            judged = tuple(self._judged(way, ways, one, other) for way in ways)
            if all(each.explanation is None for each in judged):
                known[id(ways)] = judged
            elif one and other and one.host != other.host:
                known[id(ways), self._kind(one), self._kind(other)] = judged
        return PairGroup(destinations, _scope(one, other), judged)

    def _kind(self, member: Member) -> object:
        """What the judgement of a path to another machine depends on."""
        about = (member.host, member.bus_id) if member.bus_id in self._about else None
        return about, id(self._tellers.get(member.process))

    def _judged(self, way: Route, ways: tuple[Route, ...], one: Member | None, other: Member | None) -> JudgedPair:
        if way.host_staged is None:
            return JudgedPair(way, way.family, Verdict.ERROR)
        if not way.host_staged:
            return JudgedPair(way, way.family, Verdict.PASS)
        staged = self._staged(ways, one, other)
        if staged not in self._explained:
            self._explained[staged] = explain(CAUSES, staged) or _unexplained(staged)
        found = self._explained[staged]
        return JudgedPair(way, way.family, Verdict.SKIP if found.by_design else Verdict.FAIL, found)

    def _staged(self, ways: tuple[Route, ...], one: Member | None, other: Member | None) -> Staged:
        ends = [end for way in ways for end in (way.sent, way.received) if end is not None and end.host_staged]
        networks = sorted({end.network for end in ends if end.network is not None}, key=lambda name: name != "Socket")
        network = networks[0] if networks else None
        if one is None or other is None:
            known = one or other
            teller = self._tellers.get(known.process, Teller()) if known else Teller()
            return Staged(one_node=network is None, same_host=False, network=network, source=teller, rdma=self._rdma)
        same_host = one.host == other.host and one is not other
        path = self._facts.paths.get((one.host, one.bus_id or "", other.bus_id or ""))
        return Staged(
            one_node=_scope(one, other) is Scope.INSIDE,
            same_host=same_host,
            network=network,
            path=path if same_host else None,
            gpus=len(self._gpus.get(one.host, ())) if same_host else 0,
            notes=tuple(dict.fromkeys(self._notes(one, other, path if same_host else None))),
            source=self._tellers.get(one.process, Teller()),
            destination=self._tellers.get(other.process, Teller()),
            rdma=self._rdma,
        )

    def _notes(self, one: Member, other: Member, path: str | None) -> Iterator[Note]:
        """Lines about these two GPUs."""
        if one.host == other.host and None not in (one.nvml_index, other.nvml_index):
            indices = str(one.nvml_index), str(other.nvml_index)
            for key in (indices, indices[::-1]):
                yield from self._on(one.host, self._about.get(key, ()))
            # NCCL does not print the driver's refusal of pairs whose path is SYS: it would not use them anyway.
            refused = [self._refused.get((one.host, index)) for index in indices]
            if path in (None, "SYS") and None not in refused:
                yield from filter(None, refused)
        for first, second in ((one, other), (other, one)):
            yield from self._on(one.host, self._about.get((first.bus_id or "", second.bus_id or ""), ()))
            yield from self._on(first.host, self._about.get(first.bus_id or "", ()))

    def _on(self, host: str, found: Iterable[_NoteOfHosts]) -> Iterator[Note]:
        return (note for note, hosts in found if host in hosts)


def _scope(one: Member | None, other: Member | None) -> Scope:
    """Where two ranks are; a rank that is connected with itself talks to a switch (CollNet)."""
    if one is None or other is None:
        return Scope.UNKNOWN
    return Scope.INSIDE if one.node == other.node and one is not other else Scope.ACROSS


def _unexplained(staged: Staged) -> Explanation:
    """What is said where nothing in the log explains it: how to learn more."""
    more = f"run it again with {ASK_FOR_MORE}"
    if staged.inside and any(note.about == _POLICY for note in staged.found(RemarkKind.P2P_TYPE)):
        seen = "isAllCudaP2p 1: CUDA grants these GPUs peer access, and the log does not say why NCCL keeps off it"
        return Explanation(UNKNOWN, seen, f"{more}; gpubench topo shows the paths")
    seen = "nothing in the log explains it"
    shows = "paths and peer access" if staged.inside else "the NICs of a node"
    return Explanation(UNKNOWN, seen, f"{more}; gpubench topo shows {shows}")


def _neighbours(members: Iterable[Member]) -> dict[int, frozenset[int]]:
    """For every rank those on its host or node."""
    places: dict[str, set[int]] = {}
    for member in members:
        for place in (f"host {member.host}", f"node {member.node}"):
            places.setdefault(place, set()).add(member.rank)
    return {member.rank: frozenset(places[f"host {member.host}"] | places[f"node {member.node}"]) for member in members}


def _tellers(facts: LogFacts) -> Mapping[str, Teller]:
    """What each process says; those that say the same share one."""
    settings: dict[str, list[tuple[str, str]]] = {}
    notes: dict[str, list[Note]] = {}
    for setting in facts.settings:
        for process in setting.processes:
            settings.setdefault(process, []).append((setting.name, setting.value))
    for remark in facts.remarks:
        if remark.note.kind not in _ABOUT_DEVICES:
            for process in remark.processes:
                notes.setdefault(process, []).append(remark.note)
    shared: dict[Teller, Teller] = {}
    found = {}
    for process in settings.keys() | notes.keys():
        teller = Teller(tuple(settings.get(process, ())), tuple(notes.get(process, ())))
        found[process] = shared.setdefault(teller, teller)
    return found


def _refused(remarks: Iterable[Remark]) -> Mapping[tuple[str, str], Note]:
    """By host and NVML index, GPUs to which the driver gives no peer access over PCIe, to whomever."""
    return {
        (process.rpartition(":")[0], index): remark.note
        for remark in remarks
        if remark.note.kind is RemarkKind.DRIVER_REFUSED
        for process in remark.processes
        for index in remark.note.about
    }


def _about_devices(remarks: Iterable[Remark]) -> Mapping[object, list[_NoteOfHosts]]:
    """Lines about GPUs by bus id, or by two bus ids or NVML indices, and the hosts that they are of."""
    found: dict[object, list[_NoteOfHosts]] = {}
    for remark in remarks:
        if remark.note.kind in _ABOUT_DEVICES:
            key = remark.note.about[0] if remark.note.kind in _ABOUT_A_BUS_ID else remark.note.about
            hosts = frozenset(process.rpartition(":")[0] for process in remark.processes)
            found.setdefault(key, []).append((remark.note, hosts))
    return found


def is_half_heard(way: Route) -> bool:
    """Whether one end's line of a network connection is missing: both ends write one."""
    return way.transport.kind is TransportKind.NET and None in (way.sent, way.received)
