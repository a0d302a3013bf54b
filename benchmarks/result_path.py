"""Measure what rank 0 does with the answers of thousands of ranks: seconds per row and peak memory, by number of
ranks.

    python -m benchmarks.result_path [--ranks 256,1024,4096] [--rows 24]

The group is simulated: this process is rank 0, and each gather returns an answer per rank, pickled one by one as with
MPI, with different times. Nothing is moved and no operation takes time, so that only the path from answers to rows on
disk counts: statistics, rows, `rank_times`, stragglers, and a table, a CSV and a JSON file. Making up the answers is
excluded. It prints the processor's seconds per row with the end of the run, those of the end alone, the ratio to the
smaller group, and Python's peak memory in a second run. The exit code is 1 if a row takes longer than a second.
"""

import argparse
import pickle
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import SweepRequest
from gpubench.formats.registry import FORMATS, Presentation, Target, Writer
from gpubench.measure.collective.cases import Answer
from gpubench.measure.collective.variants import SweepVariant, measure_variants
from gpubench.model.results.report import COLLECTIVE_COLUMNS, CollectiveRow, Metadata
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import ClockOffset, EntryTimes, Mode, Sampling, Spread
from gpubench.model.terms.verdict import Origin
from gpubench.ports.backend import Launch, Memory

if TYPE_CHECKING:
    from gpubench.ports.backend import Backend, CollectiveCalls

T = TypeVar("T")

MOST_SECONDS = 1.0
_RANKS_A_NODE = 8
_OPERATION_SECONDS = 50e-6
_LATE_RANK = 5
_SAMPLINGS = {
    "--iters auto": Sampling(iterations=None, budget_seconds=0.01),
    "--mode latency": Sampling(Mode.LATENCY, iterations=100),
}


class SimulatedGroup:
    """Rank 0 of a group in which every other rank returns nearly the same answer."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.seconds_of_others = 0.0
        self._random = random.Random(0)

    def gather(self, value: T) -> list[T]:
        start = time.process_time()
        pickles = [pickle.dumps(self._answer(value, rank)) for rank in range(self.size)]
        self.seconds_of_others += time.process_time() - start
        return [pickle.loads(answer) for answer in pickles]

    def collect(self, value: T) -> list[T] | None:
        return self.gather(value)

    def broadcast(self, value: T | None, root: int = 0) -> T:  # noqa: ARG002
        """Return the value, after pickling it once."""
        pickle.dumps(value)
        return cast("T", value)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        return values

    def clock_offset(self) -> ClockOffset:
        return ClockOffset(0.0, 0.0)

    def split(self, color: int, key: int) -> "SimulatedGroup":  # noqa: ARG002
        return self

    def _answer(self, value: Any, rank: int) -> Any:
        factor = 1 + 0.01 * self._random.random()
        if isinstance(value, tuple):
            return tuple(self._answer(item, rank) for item in value)
        if isinstance(value, Answer):
            return replace(value, seconds=value.seconds * factor, entries=self._answer(value.entries, rank))
        if isinstance(value, EntryTimes):
            late = rank == _LATE_RANK
            last = value.operations - 1 if late else rank % 2
            return replace(value, last=last, late_seconds=5e-4 if late else 1e-6 * factor, uncertainty=1e-6 * factor)
        if isinstance(value, Spread):
            return replace(value, mean=value.mean * factor)
        return value * factor if isinstance(value, float) else value


class NothingMoved:
    """A backend, and its memory, calls and launches, that does nothing."""

    name = "nothing"
    buffers = 2
    size_bytes = 1 << 40

    def __init__(self) -> None:
        self.calls = cast("CollectiveCalls", self)
        self._batches = 0

    def all_reduce(self, *_arguments: object) -> Launch:
        return self

    def __call__(self) -> None:
        """Nothing."""

    def allocate(self, size_bytes: int) -> Memory:  # noqa: ARG002
        return cast("Memory", self)

    def fill_sent(self, *_arguments: object) -> None:
        """Nothing."""

    def fill_byte(self, *_arguments: object) -> None:
        """Nothing."""

    def count_wrong(self, *_arguments: object) -> int:
        return 0

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:  # noqa: ARG002
        return self

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> "NothingMoved":
        self._batches = len(launches) // operations - 1
        return self

    def batch_seconds(self) -> list[float]:
        """Return nearly equal times."""
        return [4 * _OPERATION_SECONDS * (1 + 1e-4 * (number % 3)) for number in range(self._batches)]

    def once(self, launch: Launch) -> None:
        """Nothing."""

    def seconds(self, launch: Launch) -> float:  # noqa: ARG002
        return _OPERATION_SECONDS

    together = seconds


class Outputs:
    """A listener that writes the files of `gpubench allreduce --output rows.csv --output rows.json`, and a table."""

    def __init__(self, folder: Path) -> None:
        style = Presentation()
        self._writers: list[Writer] = [
            format_.writer(Target(path=folder / f"rows{format_.suffix}"), style)
            for format_ in FORMATS
            if format_.name in ("table", "csv", "json")
        ]

    def _each(self, write: Callable[[Writer], None]) -> None:
        for writer in self._writers:
            write(writer)

    def begin(self, metadata: Metadata) -> None:
        self._each(lambda writer: writer.begin(metadata, COLLECTIVE_COLUMNS))

    def progress(self, done: int, total: int, label: str) -> None:
        """Nothing."""

    def row(self, row: CollectiveRow) -> None:
        self._each(lambda writer: writer.row(row))

    def end(self, report: Any) -> None:
        self._each(lambda writer: writer.end(report))


@dataclass(frozen=True, slots=True)
class Cost:
    """The processor's seconds of all rows, and of the end of the run."""

    rows: int
    seconds: float
    end_seconds: float

    @property
    def a_row(self) -> float:
        """Seconds per row, with its share of the end."""
        return (self.seconds + self.end_seconds) / self.rows


