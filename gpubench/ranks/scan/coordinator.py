"""The coordinator of a scan on rank 0: it sends orders to all supervisors and merges their replies into
measurements.
"""

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import TypeVar

from msgspec import Struct

from gpubench.model.results import scan
from gpubench.ranks.scan import messages
from gpubench.ranks.scan.messages import OWN_FAULT, WORDS, Figure, Outcome, RoundReply, Seat
from gpubench.ranks.scan.supervisor import SECONDS_OF_PHASE_0, SECONDS_OF_SUPERVISOR, SECONDS_TO_BE_KILLED


class NodeRanks(Struct, frozen=True):
    """The ranks on every node, and the rails of every rank. A rank measures either all rails of its node or one
    rail.
    """

    ranks_by_node: tuple[tuple[int, ...], ...]
    rails_by_rank: tuple[tuple[int, ...], ...]

    @property
    def node_by_rank(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.ranks_by_node) for rank in ranks}

    @property
    def rank_by_rail(self) -> dict[scan.NodeRail, int]:
        """The rank that measures each rail of each node."""
        return {
            scan.NodeRail(node, rail): rank
            for rank, node in self.node_by_rank.items()
            for rail in self.rails_by_rank[rank]
        }


def seats(
    rings: Sequence[Sequence[scan.NodeRail]], rank_by_rail: Mapping[scan.NodeRail, int]
) -> dict[int, tuple[Seat, ...]]:
    """Return each rank's seats in these rings. A rail has at most one seat."""
    found: dict[int, tuple[Seat, ...]] = {}
    for ring in rings:
        for place, cell in enumerate(ring):
            before, after = ring[place - 1], ring[(place + 1) % len(ring)]
            seat = Seat(cell.rail, rank_by_rail[before], before.rail, rank_by_rail[after], after.rail, place, len(ring))
            rank = rank_by_rail[cell]
            found[rank] = (*found.get(rank, ()), seat)
    return found


_FIRST_RING = 1000  # Higher than the number of any round, so that workers can tell rings from rounds
SECONDS_TO_GREET = 2.0
SECONDS_OF_GRACE = 2.0  # Time for a reply to arrive after the supervisor has stopped waiting for its workers
# With a larger difference between wall clocks, logs are hard to read and certificates may be invalid
CLOCK_SECONDS = 1.0
_NO_FIGURE = "its supervisor returned no value for this ring"
_SILENT, _GONE = "its supervisor does not answer", "its supervisor is gone"


Reply = TypeVar("Reply", messages.ClockReply, messages.LocalReply, RoundReply)


class _Supervised(Struct):
    rank: int
    connection: Connection
    asked_clock: float = 0.0
    clock_offset: float = 0.0


