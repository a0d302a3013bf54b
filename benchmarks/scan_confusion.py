"""Measure how often `gpubench scan` names a bad part, under which kind, and how often a healthy one: many seeds.

    python -m benchmarks.scan_confusion --nodes 1024 --seeds 100
    python -m benchmarks.scan_confusion --shapes 2x16,3x16,5+7+9 --losses 0.05,0.1 --seeds 100
    python -m benchmarks.scan_confusion --nodes 4096 --seeds 200 --only nothing --median

The figures are simulated (simulated/scan.py). A run has several bad parts of one kind and loss. `missed` parts were not
named; `told` are those of them whose scan is not PASS; `falsely` are healthy parts that were named, per run. Only
healthy runs and runs with bad parts inside nodes have a phase 0. With --median the scores are medians and the
thresholds 1.5, 1.5 and 1.65 deviations.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from gpubench.measure.scan import judging
from gpubench.measure.scan.judging import slow_figures, still_slow
from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.rounds import scan
from gpubench.measure.scan.verdicts import FaultyPart, PartKind, decode
from gpubench.model.results.scan import LocalFigure, LocalQuantity, NodeRail, ScanFabric
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.scan import DIPS, NOISE, SimulatedFabric, SimulatedRounds

USUAL_GB_S = 92.0
FEWEST_NODES_A_FAULT = 8
"""Of fewer than forty nodes, one in eight is bad."""

LOSSES = (0.03, 0.05, 0.07, 0.1, 0.2, 0.5)

INSIDE = (PartKind.GPU.value, PartKind.GPU_PAIR.value)
UNSIZED = ("nothing", "node gone", "node hangs")
OF_LEAVES = ("rail of a leaf", "leaf", "uplink")
KINDS = ("nothing", "NIC or cable", "node", *OF_LEAVES, *UNSIZED[1:], *INSIDE)

Place = tuple[int, ...] | str
"""The nodes, or the leaf, of a part; for GPUs the node and one or two GPUs."""

INSIDE_GB_S, INSIDE_NOISE = 600.0, 0.02
"""Copies between GPUs of one node, and their noise: two H200s alone have less."""


@dataclass(frozen=True)
class Planted:
    """The bad parts of a run by place and rail, and the model that has them."""

    kind: PartKind | None
    places: Mapping[tuple[Place, int | None], None]
    model: SimulatedFabric
    inside: Mapping[Place, float] = field(default_factory=dict)


@dataclass
class Counts:
    """What happened to the bad parts of all runs."""

    planted: int = 0
    right: int = 0
    named_as: Counter[str] = field(default_factory=Counter)
    falsely: Counter[str] = field(default_factory=Counter)
    told: int = 0
    not_pass: int = 0
    seconds: float = 0.0
    runs: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--rails", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--dips", type=float, default=DIPS)
    parser.add_argument("--leaf", type=int, default=32, help="nodes a leaf; 0: leaves are not known")
    parser.add_argument("--shapes", help="nodes by leaf of several fabrics: 4x16,5+7+9; instead of --nodes and --leaf")
    parser.add_argument("--only", default="", help="kinds, or how their names begin, between commas")
    parser.add_argument("--losses", default=",".join(map(str, LOSSES)))
    parser.add_argument("--median", action="store_true", help="scores are medians")
    arguments = parser.parse_args()
    if arguments.median:
        _score_by_medians()
    wanted = arguments.only.split(",")
    print(f"{arguments.rails} rails, noise {arguments.noise:.0%}, dips {arguments.dips:.0%}, ", end="")
    print(f"{arguments.seeds} runs a line, seeds from {arguments.first} on; simulated")
    for name, fabric in _fabrics(arguments).items():
        print(f"\n{name}")
        print(
            f"{'kind':<16} loss  planted  named so  named as another kind            missed  told  not PASS   "
            "falsely a run  CPU s a run"
        )
        for kind in KINDS:
            if not any(kind == word or (word not in KINDS and kind.startswith(word)) for word in wanted):
                continue
            if kind in OF_LEAVES and None in fabric.leaves:
                continue
            for loss in map(float, arguments.losses.split(",")) if kind not in UNSIZED else (0.0,):
                _print(kind, loss, _counted(kind, loss, fabric, arguments))


def _fabrics(arguments: argparse.Namespace) -> dict[str, ScanFabric]:
    if arguments.shapes is None:
        nodes, size = arguments.nodes, arguments.leaf
        sizes = [min(size, nodes - first) for first in range(0, nodes, size)] if size else []
        name = f"{nodes} nodes" + (f", {size} a leaf" if size else "")
        return {name: _fabric(sizes or [nodes], arguments.rails, known=bool(size))}
    found = {}
    for shape in arguments.shapes.split(","):
        leaves, _, size = shape.rpartition("x")
        sizes = [int(size)] * int(leaves) if leaves else [int(count) for count in shape.split("+")]
        found[f"{len(sizes)} leaves, {sum(sizes)} nodes ({shape})"] = _fabric(sizes, arguments.rails)
    return found


def _fabric(sizes: Sequence[int], rails: int, *, known: bool = True) -> ScanFabric:
    leaves = tuple(f"leaf{leaf}" if known else None for leaf, size in enumerate(sizes) for _ in range(size))
    return ScanFabric(tuple(f"node{node}" for node in range(len(leaves))), rails, leaves)


def _counted(kind: str, loss: float, fabric: ScanFabric, arguments: argparse.Namespace) -> Counts:
    counts = Counts(runs=arguments.seeds)
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        planted = _plant(kind, loss, fabric, random.Random(f"plant{seed}"), arguments)
        start = time.process_time()
        course = scan(fabric, seed, SimulatedRounds(fabric, planted.model, seed), quick=False, keep=lambda *_: None)
        local = {}
        if kind in ("nothing", *INSIDE):
            first, again = (_inside(fabric, planted, random.Random(f"inside{seed}/{turn}")) for turn in (0, 1))
            local = still_slow(slow_figures(first), again)
        parts = decode(course, local)
        counts.seconds += (time.process_time() - start) / arguments.seeds
        missed = _compare(planted, parts, counts)
        if missed or not planted.places:
            is_pass = report_of(ScanResult(course, parts), 1).verdict is Verdict.PASS
            counts.not_pass += not is_pass
            counts.told += 0 if is_pass else missed
    return counts


def _inside(fabric: ScanFabric, planted: Planted, source: random.Random) -> list[LocalFigure]:
    """Simulate phase 0: every pair of GPUs of every node, and an all-reduce as slow as the slowest pair."""
    found = []
    for node in range(len(fabric.hosts)):
        slowest = 1.0
        for one, other in combinations(range(fabric.rails), 2):
            places = ((node, one), (node, other), (node, one, other))
            share = min(planted.inside.get(place, 1.0) for place in places) if planted.inside else 1.0
            slowest = min(slowest, share)
            gb_s = INSIDE_GB_S * share * (1 + INSIDE_NOISE * source.gauss(0.0, 1.0))
            found.append(LocalFigure(node, one, LocalQuantity.PAIR, gb_s, other))
        gb_s = INSIDE_GB_S * slowest * (1 + INSIDE_NOISE * source.gauss(0.0, 1.0))
        found.append(LocalFigure(node, 0, LocalQuantity.ALL_REDUCE, gb_s))
    return found


def _compare(planted: Planted, parts: list[FaultyPart], counts: Counts) -> int:
    """Count the named parts; return how many planted parts were not named."""
    counts.planted += len(planted.places)
    left = dict(planted.places)
    for part in parts:
        place = _place(part)
        if part.kind is planted.kind and place in left:
            counts.right += 1
            del left[place]
    for part in parts:
        if part.kind is planted.kind and _place(part) in planted.places:
            continue
        touched = [place for place in left if _touches(part, place)]
        if touched:
            counts.named_as[part.kind.value] += 1
            for place in touched:
                del left[place]
        elif not any(_touches(part, place) for place in planted.places):
            counts.falsely[part.kind.value] += 1
    return len(left)


def _place(part: FaultyPart) -> tuple[Place, int | None]:
    gpus = tuple(gpu for gpu in (part.gpu, part.partner) if gpu is not None)
    return part.leaf or (*part.nodes, *gpus), None if gpus else part.rail


def _touches(part: FaultyPart, place: tuple[Place, int | None]) -> bool:
    where, rail = place
    if part.kind is PartKind.RAIL and isinstance(where, str):
        return rail == part.rail
    if not isinstance(where, str) and len(where) > 1 and part.nodes == where[:1]:
        return True
    return (part.leaf == where or part.nodes == where) and (None in (rail, part.rail) or rail == part.rail)


def _plant(kind: str, loss: float, fabric: ScanFabric, source: random.Random, arguments: argparse.Namespace) -> Planted:
    given = {"noise": arguments.noise, "usual_dips": arguments.dips}
    rails, left = range(fabric.rails), 1 - loss
    few = source.sample(range(len(fabric.hosts)), min(5, max(1, len(fabric.hosts) // FEWEST_NODES_A_FAULT)))
    if kind == "nothing":
        return Planted(None, {}, SimulatedFabric(USUAL_GB_S, **given))
    if kind == "NIC or cable":
        cells = {NodeRail(node, source.choice(rails)): left for node in few}
        places: dict[tuple[Place, int | None], None] = {((cell.node,), cell.rail): None for cell in cells}
        return Planted(PartKind.NIC, places, SimulatedFabric(USUAL_GB_S, cells=cells, **given))
    if kind == "node":
        cells = {NodeRail(node, rail): left for node in few[:3] for rail in rails}
        places = {((node,), None): None for node in few[:3]}
        return Planted(PartKind.NODE, places, SimulatedFabric(USUAL_GB_S, cells=cells, **given))
    if kind in INSIDE:
        inside: dict[Place, float] = {
            (node, *sorted(source.sample(rails, 1 if kind == PartKind.GPU else 2))): left for node in few
        }
        model = SimulatedFabric(USUAL_GB_S, **given)
        return Planted(PartKind(kind), dict.fromkeys((place, None) for place in inside), model, inside)
    if kind in ("node gone", "node hangs"):
        rounds = {node: source.choice((1, 2, 3)) for node in few[:3]}
        places = {((node,), None): None for node in rounds}
        dies, hangs = (rounds, {}) if kind == "node gone" else ({}, rounds)
        return Planted(PartKind(kind), places, SimulatedFabric(USUAL_GB_S, dies=dies, hangs=hangs, **given))
    leaf, rail = source.choice([name for name in fabric.leaves if name is not None]), source.choice(rails)
    if kind == "leaf":
        slow = {(leaf, number): left for number in rails}
        return Planted(PartKind.LEAF, {(leaf, None): None}, SimulatedFabric(USUAL_GB_S, leaf_rails=slow, **given))
    places = {(leaf, rail): None}
    if kind == "uplink":
        return Planted(PartKind.UPLINK, places, SimulatedFabric(USUAL_GB_S, uplinks={(leaf, rail): left}, **given))
    return Planted(PartKind.LEAF_RAIL, places, SimulatedFabric(USUAL_GB_S, leaf_rails={(leaf, rail): left}, **given))


def _print(kind: str, loss: float, counts: Counts) -> None:
    others = ", ".join(f"{count} {name}" for name, count in counts.named_as.items()) or "-"
    missed = counts.planted - counts.right - counts.named_as.total()
    share = f"{counts.right / counts.planted:.1%}" if counts.planted else "-"
    falsely = ", ".join(f"{count} {name}" for name, count in counts.falsely.items())
    print(
        f"{kind:<16} {f'{loss:.0%}' if loss else '-':>4} {counts.planted:8} {share:>9}  {others:<32} {missed:6} "
        f"{counts.told:5} {counts.not_pass:9}   {counts.falsely.total() / counts.runs:13.3f} {counts.seconds:12.2f}   "
        f"{falsely}".rstrip(),
        flush=True,
    )


def _score_by_medians() -> None:
    """Use the first design of the scores: medians and their thresholds."""

    def middle(values: Sequence[float]) -> float:
        return median(values)

    judging.upper_mean = middle
    judging.upper_excess.cache_clear()
    vars(judging)["upper_excess"] = lambda _count: 0.0
    judging.DEVIATIONS = dict(zip(judging.DEVIATIONS, (1.5, 1.5, 1.65), strict=True))


if __name__ == "__main__":
    main()
