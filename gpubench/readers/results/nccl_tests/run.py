"""One run of a program of nccl-tests, from text, JSON or a cut table, and the rows of results that it becomes.

Names, units and formulas are those of nccl-tests 1.0 to 2.19 (src/common.cu, src/util.cu); rccl-tests has the same.

A cut table has a header that names its columns, in whatever words and order, with units in brackets or none. What it
leaves out follows from the rest once ranks and collective are known.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NoReturn, Self

from gpubench.errors import NotSaidError, UsageError
from gpubench.model.paths.transport import Transport, is_staged, names, parse_transport
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.results.result_file import CPU_TIME, NO_USER_FACTS, FileCircumstances, ResultFile, UserFacts
from gpubench.model.terms.operation import Placement, all_but_own_factor, ring_allreduce_factor, whole_factor
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, counted
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.records import dataclass

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
    """One line of the table, in nccl-tests' own words.

    `names_reduction` and `names_root` are whether the table has such a column, as all have since 2.11.
    """

    size_bytes: int
    count: int
    element_type: str
    reduction: str
    root: int
    placed: tuple[Placed, ...]
    names_reduction: bool = True
    names_root: bool = True

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


_SHAPES: Mapping[str, tuple[bool | None, bool, bool | None]] = {
    "allreduce": (True, False, False),
    "reducescatter": (True, False, True),
    "reduce": (True, True, False),
    "broadcast": (False, True, False),
    "allgather": (False, False, True),
    "alltoall": (False, False, True),
    "gather": (False, True, True),
    "scatter": (False, True, True),
    "sendrecv": (None, False, False),
    "alltoallv": (False, False, None),
    "hypercube": (False, False, True),
}
"""Whether rows name a reduction and a root, and count the elements of one rank's block; None is either. sendrecv names
the first reduction, which it does not use."""

_FACTOR_OF_THREE_RANKS = 1.2  # allreduce's busbw is 4/3 of algbw with three ranks; sendrecv's is algbw
_MOST_TRIED = 4096  # Ranks that busbw over algbw is tried for; from some hundred on several fit


def collective_of(lines: Sequence[OutputLine], ranks: int, named: str | None, where: str) -> str:
    """The collective of rows that do not name it; `named` is what a person says, `where` names the file.

    Raises UsageError where several have such rows and nobody says which, or where none with that name has.
    """
    possible = _possible_collectives(lines, ranks)
    if not possible:
        raise UsageError(
            f"{where}: rows of {ranks} ranks as no collective has them",
            expected="size, count and type that fit together",
            reason="a column was moved or edited, or another number of ranks took part",
            next_step="give the whole output of nccl-tests",
        )
    if named is None and len(possible) == 1:
        return possible[0]
    if named is None:
        error = NotSaidError(
            f"{where}: nothing says which collective this is",
            expected="a line such as '# Collective test starting: all_gather_perf', the command, or --collective",
            reason=f"nccl-tests before 2.17 does not say it, and rows like these are of {', '.join(possible)}",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
        error.collectives = possible
        raise error
    if named not in possible:
        raise UsageError(
            f"{where}: its rows are not of {named}, as --collective says",
            expected=f"one that has such rows: {', '.join(possible)}",
            reason="another collective ran",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
    return named


def _possible_collectives(lines: Sequence[OutputLine], ranks: int | None) -> list[str]:
    """The collectives that have rows like the largest of these; `ranks` are None where nothing says how many."""
    line = max(lines, key=lambda each: each.size_bytes)
    blocks = None if ranks == 1 else _blocks(line) == ranks if ranks else _blocks(line) != 1
    seen = line.reduction != "none", line.root >= 0, blocks
    possible = [
        name
        for name, shape in _SHAPES.items()
        if all(None in (one, other) or one == other for one, other in zip(shape, seen, strict=True))
    ]
    if not (line.names_reduction and line.names_root):
        possible = [name for name in possible if name in _before_2_11(line)]
    figures = line.placed[0]
    if {"allreduce", "sendrecv"} <= set(possible) and ranks not in (1, 2) and figures.algbw_gb_s > 0:
        if figures.busbw_gb_s > _FACTOR_OF_THREE_RANKS * figures.algbw_gb_s:
            possible.remove("sendrecv")
        elif ranks is not None:
            possible.remove("allreduce")
    return possible


def _blocks(line: OutputLine) -> int:
    return round(line.size_bytes / (line.count * ELEMENT_TYPES[line.element_type][1])) if line.count else 1


def likely_ranks(lines: Sequence[OutputLine], collective: str) -> int | None:
    """The ranks that figures tell: by the blocks of a size, or of all-reduce by busbw over algbw, which is 2(n-1)/n.

    None where they do not, or where rounding leaves several.
    """
    line = max(lines, key=lambda each: each.placed[0].algbw_gb_s)
    if _SHAPES.get(collective, (None, None, None))[2]:
        return _blocks(line) if _blocks(line) < _MOST_TRIED else None
    figures = line.placed[0]
    if collective != "allreduce" or figures.algbw_gb_s < 1:
        return None
    off = max(map(_rounded, (figures.busbw_gb_s, figures.algbw_gb_s)))
    low, high = (
        (figures.busbw_gb_s - off) / (figures.algbw_gb_s + off),
        (figures.busbw_gb_s + off) / (figures.algbw_gb_s - off),
    )
    found = [ranks for ranks in range(2, _MOST_TRIED) if low <= ring_allreduce_factor(ranks) <= high]
    return found[0] if len(found) == 1 else None


def _rounded(gb_s: float) -> float:
    """GB/s that a bandwidth is rounded by at most: nccl-tests prints two decimals, people fewer."""
    return next((0.5 / 10**digits for digits in (0, 1) if round(gb_s, digits) == gb_s), 0.005)


def _before_2_11(line: OutputLine) -> tuple[str, ...]:
    """The collectives whose programs printed these columns: alltoall's redop was blank, and sendrecv had none."""
    if line.names_root:
        return ("reduce",) if line.names_reduction else ("broadcast", "gather", "scatter")
    if line.names_reduction:
        return ("alltoall",) if line.reduction == "none" else ("allreduce", "reducescatter")
    return "allgather", "sendrecv", "hypercube"