class Coordinator:
    """Measure rounds by sending orders to all supervisors. A node is gone if one of its supervisors no longer
    replies.
    """

    def __init__(self, nodes: NodeRanks, secret: bytes, deadline_s: float) -> None:
        self.listener = socket.create_server(("", 0), backlog=4096)
        self._nodes, self._secret, self._deadline_s = nodes, secret, deadline_s
        self._node_by_rank = nodes.node_by_rank
        self._rank_by_rail = nodes.rank_by_rail
        self._selector = selectors.DefaultSelector()
        self._supervised: dict[int, _Supervised] = {}
        self._gone: dict[int, str] = {}
        self._reported: set[int] = set()
        self._ring_numbers = count(_FIRST_RING)
        # One connection per rank may exceed the default limit of 1,024 open files.
        needed, (soft, hard) = len(nodes.rails_by_rank) + 256, resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < needed:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard > 0 else needed, hard))

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def gone(self) -> Mapping[int, str]:
        """The nodes that are gone, each with the reason."""
        return self._gone

    def accept(self, seconds: float) -> None:
        """Wait until all ranks have connected. After `seconds`, a node with a missing rank counts as gone."""
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
            self._gone.setdefault(self._node_by_rank[rank], "its supervisor did not connect")
        # Request all clocks at once. Replies that arrive later are read too.
        for supervised in list(self._supervised.values()):
            supervised.asked_clock = time.time()
            try:
                messages.send(supervised.connection, messages.ClockOrder())
            except OSError:
                self._lose(supervised.rank, _GONE)
        self._collect(messages.ClockReply, dict.fromkeys(self._supervised), time.monotonic() + SECONDS_TO_GREET)

    def local(self) -> list[scan.LocalFigure]:
        """Run phase 0, the measurements inside a node, on all nodes at once."""
        replies = self._ask(
            dict.fromkeys(self._supervised, messages.LocalOrder()),
            messages.LocalReply,
            SECONDS_OF_PHASE_0 + SECONDS_TO_BE_KILLED + SECONDS_OF_GRACE,
        )
        return [
            scan.LocalFigure(
                self._node_by_rank[rank], gpu, scan.LocalQuantity(name), gb_s, failure="" if gb_s else reply.remark
            )
            for rank, reply in replies.items()
            for gpu, name, gb_s in reply.figures
        ]

    def failed(self) -> scan.BeforeRounds:
        """Return the nodes that were gone by the end of phase 0, and the rails whose worker died or hung."""
        orders = dict.fromkeys(self._supervised, messages.FailedOrder())
        replies = self._ask(orders, RoundReply, SECONDS_TO_BE_KILLED + SECONDS_OF_GRACE)
        failed = {
            scan.NodeRail(self._node_by_rank[rank], rail): _words(Outcome(outcome), reply.remark)
            for rank, reply in replies.items()
            for rail, _, outcome in reply.figures
        }
        self._reported |= self._gone.keys()
        return scan.BeforeRounds(dict(self._gone), failed)

    def clock_offsets(self) -> dict[int, float]:
        """Return the wall-clock offset of each node from this host in seconds, if it exceeds CLOCK_SECONDS."""
        return {
            self._node_by_rank[rank]: supervised.clock_offset
            for rank, supervised in self._supervised.items()
            if abs(supervised.clock_offset) > CLOCK_SECONDS
        }

    def measure(self, planned: scan.PlannedRound) -> scan.RoundOutcome:
        """Measure one round: send orders to both nodes of every pair, and merge their replies."""
        start = time.monotonic()
        orders = self._orders(planned)
        patience = self._deadline_s + SECONDS_OF_SUPERVISOR + SECONDS_OF_GRACE
        replies = self._ask(orders, RoundReply, patience)
        figures: dict[int, dict[int, Figure]] = {}
        remarks: dict[scan.NodeRail, str] = {}
        for rank, reply in replies.items():
            if reply.number == planned.number:
                node = self._node_by_rank[rank]
                figures.setdefault(node, {}).update({figure[0]: figure for figure in reply.figures})
                remarks |= {scan.NodeRail(node, rail): reply.remark for rail, _, outcome in reply.figures if outcome}
        gone = {node: seen for node, seen in self._gone.items() if node not in self._reported}
        self._reported |= gone.keys()
        samples = tuple(self._samples(planned, figures, remarks))
        return scan.RoundOutcome(planned.number, planned.phase, samples, time.monotonic() - start, gone)

    def rings(
        self, rings: Sequence[Sequence[scan.NodeRail]], *, all_reduce: bool = False, repeats_failures: bool = False
    ) -> list[scan.RingOutcome]:
        """Measure disjoint rings of rails at once. With `repeats_failures`, the next round reports the failures of
        workers again.
        """
        number = next(self._ring_numbers)
        orders = {
            rank: messages.RingOrder(number, self._deadline_s, own, all_reduce, repeats_failures)
            for rank, own in seats(rings, self._rank_by_rail).items()
        }
        replies = self._ask(orders, RoundReply, self._deadline_s + SECONDS_OF_SUPERVISOR + SECONDS_OF_GRACE)
        figures = {
            scan.NodeRail(self._node_by_rank[rank], rail): (gb_s, outcome, reply.remark)
            for rank, reply in replies.items()
            if reply.number == number
            for rail, gb_s, outcome in reply.figures
        }
        return [self._ring_outcome(ring, figures, replies) for ring in rings]

    def collective(self, nodes: Sequence[int]) -> float | scan.RingFailure:
        """Measure one ring through these nodes on every rail, all at once. Return the GB/s per node, summed over
        rails.
        """
        rails = sorted({rail for own in self._nodes.rails_by_rank for rail in own})
        outcomes = self.rings([[scan.NodeRail(node, rail) for node in nodes] for rail in rails])
        failures = [failure for outcome in outcomes for failure in outcome.failures.values()]
        if failures:
            return next((failure for failure in failures if failure.is_own), failures[0])
        return sum(outcome.gb_s for outcome in outcomes)

    def close(self) -> None:
        """End the scan on all supervisors. If no node is gone, all ranks then shut down MPI together."""
        for supervised in self._supervised.values():
            with contextlib.suppress(OSError):
                messages.send(supervised.connection, messages.EndOrder(not self._gone))
            supervised.connection.close()
        self.listener.close()
        self._selector.close()

    def _welcome(self, connection: socket.socket, ranks: set[int]) -> None:
        try:
            connection.settimeout(SECONDS_TO_GREET)
            rank = int(messages.welcome(connection, self._secret))
            if rank not in ranks or rank in self._supervised:
                raise ConnectionError(f"rank {rank}")
        except (OSError, ValueError):
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        messages.keep_alive(connection)
        self._supervised[rank] = _Supervised(rank, messages.wrap_socket(connection, SECONDS_OF_GRACE))
        self._selector.register(self._supervised[rank].connection, selectors.EVENT_READ, self._supervised[rank])

    def _orders(self, planned: scan.PlannedRound) -> dict[int, messages.RoundOrder]:
        retired: dict[int, set[int]] = {}
        for node, rail in planned.retired:
            retired.setdefault(node, set()).add(rail)
        orders: dict[int, messages.RoundOrder] = {}
        for pair in planned.pairs:
            out = tuple(retired.get(pair.first, set()) | retired.get(pair.second, set()))
            ends = (self._nodes.ranks_by_node[node] for node in pair)
            for first, second in zip(*ends, strict=True):
                for rank, partner, listens in ((first, second, True), (second, first, False)):
                    orders[rank] = messages.RoundOrder(planned.number, partner, listens, self._deadline_s, out)
        return orders

    def _ask(self, orders: Mapping[int, messages.Message], kind: type[Reply], seconds: float) -> dict[int, Reply]:
        asked: dict[int, None] = {}
        for rank, order in orders.items():
            if (supervised := self._supervised.get(rank)) is None:
                continue
            try:
                messages.send(supervised.connection, order)
                asked[rank] = None
            except OSError:
                self._lose(rank, _GONE)
        replies = self._collect(kind, asked, time.monotonic() + seconds)
        for rank in [rank for rank in asked if rank not in replies and rank in self._supervised]:
            self._lose(rank, f"{_SILENT} within {seconds:.0f} s")
        return replies

    def _collect(self, kind: type[Reply], asked: Mapping[int, None], deadline: float) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        missing = {rank for rank in asked if rank in self._supervised}
        while missing and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                supervised: _Supervised = key.data
                if supervised.rank not in self._supervised:
                    continue  # its node was dropped because another rank failed in this loop
                try:
                    message = messages.receive(supervised.connection)
                except OSError:
                    self._lose(supervised.rank, _GONE)
                else:
                    if isinstance(message, messages.ClockReply):
                        offset = messages.clock_offset(message.seconds, supervised.asked_clock, time.time())
                        supervised.clock_offset = offset
                    if isinstance(message, kind):
                        replies[supervised.rank] = message
            missing &= self._supervised.keys() - replies.keys()
        return replies

    def _lose(self, rank: int, seen: str) -> None:
        """Drop the node of a lost supervisor, and end the node's other supervisors if they still respond."""
        node = self._node_by_rank[rank]
        self._gone.setdefault(node, seen)
        for lost in self._nodes.ranks_by_node[node]:
            supervised = self._supervised.pop(lost, None)
            if supervised is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(supervised.connection)
                with contextlib.suppress(OSError):
                    messages.send(supervised.connection, messages.EndOrder(is_whole=False))
                supervised.connection.close()

    def _ring_outcome(
        self,
        ring: Sequence[scan.NodeRail],
        figures: Mapping[scan.NodeRail, tuple[float, int, str]],
        replies: Mapping[int, RoundReply],
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
        """Return why a measurement failed, and which node caused it: a node whose own worker failed, or one that is
        gone.
        """
        failed = [(node, Outcome(said[2])) for node, said in ends if said is not None and said[2]]
        for node, outcome in failed:
            if outcome in OWN_FAULT:
                return _words(outcome, remarks.get(node, "")), node
        gone = next((node for node, _ in ends if node in self._gone), None)
        if gone is not None:
            return "the node is gone", gone
        for node, outcome in failed:
            if outcome is Outcome.WRONG_DATA:
                return _words(outcome, remarks.get(node, "")), None
        if not failed:
            return WORDS[Outcome.DEADLINE], None
        node, outcome = failed[0]
        return _words(outcome, remarks.get(node, "")), None


def _words(outcome: Outcome, remark: str) -> str:
    return WORDS[outcome] + (f" ({remark})" if remark and outcome is not Outcome.DEADLINE else "")
