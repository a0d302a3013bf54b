"""Paths between ranks: NCCL's transports and connections, and the judgement of the evidence for a path."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import permutations
from typing import NamedTuple

from msgspec.structs import replace

from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.verdict import Verdict


class TransportKind(StrEnum):
    """NCCL's transports, in the order in which NCCL tries them. UNKNOWN stands for all others."""

    P2P = "p2p"
    SHM = "shm"
    NET = "net"
    COLLNET = "collnet"
    NVLS = "nvls"
    UNKNOWN = "unknown"


class Transport(Struct, frozen=True):
    """The transport of a connection.

    - `name`: NCCL's name without details that vary by channel, such as `P2P/CUMEM`, `P2P/direct pointer`, `SHM/direct`,
      `NET/IB/0/GDRDMA`, `NET/Socket/0` or `COLLNET/SHARP/0`
    - `modifiers`: the details: `read`, `CE`, `Shared`, `PCI`, or the GPU in the middle of `P2P/indirect`
    - `gdr`: whether the transport uses GPUDirect RDMA
    - `proxy_rank`: the rank whose NIC the connection uses (PXN)
    """

    name: str
    kind: TransportKind
    gdr: bool = False
    proxy_rank: int | None = None
    modifiers: tuple[str, ...] = ()

    @property
    def host_staged(self) -> bool | None:
        """True if the data passes through host memory: always for SHM, never for P2P, for networks without
        GPUDirect RDMA.
        """
        if self.kind is TransportKind.UNKNOWN:
            return None
        return self.kind not in (TransportKind.P2P, TransportKind.NVLS) and not self.gdr

    @property
    def family(self) -> str:
        """The transport's name without the NIC number: 'NET/IB/GDRDMA'."""
        return self.name if self.network is None else _NIC.sub("", self.name)

    @property
    def network(self) -> str | None:
        """The name of the network: 'IB', 'Socket' or 'AWS Libfabric'. None for transports inside a node."""
        if self.kind not in (TransportKind.NET, TransportKind.COLLNET):
            return None
        return _NETWORK.sub("", self.name)


MULTICAST = Transport("NVLS", TransportKind.NVLS)  # NVLink SHARP, which connects all GPUs of a node through NVSwitches
_NIC = re.compile(r"/-?\d+(?=/GDRDMA$|$)", re.ASCII)
_NETWORK = re.compile(r"^(?:NET|COLLNET)/|/-?\d+(?:/GDRDMA)?$", re.ASCII)
_NET = re.compile(
    r"(?P<net>(?:COLL)?NET/[^/]+/-?\d{1,9})(?:\((?P<proxy>\d{1,9})\))?(?P<gdr>/GDRDMA(?P<pci>\(PCI\))?)?(?P<shared>/Shared)?",
    re.ASCII,
)
_P2P = re.compile(r"(?P<name>P2P/(?:direct pointer|IPC|CUMEM|MNNVL))(?P<words>(?:/(?:read|CE))*)", re.ASCII)
_INDIRECT = re.compile(r"P2P/indirect/(?P<hop>-?\d+\[[0-9A-Fa-f]+\])(?P<words>(?:/read)?)", re.ASCII)
_SHM = re.compile(r"direct shared memory|SHM/(?:direct|CE)(?:/(?P<receiver>direct|CE))?", re.ASCII)

_WHOLE = (
    *(f"P2P/{name}" for name in ("direct pointer/read", "IPC/read/CE", "IPC/CE", "CUMEM/read/CE", "CUMEM/CE")),
    *("P2P/MNNVL/read/CE", "P2P/MNNVL/CE", "P2P/indirect/", "SHM/direct/direct", "SHM/direct/CE", "SHM/CE/direct"),
    *("SHM/CE/CE", "direct shared memory", "NET/", "COLLNET/"),
)
_NET_BEGINNING = re.compile(
    r"(?:P2P/indirect/-?\d*\[?[0-9A-Fa-f]*\]?(?:/r?e?a?)?|(?:COLL)?NET/[^/]+(?:/-?(?:\d{1,9}(?:\(\d*)?"
    r"(?:\)?(?P<rest>/.*))?)?)?)",
    re.ASCII,
)
_NET_ENDS = ("/GDRDMA(PCI)/Shared", "/GDRDMA/Shared", "/Shared")


