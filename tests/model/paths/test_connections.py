"""Connections of many ranks, and the joining of both ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.paths.nccl_log import ChannelSets, Connections, RankConnections, channel_code
from gpubench.model.paths.transport import (
    Edge,
    LoggedChannels,
    Path,
    Route,
    Transport,
    TransportKind,
    join_edges,
    parse_transport,
)

P2P = parse_transport("P2P/CUMEM")
DIRECT = parse_transport("NET/IB/0/GDRDMA")
STAGED = parse_transport("NET/IB/0")

EDGES = st.builds(
    Edge,
    st.integers(0, 3),
    st.integers(0, 3),
    st.builds(LoggedChannels, st.sampled_from([P2P, DIRECT, STAGED]), st.integers(1, 15), st.booleans(), st.booleans()),
)


def connected(edges: list[Edge]) -> Connections:
    """What reading a line for every channel of these edges makes of them."""
    sets = ChannelSets()
    by_rank: dict[int, RankConnections] = {}
    for src, dst, logged in edges:
        rank, peer = (dst, src) if logged.received else (src, dst)
        line = sets.line_code(logged.transport, received=logged.received)
        for channel in range(4):
            if logged.channel_bits >> channel & 1:
                connections = by_rank.setdefault(rank, RankConnections(sets, 4))
                connections.add(peer, line + channel_code(channel, logged.peer_to_peer))
    return Connections(by_rank)


def merged(edges: list[Edge]) -> list[Edge]:
    """One edge for all channels of a pair with the same transport, in an order of their own."""
    bits: dict[Edge, int] = {}
    for src, dst, logged in edges:
        key = Edge(src, dst, logged._replace(channel_bits=0))
        bits[key] = bits.get(key, 0) | logged.channel_bits
    return [Edge(key.src, key.dst, key.logged._replace(channel_bits=each)) for key, each in bits.items()]


def consistent(edges: list[Edge]) -> list[Edge]:
    """Edges whose channels have one transport at each end: of two, which a log that contradicts itself has, which one
    counts depends on their order, and that is not kept.
    """
    told: dict[tuple[object, ...], object] = {}
    kept = []
    for src, dst, logged in edges:
        channels = [(src, dst, logged.received, logged.peer_to_peer, channel) for channel in range(4)]
        own = [each for each in channels if logged.channel_bits >> each[-1] & 1]
        if all(told.setdefault(each, logged.transport) == logged.transport for each in own):
            kept.append(Edge(src, dst, logged))
    return kept


@given(st.lists(EDGES, max_size=20).map(consistent))
def test_a_million_pairs_are_kept_as_a_list_of_edges_would_be(edges: list[Edge]) -> None:
    found = [
        Path(route.sent, route.received, route.channels, route.peer_to_peer, src, dst)
        for src, by_destination in connected(edges).routes_by_source()
        for dst, pair in by_destination.items()
        for route in pair.routes
    ]
    assert set(found) == set(join_edges(merged(edges)))
    assert [(path.src, path.dst) for path in found] == sorted((path.src, path.dst) for path in found)


def test_equal_channel_sets_are_one_object() -> None:
    sets = ChannelSets()
    sent, received = sets.line_code(P2P, received=False), sets.line_code(P2P, received=True)
    one, other = sent + channel_code(0, 0), sent + channel_code(3, 1)
    both = sets.empty.add_channel(one).add_channel(other)
    assert both is sets.empty.add_channel(other).add_channel(one)
    assert both is sets.empty.add_channel(one).union_channels(sets.empty.add_channel(other))
    assert both.logged == (LoggedChannels(P2P, 0b1), LoggedChannels(P2P, 0b1000, peer_to_peer=True))
    assert not both.receives
    assert both.add_channel(received).receives


def test_a_channel_is_known_at_its_end_of_its_connection_with_whatever_transport() -> None:
    sets = ChannelSets()
    known = sets.empty.add_channel(sets.line_code(DIRECT, received=True) + channel_code(2, 1))
    assert known.has(sets.line_code(STAGED, received=True) + channel_code(2, 1))
    assert not known.has(sets.line_code(DIRECT, received=True) + channel_code(1, 1))
    assert not known.has(sets.line_code(DIRECT, received=True) + channel_code(2, 0))
    assert not known.has(sets.line_code(DIRECT, received=False) + channel_code(2, 1))


def test_transports_without_end_become_one_unknown() -> None:
    sets = ChannelSets()
    codes = {sets.line_code(Transport(f"X/{number}", TransportKind.UNKNOWN), received=False) for number in range(5000)}
    assert len(codes) == 4097
    assert sets.empty.add_channel(max(codes)).logged[0].transport.host_staged is None


def test_a_route_is_named_after_both_ends_where_they_differ() -> None:
    assert Route(DIRECT, STAGED, 1, False).name == "NET/IB/0/GDRDMA, received NET/IB/0"
    assert Route(DIRECT, DIRECT, 1, False).name == "NET/IB/0/GDRDMA"
    assert Route(None, STAGED, 1, False).transport is STAGED
    with pytest.raises(ValueError, match="at least one end"):
        Route(None, None, 1, False).transport  # noqa: B018


def test_unknown_at_one_end_is_unknown_unless_the_other_is_staged() -> None:
    unknown = Transport("NEW", TransportKind.UNKNOWN)
    assert Route(unknown, None, 1, False).host_staged is None
    assert Route(unknown, STAGED, 1, False).host_staged is True
    assert Route(P2P, None, 1, False).host_staged is False
