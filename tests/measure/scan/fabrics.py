"""Fabrics to scan, and the parts that a scan of them names."""

from gpubench.measure.scan.rounds import ScanCourse, scan
from gpubench.measure.scan.verdicts import FaultyPart, decode
from gpubench.model.results.scan import LocalFigure, PlannedRound, RoundOutcome, ScanFabric
from gpubench.simulated.scan import SimulatedFabric, SimulatedRounds

USUAL_GB_S = 90.0


def fabric(nodes: int, rails: int = 4, leaf: int = 0, nics: tuple[str, ...] = ()) -> ScanFabric:
    """Return a fabric with `leaf` nodes per leaf, or without known leaves if it is 0."""
    leaves = tuple(f"leaf{node // leaf}" if leaf else None for node in range(nodes))
    return ScanFabric(tuple(f"node{node}" for node in range(nodes)), rails, leaves, nics)


def course(of: ScanFabric, model: SimulatedFabric, seed: int = 1, *, quick: bool = False) -> ScanCourse:
    return scan(of, seed, SimulatedRounds(of, model, seed), quick=quick, keep=lambda *_: None)


def parts(of: ScanFabric, model: SimulatedFabric, local: dict[LocalFigure, float] | None = None) -> list[FaultyPart]:
    return decode(course(of, model), local or {})


class Recorded(SimulatedRounds):
    def __init__(self, of: ScanFabric, model: SimulatedFabric, seed: int = 1) -> None:
        super().__init__(of, model, seed)
        self.planned: list[PlannedRound] = []

    def measure(self, planned: PlannedRound) -> RoundOutcome:
        self.planned.append(planned)
        return super().measure(planned)
