"""Compare gpubench's host backend with the same MPI calls in a C loop, on the same processes and buffers.

    mpirun -n 2 python -m benchmarks.against_mpi --markdown ratios.md

Needs mpicc and a C compiler. Three loops take turns, each after a barrier: C on one buffer, as OSU's tests do it; C on
buffers that rotate through the largest size, as nccl-tests does it; and gpubench, which also rotates them. MPI's
broadcast has one buffer. Out of place, the root sends from its send buffer, the others receive into their receive
buffer, and nobody copies. In-place reduce-scatter leaves the result in MPI's place.

A row has the least time per operation over all turns, because other users of the cores only add to it, and the ratio of
medians. It passes if gpubench takes at most 1.1 × the time of C on rotating buffers, or 0.3 µs more.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

from gpubench.backends.mpi import group as mpi
from gpubench.backends.mpi.backends import HostBackend, NumpyMemory
from gpubench.collectives.record import Call
from gpubench.collectives.registry import collective_named
from gpubench.measure.collective.cases import rotate
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.units import format_size
from gpubench.ports.backend import Launch, Region

LOOSE, SLACK_US, FROM_BYTES = 1.1, 0.3, 1024
LOOPS = ("C, one buffer", "C, rotating", "gpubench")
KINDS = {"allreduce": b"r", "alltoall": b"t", "broadcast": b"b", "allgather": b"g", "reducescatter": b"s"}
SOURCE = r"""
#include <mpi.h>