_NAMES = re.compile(
    r"(?P<size>(?:message|msg|data|buffer)?[ _]?size|bytes)|(?P<time>(?:cpu[ _]?)?time|latency)"
    r"|(?P<algbw>alg(?:orithm)?[ _.]?(?:bw|bandwidth))|(?P<busbw>bus[ _.]?(?:bw|bandwidth))"
    r"|(?P<other>#?wrong|errors?|count|type|redop|root|out[- ]of[- ]place|in[- ]place)",
    re.IGNORECASE,
)
_UNIT = re.compile(r"\s*[(\[]\s*(?P<unit>[A-Za-zµμ/]{1,8})\s*[)\]]")
_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,6})?)\s*(?P<unit>[KMGT]?i?B?)", re.IGNORECASE)
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FIGURE = re.compile(r"\d{1,12}(?:\.\d{1,6})?(?:e[+-]?\d{1,2})?")
_CELL = re.compile(r"\d[\d.]*\s+[KMGT]i?B\b|[^\s,;]+", re.IGNORECASE)

_MICROSECONDS = {"us": 1.0, "µs": 1.0, "μs": 1.0, "usec": 1.0, "ms": 1e3, "s": 1e6}
_GB_S = {
    **dict.fromkeys(("GB/s", "GBps", "gb/s", "GB/sec"), 1.0),
    **dict.fromkeys(("Gb/s", "Gbps", "gbps", "Gbit/s"), 0.125),
    "MB/s": 1e-3,
    "GiB/s": 2**30 / BYTES_PER_GB,
}

