"""Single runs of healthy sibling nodes, with the spread of real ones (benchmarks/compare_alarms.md).

An all-to-all of 32 to 512 MiB takes one of two times, which are 6 % apart and the same for all of these sizes in a run.
All else varies by a few tenths of a percent. One row of a few hundred is an outlier of 12 %.
"""

import math
import random
from collections.abc import Callable

from gpubench.model.results.result_file import FileCircumstances, ResultFile
from tests.fakes.noisy_results import PLACEMENTS, collective_row

COLLECTIVES = ("allgather", "allreduce", "alltoall", "reducescatter", "sendrecv")
NODE_SIZES = tuple(2**power for power in range(25, 35))

_ROW, _OUTLIERS, _SLOW_RUNS = 0.004, 1 / 500, 0.3
_SLOWER = {2**25: 0.015, 2**26: 0.02, 2**27: 0.04, 2**28: 0.07, 2**29: 0.065}

Slowdown = Callable[[str, int], float]
"""The factor of a time, by collective and size"""


def unchanged(_collective: str, _size: int) -> float:
    return 1.0


def node_run(seed: str, slowdown: Slowdown = unchanged) -> ResultFile:
    """Return a run of every collective. Runs with the same seed are equal."""
    generator = random.Random(seed)
    rows = []
    for collective in COLLECTIVES:
        for placement in PLACEMENTS:
            is_slow = collective == "alltoall" and generator.random() < _SLOW_RUNS
            for size in NODE_SIZES:
                slower = 1 + _SLOWER.get(size, 0.0) if is_slow else 1.0
                hiccup = 1.12 if generator.random() < _OUTLIERS else 1.0
                noise = math.exp(generator.gauss(0, _ROW))
                time_us = (10 + size / 240e3) * noise * slower * hiccup * slowdown(collective, size)
                rows.append(collective_row(size, placement, time_us, collective=collective))
    return ResultFile(name=seed, kind="made for a test", circumstances=FileCircumstances(tool=""), rows=tuple(rows))