def parse_transport(via: str) -> Transport:
    """Parse the text after `via` in a log line of NCCL 2.10 to 2.32. Any other text becomes an UNKNOWN transport."""
    text = via.strip()
    if found := _P2P.fullmatch(text):
        return Transport(found["name"], TransportKind.P2P, modifiers=_words(found["words"]))
    if found := _NET.fullmatch(text):
        kind = TransportKind.COLLNET if text.startswith("COLL") else TransportKind.NET
        gdr = found["gdr"] is not None
        modifiers = (*(["PCI"] if found["pci"] else []), *_words(found["shared"] or ""))
        proxy_rank = None if found["proxy"] is None else int(found["proxy"])
        return Transport(found["net"] + ("/GDRDMA" if gdr else ""), kind, gdr, proxy_rank, modifiers)
    if _SHM.fullmatch(text):
        return Transport("SHM/direct", TransportKind.SHM, modifiers=("CE",) if "CE" in text else ())
    if found := _INDIRECT.fullmatch(text):
        return Transport("P2P/indirect", TransportKind.P2P, modifiers=(found["hop"], *_words(found["words"])))
    return Transport(text, TransportKind.UNKNOWN)


def may_begin_transport(via: str) -> bool:
    """True if a text may be the beginning of a transport's name, cut off at the end of a truncated line."""
    if any(whole.startswith(via) for whole in _WHOLE):
        return True
    found = _NET_BEGINNING.fullmatch(via)
    return found is not None and any(whole.startswith(found["rest"] or "") for whole in _NET_ENDS)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("/")))


class LoggedChannels(NamedTuple):
    """Channels with the same transport that one side of a connection logs, as a bit mask.

    `peer_to_peer` is true for NCCL's connection 1, which serves send and receive. `received` is true for lines of the
    receiver. For P2P and SHM, the receiver logs no lines.
    """

    transport: Transport
    channel_bits: int
    peer_to_peer: bool = False
    received: bool = False


class Edge(NamedTuple):
    """Logged channels from rank `src` to rank `dst` of a communicator. COLLNET has no peer, so `src` and `dst` are
    equal.
    """

    src: int
    dst: int
    logged: LoggedChannels


class Route(Struct, frozen=True):
    """The channels between two ranks that have the same transports at the sender and at the receiver.

    A transport is None if its side logged no lines.
    """

    sent: Transport | None
    received: Transport | None
    channels: int
    peer_to_peer: bool

    @property
    def transport(self) -> Transport:
        """The sender's transport, or the receiver's if the sender logged none."""
        transport = self.sent or self.received
        if transport is None:
            raise ValueError("a path has at least one end")
        return transport

    @property
    def host_staged(self) -> bool | None:
        """True if the transport of either side is host-staged. None if neither is, but one is unknown."""
        return is_staged([end for end in (self.sent, self.received) if end is not None])

    @property
    def name(self) -> str:
        """The name of the transport, followed by the receiver's if it differs: 'NET/IB/0/GDRDMA, received NET/IB/0'."""
        return self._describe("name")

    @property
    def family(self) -> str:
        """The name of the route without NIC numbers: 'NET/IB/GDRDMA, received NET/IB'."""
        return self._describe("family")

    def _describe(self, attribute: str) -> str:
        sent, received = (str(getattr(end, attribute)) for end in (self.transport, self.received or self.transport))
        return sent if sent == received else f"{sent}, received {received}"


def is_staged(transports: Iterable[Transport]) -> bool | None:
    """True if any transport is host-staged. None if no transport is, but one is unknown."""
    staged = [transport.host_staged for transport in transports]
    return True if True in staged else None if None in staged or not staged else False


class Path(Route, frozen=True):
    """A route from rank `src` to rank `dst`."""

    src: int
    dst: int


def join_edges(edges: Iterable[Edge]) -> tuple[Path, ...]:
    """Combine logged channels into routes, sorted by source and destination, then in the order of the log."""
    pairs: dict[tuple[int, int], list[LoggedChannels]] = {}
    for src, dst, logged in edges:
        pairs.setdefault((src, dst), []).append(logged)
    return tuple(
        Path(route.sent, route.received, route.channels, route.peer_to_peer, *pair)
        for pair in sorted(pairs)
        for route in routes(pairs[pair])
    )


def routes(logged: Iterable[LoggedChannels]) -> tuple[Route, ...]:
    """Combine the channels that both ranks of a pair logged into routes. NCCL's connection 0 comes before
    connection 1.
    """
    channels = list(logged)
    return tuple(route for peer_to_peer in (False, True) for route in _match_ends(channels, peer_to_peer=peer_to_peer))


