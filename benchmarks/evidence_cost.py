"""Measure what it costs to observe the path of NCCL's data: sweeps with and without evidence, alternating, on this
host.

    python -m benchmarks.evidence_cost --runs 7 --csv cost.csv

For every size it prints the ratio of medians, and how likely chance alone gives a ratio as large: small sizes vary by
more than 1 % between sweeps anyway. Passes if no size costs more than 1 % or 0.1 µs (whichever is larger) beyond
chance, all sizes together cost no more than 1 %, and the sweep takes no more than 1.5 s longer.
"""

import argparse
import csv
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST_RATIO, SLACK_US, MOST_GROWTH_S = 1.01, 0.1, 1.5
CHANCE, RELABELLINGS = 0.001, 10_000
"""A difference counts if fewer than this share of that many random relabellings of the sweeps give one as large."""

WITH, WITHOUT = "--evidence", "--no-evidence"

Key = tuple[int, str]
Times = dict[Key, list[float]]


def main() -> None:
    """Run, print the table, and exit with 1 if evidence costs more than the bound."""
    arguments = parse()
    times: dict[str, Times] = {WITH: defaultdict(list), WITHOUT: defaultdict(list)}
    walls: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for number in range(arguments.runs):
        # The order alternates, so that neither always meets the warmer GPUs.
        for option in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
            rows, seconds = sweep(arguments, option)
            walls[option].append(seconds)
            for key, microseconds in rows:
                times[option][key].append(microseconds)
    found = list(compare(times[WITH], times[WITHOUT]))
    slower = show(found)
    growth = statistics.median(walls[WITH]) - statistics.median(walls[WITHOUT])
    overall = statistics.median(float(row["ratio"]) for row in found)
    print(f"\nmedian ratio of all sizes {overall:.4f}, {slower} of {len(found)} cost more than they may")
    print(f"a sweep takes {statistics.median(walls[WITHOUT]):.2f} s without and {growth:+.2f} s with evidence")
    if arguments.csv:
        with Path(arguments.csv).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    sys.exit(1 if slower or overall > MOST_RATIO or growth > MOST_GROWTH_S else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", default="allreduce")
    parser.add_argument("--sizes", default="1K:4G")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each (default 5)")
    parser.add_argument("--csv", help="also write the rows here")
    return parser.parse_args()


def sweep(arguments: argparse.Namespace, option: str) -> tuple[list[tuple[Key, float]], float]:
    """Run one sweep; return microseconds by size and placement, and the seconds of the command."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.csv"
        asked = ["--sizes", arguments.sizes, "--iters", "20", "--exit-zero", option]
        command = [sys.executable, "-m", "gpubench", arguments.collective, *asked]
        start = time.perf_counter()
        subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        rows = csv.DictReader(io.StringIO(output.read_text()))
        return [((int(row["size_bytes"]), row["placement"]), float(row["time_us"])) for row in rows], seconds


def compare(with_evidence: Times, without: Times) -> Iterator[dict[str, str]]:
    """Yield a row per size and placement."""
    for key in sorted(with_evidence):
        ours, bare = statistics.median(with_evidence[key]), statistics.median(without[key])
        chance = chance_share(with_evidence[key], without[key])
        costs = ours > max(MOST_RATIO * bare, bare + SLACK_US) and chance < CHANCE
        yield {
            "size_bytes": str(key[0]),
            "placement": key[1],
            "with_us": f"{ours:.3f}",
            "without_us": f"{bare:.3f}",
            "ratio": f"{ours / bare:.4f}",
            "chance": f"{chance:.4f}",
            "spread_without": f"{max(without[key]) / min(without[key]):.3f}",
            "costs": "yes" if costs else "",
        }


def chance_share(with_evidence: list[float], without: list[float]) -> float:
    """Return how often medians would differ as much if evidence cost nothing: a one-sided permutation test."""
    times, ours = np.array(with_evidence + without), len(with_evidence)
    shuffled = np.random.default_rng(seed=0).permuted(np.tile(times, (RELABELLINGS, 1)), axis=1)
    differences = np.median(shuffled[:, :ours], axis=1) - np.median(shuffled[:, ours:], axis=1)
    return float(np.mean(differences >= np.median(times[:ours]) - np.median(times[ours:])))


def show(rows: list[dict[str, str]]) -> int:
    """Print the table; return how many sizes cost more than the bound."""
    print(f"{'size':>12} {'placement':>13} {'with µs':>12} {'without µs':>12} {'ratio':>8} {'chance':>8} {'spread':>7}")
    for row in rows:
        print(
            f"{row['size_bytes']:>12} {row['placement']:>13} {row['with_us']:>12} {row['without_us']:>12} "
            f"{row['ratio']:>8} {row['chance']:>8} {row['spread_without']:>7}",
            "costs" if row["costs"] else "",
        )
    return sum(bool(row["costs"]) for row in rows)


if __name__ == "__main__":
    main()
