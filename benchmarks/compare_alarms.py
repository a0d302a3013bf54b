"""Measure how often `gpubench compare` is right, on results with noise and a known slowdown, over many seeds.

    python -m benchmarks.compare_alarms --seeds 1000
    python -m benchmarks.compare_alarms --real FOLDER

Without `--real` the results are synthetic (tests/fakes/noisy_results.py). A failed comparison of unchanged results is a
false alarm; one with a planted slowdown that does not fail is a miss.

FOLDER has a subfolder per kind of machine, with a measured file per run or per healthy sibling, from nccl-tests or
gpubench. Every file is compared with every other, unchanged and with slowdowns planted into the new one.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path

from msgspec.structs import replace

from gpubench.errors import GpubenchError
from gpubench.measure.compare.report import compare
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.registry import read_results
from tests.fakes.noisy_results import SCENARIOS

Slowdown = Callable[[CollectiveRow], float]
"""The factor by which the time of a row grows."""

PLANTED = ("nothing", "all 5 %", "one collective 10 %", "four of its sizes 15 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="", help="scenarios, or folders, whose name begins so")
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="a folder a kind of machine, a file a run")
    parser.add_argument("--pairs", type=int, default=400, help="at most so many comparisons a kind, picked evenly")
    arguments = parser.parse_args()
    if arguments.real:
        print_real(arguments.real, arguments.only, arguments.pairs)
    else:
        print_made(arguments.seeds, arguments.only)


def print_made(seeds: int, only: str) -> None:
    """Print for each scenario how many comparisons of synthetic results fail."""
    chosen = [scenario for scenario in SCENARIOS if scenario.name.startswith(only)]
    start = time.monotonic()
    print(f"{'planted, runs a side, noise':<66}  failed  of {seeds}")
    for scenario in chosen:
        failures = sum(compare(*scenario.sides(seed)).verdict is Verdict.FAIL for seed in range(seeds))
        print(f"{scenario.name:<66}  {failures:6}", flush=True)
    comparisons = seeds * len(chosen)
    print(f"{1e3 * (time.monotonic() - start) / comparisons:.1f} ms a comparison of 46 rows, data made included")


def print_real(folder: Path, only: str, most: int) -> None:
    """Print for each kind of machine how many comparisons of measured results failed or were inconclusive."""
    print("failed + inconclusive, by what was planted into the new side")
    print(f"{'kind':<40} files  rows  compared  " + "  ".join(f"{slowdown:>24}" for slowdown in PLANTED))
    for kind in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.startswith(only)):
        files = list(readable(sorted(kind.iterdir())))
        if len(files) < 2:
            print(f"{kind.name:<40} {len(files):5}  nothing to compare", flush=True)
            continue
        counts = real_counts(files, most)
        compared = counts[0].total()
        figures = "  ".join(f"{count[Verdict.FAIL]:>15} + {count[Verdict.INCONCLUSIVE]:<6}" for count in counts)
        print(f"{kind.name:<40} {len(files):5} {len(files[0].rows):5}  {compared:8}  {figures}", flush=True)


def readable(paths: Sequence[Path]) -> Iterator[ResultFile]:
    """Yield the results in these files; name unreadable files on stderr."""
    for path in paths:
        try:
            yield read_results(path)
        except GpubenchError as error:
            print(f"{path}: {str(error).splitlines()[0]}", file=sys.stderr)


def real_counts(files: Sequence[ResultFile], most: int) -> list[Counter[Verdict]]:
    """Compare each file with each other in both directions; return the verdicts for each item of `PLANTED`."""
    sides = list(permutations(range(len(files)), 2))
    random.Random(0).shuffle(sides)
    counts: list[Counter[Verdict]] = [Counter() for _ in PLANTED]
    for place, (base, new) in enumerate(sides[:most]):
        for count, slowdown in zip(counts, slowdowns(files[new], place), strict=True):
            rows = (replace(row, time_us=row.time_us * slowdown(row)) for row in files[new].rows)
            slowed = replace(files[new], rows=tuple(rows))
            report = compare([files[base]], [slowed], other_machine=True)
            count[report.verdict] += 1
    return counts


def slowdowns(file: ResultFile, place: int) -> list[Slowdown]:
    """Return the slowdowns of `PLANTED`; `place` picks the collective and the sizes, so that all get their turn."""
    collectives = sorted({row.collective for row in file.rows})
    chosen = collectives[place % len(collectives)]
    sizes = sorted({row.size_bytes for row in file.rows if row.collective == chosen and row.time_us})
    first = place // len(collectives) % max(1, len(sizes) - 3)
    four = set(sizes[first : first + 4])
    return [
        lambda _row: 1.0,
        lambda _row: 1.05,
        lambda row: 1.10 if row.collective == chosen else 1.0,
        lambda row: 1.15 if row.collective == chosen and row.size_bytes in four else 1.0,
    ]


if __name__ == "__main__":
    main()
