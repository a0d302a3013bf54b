"""Scores and thresholds for cells, and for the GPUs inside each node. A cell is one rail of one node.

A fault only lowers a measurement, because a pair is as slow as its slower end. So a cell's score is the mean of the
upper half of its measurements. One bad partner of three, or two of five, does not change the score, and it is less
noisy than the median. The thresholds come from benchmarks/scan_confusion.py.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from statistics import NormalDist, fmean, median

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.curve import curve
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError
from gpubench.model.profiles.learning import Expectation, judge_bandwidth
from gpubench.model.profiles.profile import Profile
from gpubench.model.results import scan
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.statistics import robust_deviation
from gpubench.model.terms.units import BYTES_PER_GB, compress_names
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Verdict

LEAST_CELLS = 16
"""Cells needed to estimate the normal bandwidth inside leaves and between leaves separately. Fewer cells are merged."""

_GAP_OF_THREE, _NEAREST_OF_THREE = 0.6895, 0.3606
"""For three normally distributed values: the median distance between the two highest, and between the two nearest,
in standard deviations (by simulation).
"""

_UPPER_QUARTILE = NormalDist().inv_cdf(0.75)
_GAP_OF_TWO = math.sqrt(2) * _UPPER_QUARTILE
"""The median distance between two normally distributed values, in standard deviations."""

_DEVIATION_OF_THREE = 0.6244
"""The standard deviation of the mean of the two highest of three normally distributed values (by simulation)."""

_CELLS_OF_THREE_NODES = 3
"""Cells per rail in a scan of three nodes, in which each cell has two measurements instead of three."""

_FEW_FIGURES, _FEW_NODES = 10, 9
"""With fewer measurements or nodes, `_caution` clearly increases the noise. With these values, one in a hundred
scans of 3 to 16 healthy nodes names a component.
"""


def upper_mean(values: Sequence[float]) -> float:
    """Return the mean of the upper half of the values, including the middle one."""
    upper = sorted(values)[len(values) // 2 :]
    return math.fsum(upper) / len(upper)


@cache
def upper_excess(count: int) -> float:
    """Return the expected upper mean of `count` standard normal values (Blom, 1958)."""
    places = range(count // 2 + 1, count + 1)
    return fmean(NormalDist().inv_cdf((place - 0.375) / (count + 0.25)) for place in places)


class Yardstick(Struct, frozen=True):
    """The normal bandwidth with which measurements are compared, and the noise of a measurement.

        centres      normal bandwidth in GB/s, by rail and whether both ends share a leaf
        deviation    standard deviation of a measurement, relative to the normal bandwidth
        slow_leaves  share of the normal bandwidth left behind a slow leaf, by leaf, rail and whether both ends share it

    Cells behind a slow leaf are compared with each other.
    """

    centres: Mapping[tuple[int, bool], float]
    deviation: float
    slow_leaves: Mapping[tuple[str, int, bool], float] = field(default_factory=dict)

    def share(self, fabric: scan.ScanFabric, sample: scan.PairSample) -> float:
        """Return a measurement as a share of the normal bandwidth, or 0 if it failed."""
        first, second, rail, gb_s, _, _ = sample
        inside = fabric.inside(first, second)
        usual = self.centres.get((rail, inside), 0.0)
        if self.slow_leaves:
            usual *= min(
                self.slow_leaves.get((leaf, rail, inside), 1.0)
                for leaf in (fabric.leaves[first] or "", fabric.leaves[second] or "")
            )
        return gb_s / usual if usual > 0 else 0.0

    def score(self, figures: Sequence[float]) -> float:
        """Return the score of a cell from its measurements, in the same unit.

        If they are shares, a normal score is 1.
        """
        return upper_mean(figures) / (1 + upper_excess(len(figures)) * self.deviation)


Shares = dict[scan.NodeRail, list[float]]


def shares_of(fabric: scan.ScanFabric, yardstick: Yardstick, samples: Iterable[scan.PairSample]) -> Shares:
    """Return the shares of every cell.

    A failed measurement counts as 0 for the node that caused it, or for both nodes if the cause is unknown.
    """
    return _shares_by_cell((sample, yardstick.share(fabric, sample)) for sample in samples)


def _shares_by_cell(figures: Iterable[tuple[scan.PairSample, float]]) -> Shares:
    found: Shares = {}
    for (first, second, rail, _, failure, culprit), figure in figures:
        for node in (first, second):
            if not failure or culprit in (None, node):
                cell_figures = found.get((node, rail))  # type: ignore[call-overload] # a plain pair is equal, and sooner made
                if cell_figures is None:
                    found[scan.NodeRail(node, rail)] = [figure]
                else:
                    cell_figures.append(figure)
    return found


def screening_yardstick(fabric: scan.ScanFabric, samples: Sequence[scan.PairSample]) -> Yardstick:
    """Estimate the normal bandwidth and the noise from the screening, in which most cells are healthy."""
    measured = [sample for sample in samples if not sample.failure]
    by_class = _shares_by_class(fabric, measured)
    plain = Yardstick({key: _level(_merged(by_class, key), 0.0) for key in by_class}, 0.0)
    found = []
    # A slow leaf increases the first estimate, and slow nodes increase the second, so use the smaller one.
    for shares in shares_of(fabric, plain, measured), _flattened(fabric, plain, measured):
        within = _within(shares) * _caution(measured)
        levels = Yardstick({key: _level(_merged(by_class, key), within) for key in by_class}, within)
        found.append(replace(levels, deviation=max(within, _between(levels, shares))))
    return min(found, key=lambda yardstick: yardstick.deviation)


def _shares_by_class(fabric: scan.ScanFabric, samples: Iterable[scan.PairSample]) -> dict[tuple[int, bool], Shares]:
    figures: dict[tuple[int, bool], list[tuple[scan.PairSample, float]]] = {}
    for sample in samples:
        key = sample.rail, fabric.inside(sample.first, sample.second)
        figures.setdefault(key, []).append((sample, sample.gb_s))
    return {key: _shares_by_cell(measured) for key, measured in figures.items()}


LEAST_OF_A_LEAF_PAIR = 8
"""Measurements needed between two leaves. The error of their median is then below half the noise of one measurement."""


def _flattened(fabric: scan.ScanFabric, yardstick: Yardstick, samples: Iterable[scan.PairSample]) -> Shares:
    """Return the shares by cell, divided by the median for the two leaves of the pair.

    Slow leaves then do not add to the noise.
    """
    by_leaves: dict[tuple[str, str], list[tuple[scan.PairSample, float]]] = {}
    for sample in samples:
        one, other = sorted((fabric.leaves[sample.first] or "", fabric.leaves[sample.second] or ""))
        by_leaves.setdefault((one, other), []).append((sample, yardstick.share(fabric, sample)))
    flat: list[tuple[scan.PairSample, float]] = []
    for shares in by_leaves.values():
        level = median(share for _, share in shares) if len(shares) >= LEAST_OF_A_LEAF_PAIR else 0.0
        flat += ((sample, share / (level or 1.0)) for sample, share in shares)
    return _shares_by_cell(flat)


def _caution(samples: Sequence[scan.PairSample]) -> float:
    """Return the factor by which to increase the noise if it was estimated from few measurements or nodes.

    It is 4 for four nodes with one rail, and 1.04 for 64 nodes with four rails.
    """
    nodes = len({node for sample in samples for node in sample[:2]})
    return (1 + _FEW_FIGURES / max(1, len(samples))) * (1 + _FEW_NODES / max(1, nodes) ** 2)


def round_yardstick(
    fabric: scan.ScanFabric, samples: Sequence[scan.PairSample], good: frozenset[int], usual: Yardstick
) -> Yardstick:
    """Estimate the normal bandwidth from pairs of good nodes.

    If there are too few such pairs, keep the values in `usual`.
    """
    by_class: dict[tuple[int, bool], list[float]] = {}
    for sample in samples:
        if sample.first in good and sample.second in good and not sample.failure:
            key = sample.rail, fabric.inside(sample.first, sample.second)
            by_class.setdefault(key, []).append(sample.gb_s)
    centres = {key: median(values) for key, values in by_class.items() if len(values) >= LEAST_CELLS}
    return replace(usual, centres={**usual.centres, **centres})


def _merged(by_class: Mapping[tuple[int, bool], Shares], key: tuple[int, bool]) -> Shares:
    """Return the measurements inside leaves or between leaves, or both together if few cells have them."""
    shares = by_class[key]
    other = by_class.get((key[0], not key[1]), {})
    if not other or min(len(shares), len(other)) >= LEAST_CELLS:
        return shares
    return {cell: [*shares.get(cell, ()), *other.get(cell, ())] for cell in {*shares, *other}}


def _level(figures: Shares, deviation: float) -> float:
    return median(upper_mean(figure) / (1 + upper_excess(len(figure)) * deviation) for figure in figures.values())


def _within(shares: Shares) -> float:
    """Estimate the noise from the two highest measurements of each cell.

    A single bad partner does not affect them. In a scan of three nodes, each cell has only two measurements. On each
    rail, use the cell whose two are nearest, because it has no bad partner, or the same one twice. If more cells have
    two measurements, the scan ended early.
    """
    three = [sorted(share)[-2:] for share in shares.values() if len(share) >= 3]
    gaps = [(high - low) / high for low, high in three if high > 0]
    if gaps:
        return median(gaps) / _GAP_OF_THREE
    by_rail: dict[int, list[float]] = {}
    for cell, values in shares.items():
        if len(values) == 2 and max(values) > 0:
            by_rail.setdefault(cell.rail, []).append((max(values) - min(values)) / max(values))
    if max(map(len, by_rail.values()), default=0) > _CELLS_OF_THREE_NODES:
        return median(gap for rail_gaps in by_rail.values() for gap in rail_gaps) / _GAP_OF_TWO
    return median(min(rail_gaps) for rail_gaps in by_rail.values()) / _NEAREST_OF_THREE if by_rail else 0.0


def _between(yardstick: Yardstick, shares: Shares) -> float:
    scores = sorted(yardstick.score(share) for share in shares.values() if len(share) == 3)
    if len(scores) < LEAST_CELLS:
        return 0.0
    upper, middle = scores[len(scores) * 3 // 4], scores[len(scores) // 2]
    return (upper - middle) / _UPPER_QUARTILE / _DEVIATION_OF_THREE


DEVIATIONS: Mapping[scan.ScanPhase, float] = {
    scan.ScanPhase.SCREENING: 1.2,
    scan.ScanPhase.SUSPECTS: 1.2,
    scan.ScanPhase.CONFIRMATION: 1.5,
}
"""How far below 1 a score must be in each phase, in standard deviations of one measurement. The values come from
benchmarks/scan_confusion.py. Fewer than one in ten scans of 4,096 healthy nodes names a cell. At 2 % noise, a
scan finds over 90 % of the cells that lost 5 %.
"""

LEAST_LOSS: Mapping[scan.ScanPhase, float] = {
    scan.ScanPhase.SCREENING: 0.02,
    scan.ScanPhase.SUSPECTS: 0.02,
    scan.ScanPhase.CONFIRMATION: 0.03,
}
"""The minimum loss in each phase. Cells that differ by less are healthy, however small the noise is."""

ALARM_DEVIATIONS, LEAST_ALARM_LOSS = 5.0, 0.1
"""A single value is abnormal if it differs by this many standard deviations, and by at least this share. By chance,
one value in 3.5 million does.
"""

LEAST_COMPARED = 3
"""Number of components needed to find the slow one. A comparison of two does not show which one is slow."""

LEAST_FIGURES = 3
"""Measurements with good partners needed to confirm a cell, so that the upper mean ignores one of them."""

SURE_DEVIATIONS = 3.0
"""A loss of this many standard deviations is found 99 times in 100 (benchmarks/scan_confusion.py)."""


class CellScore(Struct, frozen=True):
    """The score of a cell in one phase, where 1 is normal, and the number of its measured and failed rounds.

    `gb_s` is the bandwidth in the same rounds, both directions together.
    """

    score: float
    figures: int
    failures: int
    gb_s: float


def threshold(phase: scan.ScanPhase, deviation: float) -> float:
    """Return the smallest loss for which a cell becomes a suspect or is confirmed, depending on the phase."""
    return max(DEVIATIONS[phase] * deviation, LEAST_LOSS[phase])


def smallest_sure_loss(deviation: float) -> float:
    """Return the smallest loss that a scan with this noise finds 99 times in 100."""
    confirmation = scan.ScanPhase.CONFIRMATION
    return max(SURE_DEVIATIONS * deviation, LEAST_LOSS[confirmation] + DEVIATIONS[confirmation] * deviation)


def scores(
    fabric: scan.ScanFabric,
    yardstick: Yardstick,
    samples: Sequence[scan.PairSample],
    good: Set[int] | None = None,
) -> dict[scan.NodeRail, CellScore]:
    """Return the score of every cell.

    If `good` is set, score only the other nodes, by their measurements with good nodes.
    """
    if good is not None:
        samples = [sample for sample in samples if (sample.first in good) != (sample.second in good)]
    failures: dict[scan.NodeRail, int] = {}
    for sample in samples:
        if sample.failure:
            for node in {sample.first, sample.second} if sample.culprit is None else {sample.culprit}:
                cell = scan.NodeRail(node, sample.rail)
                failures[cell] = failures.get(cell, 0) + 1
    found = shares_of(fabric, yardstick, samples)
    rates = _shares_by_cell((sample, sample.gb_s) for sample in samples)
    return {
        cell: CellScore(yardstick.score(shares), len(shares), failures.get(cell, 0), yardstick.score(rates[cell]))
        for cell, shares in found.items()
        if good is None or cell.node not in good
    }


def falls_behind(
    phase: scan.ScanPhase, deviation: float, scores_: Mapping[scan.NodeRail, CellScore]
) -> list[scan.NodeRail]:
    """Return the cells below the threshold of a phase.

    Before the confirmation, also return cells that failed at least once.
    """
    least = 1 - threshold(phase, deviation)
    is_last = phase is scan.ScanPhase.CONFIRMATION
    return [
        cell
        for cell, score in scores_.items()
        if (score.score < least and (not is_last or score.figures >= LEAST_FIGURES)) or (score.failures and not is_last)
    ]


def slow_figures(figures: Sequence[scan.LocalFigure]) -> dict[scan.LocalFigure, float]:
    """Return the slow measurements inside nodes (phase 0), each as a share of the median.

    A GPU is compared with all GPUs. A pair is compared with the same pair on other nodes, because pairs have different
    links.
    """
    found: dict[scan.LocalFigure, float] = {}
    for quantity in scan.LocalQuantity:
        alike: defaultdict[tuple[int, int | None], list[scan.LocalFigure]] = defaultdict(list)
        for figure in figures:
            if figure.quantity is quantity:
                alike[(figure.gpu, figure.partner) if quantity is scan.LocalQuantity.PAIR else (0, None)].append(figure)
        shares: dict[scan.LocalFigure, float] = {}
        for comparable in alike.values():
            usual = median(figure.gb_s for figure in comparable)
            if len(comparable) >= LEAST_COMPARED and usual > 0:
                shares |= {figure: figure.gb_s / usual for figure in comparable}
        noise = robust_deviation([share for figure, share in shares.items() if not figure.failure])
        least = 1 - max(ALARM_DEVIATIONS * (noise.deviation if noise else 0.0), LEAST_ALARM_LOSS)
        found |= {figure: share for figure, share in shares.items() if share < least or figure.failure}
    return found


def still_slow(first: Iterable[scan.LocalFigure], second: Sequence[scan.LocalFigure]) -> dict[scan.LocalFigure, float]:
    """Return the measurements that are slow in both passes, with their shares in the second pass."""
    before = {figure.place for figure in first}
    return {figure: share for figure, share in slow_figures(second).items() if figure.place in before}


def find_slowest(*measurements: Mapping[scan.LocalFigure, float]) -> dict[scan.LocalFigure, float]:
    """Merge the slow measurements of several passes, and keep the slowest value of each."""
    found: dict[tuple[int, int, scan.LocalQuantity, int | None], tuple[scan.LocalFigure, float]] = {}
    for figure, share in (item for measured in measurements for item in measured.items()):
        known = found.setdefault(figure.place, (figure, share))
        if share < known[1]:
            found[figure.place] = figure, share
    return dict(found.values())


def better_of(first: Sequence[scan.LocalFigure], second: Sequence[scan.LocalFigure]) -> list[scan.LocalFigure]:
    """Return the faster value of each measurement from two passes. If data were wrong in one pass, return that one."""
    found: dict[tuple[int, int, scan.LocalQuantity, int | None], scan.LocalFigure] = {}
    for figure in (*first, *second):
        known = found.setdefault(figure.place, figure)
        if (figure.failure.startswith(scan.WRONG_DATA_ARRIVED), figure.gb_s) > (
            known.failure.startswith(scan.WRONG_DATA_ARRIVED),
            known.gb_s,
        ):
            found[figure.place] = figure
    return list(found.values())


LEAST_PAIRS = 2
"""Slow pairs needed to name a GPU. With a single slow pair, it could be either GPU."""

SlowFigures = Mapping[scan.LocalFigure, float]
"""Slow measurements, each with its share of the median."""


class LocalPart(Struct, frozen=True):
    """A slow component of a node: a GPU, a pair of GPUs, or the whole node if `gpu` is None."""

    node: int
    gpu: int | None
    partner: int | None
    figures: SlowFigures


def local_parts(slow: SlowFigures, rails: int) -> Iterator[LocalPart]:
    """Yield the slow components of each node.

    It is the node itself if most of its GPUs are slow, or if only its all-reduce is slow.
    """
    by_node: defaultdict[int, dict[scan.LocalFigure, float]] = defaultdict(dict)
    for figure, share in slow.items():
        by_node[figure.node][figure] = share
    for node, node_figures in sorted(by_node.items()):
        gpus, pairs = _blamed(node_figures, rails)
        if len(gpus) * 2 > rails > 1 or not (gpus or pairs):
            yield LocalPart(node, None, None, node_figures)
            continue
        for gpu, figures in sorted(gpus.items()):
            yield LocalPart(node, gpu, None, {figure: node_figures[figure] for figure in figures})
        for pair in pairs:
            yield LocalPart(node, pair.gpu, pair.partner, {pair: node_figures[pair]})


def _blamed(slow: SlowFigures, rails: int) -> tuple[dict[int, list[scan.LocalFigure]], list[scan.LocalFigure]]:
    """Return the slow measurements by faulty GPU, and the slow pairs that no faulty GPU explains.

    A slow pair is attributed to a GPU that is slow itself, or else to the GPU with the most slow pairs.
    """
    gpus: defaultdict[int, list[scan.LocalFigure]] = defaultdict(list)
    for figure in slow:
        if figure.quantity not in (scan.LocalQuantity.PAIR, scan.LocalQuantity.ALL_REDUCE):
            gpus[figure.gpu].append(figure)
    pairs = [figure for figure in slow if figure.quantity is scan.LocalQuantity.PAIR]
    for gpu in [*gpus, *_most_in_pairs(pairs, rails)]:
        gpus[gpu] += [pair for pair in pairs if gpu in (pair.gpu, pair.partner)]
        pairs = [pair for pair in pairs if gpu not in (pair.gpu, pair.partner)]
    return gpus, pairs


def _most_in_pairs(pairs: Sequence[scan.LocalFigure], rails: int) -> Iterator[int]:
    slow = _count(pairs)
    failed = _count([pair for pair in pairs if pair.failure])
    enough = {gpu for gpu, count in slow.items() if count >= LEAST_PAIRS and 2 * count > rails - 1}
    enough |= {gpu for gpu, count in failed.items() if count >= LEAST_PAIRS}
    left = list(pairs)
    while candidates := enough & _count(left).keys():
        gpu = max(candidates, key=lambda gpu: (_count(left)[gpu], -gpu))
        yield gpu
        left = [pair for pair in left if gpu not in (pair.gpu, pair.partner)]


def _count(pairs: Sequence[scan.LocalFigure]) -> Counter[int]:
    return Counter(gpu for pair in pairs for gpu in (pair.gpu, pair.partner) if gpu is not None)


_COLLECTIVES: Mapping[scan.LocalQuantity, tuple[str, int]] = {
    scan.LocalQuantity.PAIR: ("sendrecv", scan.BOTH_WAYS),
    scan.LocalQuantity.ALL_REDUCE: ("allreduce", 1),
}
"""The collective whose expected bandwidth applies, and a factor. In a pair, each GPU sends and receives at once."""


def wrong_data_inside(fabric: scan.ScanFabric, figures: Sequence[scan.LocalFigure]) -> Iterator[Finding]:
    """Yield a finding for each pair of GPUs inside a node with wrong data, even if it happened only once."""
    found = {figure.place: figure for figure in figures if figure.failure.startswith(scan.WRONG_DATA_ARRIVED)}
    for figure in found.values():
        host = fabric.hosts[figure.node]
        gpus = () if figure.partner is None else (f"GPU{figure.gpu}", f"GPU{figure.partner}")
        yield Finding(
            WRONG_DATA,
            Verdict.FAIL,
            f"{host} GPU{figure.gpu} and GPU{figure.partner}" if figure.partner is not None else host,
            f"{figure.quantity.value}: {figure.failure}",
            "every element correct",
            "data corrupted by a GPU, a link, or ACS and IOMMU between peers",
            Cure.of(f"ssh {scan.login_name(host)} gpubench check"),
            subjects=(host,),
            places=tuple(DevicePlace(host, gpu) for gpu in gpus) or (DevicePlace(host),),
        )


def not_measured_inside(
    fabric: scan.ScanFabric, passes: Sequence[Sequence[scan.LocalFigure]], named: Sequence[scan.LocalFigure]
) -> Iterator[Finding]:
    """Yield findings for nodes on which a local measurement failed, unless another finding explains it.

    The finding is an ERROR if the last pass failed, and a WARN if only an earlier pass failed.
    """
    known = {figure.place for figure in named}
    last = {figure.place for figure in passes[-1] if figure.failure}
    found: dict[tuple[scan.LocalQuantity, str, Verdict], dict[int, None]] = {}
    for figure in (figure for figures in passes for figure in figures if figure.failure and figure.place not in known):
        if not figure.failure.startswith(scan.WRONG_DATA_ARRIVED):
            severity = Verdict.ERROR if figure.place in last else Verdict.WARN
            found.setdefault((figure.quantity, figure.failure, severity), {})[figure.node] = None
    for (quantity, failure, severity), nodes in found.items():
        names = [fabric.hosts[node] for node in sorted(nodes)]
        yield Finding(
            "inside-not-measured",
            severity,
            compress_names(names),
            f"{quantity.value}: {failure}" + ("" if severity is Verdict.ERROR else ", in one of two attempts"),
            "a measurement of every GPU, every GPU pair and the node's all-reduce",
            "NCCL needs more time to connect than the deadline, the GPU memory is in use, or a shared part hangs",
            Cure.of(
                f"ssh {scan.login_name(names[0])} gpubench check",
                comment="Or scan again with a longer deadline: --timeout 60.",
            ),
            subjects=tuple(names),
            places=tuple(map(DevicePlace, names)),
        )


def expected_inside(profile: Profile | None, gpus: int) -> dict[scan.LocalQuantity, Expectation]:
    """Return the bandwidths inside a node that a profile expects, or nothing for a generic profile.

    A pair is not faster than a copy between two GPUs. If NVLinks connect GPUs directly, a collective also uses the
    links to all other GPUs, but a pair does not.
    """
    found: dict[scan.LocalQuantity, Expectation] = {}
    if profile is None or profile.match.generic is not None or gpus < 2 or profile.match.visible < 2:
        return found
    for quantity, (name, ways) in _COLLECTIVES.items():
        collective = collective_named(name)
        try:
            seconds = curve(profile, collective, gpus, gpus).at(scan.EXCHANGED_BYTES)
        except UsageError:
            continue
        gb_s = ways * scan.EXCHANGED_BYTES * collective.busbw_factor(gpus) / seconds / BYTES_PER_GB
        if quantity is scan.LocalQuantity.PAIR:
            gb_s = min([gb_s, *(ways * value.value for value in profile.find("p2p.write_gb_s"))])
        found[quantity] = Expectation(gb_s, f"profile {profile.name}")
    return found


def find_nodes_below_profile(
    fabric: scan.ScanFabric,
    passes: Sequence[Sequence[scan.LocalFigure]],
    profiles: Mapping[int, Profile | None],
    named: Sequence[scan.LocalFigure],
) -> Iterator[Finding]:
    """Yield findings for nodes whose median bandwidth is below their profile in both passes.

    Measurements in `named` are skipped, because the comparison with other nodes already reported them.
    """
    known = {figure.place for figure in named}
    expected = {node: expected_inside(profile, fabric.rails) for node, profile in profiles.items()}
    best: dict[tuple[int, scan.LocalQuantity], dict[tuple[int, int | None], float]] = {}
    for figure in (
        figure for figures in passes for figure in figures if not figure.failure and figure.place not in known
    ):
        fastest = best.setdefault((figure.node, figure.quantity), {})
        fastest[figure.gpu, figure.partner] = max(figure.gb_s, fastest.get((figure.gpu, figure.partner), 0.0))
    by_kind: dict[tuple[scan.LocalQuantity, str], list[tuple[float, int, Expectation]]] = {}
    for (node, quantity), fastest in best.items():
        expectation = expected.get(node, {}).get(quantity)
        if expectation is not None and fastest:
            by_kind.setdefault((quantity, expectation.whose), []).append((median(fastest.values()), node, expectation))
    for (quantity, _), nodes in by_kind.items():
        slow = [node for node in nodes if judge_bandwidth(node[0], node[2], None) is not None]
        if not slow:
            continue
        gb_s, worst, expectation = min(slow)
        judged = judge_bandwidth(gb_s, expectation, None)
        if judged is None:
            continue
        severity, seen, wanted = judged
        names = [fabric.hosts[node] for _, node, _ in slow]
        yield Finding(
            "inside-below-profile",
            severity,
            compress_names(names),
            f"{quantity.value}: {seen}, on {fabric.hosts[worst]}",
            wanted,
            "a cause shared by these nodes: an NCCL setting, driver, firmware, clocks, or other jobs",
            Cure.of(f"ssh {scan.login_name(fabric.hosts[worst])} gpubench check"),
            subjects=tuple(names),
            places=tuple(map(DevicePlace, names)),
        )
