"""Connections of many ranks, and the joining of both ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.paths.connections import Bundles, ConnectionRow, Connections, channel_step
from gpubench.model.paths.transport import Edge, Route, Transport, TransportKind, join, parse_transport

P2P = parse_transport("P2P/CUMEM")
DIRECT = parse_transport("NET/IB/0/GDRDMA")
STAGED = parse_transport("NET/IB/0")

EDGES = st.builds(
    lambda src, dst, transport, bits, peer_to_peer, received: Edge(
        src, dst, transport, bits.bit_count(), peer_to_peer, received, bits
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([P2P, DIRECT, STAGED]),
    st.integers(1, 15),
    st.booleans(),
    st.booleans(),
)


def merged(edges: list[Edge]) -> list[Edge]:
    """One edge for all channels that travel alike."""
    channels: dict[tuple[object, ...], int] = {}
    for edge in edges:
        key = edge.src, edge.dst, edge.transport, edge.peer_to_peer, edge.received
        channels[key] = channels.get(key, 0) | edge.channel_bits
    return [
        Edge(src, dst, transport, bits.bit_count(), peer_to_peer, received, bits)  # type: ignore[arg-type]
        for (src, dst, transport, peer_to_peer, received), bits in channels.items()
    ]


@given(st.lists(EDGES, max_size=20))
def test_a_million_pairs_are_kept_as_a_list_of_edges_would_be(edges: list[Edge]) -> None:
    connections = Connections.of(edges)
    assert set(connections.edges()) == set(merged(edges))
    assert bool(connections) == bool(edges)
    pairs = {(src, dst): set(ways) for src, dst, ways in connections.pairs()}
    expected: dict[tuple[int, int], set[Route]] = {}
    for path in join(connections.edges()):
        way = Route(path.sent, path.received, path.channels, path.peer_to_peer)
        expected.setdefault((path.src, path.dst), set()).add(way)
    assert pairs == expected
    assert list(pairs) == sorted(pairs)


def test_equal_bundles_are_one_object() -> None:
    bundles = Bundles()
    kind = bundles.kind(P2P, received=False)
    one, other = channel_step(0, 0), channel_step(3, 1)
    assert bundles.nothing[kind + one][kind + other] is bundles.nothing[kind + other][kind + one]
    assert bundles.nothing[kind + one].has(kind + one)
    assert not bundles.nothing[kind + one].has(kind + other)


def test_a_rank_beyond_the_communicator_is_refused() -> None:
    row = ConnectionRow(Bundles(), 2)
    assert row[1].said == ()
    with pytest.raises(IndexError):
        row[2]


def test_transports_without_end_become_one_unknown() -> None:
    bundles = Bundles()
    kinds = {bundles.kind(Transport(f"X/{number}", TransportKind.UNKNOWN), received=False) for number in range(5000)}
    assert len(kinds) == 4097
    assert bundles.said(max(kinds), 1).transport.host_staged is None


def test_the_ends_of_a_connection_are_joined_by_channel() -> None:
    edges = [
        Edge(0, 1, DIRECT, 3, channel_bits=0b111),
        Edge(0, 1, DIRECT, 2, received=True, channel_bits=0b011),
        Edge(0, 1, STAGED, 1, received=True, channel_bits=0b1000),
    ]
    assert [(path.sent, path.received, path.channels, path.host_staged) for path in join(edges)] == [
        (DIRECT, DIRECT, 2, False),
        (DIRECT, None, 1, False),
        (None, STAGED, 1, True),
    ]


def test_a_way_is_named_after_both_ends_where_they_differ() -> None:
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


def test_networks_by_name() -> None:
    assert parse_transport("NET/AWS Libfabric/1/GDRDMA").network == "AWS Libfabric"
    assert parse_transport("COLLNET/SHARP/0").network == "SHARP"
    assert P2P.network is None
