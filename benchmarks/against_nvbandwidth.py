"""Compare gpubench p2p with NVIDIA's nvbandwidth and p2pBandwidthLatencyTest on this host's GPUs, pair by pair.

    python -m benchmarks.against_nvbandwidth --nvbandwidth PATH --p2p-test PATH

nvbandwidth is compared with `gpubench p2p --as nvbandwidth` (512 MiB, 16 copies after 4, median of 3): copy engines
within 1 %, kernels within 2 %. p2pBandwidthLatencyTest is compared with gpubench's default run: without peer access,
within 10 %. The programs take turns, `--runs` times; ratios are of medians. The exit code is 1 if a pair is outside.
"""

import argparse
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from statistics import median

Pair = tuple[int, int]
Figures = dict[tuple[str, Pair], float]

BOUNDS = {"ce": 0.01, "sm": 0.02, "off": 0.10}
TESTCASES = {
    "device_to_device_memcpy_write_ce": "ce write",
    "device_to_device_memcpy_read_ce": "ce read",
    "device_to_device_memcpy_write_sm": "sm write",
    "device_to_device_memcpy_read_sm": "sm read",
}
_ROW = re.compile(r"^\s*(\d+)((?:\s+[\d.]+)+)\s*$")


def run(*command: str) -> str:
    """Return the stdout of a program that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def gpubench(*arguments: str) -> Figures:
    """Return gpubench's GB/s by kind of copy and pair."""
    options = ("--format", "csv", "--no-host", "--no-patterns", "--exit-zero", *arguments)
    text = run(sys.executable, "-m", "gpubench", "p2p", *options)
    found: Figures = {}
    for row in csv.DictReader(io.StringIO(text)):
        pair = int(row["source"].removeprefix("GPU")), int(row["destination"].removeprefix("GPU"))
        if row["bandwidth_gb_s"] and int(row["size_bytes"]) > 16:
            way = "off" if row["peer"] == "off" else f"{row['engine']} {row['direction']}"
            found[way, pair] = float(row["bandwidth_gb_s"])
    return found


def nvbandwidth(binary: str) -> Figures:
    """Return nvbandwidth's GB/s; its reads go from row to column, its writes from column to row."""
    document = json.loads(run(binary, "-j", "-t", *TESTCASES))
    found: Figures = {}
    for case in document["nvbandwidth"]["testcases"]:
        way = TESTCASES[case["name"]]
        for row, cells in enumerate(case.get("bandwidth_matrix", [])):
            for column, cell in enumerate(cells):
                if cell != "N/A":
                    found[way, (column, row) if way.endswith("write") else (row, column)] = float(cell)
    return found


def p2p_test(binary: str) -> Figures:
    """Return the one-way GB/s of p2pBandwidthLatencyTest without peer access."""
    text = run(binary)
    block = text.partition("Unidirectional P2P=Disabled Bandwidth")[2].partition("Unidirectional P2P=Enabled")[0]
    found: Figures = {}
    for line in block.splitlines():
        match = _ROW.match(line)
        if match and "." in match[2]:
            for column, cell in enumerate(match[2].split()):
                if column != int(match[1]):
                    found["off", (int(match[1]), column)] = float(cell)
    return found


def medians(runs: list[Figures]) -> Figures:
    return {key: median(figures[key] for figures in runs if key in figures) for key in runs[0]}


def compare(ours: Mapping[tuple[str, Pair], float], theirs: Mapping[tuple[str, Pair], float]) -> Iterator[bool]:
    """Print a line per pair; yield whether its ratio is within the bound."""
    for way, pair in sorted(set(ours) & set(theirs)):
        ratio = ours[way, pair] / theirs[way, pair]
        bound = BOUNDS[way.partition(" ")[0]]
        inside = abs(ratio - 1) <= bound
        mark = "" if inside else "  outside"
        print(f"{way:9} {pair[0]} -> {pair[1]} {ours[way, pair]:9.2f} {theirs[way, pair]:9.2f} {ratio:8.4f}{mark}")
        yield inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvbandwidth", help="path of nvbandwidth's binary")
    parser.add_argument("--p2p-test", help="path of p2pBandwidthLatencyTest's binary")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each (default 3)")
    arguments = parser.parse_args()
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for _ in range(arguments.runs):
        own: Figures = {}
        other: Figures = {}
        if arguments.nvbandwidth:
            own |= {key: figure for key, figure in gpubench("--as", "nvbandwidth").items() if key[0] != "off"}
            other |= nvbandwidth(arguments.nvbandwidth)
        if arguments.p2p_test:
            own |= {key: figure for key, figure in gpubench().items() if key[0] == "off"}
            other |= p2p_test(arguments.p2p_test)
        ours.append(own)
        theirs.append(other)
    print(f"{'way':9} {'pair':6} {'gpubench':>9} {'peer':>9} {'ratio':>8}")
    inside = list(compare(medians(ours), medians(theirs)))
    print(f"{len(inside)} compared, {inside.count(False)} outside the bounds")
    return 0 if inside and all(inside) else 1


if __name__ == "__main__":
    sys.exit(main())
