"""A matrix of copies: what was measured of every pair in one series, and the verdict on each."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpubench.model.paths.p2p import Cell, Pair, Series
from gpubench.model.terms.copies import Direction
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.model.terms.verdict import Verdict

Judged = tuple[Verdict | None, str]
"""A verdict, None where nothing is expected, and its reason."""


@dataclass(frozen=True, slots=True)
class CopyMatrix:
    """The cells of a series, the verdicts on them, and the bandwidth in GB/s of those that were measured."""

    series: Series
    cells: Mapping[Pair, Cell]
    gb_s: Mapping[Pair, float]
    verdicts: Mapping[Pair, Judged]

    @property
    def slow(self) -> set[Pair]:
        """Pairs whose bandwidth is judged and not enough."""
        return {pair for pair in self.gb_s if self.verdicts[pair][0] in (Verdict.FAIL, Verdict.WARN)}


def bandwidth_gb_s(series: Series, cell: Cell) -> float:
    """The bandwidth of a cell, of both directions together where both are copied."""
    copies = 2 if series.direction is Direction.BOTH else 1
    return copies * series.size_bytes / cell.typical_seconds / BYTES_PER_GB


def verdict_without_bandwidth(cell: Cell, users: str, *, is_judged: bool) -> Judged | None:
    """The verdict on a cell whatever its bandwidth: failed, wrong, not judged; None where that counts."""
    if cell.error:
        return Verdict.ERROR, cell.error
    if cell.wrong:
        return Verdict.FAIL, f"{cell.wrong} wrong elements"
    if not is_judged:
        return None, ""
    return (Verdict.SKIP, f"not judged: {users}") if users else None