def run(ranks: int, rows: int, sampling: Sampling) -> Cost:
    identities = [
        RankIdentity(
            rank=rank, host=f"node{rank // _RANKS_A_NODE}", node=rank // _RANKS_A_NODE, local_rank=rank % _RANKS_A_NODE,
            pid=1000 + rank, gpu="NVIDIA H200", gpu_index=rank % _RANKS_A_NODE, gpu_uuid=f"GPU-{rank:08x}",
            gpu_bus_id=f"0000:0{rank % _RANKS_A_NODE}:00.0",
        )
        for rank in range(ranks)
    ]  # fmt: skip
    request = SweepRequest(
        collective=ALLREDUCE, sizes=tuple(1024 << number for number in range(rows)), dtypes=(DataType.FLOAT32,),
        ops=(ReduceOp.SUM,), placements=(Placement.OUT_OF_PLACE,), root=0, sampling=sampling, warmup=1,
        graph_replays=0, check=True,
    )  # fmt: skip
    group = SimulatedGroup(ranks)
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs(Path(folder))
        start = time.process_time()
        outputs.begin(metadata(identities, request))
        own = SweepVariant(setting=None, backend=cast("Backend", NothingMoved()))
        report = measure_variants(request, group, [own], identities, outputs)
        measured = time.process_time()
        outputs.end(report)
        end = time.process_time()
    if sampling.mode is Mode.LATENCY and [finding.id for finding in report.findings] != ["straggler"]:
        raise AssertionError("the rank that is late was not found")
    return Cost(rows, measured - start - group.seconds_of_others, end - measured)


def metadata(identities: Sequence[RankIdentity], request: SweepRequest) -> Metadata:
    """Return metadata like a real run's."""
    options = {
        "sizes": list(request.sizes), "dtypes": ["float32"], "ops": ["sum"], "root": None, "warmup": 1, "graph": 0,
        "placements": [placement.value for placement in request.placements], "check": True, "allocator": "cuda",
        "mode": request.sampling.mode.value, "iters": request.sampling.iterations or "auto", "budget_s": 0.01,
    }  # fmt: skip
    return Metadata(
        gpubench_version="0", run_id="0", started_at="2026-01-01T00:00:00+00:00", command=("gpubench", "allreduce"),
        subject="allreduce", origin=Origin.SIMULATED, hosts=list(dict.fromkeys(rank.host for rank in identities)),
        collective="allreduce", backend="nothing", ranks=identities, options=options,
    )  # fmt: skip


def main() -> int:
    """Run and print; return 1 if a row takes longer than a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="256,1024,4096", help="numbers of ranks, ascending")
    parser.add_argument("--rows", type=int, default=24, help="rows of a run (default 24)")
    arguments = parser.parse_args()
    slowest = 0.0
    for name, sampling in _SAMPLINGS.items():
        print(f"allreduce {name}, {arguments.rows} rows, simulated ranks")
        before: Cost | None = None
        for ranks in map(int, arguments.ranks.split(",")):
            cost = run(ranks, arguments.rows, sampling)
            tracemalloc.start()
            run(ranks, arguments.rows, sampling)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            ratio = "" if before is None else f"  × {cost.a_row / before.a_row:.1f}"
            print(
                f"  {ranks:>5} ranks  {cost.a_row:.4f} s a row, of which the end {cost.end_seconds / cost.rows:.4f}"
                f"  peak {peak / 2**20:.1f} MiB, {peak / ranks / arguments.rows:.0f} bytes a rank and row{ratio}"
            )
            before, slowest = cost, max(slowest, cost.a_row)
    return int(slowest > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