def _match_ends(logged: Sequence[LoggedChannels], *, peer_to_peer: bool) -> Iterator[Route]:
    ends = [end for end in logged if end.peer_to_peer is peer_to_peer]
    received = [end for end in ends if end.received]
    both_ends = 0
    for sent in (end for end in ends if not end.received):
        left = sent.channel_bits
        for other in received:
            if both := left & other.channel_bits:
                yield Route(sent.transport, other.transport, both.bit_count(), peer_to_peer)
                left &= ~both
                both_ends |= both
        if left:
            yield Route(sent.transport, None, left.bit_count(), peer_to_peer)
    for other in received:
        if left := other.channel_bits & ~both_ends:
            yield Route(None, other.transport, left.bit_count(), peer_to_peer)


class Tuning(Struct, frozen=True):
    """NCCL's choice for one operation, such as 'AllReduce', 'RING', 'SIMPLE'. None if the log does not show it."""

    function: str
    size_bytes: int
    algorithm: str | None
    protocol: str | None
    channels: int | None


Pair = tuple[int, int]  # Source rank and destination rank
RING, TREE = "RING", "TREE"
_UNLOGGED_TRANSPORTS = {
    "NVLS": "NVLS",
    "NVLS_TREE": "NVLS",
    "SYMMETRIC": "symmetric memory",
    "COPY_ENGINE": "copy engine",
}
"""Transports inside a node for algorithms whose connections NCCL does not log.

All of them need peer access or multicast, so none is host-staged.
"""


class RankSelection(Struct, frozen=True, kw_only=True):
    """The connections that one rank logs, and the ordered pairs of neighbors in its rings and trees.

    `no_log` is the reason if the rank has no log.
    """

    no_log: str = ""
    edges: tuple[Edge, ...] = ()
    ring: frozenset[Pair] = frozenset()
    tree: frozenset[Pair] = frozenset()


class Used(Struct, frozen=True):
    """The transports between all ordered pairs of an operation, slowest first. `unconnected` has ranks that log
    none.
    """

    pairs: Mapping[Pair, tuple[Transport, ...]]
    unconnected: tuple[int, ...] = ()

    @property
    def transport(self) -> str | None:
        """The names of all transports, slowest first: 'NET/Socket/0+P2P/CUMEM'."""
        return join_names(transport for transports in self.pairs.values() for transport in transports)

    @property
    def host_staged(self) -> bool | None:
        """True if any pair is host-staged. None if no pair is, but one is unknown."""
        staged = [is_staged(transports) for transports in self.pairs.values()]
        if True in staged:
            return True
        return None if self.unconnected or None in staged or not staged else False


def join_names(transports: Iterable[Transport]) -> str | None:
    """Join distinct transport names with '+', slowest first. None if there are no transports."""
    return "+".join(dict.fromkeys(transport.name for transport in sorted(transports, key=_speed_order))) or None


def _speed_order(transport: Transport) -> tuple[int, str]:
    """Sort key for speed: host-staged networks, shared memory, unknown transports, direct networks, then P2P and
    NVLS.
    """
    if transport.host_staged:
        return (0 if transport.network else 1), transport.name
    kinds = (TransportKind.UNKNOWN, TransportKind.COLLNET, TransportKind.NET)
    return (2 + kinds.index(transport.kind) if transport.kind in kinds else 5), transport.name


def drop_idle_pairs(pairs: Iterable[Pair], expected_bytes: Sequence[tuple[float, float]]) -> list[Pair]:
    """Return the pairs of a ring that move data.

    No data enters the root of a broadcast or leaves the root of a reduction. `expected_bytes` are the bytes that each
    rank must send and receive.
    """
    senders, receivers = ([rank for rank, moved in enumerate(expected_bytes) if moved[end]] for end in (0, 1))
    return [pair for pair in pairs if senders != [pair[1]] and receivers != [pair[0]]]


