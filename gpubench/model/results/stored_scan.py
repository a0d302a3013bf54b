"""A scan as it is kept on disk: a line for the nodes, a line for phase 0, a line a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.errors import UsageError
from gpubench.model.results.scan_rounds import (
    BeforeRounds,
    LocalFigure,
    LocalQuantity,
    NodeRail,
    PairSample,
    RoundOutcome,
    ScanFabric,
    ScanPhase,
)
from gpubench.model.terms.verdict import Finding

MOST_NODES, MOST_RAILS = 65_536, 64

_EXPECTED = f"rounds as gpubench scan kept them, of {MOST_NODES} nodes and {MOST_RAILS} rails at most, each node once"


@dataclass(frozen=True, slots=True)
class StoredFabric:
    """The nodes of a scan, its seed, and what moved the data."""

    hosts: tuple[str, ...]
    rails: int
    leaves: tuple[str | None, ...]
    nics: tuple[str | None, ...]
    seed: int
    backend: str
    origin: str
    rates: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, fabric: ScanFabric, seed: int, backend: str, origin: str) -> "StoredFabric":
        """To keep."""
        return cls(fabric.hosts, fabric.rails, fabric.leaves, fabric.nics, seed, backend, origin, fabric.rates)

    def fabric(self) -> ScanFabric:
        """As it was. Raises UsageError for one that cannot be."""
        fits = len(self.leaves) == len(self.hosts) == len(set(self.hosts)) <= MOST_NODES
        if not self.hosts or not 1 <= self.rails <= MOST_RAILS or not fits:
            raise UsageError(
                f"{len(self.hosts)} nodes with {self.rails} rails and {len(self.leaves)} leaves", expected=_EXPECTED
            )
        return ScanFabric(self.hosts, self.rails, self.leaves, self.nics, self.rates[: self.rails])


@dataclass(frozen=True, slots=True)
class StoredLocal:
    """The figures of phase 0: node and GPU (two, of a pair), quantity, GB/s of each; by place why there is none.

    `findings` are what facts, clocks and profiles showed of the nodes, None of an older gpubench.
    """

    places: tuple[tuple[int, ...], ...]
    quantities: tuple[LocalQuantity, ...]
    gb_s: tuple[float, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None

    @classmethod
    def of(cls, figures: Sequence[LocalFigure], findings: Sequence[Finding] = ()) -> "StoredLocal":
        """To keep."""
        return cls(
            tuple(
                (each.node, each.gpu) if each.partner is None else (each.node, each.gpu, each.partner)
                for each in figures
            ),
            tuple(each.quantity for each in figures),
            tuple(each.gb_s for each in figures),
            {str(n): each.failure for n, each in enumerate(figures) if each.failure},
            tuple(findings),
        )

    def figures(self, fabric: ScanFabric) -> list[LocalFigure]:
        """As they were. Raises UsageError for nodes that are not there."""
        figures = []
        for number, (place, quantity, gb_s) in enumerate(zip(self.places, self.quantities, self.gb_s, strict=False)):
            node, gpu = _checked(place[:2], 2, fabric)
            partner = _checked((node, *place[2:]), 2, fabric)[1] if len(place) > 2 else None
            failure = self.failures.get(str(number), "")
            figures.append(LocalFigure(node, gpu, quantity, max(gb_s, 0.0), partner, failure))
        return figures


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A round: nodes and rail of every figure, its GB/s, and by place in these lists why there is none."""

    number: int
    phase: ScanPhase
    seconds: float
    places: tuple[tuple[int, ...], ...]
    gb_s: tuple[float, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    culprits: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: RoundOutcome) -> "StoredRound":
        """To keep."""
        samples = outcome.samples
        return cls(
            outcome.number,
            outcome.phase,
            outcome.seconds,
            tuple(each[:3] for each in samples),
            tuple(each.gb_s for each in samples),
            {str(n): each.failure for n, each in enumerate(samples) if each.failure},
            {str(n): each.culprit for n, each in enumerate(samples) if each.culprit is not None},
            {str(node): seen for node, seen in outcome.gone.items()},
        )

    def outcome(self, fabric: ScanFabric) -> RoundOutcome:
        """As it was. Raises UsageError for nodes or rails that are not there."""
        samples = []
        for number, (place, gb_s) in enumerate(zip(self.places, self.gb_s, strict=False)):
            first, second, rail = _checked(place, 3, fabric)
            failure, culprit = self.failures.get(str(number), ""), self.culprits.get(str(number))
            samples.append(PairSample(first, second, rail, max(gb_s, 0.0), failure, culprit))
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        gone = {numbers[node]: seen for node, seen in self.gone.items() if node in numbers}
        return RoundOutcome(self.number, self.phase, tuple(samples), self.seconds, gone)


@dataclass(frozen=True, slots=True)
class StoredAbsent:
    """The nodes that were gone in phase 0, or not in the job that went on, and why, by number.

    `failed` are rails whose worker died or hung in phase 0, by node and rail: '3/1'.
    """

    absent: Mapping[str, str]
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: BeforeRounds) -> "StoredAbsent":
        """To keep."""
        return cls(
            {str(node): seen for node, seen in found.gone.items()},
            {f"{node}/{rail}": seen for (node, rail), seen in found.failed.items()},
        )

    def rails(self, fabric: ScanFabric) -> dict[NodeRail, str]:
        """The rails that failed. Raises UsageError for some that are not there."""
        found = {}
        for place, seen in self.failed.items():
            numbers = [int(each) if each.isdecimal() else -1 for each in place.split("/")]
            node, rail = _checked(numbers, 2, fabric)
            found[NodeRail(node, rail)] = seen
        return found

    def nodes(self, fabric: ScanFabric) -> dict[int, str]:
        """As they are numbered in the scan."""
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        return {numbers[node]: seen for node, seen in self.absent.items() if node in numbers}


def _checked(place: Sequence[int], count: int, fabric: ScanFabric) -> Sequence[int]:
    nodes, rail = place[: max(1, count - 1)], place[-1] if place else -1
    fits = len(place) == count and all(0 <= node < len(fabric.hosts) for node in nodes)
    if not fits or not 0 <= rail < max(fabric.rails, 1):
        raise UsageError(f"a figure of {list(place)[:4]}", expected=f"{_EXPECTED}, of {len(fabric.hosts)} nodes")
    return place
