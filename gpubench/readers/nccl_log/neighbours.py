"""The neighbours of a rank in NCCL's rings and trees, from lines that it logs while it makes a communicator."""

import re

Pair = tuple[int, int]

_RING = re.compile(rb" NCCL INFO Ring \d{1,4} : (\d{1,7}) -> (\d{1,7}) -> (\d{1,7})$")
_TREES = re.compile(rb" NCCL INFO Trees((?: \[\d{1,4}\] -?\d+/-?\d+/-?\d+->\d+->-?\d+)+)")
_TREE = re.compile(rb"\[\d+\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)(?= |$)")
_LONGEST_LINE = 1000
"""NCCL cuts a line off behind 1023 characters, its beginning included: what stands at the end may be half a number."""


def ring_pairs(line: bytes) -> tuple[Pair, ...]:
    """'Ring 00 : 3 -> 0 -> 1' (subsystem GRAPH): data come from 3 to 0 and go from 0 to 1."""
    found = _RING.search(line)
    if found is None:
        return ()
    before, rank, after = map(int, found.groups())
    return tuple(pair for pair in ((before, rank), (rank, after)) if pair[0] != pair[1])


def tree_pairs(line: bytes) -> tuple[Pair, ...]:
    """'Trees [0] 2/-1/-1->1->0 [1] …' (children, rank, parent, a tree a channel): data go both ways to each of them."""
    found = _TREES.search(line)
    if found is None:
        return ()
    trees = [tuple(map(int, groups)) for groups in _TREE.findall(found[1])]
    if len(line) >= _LONGEST_LINE:
        trees.pop()
    peers = {(rank, peer) for *children, rank, parent in trees for peer in (*children, parent) if peer >= 0}
    return tuple(sorted(peers | {(peer, rank) for rank, peer in peers}))