class Selection:
    """The connections from the logs of all ranks. `nodes` has each rank's node, according to MPI."""

    def __init__(self, ranks: Sequence[RankSelection], nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._paths = join_edges(edge for rank in ranks for edge in rank.edges)
        self._ring = frozenset[Pair]().union(*(rank.ring for rank in ranks))
        self._tree = frozenset[Pair]().union(*(rank.tree for rank in ranks))
        self.no_log = next((f"rank {number}: {rank.no_log}" for number, rank in enumerate(ranks) if rank.no_log), "")

    def algorithm_connections(self, algorithm: str | None) -> Used:
        """Return the connections of a collective that uses this algorithm. None stands for all connections.

        If the log also contains a larger communicator, skip ranks that do not exist in this one.
        """
        size = len(self._nodes)
        paths = [path for path in self._paths if not path.peer_to_peer and max(path.src, path.dst) < size]
        if algorithm in _UNLOGGED_TRANSPORTS:
            through = Transport(_UNLOGGED_TRANSPORTS[algorithm], TransportKind.P2P)
            nodes = self._nodes
            inside = [pair for pair in permutations(range(size), 2) if nodes[pair[0]] == nodes[pair[1]]]
            across = {(path.src, path.dst) for path in paths if nodes[path.src] != nodes[path.dst]}
            return Used(dict.fromkeys(inside, (through,)) | _transports_by_pair(paths, across))
        logged = {RING: self._ring, TREE: self._tree}.get(algorithm or "", frozenset[Pair]())
        neighbours = {pair for pair in logged if max(pair) < size}
        if neighbours:
            return Used(_transports_by_pair(paths, neighbours))
        pairs = _transports_by_pair(paths, {(path.src, path.dst) for path in paths})
        connected = {source for source, _ in pairs}
        ranks = range(size) if size > 1 else ()
        return Used(pairs, tuple(rank for rank in ranks if rank not in connected))

    def send_connections(self, pairs: Iterable[Pair]) -> Used:
        """Return the connections of sends and receives. Include all SHM connections, whose log lines do not state
        their purpose.
        """
        paths = [path for path in self._paths if path.peer_to_peer or path.transport.kind is TransportKind.SHM]
        return Used(_transports_by_pair(paths, pairs))


def _transports_by_pair(paths: Sequence[Path], pairs: Iterable[Pair]) -> dict[Pair, tuple[Transport, ...]]:
    found: dict[Pair, dict[Transport, None]] = {pair: {} for pair in sorted(pairs)}
    for path in paths:
        if (path.src, path.dst) in found:
            ends = (end for end in (path.sent, path.received) if end is not None)
            found[path.src, path.dst] |= dict.fromkeys(ends)
    return {pair: tuple(sorted(transports, key=_speed_order)) for pair, transports in found.items()}


class State(StrEnum):
    """Whether one kind of evidence for a direct path is present, absent or contradicting."""

    PRESENT = "present"
    ABSENT = "absent"
    CONTRADICTING = "contradicting"


class EvidenceUse(StrEnum):
    """How to use evidence on paths: show it in the table, keep it only for JSON and the verdict, or skip it."""

    SHOWN = "shown"
    KEPT = "kept"
    OFF = "off"


class Conclusion(StrEnum):
    """The conclusion from all evidence on a path. POSSIBLE and IMPOSSIBLE apply to paths without traffic."""

    DIRECT = "direct"
    STAGED = "staged"
    WRONG = "wrong data"
    DISPUTED = "disputed"
    UNKNOWN = "unknown"
    POSSIBLE = "direct possible"
    IMPOSSIBLE = "direct impossible"


class Confidence(StrEnum):
    """The confidence in a conclusion.

    PROVEN needs two kinds of evidence, and LIKELY needs one. WEAK means that kinds of evidence contradict each other.
    NONE means that there is no evidence.
    """

    PROVEN = "proven"
    LIKELY = "likely"
    WEAK = "weak"
    NONE = "none"


class Evidence(Struct, frozen=True):
    """One kind of evidence on one path: its state, and the observation as text."""

    state: State = State.ABSENT
    seen: str = ""


class PathEvidence(Struct, frozen=True, kw_only=True):
    """All evidence on one path.

    `by_design` is the reason if host staging is expected. `in_doubt` is true if nothing proves whether the pair can
    avoid host memory.
    """

    capability: Evidence = Evidence()
    selection: Evidence = Evidence()
    measurement: Evidence = Evidence()
    correctness: Evidence = Evidence()
    by_design: str = ""
    in_doubt: bool = False


class Judgement(Struct, frozen=True):
    """The conclusion about a path, the verdict on it, and the confidence in the conclusion."""

    conclusion: Conclusion
    verdict: Verdict
    confidence: Confidence


class Rule(Struct, frozen=True):
    """One row of the decision table: the judgement for certain states of the evidence.

    `states` has one word each for capability, selection, measurement and correctness. The letters of a word are the
    matching states: P for present, A for absent, C for contradicting.
    """

    states: str
    judgement: Judgement
    meaning: str

    def holds(self, states: Sequence[State]) -> bool:
        """True if this row matches the states of the four kinds of evidence."""
        return all(state.name[0] in allowed for state, allowed in zip(states, self.states.split(), strict=True))


_DIRECT_PROVEN = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.PROVEN)
_DIRECT_LIKELY = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.LIKELY)
_DIRECT_WEAK = Judgement(Conclusion.DIRECT, Verdict.PASS, Confidence.WEAK)
_DISPUTED = Judgement(Conclusion.DISPUTED, Verdict.WARN, Confidence.WEAK)
_STAGED_PROVEN = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.PROVEN)
_STAGED_LIKELY = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.LIKELY)
_STAGED_WEAK = Judgement(Conclusion.STAGED, Verdict.FAIL, Confidence.WEAK)
_WRONG = Judgement(Conclusion.WRONG, Verdict.FAIL, Confidence.PROVEN)
_UNKNOWN = Judgement(Conclusion.UNKNOWN, Verdict.WARN, Confidence.NONE)