_FACTORS = {
    "allreduce": ring_allreduce_factor,
    **dict.fromkeys(("allgather", "reducescatter", "alltoall", "gather", "scatter"), all_but_own_factor),
    **dict.fromkeys(("broadcast", "reduce", "sendrecv"), whole_factor),
}


@dataclass(frozen=True, slots=True)
class CutColumns:
    """The columns of such a table by their names; `scales` turn a column's unit into µs, or GB/s."""

    names: tuple[str, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, line: str) -> "CutColumns | None":
        """Those that a line names; None of a line that is no header of such a table."""
        names: list[str] = []
        scales: list[float] = []
        end, between = 0, ""
        for found in _NAMES.finditer(line):
            between += line[end : found.start()]
            unit = _UNIT.match(line, found.end())
            end = found.end() if unit is None else unit.end()
            names.append(str(found.lastgroup))
            scales.append(_scale(found.lastgroup, unit))
        rest = between + line[end:]
        figures = {"time", "algbw", "busbw"} & set(names)
        if names[:1] != ["size"] or not figures or re.search(r"\w{3}", rest) or 0.0 in scales:
            return None
        return cls(tuple(names), tuple(scales))

    def line(self, text: str) -> "CutLine | None":
        """The figures of a row; None of a line that has others, or not as many."""
        cells = _CELL.findall(text.replace("|", " "))
        size = _SIZE.fullmatch(cells[0]) if cells else None
        if size is None or len(cells) != len(self.names):
            return None
        halves: list[dict[str, float]] = [{}]
        for name, scale, cell in zip(self.names[1:], self.scales[1:], cells[1:], strict=True):
            if name == "other":
                continue
            if _FIGURE.fullmatch(cell) is None or float(cell) <= 0:
                return None
            if name in halves[-1]:
                halves.append({})
            halves[-1][name] = scale * float(cell)
        size_bytes = int(float(size["number"]) * _SIZES[size["unit"].upper().rstrip("B").rstrip("I")])
        return CutLine(size_bytes, tuple(halves[:2])) if size_bytes > 0 and halves[0] else None


def _scale(name: str | None, unit: re.Match[str] | None) -> float:
    if unit is None or name not in ("time", "algbw", "busbw"):
        return 1.0
    return (_MICROSECONDS if name == "time" else _GB_S).get(unit["unit"], 0.0)


@dataclass(frozen=True, slots=True)
class CutLine:
    """One row: its size, and by placement the figures that were left."""

    size_bytes: int
    halves: tuple[dict[str, float], ...]

    def whole(self, collective: str, ranks: int) -> OutputLine:
        """The row with what follows from the rest: algbw is size over time, and busbw that times the factor."""
        return OutputLine(
            size_bytes=self.size_bytes,
            count=self.size_bytes // 4,
            element_type="float",
            reduction="none",
            root=-1,
            placed=tuple(
                self._placed(half, placement, _FACTORS[collective](ranks))
                for half, placement in zip(self.halves, Placement, strict=False)
            ),
        )

    def _placed(self, half: dict[str, float], placement: Placement, factor: float) -> Placed:
        algbw = half.get("algbw") or (half["busbw"] / factor if "busbw" in half and factor else None)
        time_us = half.get("time")
        if time_us is None:
            time_us = self.size_bytes / ((algbw or 1.0) * BYTES_PER_GB) * MICROSECONDS_PER_SECOND
        algbw = algbw or self.size_bytes / time_us * MICROSECONDS_PER_SECOND / BYTES_PER_GB
        return Placed(
            placement=placement,
            time_us=time_us,
            algbw_gb_s=algbw,
            busbw_gb_s=half.get("busbw", algbw * factor),
            wrong=None,
        )


