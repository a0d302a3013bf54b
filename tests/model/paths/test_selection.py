"""What NCCL chose: pairs of an algorithm, of sends and receives, and what no connection shows."""

from gpubench.model.paths.transport import (
    Edge,
    LoggedChannels,
    RankSelection,
    Selection,
    Transport,
    TransportKind,
    drop_idle_pairs,
    is_staged,
    join_names,
    parse_transport,
)

P2P, SHM = parse_transport("P2P/CUMEM"), parse_transport("SHM/direct/direct")
SOCKET, GDR = parse_transport("NET/Socket/0"), parse_transport("NET/IB/0/GDRDMA")
STRANGE = parse_transport("WARP/9")

RING = frozenset({(0, 1), (1, 2), (2, 3), (3, 0)})
ONE_NODE = [0, 0, 0, 0]


def edge(src: int, dst: int, transport: Transport, *, sends: bool = False, received: bool = False) -> Edge:
    return Edge(src, dst, LoggedChannels(transport, 0b11, sends, received))


def ring_of(*transports: Transport) -> Selection:
    """Rank n is connected to the next by the nth transport."""
    size = len(transports)
    ranks = [
        RankSelection(edges=(edge(rank, (rank + 1) % size, transport),), ring=RING)
        for rank, transport in enumerate(transports)
    ]
    return Selection(ranks, [0] * size)


def test_a_ring_is_as_good_as_its_worst_connection() -> None:
    direct = ring_of(P2P, P2P, P2P, P2P).algorithm_connections("RING")
    assert (direct.transport, direct.host_staged) == ("P2P/CUMEM", False)
    assert set(direct.pairs) == RING
    mixed = ring_of(P2P, SHM, P2P, SOCKET).algorithm_connections("RING")
    assert (mixed.transport, mixed.host_staged) == ("NET/Socket/0+SHM/direct+P2P/CUMEM", True)
    assert mixed.pairs[1, 2] == (SHM,)


def test_what_is_not_known_is_not_fine() -> None:
    strange = ring_of(P2P, STRANGE, P2P, P2P).algorithm_connections("RING")
    assert (strange.transport, strange.host_staged) == ("WARP/9+P2P/CUMEM", None)
    worse = ring_of(P2P, STRANGE, SHM, P2P).algorithm_connections("RING")
    assert worse.host_staged is True
    ranks = [RankSelection(edges=(edge(0, 1, P2P),), ring=RING), *[RankSelection() for _ in range(3)]]
    missed = Selection(ranks, ONE_NODE).algorithm_connections("RING")
    assert missed.pairs[1, 2] == ()
    assert missed.host_staged is None
    unconnected = Selection([RankSelection(edges=(edge(0, 1, P2P),)), *ranks[1:]], ONE_NODE).algorithm_connections(
        "PAT"
    )
    assert unconnected.unconnected == (1, 2, 3)
    assert unconnected.host_staged is None


def test_ranks_that_the_job_does_not_have_are_of_another_communicator() -> None:
    larger = [RankSelection(edges=(edge(0, 1, P2P), edge(0, 3, SHM), edge(3, 0, SHM)), ring=RING) for _ in range(2)]
    used = Selection(larger, [0, 0]).algorithm_connections("RING")
    assert dict(used.pairs) == {(0, 1): (P2P,)}
    assert dict(Selection(larger, [0, 0]).algorithm_connections("PAT").pairs) == {(0, 1): (P2P,)}


def test_an_algorithm_runs_over_its_own_neighbours() -> None:
    tree = frozenset({(0, 1), (1, 0)})
    ranks = [
        RankSelection(edges=(edge(0, 1, P2P), edge(0, 2, SHM)), ring=frozenset({(0, 2), (2, 1), (1, 0)}), tree=tree),
        RankSelection(edges=(edge(1, 0, P2P),)),
        RankSelection(edges=(edge(2, 1, P2P),)),
    ]
    selection = Selection(ranks, [0, 0, 0])
    assert selection.algorithm_connections("TREE").host_staged is False
    assert selection.algorithm_connections("RING").host_staged is True
    everything = selection.algorithm_connections(None)
    assert set(everything.pairs) == {(0, 1), (0, 2), (1, 0), (2, 1)}
    assert everything.unconnected == ()


def test_sends_have_connections_of_their_own_but_in_shared_memory() -> None:
    ranks = [
        RankSelection(edges=(edge(0, 1, P2P), edge(0, 1, SOCKET, sends=True))),
        RankSelection(edges=(edge(1, 0, SHM),)),
    ]
    selection = Selection(ranks, [0, 0])
    used = selection.send_connections({(0, 1), (1, 0)})
    assert used.pairs == {(0, 1): (SOCKET,), (1, 0): (SHM,)}
    assert selection.send_connections({(0, 1), (0, 2)}).pairs[0, 2] == ()


def test_both_ends_of_a_network_connection_count() -> None:
    half = parse_transport("NET/IB/0")
    ranks = [
        RankSelection(edges=(edge(0, 1, GDR),)),
        RankSelection(edges=(edge(0, 1, half, received=True), edge(1, 0, GDR))),
    ]
    used = Selection(ranks, [0, 1]).algorithm_connections(None)
    assert used.pairs[0, 1] == (half, GDR)
    assert used.host_staged is True
    assert used.transport == "NET/IB/0+NET/IB/0/GDRDMA"


def test_multicast_takes_no_connection_inside_a_node() -> None:
    across = edge(1, 2, SOCKET)
    ranks = [RankSelection(edges=(across,)), *[RankSelection() for _ in range(3)]]
    used = Selection(ranks, [0, 0, 1, 1]).algorithm_connections("NVLS")
    assert {
        pair for pair, transports in used.pairs.items() if transports == (Transport("NVLS", TransportKind.P2P),)
    } == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert used.pairs[1, 2] == (SOCKET,)
    assert used.host_staged is True


def test_a_rank_that_heard_nothing_is_named() -> None:
    assert Selection([RankSelection(), RankSelection(no_log="why")], [0, 0]).no_log == "rank 1: why"
    assert Selection([RankSelection()], [0]).no_log == ""
    alone = Selection([RankSelection()], [0]).algorithm_connections("RING")
    assert (alone.host_staged, alone.unconnected) == (None, ())


def test_names_and_states_of_nothing() -> None:
    assert join_names([]) is None
    assert is_staged([]) is None
    assert is_staged([P2P, STRANGE]) is None
    assert join_names([P2P, GDR, SHM, P2P]) == "SHM/direct+NET/IB/0/GDRDMA+P2P/CUMEM"


def test_nothing_goes_into_the_root_of_a_broadcast_or_out_of_that_of_a_reduction() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    broadcast = [(0.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
    assert drop_idle_pairs(ring, broadcast) == [(1, 2), (2, 3), (3, 0)]
    reduction = [(received, sent) for sent, received in broadcast]
    assert drop_idle_pairs(ring, reduction) == [(0, 1), (2, 3), (3, 0)]
    assert drop_idle_pairs(ring, [(1.0, 1.0)] * 4) == ring
    assert drop_idle_pairs(ring, [(1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]) == ring
