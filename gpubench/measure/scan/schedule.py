"""Who measures whom in which round: it follows from a seed and the nodes that live, so that nobody has to be told."""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

from gpubench.model.results.scan_rounds import NodePair, ScanFabric

_FEW_NODES = 64
"""Among so few nodes two random matchings often share a pair, which is then taken apart."""


def circle_round(number: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of a round of the circle tournament: in n - 1 rounds each of an even number n meets every other once.

    As in every round robin (Schurig, 1886), one stands still and the others turn around it; of an odd number the one
    that stands still is nobody, and whoever would meet it sits out.
    """
    order: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    turning = len(order) - 1
    if turning < 1:
        return []
    meetings = [(order[-1], order[number % turning])]
    meetings += [
        (order[(number + step) % turning], order[(number - step) % turning]) for step in range(1, len(order) // 2)
    ]
    return [(one, other) for one, other in meetings if one is not None and other is not None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The matchings of a scan. Of an odd number of nodes another one sits out in every round."""

    fabric: ScanFabric
    seed: int

    def screening(self, number: int, living: Sequence[int]) -> tuple[NodePair, ...]:
        """Round `number` of the screening, from 1 on: one inside the leaves where they are known, then across."""
        return tuple(self._matching(number, living, inside=number == 1))

    def against_good(
        self, number: int, suspects: Sequence[int], good: Sequence[int]
    ) -> tuple[tuple[NodePair, ...], tuple[NodePair, ...]]:
        """Suspects with known good nodes, another one in every round; and all others among themselves.

        Where there are more suspects than good nodes, they take turns.
        """
        order = self._shuffled("suspects", suspects)
        partners = self._shuffled("good", good)
        most = min(len(order), len(partners))
        turn = 0 if most == len(order) else number * most
        chosen = [order[(turn + i) % len(order)] for i in range(most)]
        taken = [partners[(number + i) % len(partners)] for i in range(most)]
        judged = tuple(NodePair(one, other) for one, other in zip(chosen, taken, strict=True))
        left = sorted((set(suspects) | set(good)) - set(chosen) - set(taken))
        others = self._matching(number, left, inside=number % 2 == 1)
        return judged, tuple(others)

    def _matching(self, number: int, nodes: Sequence[int], *, inside: bool) -> list[NodePair]:
        if len({self.fabric.leaves[node] for node in nodes}) < 2 or any(
            self.fabric.leaves[node] is None for node in nodes
        ):
            return self._circle(number, nodes)
        even = self._without_one(number, nodes)
        return self._inside(number, even) if inside else self._across(number, even)

    def _circle(self, number: int, nodes: Sequence[int]) -> list[NodePair]:
        """A round of the circle tournament over a shuffled order."""
        return [NodePair(one, other) for one, other in circle_round(number, self._shuffled("circle", nodes))]

    def _inside(self, number: int, nodes: Sequence[int]) -> list[NodePair]:
        """Pairs within leaves; what is left of leaves with an odd number is paired across."""
        members: dict[str | None, list[int]] = {}
        for node in self._shuffled(f"inside{number}", nodes):
            members.setdefault(self.fabric.leaves[node], []).append(node)
        left = [each.pop() for each in members.values() if len(each) % 2]
        groups = [*members.values(), left]
        return [NodePair(each[i], each[i + 1]) for each in groups for i in range(0, len(each) - 1, 2)]

    def _across(self, number: int, nodes: Sequence[int]) -> list[NodePair]:
        """Random pairs between leaves, wherever no leaf has more than half of all nodes; of few nodes no pair again.

        A pair within a leaf changes partners with a pair of which neither node is on it: there is one, as no leaf has
        more than half of all.
        """
        before = self._before(number, nodes) if len(nodes) <= _FEW_NODES else frozenset()
        order = self._shuffled(f"across{number}", nodes)
        pairs = [NodePair(order[place], order[place + 1]) for place in range(0, len(order) - 1, 2)]
        for place in range(len(pairs)):
            for known in (before, frozenset[frozenset[int]]()):
                if not self._is_poor(pairs[place], known) or self._mend(pairs, place, known):
                    break
        return pairs

    def _mend(self, pairs: list[NodePair], place: int, before: Set[frozenset[int]]) -> bool:
        """Exchange partners with another pair, so that neither is poor; False where none is fit."""
        one, other = pairs[place]
        for step in range(1, len(pairs)):
            elsewhere = (place + step) % len(pairs)
            for third, fourth in (pairs[elsewhere], pairs[elsewhere][::-1]):
                changed = NodePair(one, third), NodePair(other, fourth)
                if not any(self._is_poor(pair, before) for pair in changed):
                    pairs[place], pairs[elsewhere] = changed
                    return True
        return False

    def _before(self, number: int, nodes: Sequence[int]) -> frozenset[frozenset[int]]:
        """The pairs of the rounds before."""
        found = {frozenset(pair) for pair in self._inside(1, nodes)}
        for earlier in range(2, number):
            found |= {frozenset(pair) for pair in self._across(earlier, nodes)}
        return frozenset(found)

    def _is_poor(self, pair: NodePair, before: Set[frozenset[int]]) -> bool:
        return self.fabric.inside(*pair) or frozenset(pair) in before

    def _without_one(self, number: int, nodes: Sequence[int]) -> Sequence[int]:
        """An even number of nodes: of an odd one another node sits out in every round."""
        if len(nodes) % 2 == 0:
            return nodes
        idle = self._shuffled("idle", nodes)[number % len(nodes)]
        return [node for node in nodes if node != idle]

    def _shuffled(self, name: str, nodes: Sequence[int]) -> list[int]:
        order = sorted(nodes)
        random.Random(f"{self.seed}/{name}").shuffle(order)
        return order