def _cut_collectives(lines: Sequence[CutLine]) -> list[str]:
    """The collectives that such rows may be of: all, but where busbw is more than algbw only all-reduce."""
    halves = [half for line in lines for half in line.halves if {"algbw", "busbw"} <= half.keys()]
    if any(half["busbw"] > 1.2 * half["algbw"] for half in halves):
        return ["allreduce"]
    return list(_FACTORS)


_MOVES_ONLY = ("allgather", "broadcast", "alltoall", "alltoallv", "gather", "scatter", "sendrecv", "hypercube")
_AVERAGES: Mapping[int | None, str] = {
    0: "time of rank 0 (-a 0)",
    2: "time of the fastest rank (-a 2)",
    3: "time of the slowest rank (-a 3)",
}
_Z95 = 1.96


@dataclass(slots=True, kw_only=True)
class NcclTestsRun:
    """A run while it is read. `average` is -a: 0 rank 0, 1 mean, 2 fastest, 3 slowest; None where nothing says.

    `program` is nccl-tests or rccl-tests, `library` the name and version of what it measured. `halves` are lines of
    which the second half is missing; `transports` are those that NCCL's lines name, as they name them.
    """

    program: str = "nccl-tests"
    collective: str | None = None
    version: str | None = None
    library: tuple[str, str] | None = None
    settings: dict[str, int] = field(default_factory=dict)
    blocking: bool = False
    cpu_time: bool = False
    average: int | None = None
    devices: list[Device] = field(default_factory=list)
    lines: list[OutputLine] = field(default_factory=list)
    halves: list[OutputLine] = field(default_factory=list)
    cut: list[CutLine] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    out_of_bounds: int | None = None
    complete: bool = False

    @property
    def measured(self) -> list[OutputLine]:
        """The lines of which something can be judged: small sizes are rounded down to 0, where nothing moves."""
        return [line for line in self.lines if line.size_bytes > 0]

    @property
    def lacks_devices(self) -> bool:
        """True where the list of devices is not whole, as in an excerpt that begins with the last of them."""
        processes = len({(device.host, device.pid) for device in self.devices})
        listed = max(len(self.devices), processes * self.ranks_a_process)
        return max((device.rank for device in self.devices), default=-1) >= listed

    def rows(self, where: str, user_facts: UserFacts = NO_USER_FACTS) -> list[CollectiveRow]:
        """Its lines as rows, one a placement; `user_facts` is what a person says of a run that does not say it.

        Raises NotSaidError where nothing says how many ranks there were, or which collective it was, and UsageError
        where figures contradict each other or `user_facts`; `where` names the file.
        """
        lines = self.measured
        if not (lines or self.cut):
            return []
        named = self.collective or user_facts.collective
        shape = self._shape(where, user_facts)
        possible = [named] if named else _possible_collectives(lines, None) if lines else _cut_collectives(self.cut)
        if shape is None:
            raise self._not_said(where, possible)
        if not lines and len(possible) > 1:
            raise self._not_said(where, possible)
        lines = lines or [each.whole(possible[0], shape[0]) for each in self.cut]
        if (not self.devices or self.lacks_devices) and len(possible) == 1:
            self._check_user_facts(lines, where, user_facts, possible[0])
        collective = self.collective or (
            possible[0] if self.cut else collective_of(lines, shape[0], user_facts.collective, where)
        )
        how = "--collective" if user_facts.collective else "the shape of its rows"
        by = None if self.collective else f"{collective} by {how}: nccl-tests did not name it"
        return [self._row(collective, by, shape, line, placed) for line in lines for placed in line.placed]

    def _check_user_facts(
        self, lines: Sequence[OutputLine], where: str, user_facts: UserFacts, collective: str
    ) -> None:
        likely = likely_ranks(lines, collective)
        if likely is not None and likely != user_facts.ranks:
            a_node, rest = divmod(likely, user_facts.nodes)
            raise UsageError(
                f"{where}: its busbw over algbw is that of {likely} ranks, and --machine has {user_facts.ranks}",
                expected=f"the machine that the table is of{'' if rest else f': {a_node} ranks on each node'}",
                reason="another number of GPUs or nodes took part",
                next_step=f"--machine NAME/{a_node} is that part of each node" if not rest and a_node else "",
            )

    def _not_said(self, where: str, collectives: list[str]) -> NotSaidError:
        error = NotSaidError(
            f"{where}: rows without the lines that say how many ranks there were and of how many iterations",
            expected="the lines '# nThread ...' and '#  Rank  0 ...' above them",
            reason="the beginning of the output is missing",
            next_step="give the whole output of nccl-tests",
        )
        error.ranks, error.collectives = True, collectives
        if len(collectives) == 1 and self.measured:
            error.likely_ranks = likely_ranks(self.measured, collectives[0])
        return error

    def _shape(self, where: str, user_facts: UserFacts) -> tuple[int, int, str | None] | None:
        """Ranks, nodes and part of a communicator; None where nothing says how many ranks there were."""
        if not self.devices or self.lacks_devices:
            ranks = max((device.rank + 1 for device in self.devices), default=user_facts.ranks)
            return None if ranks is None or user_facts.ranks is None else (ranks, user_facts.nodes, None)
        groups = sorted({device.group for device in self.devices})
        own = [device for device in self.devices if device.group == self.devices[0].group]
        nodes = len({device.host for device in own})
        # A list of devices is cut at 2 kB a process, and JSON names only the first of each.
        processes = len({(device.host, device.pid) for device in own})
        ranks = max(len(own), processes * self.ranks_a_process)
        if not 0 < ranks <= limits.MOST_RESULT_RANKS:
            raise UsageError(f"{where}: a run of {ranks} ranks", expected=f"1 to {limits.MOST_RESULT_RANKS}")
        return ranks, nodes, f"each of {len(groups)} groups, as one" if len(groups) > 1 else None

    @property
    def ranks_a_process(self) -> int:
        """GPUs that a process drives, several ranks on each where rccl-tests has that."""
        return math.prod(self.settings.get(name, 1) for name in ("threads", "gpus", "ranks_a_gpu"))

    @property
    def _paths(self) -> list[Transport]:
        """The transports of NCCL's own lines among the rows, without the numbers of NICs."""
        return [replace(each, name=each.family) for each in map(parse_transport, self.transports)]

    @property
    def _iterations(self) -> int | None:
        counted = self.settings.get("iterations")
        return None if counted is None else counted * self.settings.get("aggregated", 1)

    def _row(
        self,
        collective: str,
        by: str | None,
        shape: tuple[int, int, str | None],
        line: OutputLine,
        placed: Placed,
    ) -> CollectiveRow:
        ranks, nodes, group = shape
        each = placed.per_iteration or PerIteration()
        fastest, slowest, slowest_rank = self._extremes(placed, each)
        return CollectiveRow(
            collective=collective,
            backend="rccl" if self.program == "rccl-tests" else "nccl",
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
            iterations=self._iterations,
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
            transport=names(self._paths),
            host_staged=is_staged(self._paths),
            verdict=None,
            note=self._note(by, placed),
        )

    def _extremes(self, placed: Placed, each: PerIteration) -> tuple[float | None, float | None, int | None]:
        means = each.mean_us_by_process
        if means:
            slowest = max(range(len(means)), key=means.__getitem__)
            return min(means), means[slowest], slowest * self.ranks_a_process
        return (
            placed.time_us if self.average == 2 else None,
            placed.time_us if self.average == 3 else None,
            None,
        )

    def _note(self, by: str | None, placed: Placed) -> str | None:
        each = placed.per_iteration
        slowest = ", slowest GPU of each" if each and each.mean_us_by_process else ""
        notes = (
            _AVERAGES.get(self.average, ""),
            CPU_TIME if self.cpu_time else "",
            "waits after each operation (-z)" if self.blocking else "",
            f"statistics of single operations between CUDA events{slowest}" if each else "",
            by,
        )
        return "; ".join(filter(None, notes)) or None


