"""Compare gpubench with NVIDIA's nccl-tests on the GPUs of this host: the time ratio at every size, from alternate
runs.

    python -m benchmarks.against_nccl_tests --peer ~/nccl-tests/build --ranks 4 --csv ratios.csv

    python -m benchmarks.against_nccl_tests --peer ~/nccl-tests/build --ranks-per-gpu 2,4,8 --last 256M --markdown t.md

`--peer` is a folder with nccl-tests' MPI build (all_reduce_perf, ...). Three programs take turns: nccl-tests with 20
iterations after 5 to warm up, gpubench with `--iters 20`, and gpubench with its defaults (in graphs these are the
same). All run float32, out of place, without data checks, so that only the timed loops are compared. Ratios are of
medians over the runs. Plain launches use plain allocations; graphs use ncclMemAlloc, as nccl-tests does. The time from
the start of a program to its first row is measured too.

`--ranks-per-gpu` puts all ranks on the first visible GPU under a running MPS server: nccl-tests with
NCCL_TESTS_DEVICE=0, and both programs with the settings that gpubench makes for ranks that share a GPU. Both take NCCL
2.30 or newer from LD_PRELOAD=/path/libnccl.so.2 or LD_LIBRARY_PATH.

With `--iters 20` a size passes up to 1.05 × the time of nccl-tests or 0.5 µs more, whichever is larger, and from 16 MiB
up to 1.02 ×. With defaults it passes up to 1.02 × or 0.2 µs more (0.5 µs if ranks share a GPU). Results are written
after every collective. `--seconds` limits the time at which the last collective starts.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from statistics import median

from gpubench.machine.host import is_mps_running, sharing_settings

PEERS = {
    "allreduce": "all_reduce_perf",
    "allgather": "all_gather_perf",
    "reducescatter": "reduce_scatter_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "alltoall": "alltoall_perf",
    "gather": "gather_perf",
    "scatter": "scatter_perf",
    "sendrecv": "sendrecv_perf",
}
LOOSE, SLACK_US = 1.05, 0.5
TIGHT, TIGHT_FROM_BYTES, TIGHT_SLACK_US = 1.02, 16 * 2**20, 0.2
SECONDS_OF_A_RUN = 300


class Way(StrEnum):
    """A program and its number of iterations."""

    PEER = "nccl-tests"
    COUNTED = "--iters 20"
    DEFAULT = "default"


@dataclass
class Measured:
    """The runs of one program: microseconds by size, and the seconds from each start to its first row."""

    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_rows: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A collective on a number of ranks; `graph` is the number of graph replays, 0 for plain launches."""

    collective: str
    ranks: int
    graph: int

    @property
    def ways(self) -> tuple[Way, ...]:
        """All three, but two in graphs, where gpubench's default is 20 iterations."""
        return (Way.PEER, Way.COUNTED) if self.graph else tuple(Way)


@dataclass(frozen=True)
class Row:
    """One size of a block: gpubench beside nccl-tests."""

    collective: str
    ranks: int
    graph: int
    way: Way
    size_bytes: int
    gpubench_us: float
    nccl_tests_us: float
    ratio: float
    slower: bool
    gpubench_spread: float
    nccl_tests_spread: float


