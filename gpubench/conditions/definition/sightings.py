"""Sightings on nodes, devices, pairs and ranks, named as people know them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Found, Look, Sighting, Unread, in_each_node, joined
from gpubench.model.facts.error_counts import Errors
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import Device, Topology


def sureness(errors: Errors) -> Confidence:
    """The confidence that counted errors slow anything down now: totals do not say when they were counted."""
    if not errors.meanwhile:
        return Confidence.WEAK
    return Confidence.PROVEN if errors.grave else Confidence.LIKELY


def of_node(
    run: Circumstances,
    number: int,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    *words: str,
    **more: Any,
) -> Sighting:
    """On a node, which touches the paths of all its GPUs; `words` name what on it."""
    more = {"gpus": run.gpus_of(number), "names": () if words else (run.named(number),), **more}
    return Sighting(subject=run.on(number, *words), seen=seen, confidence=confidence, **more)


def of_gpu(
    run: Circumstances, position: int, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
) -> Sighting:
    """On one GPU."""
    known, node = run.wiring.gpu(position), run.wiring.gpus[position].node
    names = () if known is None else (run.named(node, known),)
    here = frozenset((position,))
    return Sighting(subject=run.name(position), seen=seen, confidence=confidence, gpus=here, **{"names": names, **more})


def of_every_node(
    seen: Callable[[Topology], str | None], confidence: Confidence = Confidence.PROVEN, unknown: str = ""
) -> Look:
    """A detector that looks at each node by itself: what is seen of it, empty where nothing is; where nothing is, why
    a fact of the driver's settings, or the kernel's, is not known.
    """

    @in_each_node
    def look(run: Circumstances) -> Found:
        for number, node in run.nodes.items():
            found = seen(node)
            if found:
                yield of_node(run, number, found, confidence)
            else:
                reasons = node.snapshot.driver_settings.unknown, node.snapshot.kernel.unknown
                yield from (each for known in reasons for each in unread(run.on(number), known, unknown))

    return look


def of_every_rank(seen: Callable[[RankFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """A detector that looks at each process by itself."""
    return lambda run: (of_ranks(run, [it], found, confidence) for it in run.facts if (found := seen(it)))


def of_every_gpu(seen: Callable[[GpuFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """A detector that looks at each GPU by itself: what is seen of it, empty where nothing is."""
    return in_each_node(
        lambda run: (of_gpu(run, at, found, confidence) for at, _, gpu in run.gpus() if (found := seen(gpu)))
    )


def of_device(
    run: Circumstances,
    number: int,
    device: Device,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """On a device of a node: a GPU's trouble is its own, a NIC's is that of all GPUs of the node."""
    gpus = run.gpus_of(number)
    if isinstance(device, GpuFacts):
        gpus = frozenset(each for each in gpus if run.wiring.gpu(each) is device)
    names = (run.named(number, device),)
    subject = run.on(number, device.device)
    return Sighting(subject=subject, seen=seen, confidence=confidence, gpus=gpus, **{"names": names, **more})


def of_pairs(
    run: Circumstances,
    pairs: Collection[Pair],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """Between ordered pairs of GPUs."""
    names = tuple(map(run.pair_name, sorted(pairs)))
    return Sighting(
        subject=joined(names), seen=seen, confidence=confidence, pairs=frozenset(pairs), **{"names": names, **more}
    )


def of_ranks(
    run: Circumstances,
    ranks: Sequence[RankFacts],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """On ranks of one node."""
    gpus = frozenset(gpu for each in ranks for gpu in run.gpus_of_rank(each))
    subject = run.on(ranks[0].node, rank_names(ranks))
    return Sighting(subject=subject, seen=seen, confidence=confidence, **{"gpus": gpus, **more})


def rank_names(ranks: Sequence[RankFacts]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined(str(each.rank) for each in ranks)}"


def unread(subject: str, known: Mapping[str, str], name: str) -> Iterator[Unread]:
    """The reason why a fact could not be read, where that is known."""
    if known.get(name):
        yield Unread(subject, known[name])


def rdma_nics(node: Topology) -> list[NicFacts]:
    """The NICs of a node that can do RDMA, up or not."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(run: Circumstances) -> Iterator[tuple[int, Topology, list[RankFacts]]]:
    """Nodes with RDMA NICs, and their processes."""
    for number, node in run.nodes.items():
        if rdma_nics(node):
            yield number, node, run.ranks_of(number)