def _ci95_percent(each: PerIteration) -> float | None:
    """Half the 95 % interval of the mean, as if operations were independent: 1.96 standard errors."""
    if each.cv_percent is None or not each.samples:
        return None
    return _Z95 * each.cv_percent / math.sqrt(each.samples)


def result_file(
    runs: Sequence[NcclTestsRun],
    name: str,
    kind: str,
    remarks: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    user_facts: UserFacts = NO_USER_FACTS,
    damaged: int = 0,
) -> ResultFile:
    """The rows of all runs, with the circumstances of the first that has rows; `kind` is text or JSON.

    `user_facts` is what a person says of runs that do not say it; `damaged` lines were left out. Raises UsageError if
    nothing was measured, and NotSaidError where nothing says of how many ranks, or of which collective, rows are.
    """
    measured = [run for run in runs if run.measured or run.cut]
    if not measured:
        _refuse(runs, name, damaged)
    rows = tuple(row for run in measured for row in run.rows(name, user_facts))
    left_out = [f"{damaged} damaged lines left out"] if damaged else []
    unfinished = sum(not run.complete for run in measured)
    more = [f"{unfinished} of {len(measured)} runs did not end"] if unfinished else []
    empty = sum(not run.lines and bool(run.settings) for run in runs)
    more += [f"{empty} runs without a row"] if empty else []
    zero = sum(len(run.lines) - len(run.measured) for run in runs)
    more += [f"{counted(zero, 'row')} of size 0 left out: nothing moved"] if zero else []
    more += ["columns were cut: what they leave out follows from the rest"] if any(run.cut for run in runs) else []
    more += ["its rows have one half, taken for out of place"] if any(run.lines is run.halves for run in runs) else []
    return ResultFile(
        name=name,
        kind=f"{measured[0].program} {kind}",
        circumstances=_circumstances(measured, environment),
        rows=rows,
        complete=not unfinished and not empty,
        remarks=(*remarks, *left_out, *more),
    )