double seconds(char kind, char *send, char *receive, long bytes, int buffers, int in_place, int operations) {
    MPI_Comm all = MPI_COMM_WORLD;
    int rank, ranks;
    MPI_Comm_rank(all, &rank);
    MPI_Comm_size(all, &ranks);
    int block = bytes / ranks;
    MPI_Barrier(all);
    double start = MPI_Wtime();
    for (int i = 0; i < operations; ++i) {
        char *given = in_place ? MPI_IN_PLACE : send + i % buffers * bytes, *taken = receive + i % buffers * bytes;
        if (kind == 'r') MPI_Allreduce(given, taken, bytes / 4, MPI_FLOAT, MPI_SUM, all);
        if (kind == 't') MPI_Alltoall(given, block, MPI_BYTE, taken, block, MPI_BYTE, all);
        if (kind == 'b') MPI_Bcast(in_place || rank ? taken : given, bytes, MPI_BYTE, 0, all);
        if (kind == 'g') MPI_Allgather(given, block, MPI_BYTE, taken, block, MPI_BYTE, all);
        if (kind == 's') MPI_Reduce_scatter_block(given, taken, block / 4, MPI_FLOAT, MPI_SUM, all);
    }
    return (MPI_Wtime() - start) / operations;
}
"""


def main() -> None:
    """Run as one rank. Rank 0 prints the table, and exits with 1 if a row of 1 KiB or more is slower than the bound."""
    arguments = parse()
    group = mpi.start(LaunchedRank("mpirun", 0, 1))
    backend = HostBackend(group, group.size)
    memories = NumpyMemory(arguments.last), NumpyMemory(arguments.last)
    for memory in memories:
        memory.fill_byte(arguments.last, 0)
    with tempfile.TemporaryDirectory() as folder:
        c_loop = compile_loop(arguments.mpicc, Path(folder))
    rows = []
    for collective in arguments.collectives.split(","):
        for placement in Placement if collective_named(collective).in_place else [Placement.OUT_OF_PLACE]:
            for size in sizes(arguments):
                loops = make_loops(collective, placement, size, group, backend, memories, c_loop)
                times = time_loops(arguments.turns, loops, group)
                rows.append(Row(collective, placement.replace("_", " "), size, times))
    mpi.finish()
    if group.rank == 0:
        show(rows, arguments.markdown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="turns of each loop at a size (default 100)")
    parser.add_argument("--first", type=int, default=64, help="smallest size (default 64)")
    parser.add_argument("--last", type=int, default=2**22, help="largest size (default 4 MiB)")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default 4)")
    parser.add_argument("--collectives", default=",".join(KINDS))
    parser.add_argument("--mpicc", default=str(Path(sys.executable).with_name("mpicc")))
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    return parser.parse_args()


def compile_loop(mpicc: str, folder: Path) -> Callable[..., float]:
    """Compile the C loop."""
    source, library = folder / "loop.c", folder / "loop.so"
    source.write_text(SOURCE)
    subprocess.run([mpicc, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    seconds = ctypes.CDLL(str(library)).seconds
    seconds.restype = ctypes.c_double
    seconds.argtypes = (ctypes.c_char, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, *[ctypes.c_int] * 3)
    return cast("Callable[..., float]", seconds)


def sizes(arguments: argparse.Namespace) -> Iterator[int]:
    size = arguments.first
    while size <= arguments.last:
        yield size
        size *= arguments.factor


Loop = Callable[[], float]


def make_loops(
    name: str,
    placement: Placement,
    size: int,
    group: mpi.MpiGroup,
    backend: HostBackend,
    memories: Sequence[NumpyMemory],
    c_loop: Callable[..., float],
) -> list[Loop]:
    """Return each loop as a function that runs it once and returns the mean seconds per operation."""
    collective, dtype = collective_named(name), DataType.FLOAT32
    layout = collective.layout(size // dtype.size_bytes, dtype, group.size)
    operations = max(2, min(50, 2**22 // size))
    rotated = min(memories[0].size_bytes // size, operations, 20)
    in_place = placement is Placement.IN_PLACE

    def launch(number: int) -> Launch:
        send, receive = (Region(memory, number * size) for memory in memories)
        if in_place:
            steps = layout.in_place_send, layout.in_place_receive
            start = receive.offset_bytes
            send, receive = (Region(memories[1], start + group.rank * step * dtype.size_bytes) for step in steps)
        call = Call(send, receive, layout.count, dtype, ReduceOp.SUM, 0, group.rank, group.size)
        return collective.issue(backend.calls, call)

    bound = backend.bind(rotate([launch(number) for number in range(rotated)], operations), 0)
    in_c = partial(c_loop, KINDS[name], *(memory.address for memory in memories), size)
    c_loops = [partial(in_c, buffers, in_place, operations) for buffers in (1, rotated)]
    return [*c_loops, lambda: backend.together(bound) / operations]


def time_loops(turns: int, loops: Sequence[Loop], group: mpi.MpiGroup) -> list[list[float]]:
    """Return the microseconds of each loop in each turn, averaged over ranks."""
    seconds = [[loop() for loop in loops] for _ in range(turns)]
    turn_times = [
        [1e6 * sum(times) / group.size for times in zip(*turn, strict=True)]
        for turn in zip(*group.gather(seconds), strict=True)
    ]
    return [list(times) for times in zip(*turn_times, strict=True)]


@dataclass(frozen=True)
class Row:
    """One size of a collective; `times` are microseconds by loop and turn."""

    collective: str
    placement: str
    size_bytes: int
    times: Sequence[Sequence[float]]

    @property
    def is_slow(self) -> bool:
        _, theirs, ours = map(min, self.times)
        return self.size_bytes >= FROM_BYTES and ours > max(LOOSE * theirs, theirs + SLACK_US)

    @property
    def cells(self) -> list[str]:
        """Least times, then the ratios of least times and of medians."""
        least, middle = [min(times) for times in self.times], [median(times) for times in self.times]
        ratios = f"{least[2] / least[1]:.2f}", f"{middle[2] / middle[1]:.2f}"
        words = self.collective, self.placement, format_size(self.size_bytes)
        return [*words, *(f"{time_us:.2f}" for time_us in least), *ratios]


HEAD = ("collective", "placement", "size", *(f"{loop}, µs" for loop in LOOPS), "ratio", "ratio of medians")


def show(rows: Sequence[Row], markdown: Path | None) -> None:
    """Print the table and exit."""
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *(row.cells for row in rows))]
    slow = [row for row in rows if row.is_slow]
    print("\n".join([*lines, "", f"{len(rows)} rows, {len(slow)} of 1 KiB and more slower than the bound"]))
    if markdown:
        markdown.write_text("\n".join(lines) + "\n")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
