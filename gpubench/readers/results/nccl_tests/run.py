"""One run of a program of nccl-tests, from its text or its JSON, and the rows that it becomes.

Names, units and formulas are those of nccl-tests 2.10 to 2.19 (src/common.cu, src/util.cu).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from gpubench.errors import UsageError
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.terms.origin import Origin

COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "sendrecv", "alltoall", "alltoallv")},
    "hypercube": "hypercube",
}
"""gpubench's name by nccl-tests'. alltoallv and hypercube are nccl-tests' alone."""

ELEMENT_TYPES = {
    **{f"{sign}int{bits}": (f"{sign}int{bits}", bits // 8) for sign in ("", "u") for bits in (8, 32, 64)},
    "char": ("int8", 1),
    "int": ("int32", 4),
    "half": ("float16", 2),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "bfloat16": ("bfloat16", 2),
    **{name: (name.replace("_", "").replace("fp", "f"), 1) for name in ("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2")},
}
"""gpubench's name and the bytes of an element, by nccl-tests' name."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
_MOVES_ONLY = ("allgather", "broadcast", "alltoall", "alltoallv", "gather", "scatter", "sendrecv", "hypercube")
_AVERAGES: Mapping[int | None, str] = {
    0: "time of rank 0 (-a 0)",
    2: "time of the fastest rank (-a 2)",
    3: "time of the slowest rank (-a 3)",
}
_MOST_RANKS = 2**20
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Device:
    """A rank as nccl-tests lists it. `bus_id` is None where it prints less than a whole one, as before 2.11."""

    rank: int
    group: int
    pid: int
    host: str
    index: int
    bus_id: str | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PerIteration:
    """The statistics of -I: microseconds between CUDA events around single operations; None is left out in text."""

    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv_percent: float | None = None
    samples: int | None = None
    mean_us_by_process: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One half of a line: out of place, or in place. `wrong` is None where nothing was compared."""

    placement: str
    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int | None
    per_iteration: PerIteration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line of the table, in nccl-tests' own words."""

    size_bytes: int
    count: int
    element_type: str
    reduction: str
    root: int
    placed: tuple[Placed, ...]

    @classmethod
    def of(cls, cells: Mapping[str, Any], placed: tuple[Placed, ...]) -> Self:
        """The line of these cells, named as in nccl-tests' JSON."""
        return cls(
            size_bytes=int(cells["size"]),
            count=int(cells["count"]),
            element_type=str(cells["type"]),
            reduction=str(cells["redop"]),
            root=int(cells["root"]),
            placed=placed,
        )


@dataclass(slots=True, kw_only=True)
class NcclTestsRun:
    """A run while it is read. `average` is -a: 0 rank 0, 1 mean, 2 fastest, 3 slowest; None where nothing says.

    `largest_error` is whether the last column is the largest error, which rounding makes too, as before 2.12.
    """

    collective: str | None = None
    version: str | None = None
    nccl: str | None = None
    settings: dict[str, int] = field(default_factory=dict)
    blocking: bool = False
    per_iteration: bool = False
    cpu_time: bool = False
    largest_error: bool = False
    average: int | None = None
    devices: list[Device] = field(default_factory=list)
    lines: list[OutputLine] = field(default_factory=list)
    out_of_bounds: int | None = None
    complete: bool = False

    def rows(self, where: str) -> list[CollectiveRow]:
        """Its lines as rows, two each.

        Raises UsageError where nothing says how many ranks there were, or which collective it was; `where` names the
        file.
        """
        if not self.lines:
            return []
        ranks, nodes, group = self._shape(where)
        collective = self.collective or _named_by_shape(self.lines, ranks, where)
        shape = ranks, nodes, group
        return [self._row(collective, shape, line, placed) for line in self.lines for placed in line.placed]

    def _shape(self, where: str) -> tuple[int, int, str | None]:
        """Ranks and nodes of a communicator, and which part of the job it is; None where it is the whole."""
        if not self.devices or "iterations" not in self.settings:
            raise UsageError(
                f"{where}: rows without the lines that say how many ranks there were and of how many iterations",
                expected="the lines '# nThread ...' and '#  Rank  0 ...' above them",
                reason="the beginning of the output is missing",
                next_step="give the whole output of nccl-tests",
            )
        groups = sorted({device.group for device in self.devices})
        own = [device for device in self.devices if device.group == self.devices[0].group]
        nodes = len({device.host for device in own})
        # A list of devices is cut at 2 kB a process, and JSON names only the first of each.
        processes = len({(device.host, device.pid) for device in own})
        ranks = max(len(own), processes * self.settings.get("threads", 1) * self.settings.get("gpus", 1))
        if not 0 < ranks <= _MOST_RANKS:
            raise UsageError(f"{where}: a run of {ranks} ranks", expected=f"1 to {_MOST_RANKS}")
        return ranks, nodes, f"each of {len(groups)} groups, as one" if len(groups) > 1 else None

    def _row(
        self, collective: str, shape: tuple[int, int, str | None], line: OutputLine, placed: Placed
    ) -> CollectiveRow:
        ranks, nodes, group = shape
        each = placed.per_iteration or PerIteration()
        fastest, slowest, slowest_rank = self._extremes(placed, each)
        return CollectiveRow(
            collective=collective,
            backend="nccl",
            origin=Origin.RECORDED,
            group=group,
            ranks=ranks,
            nodes=nodes,
            size_bytes=line.size_bytes,
            count=line.count,
            dtype=ELEMENT_TYPES[line.element_type][0],
            op=None if line.reduction == "none" or collective in _MOVES_ONLY else line.reduction,
            root=None if line.root < 0 else line.root,
            placement=placed.placement,
            mode="latency" if self.blocking else "throughput",
            graph=self.settings.get("graph", 0),
            iterations=self.settings["iterations"] * self.settings.get("aggregated", 1),
            time_us=placed.time_us,
            time_us_fastest_rank=fastest,
            time_us_slowest_rank=slowest,
            slowest_rank=slowest_rank,
            algbw_gb_s=placed.algbw_gb_s,
            busbw_gb_s=placed.busbw_gb_s,
            wrong=placed.wrong,
            verified=Verified.NO if placed.wrong is None else Verified.REPEAT,
            batch_cv=None if each.cv_percent is None else each.cv_percent / 100,
            ci95_percent=_ci95_percent(each),
            p50_us=each.p50_us,
            p95_us=each.p95_us,
            p99_us=each.p99_us,
            verdict=None,
            note=self._note(collective, placed),
        )

    def _extremes(self, placed: Placed, each: PerIteration) -> tuple[float | None, float | None, int | None]:
        """The fastest and slowest rank's time, and which rank that was: of a process that drives several, the first."""
        means = each.mean_us_by_process
        if means:
            slowest = max(range(len(means)), key=means.__getitem__)
            ranks_of_one = self.settings.get("threads", 1) * self.settings.get("gpus", 1)
            return min(means), means[slowest], slowest * ranks_of_one
        return (
            placed.time_us if self.average == 2 else None,
            placed.time_us if self.average == 3 else None,
            None,
        )

    def _note(self, collective: str, placed: Placed) -> str | None:
        each = placed.per_iteration
        slowest = ", slowest GPU of each" if each and each.mean_us_by_process else ""
        notes = (
            _AVERAGES.get(self.average, ""),
            "time of the CPU alone (-C)" if self.cpu_time else "",
            "waits after each operation (-z)" if self.blocking else "",
            f"statistics of single operations between CUDA events{slowest}" if each else "",
            "" if self.collective else f"{collective} by the shape of its rows: nccl-tests did not name it",
        )
        return "; ".join(filter(None, notes)) or None


def _ci95_percent(each: PerIteration) -> float | None:
    """Half the 95 % interval of the mean, as if operations were independent: 1.96 standard errors."""
    if each.cv_percent is None or not each.samples:
        return None
    return _Z95 * each.cv_percent / math.sqrt(each.samples)


def _named_by_shape(lines: Sequence[OutputLine], ranks: int, where: str) -> str:
    """The collective of an output that does not name it (nccl-tests before 2.17), where the rows leave only one.

    Raises UsageError where several have such rows, as alltoall and allgather, gather and scatter.
    """
    line = max(lines, key=lambda each: each.size_bytes)
    blocks = line.size_bytes == line.count * ELEMENT_TYPES[line.element_type][1] * ranks and ranks > 1
    rooted, reduces = line.root >= 0, line.reduction != "none"
    factor = line.placed[0].busbw_gb_s / line.placed[0].algbw_gb_s if line.placed[0].algbw_gb_s else 0.0
    if reduces and not rooted and not blocks and factor > 1.2:
        return "allreduce"
    by_shape: Mapping[tuple[bool, bool, bool], str] = {
        (True, False, True): "reducescatter",
        (True, True, False): "reduce",
        (False, True, False): "broadcast",
    }
    if (reduces, rooted, blocks) in by_shape:
        return by_shape[reduces, rooted, blocks]
    raise UsageError(
        f"{where}: nothing says which collective this is",
        expected="the line '# Collective test starting: all_gather_perf', which nccl-tests prints since 2.17",
        reason="an older nccl-tests, and several collectives have rows of this shape",
        next_step="write that line into the file, above the line '# nThread'",
    )
