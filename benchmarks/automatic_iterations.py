"""Measure what `--iters auto` costs beside nccl-tests with its defaults (20 iterations, data check), on this host's
GPUs.

    python -m benchmarks.automatic_iterations --peer ~/nccl-tests/build --ranks 4 --csv seconds.csv

Both sweep the same sizes out of place and in place, check every result, and take turns. The measuring time runs from
the head of the table, which both print once communicators exist, to the last row: warm-up, timing and checks. The rest
is start-up. Passes if gpubench measures no longer than nccl-tests (median of the runs), and every row reaches its
promised interval or says that it did not.
"""

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.against_nccl_tests import PEERS, mpi_environment

MOST_PERCENT = 1.0
OURS, PEER = "gpubench --iters auto", "nccl-tests"


@dataclass(frozen=True, slots=True)
class Run:
    """One sweep: seconds from the head of the table to its last row, seconds of the whole command, and the rows."""

    measuring_s: float
    whole_s: float
    rows: Sequence[str]


def main() -> None:
    """Run, print the table, and exit with 1 if measuring takes longer or a row misses its interval."""
    arguments = parse()
    runs: dict[str, list[Run]] = {OURS: [], PEER: []}
    for number in range(arguments.runs):
        # The order alternates, so that neither always meets the warmer GPUs.
        for name in (OURS, PEER) if number % 2 else (PEER, OURS):
            runs[name].append(sweep(arguments, name))
    rows: list[dict[str, Any]] = [json.loads(line) for run in runs[OURS] for line in run.rows]
    ratio = show(runs)
    silent = show_intervals(rows)
    if arguments.csv:
        write(Path(arguments.csv), runs)
    sys.exit(1 if ratio > 1 or silent else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder with nccl-tests' MPI build")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each (default 5)")
    parser.add_argument("--first", default="1K", help="smallest size (default 1K)")
    parser.add_argument("--last", default="4G", help="largest size (default 4G)")
    parser.add_argument("--collective", default="allreduce", choices=PEERS)
    parser.add_argument("--csv", help="also write the seconds here")
    parser.add_argument("--mpirun", default=shutil.which("mpirun") or "mpirun")
    return parser.parse_args()


def sweep(arguments: argparse.Namespace, name: str) -> Run:
    launch = [arguments.mpirun, "-n", str(arguments.ranks)]
    if name == OURS:
        own = [arguments.collective, "--sizes", f"{arguments.first}:{arguments.last}", "--iters", "auto"]
        command = [*launch, sys.executable, "-m", "gpubench", *own, "--exit-zero", "--format", "jsonl"]
        return stamped(
            command, is_head=lambda line: "gpubench_version" in line, is_row=lambda line: '"kind": "row"' in line
        )
    program = str(arguments.peer / PEERS[arguments.collective])
    command = [*launch, "stdbuf", "-oL", program, "-b", arguments.first, "-e", arguments.last, "-f", "2"]
    return stamped(command, is_head=lambda line: "algbw" in line, is_row=lambda line: line.strip()[:1].isdecimal())


def stamped(command: Sequence[str], is_head: Callable[[str], bool], is_row: Callable[[str], bool]) -> Run:
    """Run a command and note when it prints its head and its last row."""
    head = last = None
    rows: list[str] = []
    start = time.perf_counter()
    with subprocess.Popen(command, env=mpi_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if head is None and is_head(line):
                head = time.perf_counter()
            elif is_row(line):
                last = time.perf_counter()
                rows.append(line)
    whole = time.perf_counter() - start
    if process.returncode or head is None or last is None:
        sys.exit(f"{' '.join(command)} ended with exit code {process.returncode} and {len(rows)} rows")
    return Run(last - head, whole, rows)


def show_intervals(rows: Sequence[dict[str, Any]]) -> int:
    """Print how many rows reach the interval; return how many miss it without saying so."""
    beyond = [row for row in rows if row["ci95_percent"] is None or row["ci95_percent"] > MOST_PERCENT]
    print(f"{len(rows) - len(beyond)} of {len(rows)} rows within {MOST_PERCENT:g} %; the others:")
    for row in beyond:
        print(f"  {row['size_bytes']} {row['placement']}: {row['note']}")
    return sum("95 % interval" not in (row["note"] or "") for row in beyond)


def show(runs: dict[str, list[Run]]) -> float:
    """Print the table; return the ratio of our measuring time to nccl-tests'."""
    print(f"{'':<24} {'start-up s':>10} {'measuring s':>11}   of each run")
    medians = {}
    for name, found in runs.items():
        medians[name] = statistics.median(run.measuring_s for run in found)
        start_up = statistics.median(run.whole_s - run.measuring_s for run in found)
        seconds = " ".join(f"{run.measuring_s:.2f}" for run in found)
        print(f"{name:<24} {start_up:>10.2f} {medians[name]:>11.2f}   {seconds}")
    ratio = medians[OURS] / medians[PEER]
    print(f"\nmeasuring takes {ratio:.3f} times as long as nccl-tests does")
    return ratio


def write(path: Path, runs: dict[str, list[Run]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["program", "run", "measuring_s", "whole_s"])
        for name, found in runs.items():
            writer.writerows(
                [name, number, f"{run.measuring_s:.3f}", f"{run.whole_s:.3f}"] for number, run in enumerate(found)
            )


if __name__ == "__main__":
    main()
