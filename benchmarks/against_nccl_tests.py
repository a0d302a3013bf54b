"""gpubench beside NVIDIA's nccl-tests on the GPUs of this host: the time ratio at every size, from interleaved runs.

    python -m benchmarks.against_nccl_tests --peer ~/nccl-tests/build --ranks 4 --csv ratios.csv

`--peer` is a folder with nccl-tests' MPI build (all_reduce_perf, ...). Both programs run one process a GPU, float32,
out of place, without their data checks, so that only the timed loops are compared; they take turns, and ratios are of
medians. nccl-tests times 20 iterations after 5 to warm up, gpubench as many as `--iters` says. Buffers are plain
allocations in plain launches, and in graphs of ncclMemAlloc, as the peer's are. A size passes when gpubench is not
slower than 1.05 × the peer or 0.5 µs, whichever is larger, and from 16 MiB on not slower than 1.02 ×; with
`--iters auto`, gpubench's own way, than 1.02 × or 0.2 µs.
"""

import argparse
import csv
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

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

Times = dict[int, list[float]]


def main() -> None:
    """Run, print the table, and exit 1 where a size is slower than the bounds."""
    arguments = parse()
    environment = mpi_environment()
    rows: list[dict[str, object]] = []
    for collective in arguments.collectives.split(","):
        for graph in arguments.graph:
            own, peer = measure(arguments, environment, collective, graph)
            rows += list(compare(collective, graph, own, peer, automatic=arguments.iters == "auto" and not graph))
            print_rows(rows[-len(own) :])
    if arguments.csv:
        with Path(arguments.csv).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    slower = [row for row in rows if row["slower"]]
    print(
        f"\n{len(rows)} sizes, {len(slower)} slower than the bounds, median ratio {statistics.median(ratios(rows)):.3f}"
    )
    sys.exit(1 if slower else 0)


def mpi_environment() -> dict[str, str]:
    """What lets mpirun start one process a GPU as root, wherever they run."""
    return dict(os.environ) | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder with nccl-tests' MPI build")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each (default 5)")
    parser.add_argument("--first", default="8", help="smallest size (default 8)")
    parser.add_argument("--last", default="4G", help="largest size (default 4G)")
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next (default 2)")
    parser.add_argument("--graph", type=int, nargs="+", default=[0, 1], help="graph replays; 0 is plain (default 0 1)")
    parser.add_argument("--iters", default="20", help="gpubench's iterations in plain launches, or auto (default 20)")
    parser.add_argument("--collectives", default=",".join(PEERS))
    parser.add_argument("--csv", help="also write the rows here")
    parser.add_argument("--mpirun", default=shutil.which("mpirun") or "mpirun")
    return parser.parse_args()


def measure(
    arguments: argparse.Namespace, environment: dict[str, str], collective: str, graph: int
) -> tuple[Times, Times]:
    """Microseconds by size of every run, of gpubench and of the peer, taking turns."""
    own: Times = defaultdict(list)
    peer: Times = defaultdict(list)
    for _ in range(arguments.runs):
        for size, microseconds in run_own(arguments, environment, collective, graph):
            own[size].append(microseconds)
        for size, microseconds in run_peer(arguments, environment, collective, graph):
            peer[size].append(microseconds)
    return own, peer


def run_own(
    arguments: argparse.Namespace, environment: dict[str, str], collective: str, graph: int
) -> Iterator[tuple[int, float]]:
    """One sweep of gpubench under the same mpirun as the peer."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "own.csv"
        sizes = f"{arguments.first}:{arguments.last}:{arguments.factor}"
        options = ["--sizes", sizes, "--out-of-place", "--no-check", "--output", str(output)]
        options += ["--iters", "20" if graph else arguments.iters]
        if graph:
            # In a graph, buffers that NCCL allocated, as the peer's are, take another path than plain ones.
            options += ["--graph", str(graph), "--allocator", "nccl"]
        command = [arguments.mpirun, "-n", str(arguments.ranks), sys.executable, "-m", "gpubench", collective, *options]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        for row in csv.DictReader(io.StringIO(output.read_text())):
            yield int(row["size_bytes"]), float(row["time_us"])


def run_peer(
    arguments: argparse.Namespace, environment: dict[str, str], collective: str, graph: int
) -> Iterator[tuple[int, float]]:
    """One sweep of nccl-tests, which prints size, count, type, redop, root, then time, algbw, busbw, #wrong."""
    program = str(arguments.peer / PEERS[collective])
    sizes = ["-b", arguments.first, "-e", arguments.last, "-f", str(arguments.factor)]
    options = [*sizes, "-w", "5", "-n", "20", "-c", "0", "-G", str(graph)]
    command = [arguments.mpirun, "-n", str(arguments.ranks), program, *options]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    for line in printed.splitlines():
        words = line.split()
        if words and words[0].isdecimal() and int(words[0]) > 0:
            yield int(words[0]), float(words[5])


def bound_of(theirs: float, size: int, *, automatic: bool) -> float:
    """Microseconds that gpubench may take where the peer takes `theirs`."""
    if automatic:
        return max(TIGHT * theirs, theirs + TIGHT_SLACK_US)
    return TIGHT * theirs if size >= TIGHT_FROM_BYTES else max(LOOSE * theirs, theirs + SLACK_US)


def compare(collective: str, graph: int, own: Times, peer: Times, *, automatic: bool) -> Iterator[dict[str, object]]:
    """A row a size that both measured."""
    for size in sorted(own.keys() & peer.keys()):
        ours, theirs = statistics.median(own[size]), statistics.median(peer[size])
        yield {
            "collective": collective,
            "graph": graph,
            "size_bytes": size,
            "gpubench_us": round(ours, 3),
            "nccl_tests_us": theirs,
            "ratio": round(ours / theirs, 4),
            "slower": ours > bound_of(theirs, size, automatic=automatic),
            "gpubench_spread": spread(own[size]),
            "nccl_tests_spread": spread(peer[size]),
        }


def spread(values: Sequence[float]) -> float:
    """The largest over the smallest of a size's runs."""
    return round(max(values) / min(values), 3)


def ratios(rows: Sequence[dict[str, object]]) -> list[float]:
    """The ratio of every row."""
    return [float(str(row["ratio"])) for row in rows]


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """One block of the table."""
    if not rows:
        return
    print(f"\n{rows[0]['collective']}{' in a graph' if rows[0]['graph'] else ''}")
    print(f"{'size':>12} {'gpubench µs':>12} {'nccl-tests':>12} {'ratio':>7}  spread of runs")
    for row in rows:
        mark = "  slower" if row["slower"] else ""
        print(
            f"{row['size_bytes']:>12} {row['gpubench_us']:>12} {row['nccl_tests_us']:>12} {row['ratio']:>7}"
            f"  {row['gpubench_spread']:.2f} {row['nccl_tests_spread']:.2f}{mark}"
        )


if __name__ == "__main__":
    main()