RULES = (
    Rule("PAC PAC PAC C", _WRONG, "wrong data arrived, so the speed of the path does not matter"),
    Rule("PAC C C PA", _STAGED_PROVEN, "the library chose host memory, and the measurements agree"),
    Rule("PA C A PA", _STAGED_LIKELY, "the library chose host memory, and no measurement contradicts it"),
    Rule("C C A PA", _STAGED_PROVEN, "the library chose host memory, and the machine has no direct path"),
    Rule("PAC C P PA", _STAGED_WEAK, "the library chose host memory, but some data took a direct path"),
    Rule("PA P P P", _DIRECT_PROVEN, "the library chose a direct path, the measurements agree, and the data are right"),
    Rule(
        "PA P P A",
        _DIRECT_LIKELY,
        "the library chose a direct path and the measurements agree, but the data were not checked",
    ),
    Rule(
        "C P P PA",
        _DIRECT_LIKELY,
        "the library chose a direct path and the measurements agree, although the driver reports none",
    ),
    Rule("P P A PA", _DIRECT_LIKELY, "the library chose a direct path, and the machine has one"),
    Rule("A P A PA", _DIRECT_WEAK, "the library chose a direct path, and there is no other evidence"),
    Rule("C P A PA", _DISPUTED, "the library chose a direct path, the driver reports none, and no measurement decides"),
    Rule("PA P C PA", _DISPUTED, "the library chose a direct path, but the measurements match host memory"),
    Rule(
        "C P C PA",
        _STAGED_LIKELY,
        "the driver and the measurements show host memory, although the library chose a direct path",
    ),
    Rule(
        "P A P P",
        _DIRECT_PROVEN,
        "a direct path exists, the measurements show that it was used, and the data are right",
    ),
    Rule("PA A P PA", _DIRECT_LIKELY, "host memory cannot reach this bandwidth, or counters show direct traffic"),
    Rule(
        "C A P PA",
        _DISPUTED,
        "the measurements show a direct path, the driver reports none, and the library's choice is unknown",
    ),
    Rule("P A C PA", _STAGED_LIKELY, "a direct path exists, but the measurements match host memory"),
    Rule("A A C PA", _STAGED_WEAK, "the measurements match host memory, and there is no other evidence"),
    Rule("C A C PA", _STAGED_LIKELY, "the driver reports no direct path, and the measurements agree"),
    Rule("PAC A A PA", _UNKNOWN, "no evidence shows which path was used, so gpubench does not assume a direct one"),
)
"""The decision table. The first matching row applies."""


def decide(evidence: PathEvidence) -> Rule:
    """Return the matching row of the decision table."""
    kinds = (evidence.capability, evidence.selection, evidence.measurement, evidence.correctness)
    return _find_rule(*(kind.state for kind in kinds))


@cache
def _find_rule(*states: State) -> Rule:
    return next(rule for rule in RULES if rule.holds(states))


def judge(evidence: PathEvidence) -> Judgement:
    """Judge the evidence. If host staging is expected by design, the verdict is SKIP. If that is uncertain, it is
    WARN.
    """
    judgement = decide(evidence).judgement
    if judgement.conclusion is Conclusion.STAGED and (evidence.by_design or evidence.in_doubt):
        return replace(judgement, verdict=Verdict.SKIP if evidence.by_design else Verdict.WARN)
    return judgement
