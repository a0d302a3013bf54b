"""Sightings on nodes, GPUs and pairs, named as people know them."""

from collections.abc import Collection, Iterator
from heapq import nsmallest

from gpubench.conditions.cause import Sighting
from gpubench.conditions.circumstances import Circumstances
from gpubench.model.facts.error_counts import Errors
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import NicFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import Topology

_MOST_NAMED = 4


def sureness(errors: Errors) -> Confidence:
    """How sure it is that counted errors slow anything down now: totals do not say when they were counted."""
    if not errors.meanwhile:
        return Confidence.WEAK
    return Confidence.PROVEN if errors.grave else Confidence.LIKELY


def of_node(around: Circumstances, number: int, seen: str, confidence: Confidence, *words: str) -> Sighting:
    """On a node, which touches the paths of all its GPUs; `words` name what on it."""
    return Sighting(subject=around.on(number, *words), seen=seen, confidence=confidence, gpus=around.gpus_of(number))


def of_gpu(around: Circumstances, position: int, seen: str, confidence: Confidence) -> Sighting:
    """On one GPU."""
    return Sighting(subject=around.name(position), seen=seen, confidence=confidence, gpus=frozenset((position,)))


def of_pairs(around: Circumstances, pairs: Collection[Pair], seen: str, confidence: Confidence) -> Sighting:
    """Between ordered pairs of GPUs."""
    shown = nsmallest(_MOST_NAMED, pairs)
    more = len(pairs) - len(shown)
    subject = ", ".join(map(around.pair_name, shown)) + (f" and {more} more" if more else "")
    return Sighting(subject=subject, seen=seen, confidence=confidence, pairs=frozenset(pairs))


def rdma_nics(node: Topology) -> list[NicFacts]:
    """The NICs of a node that can do RDMA, up or not."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(around: Circumstances) -> Iterator[tuple[int, Topology, list[RankFacts]]]:
    """Nodes with RDMA NICs, and their processes."""
    for number, node in around.nodes.items():
        if rdma_nics(node):
            yield number, node, around.ranks_of(number)
