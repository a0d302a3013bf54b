"""Results with noise and a known slowdown, as two sides of a comparison."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile

SIZES = tuple(2**power for power in range(10, 33))
PLACEMENTS = ("out_of_place", "in_place")
SMALL_ROWS_ARE_NOISIER = 4.0


@dataclass(frozen=True)
class Scenario:
    """`slowdown` is the factor of the new side's time by size. 1 is no change.

    `row_noise` is the standard deviation of a row of the largest size, `run_noise` that of a run. One of a hundred rows
    is an outlier, which takes up to a third longer.
    """

    name: str
    runs: int
    row_noise: float
    run_noise: float
    slowdown: Callable[[int], float]

    @property
    def changed(self) -> bool:
        return any(self.slowdown(size) != 1 for size in SIZES)

    def sides(self, seed: int) -> tuple[list[ResultFile], list[ResultFile]]:
        generator = random.Random(f"{self.name} {seed}")
        base = [self._run(generator, lambda _size: 1.0) for _ in range(self.runs)]
        return base, [self._run(generator, self.slowdown) for _ in range(self.runs)]

    def _run(self, generator: random.Random, slowdown: Callable[[int], float]) -> ResultFile:
        whole = generator.gauss(0, self.run_noise)
        rows = [
            collective_row(size, placement, self._time_us(generator, size, whole) * slowdown(size))
            for size in SIZES
            for placement in PLACEMENTS
        ]
        return ResultFile(
            name="simulated", kind="made for a test", circumstances=FileCircumstances(tool=""), rows=tuple(rows)
        )

    def _time_us(self, generator: random.Random, size: int, whole: float) -> float:
        """Return 10 µs plus the size at 240 GB/s. Noise decreases evenly from the smallest to the largest size."""
        place = SIZES.index(size) / (len(SIZES) - 1)
        noise = self.row_noise * SMALL_ROWS_ARE_NOISIER ** (1 - place)
        outlier = generator.uniform(1, 1.33) if generator.random() < 0.01 else 1.0
        return (10 + size / 240e3) * math.exp(whole + generator.gauss(0, noise)) * outlier


def collective_row(
    size: int, placement: str = "out_of_place", time_us: float = 100.0, **changes: object
) -> CollectiveRow:
    values: dict[str, object] = {
        "collective": "allreduce",
        "backend": "nccl",
        "origin": "recorded",
        "ranks": 8,
        "nodes": 1,
        "size_bytes": size,
        "count": size // 4,
        "dtype": "float32",
        "op": "sum",
        "root": None,
        "placement": placement,
        "mode": "throughput",
        "graph": 0,
        "iterations": 20,
        "time_us": time_us,
        "time_us_fastest_rank": None,
        "time_us_slowest_rank": None,
        "slowest_rank": None,
        "algbw_gb_s": size / time_us / 1e3,
        "busbw_gb_s": 1.75 * size / time_us / 1e3,
        "wrong": 0,
        "verified": "repeat",
        "verdict": None,
    }
    return CollectiveRow(**(values | changes))  # type: ignore[arg-type]


def from_size(first: int, factor: float) -> Callable[[int], float]:
    return lambda size: factor if size >= first else 1.0


def only(slow: Sequence[int], factor: float) -> Callable[[int], float]:
    return lambda size: factor if size in slow else 1.0


QUIET, USUAL, NOISY = (0.001, 0.002), (0.004, 0.004), (0.015, 0.005)
"""Noise of rows of the largest size, and of runs"""

_CHANGES: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("nothing", from_size(2**60, 1.0)),
    ("all 10 % slower", from_size(0, 1.10)),
    ("from 256M on 5 % slower", from_size(2**28, 1.05)),
    ("1G alone 25 % slower", only([2**30], 1.25)),
    (
        "staged: 2 to 12 times slower from 64K on",
        lambda size: 1.0 if size < 2**16 else 2 + (math.log2(size) - 16) * 0.625,
    ),
)
SCENARIOS = tuple(
    Scenario(f"{change}, {runs} run{'s' if runs > 1 else ''}, {noise} noise", runs, *figures, slowdown)
    for change, slowdown in _CHANGES
    for runs in (1, 3)
    for noise, figures in (("quiet", QUIET), ("usual", USUAL), ("much", NOISY))
)