def main() -> None:
    """Run, print the tables, and exit with 1 if a size is slower than its bound."""
    arguments = parse()
    environments = {ranks: mpi_environment(ranks if arguments.shared else 1) for ranks in arguments.ranks}
    rows: list[Row] = []
    lines: list[str] = list(HEAD)
    for block in blocks(arguments):
        if time.monotonic() > arguments.deadline:
            lines.append(f"\nLeft out for want of time: {block.collective} of {block.ranks} ranks, and what follows.")
            break
        measured = measure(arguments, environments[block.ranks], block)
        new_rows = list(compare(block, measured, shared=arguments.shared))
        rows += new_rows
        lines.append(summary(block, measured, new_rows))
        print_rows(new_rows)
        write(arguments, rows, lines)
    slower = [row for row in rows if row.slower]
    print("\n" + "\n".join(lines))
    print(f"\n{len(rows)} sizes, {len(slower)} slower than the bounds")
    write(arguments, rows, lines)
    sys.exit(1 if slower or not rows else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder with nccl-tests' MPI build")
    parser.add_argument("--ranks", type=numbers, default=[4], metavar="N[,N]", help="one a GPU (default 4)")
    parser.add_argument("--ranks-per-gpu", type=numbers, metavar="N[,N]", help="instead: ranks that share one GPU")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each way (default 5)")
    parser.add_argument("--first", default="8", help="smallest size (default 8)")
    parser.add_argument("--last", default="4G", help="largest size (default 4G)")
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next (default 2)")
    parser.add_argument("--graph", type=int, nargs="+", default=[0, 1], help="graph replays; 0 is plain (default 0 1)")
    parser.add_argument("--collectives", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no collective later than that")
    parser.add_argument("--csv", type=Path, help="also write the rows here")
    parser.add_argument("--markdown", type=Path, help="also write the table of all collectives here")
    parser.add_argument("--mpirun", default=shutil.which("mpirun") or "mpirun")
    arguments = parser.parse_args()
    unknown = set(arguments.collectives.split(",")) - PEERS.keys()
    if unknown:
        parser.error(f"no collective: {', '.join(sorted(unknown))}")
    arguments.shared = arguments.ranks_per_gpu is not None
    arguments.ranks = arguments.ranks_per_gpu or arguments.ranks
    if arguments.shared and not is_mps_running(os.environ):
        parser.error("no MPS server runs, without which ranks that share a GPU take turns: nvidia-cuda-mps-control -d")
    arguments.deadline = time.monotonic() + arguments.seconds
    return arguments


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def blocks(arguments: argparse.Namespace) -> Iterator[Block]:
    for ranks in arguments.ranks:
        for graph in arguments.graph:
            for collective in arguments.collectives.split(","):
                yield Block(collective, ranks, graph)


def mpi_environment(ranks_per_gpu: int = 1) -> dict[str, str]:
    """Return the variables that let mpirun start ranks as root on any core, and let several ranks share a GPU."""
    common = dict(os.environ) | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if ranks_per_gpu == 1:
        return common
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return common | sharing_settings(ranks_per_gpu) | {"CUDA_VISIBLE_DEVICES": first, "NCCL_TESTS_DEVICE": "0"}


def measure(arguments: argparse.Namespace, environment: dict[str, str], block: Block) -> dict[Way, Measured]:
    found = {way: Measured() for way in block.ways}
    for _ in range(arguments.runs):
        for way, measured in found.items():
            command = peer_command(arguments, block) if way is Way.PEER else own_command(arguments, block, way)
            run(command, environment, way, measured)
    return found


def own_command(arguments: argparse.Namespace, block: Block, way: Way) -> list[str]:
    sizes = f"{arguments.first}:{arguments.last}:{arguments.factor}"
    options = ["--sizes", sizes, "--out-of-place", "--no-check", "--format", "csv"]
    if way is Way.COUNTED:
        options += ["--iters", "20"]
    if block.graph:
        # In a graph, buffers that NCCL allocated take another path than plain ones; nccl-tests uses them.
        options += ["--graph", str(block.graph), "--allocator", "nccl"]
    return [
        arguments.mpirun,
        "-n",
        str(block.ranks),
        sys.executable,
        "-m",
        "gpubench",
        block.collective,
        "--exit-zero",
        *options,
    ]


def peer_command(arguments: argparse.Namespace, block: Block) -> list[str]:
    program = str(arguments.peer / PEERS[block.collective])
    sizes = ["-b", arguments.first, "-e", arguments.last, "-f", str(arguments.factor)]
    options = [*sizes, "-w", "5", "-n", "20", "-c", "0", "-G", str(block.graph)]
    return [arguments.mpirun, "-n", str(block.ranks), program, *options]


def run(command: Sequence[str], environment: dict[str, str], way: Way, measured: Measured) -> None:
    """Run one sweep; end it if it takes longer than any normal one."""
    start = time.monotonic()
    limited = ["timeout", str(SECONDS_OF_A_RUN), *command]
    with subprocess.Popen(limited, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        columns: list[str] = []
        has_row = False
        for line in process.stdout:
            words = line.split() if way is Way.PEER else next(csv.reader([line.strip()]), [])
            found = parse_peer_row(words) if way is Way.PEER else parse_own_row(words, columns)
            if found is None:
                columns = words if "size_bytes" in words else columns
                continue
            if not has_row:
                measured.first_rows.append(time.monotonic() - start)
            has_row = True
            measured.times[found[0]].append(found[1])
    if process.returncode or not has_row:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")


def parse_own_row(words: Sequence[str], columns: Sequence[str]) -> tuple[int, float] | None:
    """Return size and microseconds of a CSV line; None before the first row."""
    row = dict(zip(columns, words, strict=False))
    size = row.get("size_bytes", "")
    return (int(size), float(row["time_us"])) if size.isdecimal() else None


def parse_peer_row(words: Sequence[str]) -> tuple[int, float] | None:
    """Return size and microseconds of nccl-tests' line: size, count, type, redop, root, time, algbw, busbw, #wrong."""
    return (int(words[0]), float(words[5])) if words and words[0].isdecimal() and int(words[0]) > 0 else None


def longest_us(theirs: float, size: int, way: Way, *, shared: bool) -> float:
    """Return the microseconds that gpubench may take if nccl-tests takes `theirs`."""
    if way is Way.DEFAULT:
        return max(TIGHT * theirs, theirs + (SLACK_US if shared else TIGHT_SLACK_US))
    return TIGHT * theirs if size >= TIGHT_FROM_BYTES else max(LOOSE * theirs, theirs + SLACK_US)


def compare(block: Block, measured: dict[Way, Measured], *, shared: bool) -> Iterator[Row]:
    """Yield a row for every size that both programs measured."""
    peer = measured[Way.PEER].times
    for way in block.ways[1:]:
        own = measured[way].times
        for size in sorted(own.keys() & peer.keys()):
            ours, theirs = median(own[size]), median(peer[size])
            yield Row(
                **asdict(block),
                way=way,
                size_bytes=size,
                gpubench_us=round(ours, 3),
                nccl_tests_us=theirs,
                ratio=round(ours / theirs, 4),
                slower=ours > longest_us(theirs, size, way, shared=shared),
                gpubench_spread=spread(own[size]),
                nccl_tests_spread=spread(peer[size]),
            )


def spread(values: Sequence[float]) -> float:
    """Return the ratio of the slowest run to the fastest."""
    return round(max(values) / min(values), 3)


COLUMNS = (
    *("collective", "ranks", "launches", "sizes", "`--iters 20`: median, worst", "default: median, worst", "slower"),
    *("spread: nccl-tests, 20, default", "first row, s: nccl-tests, 20, default"),
)
HEAD = f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"


def summary(block: Block, measured: dict[Way, Measured], rows: Sequence[Row]) -> str:
    """Return the block's line of the final table: ratios over all sizes, median spread of the runs, seconds."""

    def ratios(way: Way) -> str:
        found = [row.ratio for row in rows if row.way is way]
        return f"{median(found):.3f}, {max(found):.2f}" if found else "-"

    spreads, seconds = [], []
    for way in Way:
        ours = measured.get(way)
        spreads.append("-" if ours is None else f"{median(map(spread, ours.times.values())):.2f}")
        seconds.append("-" if ours is None else f"{median(ours.first_rows):.2f}")
    cells = [
        *(block.collective, block.ranks, "graph" if block.graph else "plain", len({row.size_bytes for row in rows})),
        *(ratios(Way.COUNTED), ratios(Way.DEFAULT), sum(row.slower for row in rows)),
        *(", ".join(spreads), ", ".join(seconds)),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def print_rows(rows: Sequence[Row]) -> None:
    if not rows:
        return
    first = rows[0]
    print(f"\n{first.collective} of {first.ranks} ranks{' in a graph' if first.graph else ''}")
    print(f"{'size':>12} {'way':>12} {'gpubench µs':>12} {'nccl-tests':>12} {'ratio':>7}  spread of runs")
    for row in rows:
        mark = "  slower" if row.slower else ""
        print(
            f"{row.size_bytes:>12} {row.way:>12} {row.gpubench_us:>12} {row.nccl_tests_us:>12} {row.ratio:>7}"
            f"  {row.gpubench_spread:.2f} {row.nccl_tests_spread:.2f}{mark}",
            flush=True,
        )


def write(arguments: argparse.Namespace, rows: Sequence[Row], lines: Sequence[str]) -> None:
    """Write the rows and the table so far to the files of the options."""
    if arguments.csv:
        with arguments.csv.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [field_.name for field_ in fields(Row)])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
