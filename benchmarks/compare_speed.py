"""Measure how long `gpubench compare` takes for two checks of a cluster: processor seconds of the command, peak
MiB.

    python -m benchmarks.compare_speed --nodes 64 --nodes 512

Two files of `gpubench check --simulate 'hgx-h100-8*NODES'` with different seeds are compared `--runs` times. A
simulated check measures the pairs of one node and writes all others as equal, which no real check does. So the second
table gives every node its own figures, with `--noise` percent of deviation. The first run caches Python's byte code, as
in an installed package; the median and the fastest of several runs ignore it.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from typer.testing import CliRunner

from gpubench.cli.app import app

FIGURES = ("bandwidth_gb_s", "limit_percent", "expected_percent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.4)
    arguments = parser.parse_args()
    print("| nodes | figures | rows | processor s (median) | fastest | MiB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for nodes in arguments.nodes or [64]:
            files = [checked(Path(folder, f"{nodes}-{seed}.json"), nodes, seed) for seed in (1, 2)]
            rows = sum(document_rows(json.loads(files[0].read_text())))
            for figures in ("of one node", "of every node"):
                if figures == "of every node":
                    for seed, path in enumerate(files):
                        path.write_text(json.dumps(varied(json.loads(path.read_text()), arguments.noise, seed)))
                spent = [seconds(files) for _ in range(arguments.runs)]
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
                print(f"| {nodes} | {figures} | {rows} | {median(spent):.2f} | {min(spent):.2f} | {peak:.0f} |")


def checked(path: Path, nodes: int, seed: int) -> Path:
    """Write the result of a simulated check; it runs in this process, because peak memory is measured of children."""
    words = ("check", "--simulate", f"hgx-h100-8*{nodes}", "--seed", str(seed), "--output", str(path), "-q")
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    if done.exit_code:
        raise SystemExit(done.output)
    return path


def document_rows(document: Mapping[str, Any]) -> Sequence[int]:
    """Return the number of rows of collectives and of pairs, those of equal nodes included."""
    nodes = sum(len(group["nodes"]) for group in document["alike"]["pairs"])
    return len(document["rows"]), nodes * len(document["pairs"])


def varied(document: dict[str, Any], percent: float, seed: int) -> dict[str, Any]:
    """Return the document with different figures for every node but the first."""
    generator, rows = random.Random(seed), document["pairs"]
    first, *others = (node for group in document["alike"]["pairs"] for node in group["nodes"])
    parts: list[dict[str, Any]] = [{"nodes": [first]}]
    for node in others:
        factors = [generator.gauss(1, percent / 100) for _ in rows]
        values: dict[str, list[float | None]] = {
            name: [None if row[name] is None else row[name] * by for row, by in zip(rows, factors, strict=True)]
            for name in FIGURES
        }
        values["latency_us"] = [
            None if row["latency_us"] is None else row["latency_us"] / by for row, by in zip(rows, factors, strict=True)
        ]
        parts.append({"nodes": [node], "as": first, "values": values})
    document["alike"]["pairs"] = parts
    return document


def seconds(files: Sequence[Path]) -> float:
    """Return the processor seconds of one comparison."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gpubench", "compare", "--exit-zero", *map(str, files)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, env=settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
