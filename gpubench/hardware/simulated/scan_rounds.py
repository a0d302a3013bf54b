"""Rounds of a scan on nodes that are not there: a model, never a measurement."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.model.results.scan_rounds import NodeRail, PairSample, PlannedRound, RoundOutcome, ScanFabric

NOISE = 0.02
"""Standard deviation of a figure, as a share of it: that for which the thresholds of a scan are shown to hold."""

DIPS = 0.01
"""Share of figures that something passing by lowers, by 5 to 40 %."""

_SMALLEST_DIP, _LARGEST_DIP = 0.05, 0.4

_COLLECTIVE_SPREAD = 0.003
"""Of a collective of large messages, as hardware.simulated.times has it."""

SET_UP_SECONDS = 0.44
"""To make communicators of two ranks, one a GPU: the slowest first one of four H200 took so long."""

SECONDS_OF_COPYING = 0.5
"""Of a round, after its warm-up."""

CONTROL_SECONDS = 0.1
"""To tell all nodes of a round and hear of all: the bound that benchmarks/scan_control.py holds itself to."""

DEADLINE_SECONDS = 10.0
"""After which a round is given up where somebody hangs."""


@dataclass(frozen=True, slots=True)
class SimulatedFabric:
    """What is wrong with a fabric. Shares are of the usual bandwidth: by cell, by leaf and rail, and of its uplinks.

    `dies` and `hangs` are rounds by node, from which on; `dips` the probability that a node's figure is a dip.
    """

    usual_gb_s: float
    cells: Mapping[NodeRail, float] = field(default_factory=dict)
    leaf_rails: Mapping[tuple[str, int], float] = field(default_factory=dict)
    uplinks: Mapping[tuple[str, int], float] = field(default_factory=dict)
    dies: Mapping[int, int] = field(default_factory=dict)
    hangs: Mapping[int, int] = field(default_factory=dict)
    dips: Mapping[int, float] = field(default_factory=dict)
    noise: float = NOISE
    usual_dips: float = DIPS


class SimulatedRounds:
    """Measures rounds by the model; equal seeds give equal figures."""

    def __init__(self, fabric: ScanFabric, model: SimulatedFabric, seed: int) -> None:
        self._fabric, self._model, self._seed = fabric, model, seed

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        """All pairs of a round; a node that dies in it is gone, one that hangs costs the deadline."""
        model, source = self._model, random.Random(f"{self._seed}/round{planned.number}")
        taking_part = {node for pair in planned.pairs for node in pair}
        gone = {node: "its supervisor stopped answering" for node in taking_part if self._dead(node, planned.number)}
        samples: list[PairSample] = []
        hung = False
        for first, second in planned.pairs:
            dead = next((node for node in (first, second) if node in gone), None)
            hangs = any(planned.number >= model.hangs.get(node, planned.number + 1) for node in (first, second))
            for rail in range(self._fabric.rails):
                if planned.retired and not planned.retired.isdisjoint((NodeRail(first, rail), NodeRail(second, rail))):
                    continue
                if dead is not None:
                    samples.append(PairSample(first, second, rail, 0.0, "the node is gone", dead))
                elif hangs:
                    hung = True
                    samples.append(PairSample(first, second, rail, 0.0, "not done within the deadline"))
                else:
                    samples.append(PairSample(first, second, rail, self._figure(source, first, second, rail)))
        seconds = SET_UP_SECONDS + SECONDS_OF_COPYING + CONTROL_SECONDS + (DEADLINE_SECONDS if hung or gone else 0.0)
        return RoundOutcome(planned.number, planned.phase, tuple(samples), seconds, gone)

    def collective(self, nodes: Sequence[int]) -> tuple[float | None, str]:
        """GB/s that a node sends on all its rails in a ring of these nodes, as slow as the slowest of all rails.

        None, with the reason, where one of them hangs or is dead by then.
        """
        model = self._model
        if {*model.dies, *model.hangs}.intersection(nodes):
            return None, "not done within the deadline"
        share = 1.0
        if model.cells or model.leaf_rails or model.uplinks:
            share = min(
                self._share(node, rail) * model.uplinks.get((self._leaf(node), rail), 1.0)
                for node in nodes
                for rail in range(self._fabric.rails)
            )
        noise = 1 + _COLLECTIVE_SPREAD * random.Random(f"{self._seed}/collective{len(nodes)}").gauss(0.0, 1.0)
        return self._fabric.rails * model.usual_gb_s * share * noise, ""

    def _dead(self, node: int, number: int) -> bool:
        return number >= self._model.dies.get(node, number + 1)

    def _figure(self, source: random.Random, first: int, second: int, rail: int) -> float:
        model = self._model
        share = min(self._share(first, rail), self._share(second, rail))
        if model.uplinks and not self._fabric.inside(first, second):
            share = min(share, *(model.uplinks.get((self._leaf(node), rail), 1.0) for node in (first, second)))
        gb_s = model.usual_gb_s * share * (1 + model.noise * source.gauss(0.0, 1.0))
        dips = max((model.dips.get(node, 0.0) for node in (first, second)), default=0.0) if model.dips else 0.0
        if source.random() < max(dips, model.usual_dips):
            gb_s *= 1 - source.uniform(_SMALLEST_DIP, _LARGEST_DIP)
        return max(gb_s, 0.0)

    def _share(self, node: int, rail: int) -> float:
        share = self._model.cells.get(NodeRail(node, rail), 1.0)
        if self._model.leaf_rails:
            share *= self._model.leaf_rails.get((self._leaf(node), rail), 1.0)
        return share

    def _leaf(self, node: int) -> str:
        return self._fabric.leaves[node] or ""
