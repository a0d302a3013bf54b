"""Rank 0's side of a scan: orders to all supervisors, their replies, and the seats of ranks in rings."""

import contextlib
import resource
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import count

from gpubench.model.results import scan
from gpubench.ranks.scan.messages import (
    OWN_FAULT,
    WORDS,
    Figure,
    Frames,
    MessageType,
    Outcome,
    RingOrder,
    RoundOrder,
    RoundReply,
    Seat,
    clock_offset,
    framed,
    keep_alive,
    local_figures,
    welcome,
)
from gpubench.ranks.scan.supervisor import SECONDS_OF_PHASE_0, SECONDS_OF_SUPERVISOR, SECONDS_TO_BE_KILLED
from gpubench.records import dataclass


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of every node, and the rails of every rank: all rails of a node on one rank, or one a rank."""

    ranks_by_node: tuple[tuple[int, ...], ...]
    rails_by_rank: tuple[tuple[int, ...], ...]

    @property
    def node_by_rank(self) -> dict[int, int]:
        """The node of every rank."""
        return {rank: node for node, ranks in enumerate(self.ranks_by_node) for rank in ranks}

    @property
    def rank_by_rail(self) -> dict[scan.NodeRail, int]:
        """The rank that has a rail of a node."""
        return {
            scan.NodeRail(node, rail): rank
            for rank, node in self.node_by_rank.items()
            for rail in self.rails_by_rank[rank]
        }


def seats(
    rings: Sequence[Sequence[scan.NodeRail]], rank_by_rail: Mapping[scan.NodeRail, int]
) -> dict[int, tuple[Seat, ...]]:
    """The seats of every rank in these rings; a rail has one at most."""
    found: dict[int, tuple[Seat, ...]] = {}
    for ring in rings:
        for place, cell in enumerate(ring):
            before, after = ring[place - 1], ring[(place + 1) % len(ring)]
            seat = Seat(cell.rail, rank_by_rail[before], before.rail, rank_by_rail[after], after.rail, place, len(ring))
            rank = rank_by_rail[cell]
            found[rank] = (*found.get(rank, ()), seat)
    return found


_AT_ONCE = 2**12  # More than a reply of 64 rails; a larger buffer takes longer to make than to fill
_FIRST_RING = 1000  # Rings have numbers beyond those of all rounds, so that no worker takes one for the other
SECONDS_TO_GREET = 2.0
SECONDS_OF_GRACE = 2.0  # Beyond what a supervisor itself waits for its workers
CLOCK_SECONDS = 1.0  # Wall clocks further apart make logs hard to read and certificates invalid
_NO_FIGURE = "its supervisor gave no figure of this ring"
_SILENT, _GONE = "its supervisor does not answer", "its supervisor is gone"


@dataclass(slots=True)
class _Supervised:
    rank: int
    connection: socket.socket
    frames: Frames = field(default_factory=Frames)
    asked_clock: float = 0.0
    clock_offset: float = 0.0


class Coordinator:
    """Measures rounds by the supervisors that are connected; a node of which one is gone is gone."""

    def __init__(self, nodes: NodeRanks, secret: bytes, deadline_s: float) -> None:
        self.listener = socket.create_server(("", 0), backlog=4096)
        self._nodes, self._secret, self._deadline_s = nodes, secret, deadline_s
        self._node_by_rank = nodes.node_by_rank
        self._rank_by_rail = nodes.rank_by_rail
        self._selector = selectors.DefaultSelector()
        self._supervised: dict[int, _Supervised] = {}
        self._gone: dict[int, str] = {}
        self._told: set[int] = set()
        self._ring_numbers = count(_FIRST_RING)
        _allow_files(len(nodes.rails_by_rank) + 256)

    @property
    def port(self) -> int:
        """Where supervisors connect to."""
        return int(self.listener.getsockname()[1])

    @property
    def gone(self) -> Mapping[int, str]:
        """Nodes that are gone, and what was seen of that."""
        return self._gone

    def accept(self, seconds: float) -> None:
        """Wait until all ranks have connected, or for so long; nodes of which one has not are gone."""
        deadline = time.monotonic() + seconds
        ranks = set(self._node_by_rank)
        while self._supervised.keys() != ranks and (left := deadline - time.monotonic()) > 0:
            self.listener.settimeout(left)
            try:
                connection, _ = self.listener.accept()
            except OSError:
                break
            self._welcome(connection, ranks)
        for rank in ranks - self._supervised.keys():
            self._gone.setdefault(self._node_by_rank[rank], "its supervisor did not come")
        self._ask_clocks()

    def _ask_clocks(self) -> None:
        """Ask when all are there, so that none answered long ago; an answer that comes later counts too."""
        for supervised in list(self._supervised.values()):
            supervised.asked_clock = time.time()
            try:
                supervised.connection.send(framed(bytes((MessageType.CLOCK,))))
            except OSError:
                self._lose(supervised.rank, _GONE)
        self._collect(MessageType.CLOCK, dict.fromkeys(self._supervised), time.monotonic() + SECONDS_TO_GREET)

    def local(self) -> list[scan.LocalFigure]:
        """Phase 0 of all nodes at once."""
        replies = self._ask(
            {rank: bytes((MessageType.LOCAL_ORDER,)) for rank in self._supervised},
            MessageType.LOCAL_REPLY,
            SECONDS_OF_PHASE_0 + SECONDS_TO_BE_KILLED + SECONDS_OF_GRACE,
        )
        figures: list[scan.LocalFigure] = []
        for rank, body in replies.items():
            with contextlib.suppress(struct.error, IndexError):
                figures += local_figures(self._node_by_rank[rank], body)
        return figures

    def failed(self) -> scan.BeforeRounds:
        """What phase 0 left that does not work: nodes that are gone, rails whose worker died or hung."""
        orders = dict.fromkeys(self._supervised, bytes((MessageType.FAILED_ORDER,)))
        replies = self._ask(orders, MessageType.REPLY, SECONDS_TO_BE_KILLED + SECONDS_OF_GRACE)
        failed: dict[scan.NodeRail, str] = {}
        for rank, body in replies.items():
            with contextlib.suppress(struct.error, ValueError):
                reply, node = RoundReply.of(body), self._node_by_rank[rank]
                failed |= {
                    scan.NodeRail(node, rail): _words(Outcome(out), reply.remark) for rail, _, out in reply.figures
                }
        self._told |= self._gone.keys()
        return scan.BeforeRounds(dict(self._gone), failed)

    def clock_offsets(self) -> dict[int, float]:
        """By how many seconds the wall clock of a node differs from this one's, where that is much."""
        return {
            self._node_by_rank[rank]: each.clock_offset
            for rank, each in self._supervised.items()
            if abs(each.clock_offset) > CLOCK_SECONDS
        }

    def measure(self, planned: scan.PlannedRound) -> scan.RoundOutcome:
        """A round: orders to both nodes of every pair, and their replies made into figures."""
        start = time.monotonic()
        orders = self._orders(planned)
        patience = self._deadline_s + SECONDS_OF_SUPERVISOR + SECONDS_OF_GRACE
        replies = self._ask(orders, MessageType.REPLY, patience)
        figures: dict[int, dict[int, Figure]] = {}
        remarks: dict[scan.NodeRail, str] = {}
        for rank, body in replies.items():
            with contextlib.suppress(struct.error):
                reply = RoundReply.of(body)
                if reply.number == planned.number:
                    node = self._node_by_rank[rank]
                    figures.setdefault(node, {}).update({each[0]: each for each in reply.figures})
                    remarks |= {scan.NodeRail(node, each[0]): reply.remark for each in reply.figures if each[2]}
        gone = {node: seen for node, seen in self._gone.items() if node not in self._told}
        self._told |= gone.keys()
        samples = tuple(self._samples(planned, figures, remarks))
        return scan.RoundOutcome(planned.number, planned.phase, samples, time.monotonic() - start, gone)

    def rings(
        self, rings: Sequence[Sequence[scan.NodeRail]], *, all_reduce: bool = False, told_later: bool = False
    ) -> list[scan.RingOutcome]:
        """What disjoint rings of rails deliver, all at once; in phase 0 a failed worker is `told_later` once more."""
        number = next(self._ring_numbers)
        orders = {
            rank: RingOrder(number, self._deadline_s, own, all_reduce, told_later).packed()
            for rank, own in seats(rings, self._rank_by_rail).items()
        }
        replies = self._ask(orders, MessageType.REPLY, self._deadline_s + SECONDS_OF_SUPERVISOR + SECONDS_OF_GRACE)
        figures: dict[scan.NodeRail, tuple[float, int, str]] = {}
        for rank, body in replies.items():
            with contextlib.suppress(struct.error):
                reply = RoundReply.of(body)
                node = self._node_by_rank[rank]
                if reply.number == number:
                    figures |= {
                        scan.NodeRail(node, rail): (gb_s, out, reply.remark) for rail, gb_s, out in reply.figures
                    }
        return [self._ring_outcome(ring, figures, replies) for ring in rings]

    def collective(self, nodes: Sequence[int]) -> float | scan.RingFailure:
        """GB/s that pass a node in rings of these nodes, one a rail: the slowest of every ring, summed over rails."""
        rails = sorted({rail for own in self._nodes.rails_by_rank for rail in own})
        outcomes = self.rings([[scan.NodeRail(node, rail) for node in nodes] for rail in rails])
        failures = [failure for each in outcomes for failure in each.failures.values()]
        if failures:
            return next((each for each in failures if each.is_own), failures[0])
        return sum(each.gb_s for each in outcomes)

    def close(self) -> None:
        """Tell all supervisors that the scan is over, and whether everybody is still there to end MPI together."""
        end = bytes((MessageType.END, not self._gone))
        for each in self._supervised.values():
            with contextlib.suppress(OSError):
                each.connection.settimeout(SECONDS_OF_GRACE)
                each.connection.sendall(framed(end))
            each.connection.close()
        self.listener.close()
        self._selector.close()

    def _welcome(self, connection: socket.socket, ranks: set[int]) -> None:
        try:
            connection.settimeout(SECONDS_TO_GREET)
            rank = int(welcome(connection, self._secret))
            if rank not in ranks or rank in self._supervised:
                raise ConnectionError(f"rank {rank}")
        except (OSError, ValueError):
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        connection.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._supervised[rank] = _Supervised(rank, connection)
        self._selector.register(connection, selectors.EVENT_READ, self._supervised[rank])

    def _orders(self, planned: scan.PlannedRound) -> dict[int, bytes]:
        retired: dict[int, int] = {}
        for node, rail in planned.retired:
            retired[node] = retired.get(node, 0) | 1 << rail
        orders: dict[int, bytes] = {}
        for pair in planned.pairs:
            mask = retired.get(pair.first, 0) | retired.get(pair.second, 0)
            ends = (self._nodes.ranks_by_node[node] for node in pair)
            for first, second in zip(*ends, strict=True):
                for rank, partner, listens in ((first, second, True), (second, first, False)):
                    orders[rank] = RoundOrder(planned.number, partner, listens, self._deadline_s, mask).packed()
        return orders

    def _ask(self, orders: Mapping[int, bytes], kind: MessageType, seconds: float) -> dict[int, bytes]:
        asked: dict[int, None] = {}
        for rank, order in orders.items():
            if (supervised := self._supervised.get(rank)) is None:
                continue
            try:
                supervised.connection.send(framed(order))
                asked[rank] = None
            except OSError:
                self._lose(rank, _GONE)
        replies = self._collect(kind, asked, time.monotonic() + seconds)
        for rank in [rank for rank in asked if rank not in replies and rank in self._supervised]:
            self._lose(rank, f"{_SILENT} within {seconds:.0f} s")
        return replies

    def _collect(self, kind: MessageType, asked: Mapping[int, None], deadline: float) -> dict[int, bytes]:
        replies: dict[int, bytes] = {}
        missing = {rank for rank in asked if rank in self._supervised}
        while missing and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                supervised: _Supervised = key.data
                for message in self._received(supervised):
                    if message[0] == MessageType.CLOCK:
                        answered = time.time()
                        supervised.clock_offset = clock_offset(message[1:], supervised.asked_clock, answered)
                    if message[0] == kind:
                        replies[supervised.rank] = message[1:]
                        missing.discard(supervised.rank)
                if supervised.rank not in self._supervised:
                    missing.discard(supervised.rank)
        return replies

    def _received(self, supervised: _Supervised) -> list[bytes]:
        try:
            data = supervised.connection.recv(_AT_ONCE)
            if data:
                return supervised.frames.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            pass
        self._lose(supervised.rank, _GONE)
        return []

    def _lose(self, rank: int, seen: str) -> None:
        """A node without one of its supervisors is gone; its others are told to end, should they still hear."""
        node = self._node_by_rank[rank]
        self._gone.setdefault(node, seen)
        for each in self._nodes.ranks_by_node[node]:
            supervised = self._supervised.pop(each, None)
            if supervised is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(supervised.connection)
                with contextlib.suppress(OSError):
                    supervised.connection.send(framed(bytes((MessageType.END, False))))
                supervised.connection.close()

    def _ring_outcome(
        self,
        ring: Sequence[scan.NodeRail],
        figures: Mapping[scan.NodeRail, tuple[float, int, str]],
        replies: Mapping[int, bytes],
    ) -> scan.RingOutcome:
        failures: dict[scan.NodeRail, scan.RingFailure] = {}
        for cell in ring:
            if cell not in figures:
                seen = _NO_FIGURE if self._rank_by_rail[cell] in replies else self._gone.get(cell.node, _SILENT)
                failures[cell] = scan.RingFailure(cell.node, seen, is_own=True)
            elif figures[cell][1]:
                _, outcome, remark = figures[cell]
                failures[cell] = scan.RingFailure(cell.node, _words(Outcome(outcome), remark), outcome in OWN_FAULT)
        return scan.RingOutcome(0.0 if failures else min(figures[cell][0] for cell in ring), failures)

    def _samples(
        self,
        planned: scan.PlannedRound,
        figures: Mapping[int, Mapping[int, Figure]],
        remarks: Mapping[scan.NodeRail, str],
    ) -> Iterator[scan.PairSample]:
        rails = sorted({rail for own in self._nodes.rails_by_rank for rail in own})
        nothing: Mapping[int, Figure] = {}
        for first, second in planned.pairs:
            one, other = figures.get(first, nothing), figures.get(second, nothing)
            for rail in rails:
                if planned.retired and not planned.retired.isdisjoint(
                    (scan.NodeRail(first, rail), scan.NodeRail(second, rail))
                ):
                    continue
                ours, theirs = one.get(rail), other.get(rail)
                if ours is not None and theirs is not None and not ours[2] and not theirs[2]:
                    yield scan.PairSample(first, second, rail, (ours[1] + theirs[1]) / 2)
                else:
                    ends = ((first, ours), (second, theirs))
                    own = {node: remarks.get(scan.NodeRail(node, rail), "") for node in (first, second)}
                    yield scan.PairSample(first, second, rail, 0.0, *self._failure(ends, own))

    def _failure(self, ends: Sequence[tuple[int, Figure | None]], remarks: Mapping[int, str]) -> tuple[str, int | None]:
        """Why a figure is missing, and of which node: whoever blames itself, or is gone, is to blame."""
        failed = [(node, Outcome(said[2])) for node, said in ends if said is not None and said[2]]
        for node, outcome in failed:
            if outcome in OWN_FAULT:
                return _words(outcome, remarks.get(node, "")), node
        gone = next((node for node, _ in ends if node in self._gone), None)
        if gone is not None:
            return "the node is gone", gone
        wrong = next((each for each in failed if each[1] is Outcome.WRONG_DATA), None)
        if wrong is not None:
            return _words(wrong[1], remarks.get(wrong[0], "")), None
        if not failed:
            return WORDS[Outcome.DEADLINE], None
        node, outcome = failed[0]
        return _words(outcome, remarks.get(node, "")), None


def _words(outcome: Outcome, remark: str) -> str:
    return WORDS[outcome] + (f" ({remark})" if remark and outcome is not Outcome.DEADLINE else "")


def _allow_files(count: int) -> None:
    """A connection a rank: more than the usual soft limit of 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard > 0 else count, hard))
