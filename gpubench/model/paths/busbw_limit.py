"""The ceiling of busbw on the links that an operation uses, derived from the bytes that have to pass through them.

t is the time, S the size, f the factor between algbw and busbw, w(i) the GB/s that rank i's links carry one way to the
ranks that it sends to. The derivations stand in docs/limits.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpubench.model.paths.selection import RING, Pair
from gpubench.model.paths.topology import Limit
from gpubench.model.paths.wiring import Wiring

TOTAL_BOUND = ("TREE", "PAT")
"""Algorithms that move at least as much in all as a ring does, in shares that differ between ranks."""

_SENT, _RECEIVED = 0, 1


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operation: f, and for a byte of the size the bytes that each rank sends and receives, at least."""

    busbw_factor: float
    expected_bytes: Sequence[tuple[float, float]]


def busbw_limit(algorithm: str, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The ceiling of an algorithm of NCCL's over the connections that it uses, in GB/s.

    RING: every rank passes on f·S, so busbw = f·S/t ≤ the least w(i). TREE and PAT: all ranks together move n·f·S or
    more, so busbw ≤ the mean w(i).
    """
    if pairs and algorithm != RING and algorithm not in TOTAL_BOUND:
        return Limit(None, f"no ceiling is derived for {algorithm}")
    links = _links(pairs, wiring)
    unknown = _unknown(links.values())
    if unknown is not None or algorithm == RING:
        return unknown or _least(links.values())
    leaving = [limit.gb_s or 0.0 for (_, direction), limit in links.items() if direction == _SENT]
    return Limit(sum(leaving) / len(leaving), f"mean of {len(leaving)} ranks' links")


def exchange_limit(work: Work, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The ceiling where data go straight from rank to rank, in GB/s: a rank that has to send s·S needs t ≥ s·S/w(i)."""
    links = _links(pairs, wiring)
    return _unknown(links.values()) or _least(
        [
            Limit(limit.gb_s * work.busbw_factor / work.expected_bytes[rank][direction], limit.note)
            for (rank, direction), limit in links.items()
            if limit.gb_s is not None and work.expected_bytes[rank][direction]
        ]
    )


def _links(pairs: Collection[Pair], wiring: Wiring) -> dict[tuple[int, int], Limit]:
    """The GB/s of each rank's links by direction: to the ranks it sends to, from those it receives from."""
    peers: dict[tuple[int, int], set[Pair]] = {}
    for pair in pairs:
        peers.setdefault((pair[0], _SENT), set()).add(pair)
        peers.setdefault((pair[1], _RECEIVED), set()).add(pair)
    return {(rank, direction): _carried(rank, its, wiring) for (rank, direction), its in peers.items()}


def _carried(rank: int, pairs: Collection[Pair], wiring: Wiring) -> Limit:
    """The GB/s of several pairs of a rank at once: their sum, and no more than all its links of that kind carry."""
    limits = {pair: wiring.limit(pair) for pair in sorted(pairs)}
    unknown = _unknown(limits.values())
    if unknown is not None:
        return unknown
    nvlink = [limit.gb_s or 0.0 for pair, limit in limits.items() if wiring.has_nvlinks(pair)]
    pcie = [limit.gb_s or 0.0 for pair, limit in limits.items() if not wiring.has_nvlinks(pair)]
    carried = _capped(nvlink, wiring.nvlink_total(rank)) + _capped(pcie, wiring.to_host(rank))
    return Limit(carried, f"links of rank {rank}")


def _capped(each_gb_s: Sequence[float], total: Limit) -> float:
    """The sum, in GB/s, or the total of all links where that is known and less."""
    return sum(each_gb_s) if total.gb_s is None else min(sum(each_gb_s), total.gb_s)


def _unknown(limits: Collection[Limit]) -> Limit | None:
    """The first limit that is not known; also of no limits at all."""
    if not limits:
        return Limit(None, "who is connected to whom is not known")
    return next((limit for limit in limits if limit.gb_s is None), None)


def _least(limits: Collection[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.gb_s or 0.0)