def _refuse(runs: Sequence[NcclTestsRun], name: str, damaged: int) -> NoReturn:
    seen, reason = f"{name} has nothing that was measured", "the run ended before its first size"
    if damaged:
        seen = f"{name} has no whole row: {counted(damaged, 'row')} damaged"
        reason = "values are missing, or other output stands among them"
    elif any(run.lines for run in runs):
        seen, reason = f"{name} has rows of size 0 alone", "with many ranks small sizes are rounded down to nothing"
    raise UsageError(
        seen,
        expected="rows of nccl-tests: size, count, type, redop, root, time, algbw, busbw, #wrong",
        reason=reason,
        next_step=f"tail {name} shows how the run ended; -e 1G makes it measure larger sizes",
    )


def _circumstances(runs: Sequence[NcclTestsRun], environment: Mapping[str, str] | None) -> FileCircumstances:
    first = runs[0]
    bounds = [run.out_of_bounds for run in runs if run.out_of_bounds is not None]
    # JSON names only the first device of each process: the others are taken to be alike.
    each = 1
    processes = {(device.host, device.pid) for device in first.devices}
    if len(first.devices) == len(processes):
        each = first.ranks_a_process
    return FileCircumstances(
        tool=" ".join(filter(None, (first.program, first.version))),
        hosts=() if first.lacks_devices else tuple(dict.fromkeys(device.host for device in first.devices)),
        gpus=() if first.lacks_devices else tuple(device.name for device in first.devices for _ in range(each)),
        libraries=dict([first.library]) if first.library else {},
        environment=environment,
        options={key: str(first.settings[key]) for key in ("warmup", "validation") if key in first.settings},
        wrong_elements=sum(bounds) if bounds else None,
    )
