"""Which part of a node is bad by phase 0: a GPU, the way between two of them, or the node."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.results.scan_rounds import LocalFigure, LocalQuantity

LEAST_PAIRS = 2
"""Of one slow pair alone nobody can say which of its two GPUs it is."""

SlowFigures = Mapping[LocalFigure, float]
"""Figures that fall behind, with their shares of what is usual."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a node that `figures` show to be slow: a GPU, a GPU with its partner, or, with neither, the node."""

    node: int
    gpu: int | None
    partner: int | None
    figures: SlowFigures


def local_parts(slow: SlowFigures, rails: int) -> Iterator[LocalPart]:
    """The parts that slow figures show, each in one: the node where most GPUs are slow, or all-reduce alone."""
    by_node: defaultdict[int, dict[LocalFigure, float]] = defaultdict(dict)
    for figure, share in slow.items():
        by_node[figure.node][figure] = share
    for node, own in sorted(by_node.items()):
        gpus, pairs = _blamed(own, rails)
        if len(gpus) * 2 > rails > 1 or not (gpus or pairs):
            yield LocalPart(node, None, None, own)
            continue
        for gpu, figures in sorted(gpus.items()):
            yield LocalPart(node, gpu, None, {each: own[each] for each in figures})
        for each in pairs:
            yield LocalPart(node, each.gpu, each.partner, {each: own[each]})


def _blamed(own: SlowFigures, rails: int) -> tuple[dict[int, list[LocalFigure]], list[LocalFigure]]:
    """Figures by GPU that is to blame, and the pairs left: each time the GPU with the most slow pairs is taken."""
    gpus: defaultdict[int, list[LocalFigure]] = defaultdict(list)
    for each in own:
        if each.quantity not in (LocalQuantity.PAIR, LocalQuantity.ALL_REDUCE):
            gpus[each.gpu].append(each)
    pairs = [each for each in own if each.quantity is LocalQuantity.PAIR]
    for gpu in [*gpus, *_most_in_pairs(pairs, rails)]:
        gpus[gpu] += [each for each in pairs if gpu in (each.gpu, each.partner)]
        pairs = [each for each in pairs if gpu not in (each.gpu, each.partner)]
    return gpus, pairs


def _most_in_pairs(pairs: Sequence[LocalFigure], rails: int) -> Iterator[int]:
    """GPUs of which most pairs are slow, or several had no figure, after which no more were tried."""
    slow = _count(pairs)
    failed = _count([each for each in pairs if each.failure])
    enough = {gpu for gpu, count in slow.items() if count >= LEAST_PAIRS and 2 * count > rails - 1}
    enough |= {gpu for gpu, count in failed.items() if count >= LEAST_PAIRS}
    left = list(pairs)
    while candidates := enough & _count(left).keys():
        gpu = max(candidates, key=lambda each: (_count(left)[each], -each))
        yield gpu
        left = [each for each in left if gpu not in (each.gpu, each.partner)]


def _count(pairs: Sequence[LocalFigure]) -> Counter[int]:
    return Counter(gpu for each in pairs for gpu in (each.gpu, each.partner) if gpu is not None)
