"""Rows beside each other: the rows of `compare`, keys of comparable rows, sibling groups, and curves over size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Annotated, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results import report
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import format_size, group_by, plural
from gpubench.model.terms.verdict import Verdict


class Status(StrEnum):
    """The sides that have a row: both, the old one alone, the new one alone."""

    COMPARED = "compared"
    MISSING = "missing"
    ADDED = "added"


class Change(StrEnum):
    """The direction in which time changed by more than noise."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


def bandwidth_lost(slower_percent: float) -> float:
    """The percent of bandwidth that is lost where the time is `slower_percent` longer; negative: gained."""
    return 100 * slower_percent / (100 + slower_percent)


class RowKey(NamedTuple):
    """The columns that say what a row is of: two rows with the same key measured the same thing.

    A tuple, for a comparison of a cluster looks up each of its many rows several times.
    """

    collective: str | None = None
    backend: str | None = None
    group: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    source: str | None = None
    destination: str | None = None
    source_node: str | None = None
    destination_node: str | None = None
    scope: str | None = None
    direction: str | None = None
    engine: str | None = None
    peer: str | None = None
    size_bytes: int | None = None
    dtype: str | None = None
    op: str | None = None
    root: int | None = None
    placement: str | None = None
    mode: str | None = None
    graph: int | None = None
    setting: str | None = None

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The names of a pair's devices."""
        return self.source, self.destination

    @property
    def name(self) -> str:
        """In words, without defaults such as float32 or sum: 'allreduce 1M in place', 'GPU0 → GPU1 256M write ce'."""
        return _name(self)


class ComparisonRow(report.Record, frozen=True, kw_only=True):
    """The same thing in old and new results."""

    section = "comparison"
    on_page = report.OnPage(most=1000, folds=True)

    collective: str | None = None  #: as in rows of collectives; null where it is a pair
    backend: str | None = None  #: what moved the data; a model of NCCL counts as nccl
    group: str | None = None  #: the part of the job
    ranks: Annotated[int | None, {"minimum": 1}] = None  #: ranks in the group
    nodes: Annotated[int | None, {"minimum": 1}] = None  #: hosts in the group
    source: str | None = None  #: of a pair: bus id where both sides have the same hosts, else the device's name
    destination: str | None = None  #: as source
    source_node: str | None = None  #: host, or 'node 0' where the sides have different hosts
    destination_node: str | None = None  #: as source_node
    scope: str | None = None  #: process, ipc or network
    direction: str | None = None  #: write, read or both
    engine: str | None = None  #: ce, sm, nccl or cpu
    peer: str | None = None  #: peer access: on or off
    size_bytes: int | None = None  #: as in rows
    dtype: str | None = None  #: element type
    op: str | None = None  #: reduction
    root: int | None = None  #: root rank
    placement: str | None = None  #: out_of_place or in_place
    mode: str | None = None  #: throughput or latency
    graph: int | None = None  #: replays of a captured CUDA graph
    #: what else tells rows of one file apart: algorithm and protocol of a sweep, kind of host memory
    setting: str | None = None
    status: Annotated[str, Status]  #: which side has it: both, the old one alone, the new one alone
    change: Annotated[str | None, Change] = None  #: of time, beyond noise; null where there is no time on both sides
    verdict: Annotated[str, Verdict]  #: of this row
    #: how much longer the new one takes; negative: faster
    slower_percent: Annotated[float | None, report.SIGNED] = None
    noise_percent: float | None = None  #: what that has to exceed to count
    noise_source: str | None = None  #: where noise_percent is from
    base_time_us: float | None = None  #: median over runs
    new_time_us: float | None = None  #: as base_time_us
    base_gb_s: float | None = None  #: busbw of a collective, bandwidth of a pair
    new_gb_s: float | None = None  #: as base_gb_s
    base_runs: int = 0  #: runs that have it
    new_runs: int = 0  #: as base_runs
    base_origin: str | None = None  #: measured, simulated or recorded
    new_origin: str | None = None  #: as base_origin
    base_transport: str | None = None  #: as NCCL names it
    new_transport: str | None = None  #: as base_transport
    base_host_staged: bool | None = None  #: whether data went through host memory
    new_host_staged: bool | None = None  #: as base_host_staged
    base_verdict: Annotated[str | None, Verdict] = None  #: the worst of the runs; null: not judged
    new_verdict: Annotated[str | None, Verdict] = None  #: as base_verdict
    reason: str | None = None  #: what the verdict rests on
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named
    source_device: str | None = None  #: of a pair: the device's name in the new results, else in the old ones
    destination_device: str | None = None  #: as source_device

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The names of a pair's devices, which people know better than bus ids."""
        return self.source_device or self.source, self.destination_device or self.destination

    @property
    def name(self) -> str:
        """As that of its key, with `ends`."""
        return _name(self)


def _name(row: "RowKey | ComparisonRow") -> str:
    size = None if row.size_bytes is None else format_size(row.size_bytes)
    if row.collective is None:
        peer = "peer off" if row.peer == "off" else None
        parts: tuple[str | None, ...] = (
            " → ".join(map(str, row.ends)),
            size,
            row.direction,
            row.engine,
            peer,
            row.setting,
        )
    else:
        usual = ("float32", "sum", "throughput")
        dtype, op, mode = (None if each in usual else each for each in (row.dtype, row.op, row.mode))
        root = f"root {row.root}" if row.root else None
        place = "in place" if row.placement == "in_place" else None
        graph = "graph" if row.graph else None
        parts = (row.collective, size, dtype, op, root, place, mode, graph, row.setting, row.group)
    return " ".join(filter(None, parts))


class CircumstanceRow(report.Record, frozen=True, kw_only=True):
    """A circumstance that numbers depend on."""

    section = "circumstances"

    name: str  #: what it is: a version, the GPUs, the topology, an option, a variable
    base: str | None  #: null: no file of this side tells
    new: str | None  #: as base
    changed: bool  #: both are known, and differ
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named


class MachineRow(report.Record, frozen=True, kw_only=True):
    """One collective, or copies between GPUs, on two machines."""

    section = "machines"

    what: str  #: the collective, with type and reduction where they are not the usual ones; or the way of copying
    base_gpus: int | None  #: GPUs that took part
    new_gpus: int | None  #: as base_gpus
    base_nodes: int | None  #: nodes that took part
    new_nodes: int | None  #: as base_nodes
    size_bytes: int | None  #: the largest size in common, of base_gb_s and new_gb_s; null: both are the peaks
    base_gb_s: float  #: per GPU: busbw of a collective, the median pair's bandwidth of copies
    new_gb_s: float  #: as base_gb_s
    ratio: float  #: new_gb_s over base_gb_s
    base_node_gb_s: float | None  #: base_gb_s times the GPUs of a node
    new_node_gb_s: float | None  #: as base_node_gb_s
    base_peak_gb_s: float  #: the highest of all sizes
    new_peak_gb_s: float  #: as base_peak_gb_s
    base_peak_bytes: int  #: the size with the highest
    new_peak_bytes: int  #: as base_peak_bytes
    base_half_bytes: int  #: the smallest measured size that reaches half of the highest
    new_half_bytes: int  #: as base_half_bytes
    latency_bytes: int | None  #: the smallest size in common, of the latencies; null: see reason
    base_latency_us: float | None  #: time of an operation
    new_latency_us: float | None  #: as base_latency_us
    reason: str | None = None  #: why latencies are not compared


class FindingStatus(StrEnum):
    """A finding of the new results in relation to the old ones, the worst first."""

    NEW = "new"
    GRAVER = "graver"
    SAME = "same"
    MILDER = "milder"
    GONE = "gone"


class FindingChangeRow(report.Record, frozen=True, kw_only=True):
    """A finding of a check or of topo on one subject, as both sides tell it."""

    section = "finding_changes"

    finding: str  #: its id
    subject: str  #: what it is on
    status: Annotated[str, FindingStatus]  #: new, graver or milder than before, the same, or gone
    #: on the change: a finding that is new or graver has its own
    verdict: Annotated[str, Verdict]
    base_severity: str | None  #: null: not found before
    new_severity: str | None  #: null: not found now
    base_seen: str | None  #: what was seen before
    new_seen: str | None  #: what is seen now
    series: str | None = None  #: the newest of the dated results that were compared; null: two files were named


class Use(StrEnum):
    """The use of a dated result in a comparison."""

    NEW = "new"
    BASE = "base"
    LEFT_OUT = "left out"


class HistoryRow(report.Record, frozen=True, kw_only=True):
    """A file of a folder of dated results."""

    section = "history"

    file: str  #: its name in the folder
    started_at: str | None = None  #: when its run began, UTC; null: it was not read
    command: str | None = None  #: what was run; null: its name is none of a dated result
    host: str | None = None  #: the first host, and how many more
    run_verdict: str | None = None  #: what its run ended with; null: it was not read
    use: Annotated[str, Use]  #: new: compared with those before it; base: one of these; left out: in no comparison
    series: str | None = None  #: the comparison it took part in, by its newest result
    reason: str | None = None  #: why it was left out


def collective_key(row: report.CollectiveRow) -> RowKey:
    """The key of a row of a collective. A model of NCCL is compared with NCCL, where that is asked for at all."""
    return report.made_of(RowKey, row, backend="nccl" if row.backend == "simulated" else row.backend)


def pair_key(row: report.PairRow) -> RowKey:
    """The key of a pair on its own machine: by bus ids."""
    return next(pair_keys([row]))


def pair_keys(rows: Iterable[report.PairRow], nodes: Mapping[str, int] | None = None) -> Iterator[RowKey]:
    """The keys of pairs. `nodes` are the places of a side's hosts where the other side has others: these count then."""
    hosts = None if nodes is None else {name: f"node {place}" for name, place in nodes.items()}
    kinds = {note: HostMemory.parse_note(note) for note in {note for (note,) in report.cells_of(rows, "note")}}
    settings = {note: memory.full_name if memory else None for note, memory in kinds.items()}
    for source, to, source_bus, to_bus, source_node, to_node, *kind, size, note in report.cells_of(rows, *_OF_PAIR):
        if hosts is None:
            source, to = source if source_bus is None else source_bus, to if to_bus is None else to_bus
        else:
            source_node, to_node = hosts[source_node], hosts[to_node]
        ends = source, to, source_node, to_node
        yield RowKey._make((*_NO_COLLECTIVE, *ends, *kind, size, *_NOTHING_REDUCED, settings[note]))


_OF_PAIR = (
    *("source", "destination", "source_bus_id", "destination_bus_id", "source_node", "destination_node"),
    *("scope", "direction", "engine", "peer", "size_bytes", "note"),
)
_NO_COLLECTIVE = (None,) * RowKey._fields.index("source")
_NOTHING_REDUCED = (None,) * (RowKey._fields.index("setting") - RowKey._fields.index("dtype"))


def siblings(keys: Iterable[RowKey]) -> Iterator[list[RowKey]]:
    """Keys that differ in size and placement alone, or of pairs in the pair alone: those with noise in common."""
    yield from group_by(keys, lambda key: (_BUT_PAIR if key.collective is None else _BUT_SIZE)(key)).values()


_BUT_SIZE, _BUT_PAIR = (
    itemgetter(*(place for place, name in enumerate(RowKey._fields) if name not in others))
    for others in (("size_bytes", "placement"), ("source", "destination", "source_node", "destination_node"))
)


LEAST_OTHERS = 2
"""Of fewer none is the usual one; of two groups the faster is what both should reach."""


class SiblingFigure(Struct, frozen=True):
    """What other groups of a run reached, with how many there are, and the source in words."""

    time_us: float
    busbw_gb_s: float
    others: int
    source: str


def figures_of_siblings(rows: Sequence[report.CollectiveRow]) -> list[SiblingFigure | None]:
    """For each of the rows that all groups of a run have of one case, what the others reach; None where none is alike.

    Groups are alike where the rows have the same ranks, nodes and limit. Of several others the middle one counts, of
    an even number the faster of the two in the middle, so that one slow group among three does not become the measure;
    of two groups the faster one. A row with wrong data is no measure.
    """
    return [_figure(number, row, rows) for number, row in enumerate(rows)]


def _figure(number: int, row: report.CollectiveRow, rows: Sequence[report.CollectiveRow]) -> SiblingFigure | None:
    others = [each for place, each in enumerate(rows) if place != number and _are_alike(each, row) and not each.wrong]
    if not others:
        return None
    if len(others) < LEAST_OTHERS:
        own = [row] if not row.wrong else []
        return _of(min((*own, *others), key=_time), 1, "the faster of two groups of this run")
    middle = sorted(others, key=_time)[(len(others) - 1) // 2]
    return _of(middle, len(others), f"{plural(len(others), 'other group')} of this run")


def _of(row: report.CollectiveRow, others: int, source: str) -> SiblingFigure:
    return SiblingFigure(row.time_us, row.reached_gb_s, others, source)


def _time(row: report.CollectiveRow) -> float:
    return row.time_us


def _are_alike(one: report.CollectiveRow, other: report.CollectiveRow) -> bool:
    keys = [collective_key(row)._replace(group=None) for row in (one, other)]
    return keys[0] == keys[1] and one.limit_gb_s == other.limit_gb_s


Points = tuple[tuple[int, float], ...]
"""Size in bytes and value, by ascending size."""

_MOST_LINES = 4
_FEWEST_SIZES = 3
HOST = "host"
OPEN_ENDED = "neither limit nor expectation is known: the axis ends at the highest measured"


class CurveLine(Struct, frozen=True):
    """A named curve."""

    name: str
    points: Points


class Chart(Struct, frozen=True):
    """Curves with one unit, and what they are held against: what links carry at most, what healthy machines reach."""

    title: str
    unit: str
    lines: tuple[CurveLine, ...]
    limit: Points = ()
    expected: Points = ()
    logarithmic: bool = False

    @property
    def highest(self) -> float:
        """The highest value of all, what curves are held against included: 25 of 340 GB/s is seen as 25 of 340."""
        drawn = (*(line.points for line in self.lines), self.limit, self.expected)
        return max((value for points in drawn for _, value in points), default=0.0)

    @property
    def is_open_ended(self) -> bool:
        """True where nothing is known to hold the curves against: the highest of them may still be low."""
        return not (self.limit or self.expected or self.logarithmic or self.is_comparison)

    @property
    def is_comparison(self) -> bool:
        """True if its curves are held against each other."""
        return [line.name for line in self.lines] == ["before", "after"]


def charts(rows: Sequence[report.Row]) -> list[Chart]:
    """A chart of bandwidth and one of time for every way of measuring that visited three sizes or more."""
    collectives = [row for row in rows if isinstance(row, report.CollectiveRow)]
    pairs = [row for row in rows if isinstance(row, report.PairRow) and HOST not in (row.source, row.destination)]
    found: list[Chart] = []
    for members in group_by(collectives, _series).values():
        found += _collective(members)
    for copies in group_by(pairs, lambda row: (row.engine, row.direction, row.peer)).values():
        found += _pairs(copies)
    return [chart for chart in found if any(len(line.points) >= _FEWEST_SIZES for line in chart.lines)]


def compared_charts(rows: Sequence[ComparisonRow]) -> list[Chart]:
    """A chart for everything that was compared in three sizes or more: both sides in one; of many pairs the slowest."""
    both = [row for row in rows if row.status == Status.COMPARED and row.size_bytes is not None]
    found = []
    for name, members in group_by(both, _series_name).items():
        lines = tuple(
            CurveLine(side, _lowest((row.size_bytes or 0, getattr(row, field)) for row in members))
            for side, field in (("before", "base_gb_s"), ("after", "new_gb_s"))
        )
        pairs = len({(row.source, row.destination) for row in members})
        words = f"slowest of {pairs} pairs, {name}" if pairs > 1 else name
        what = "bandwidth" if members[0].collective is None else "bus bandwidth"
        found.append(Chart(f"{words}: {what}, before and after", "GB/s", lines))
    return [chart for chart in found if all(len(line.points) >= _FEWEST_SIZES for line in chart.lines)]


def _series_name(row: ComparisonRow) -> str:
    if row.collective is not None:
        return replace(row, size_bytes=None).name
    peer = "peer access off" if row.peer == "off" else None
    ends = HOST if HOST in (row.source, row.destination) else None
    return " ".join(filter(None, ("copies:", row.engine, row.direction, peer, row.setting, ends)))


def _lowest(values: Iterable[tuple[int, float | None]]) -> Points:
    found: dict[int, float] = {}
    for size, value in values:
        if value is not None:
            found[size] = min(value, found.get(size, value))
    return tuple(sorted(found.items()))


def _series(row: report.CollectiveRow) -> tuple[str, ...]:
    return row.dtype, row.op or "", row.group or "", row.backend, row.setting or ""


def _collective(rows: Sequence[report.CollectiveRow]) -> list[Chart]:
    what = " ".join(filter(None, (rows[0].collective, rows[0].dtype, rows[0].op, rows[0].group, rows[0].setting)))
    lines = {
        name.replace("_", " "): [row for row in rows if row.placement == name]
        for name in dict.fromkeys(row.placement for row in rows)
    }
    bandwidth = tuple(
        CurveLine(name, _points((row.size_bytes, row.busbw_gb_s) for row in each)) for name, each in lines.items()
    )
    times = tuple(
        CurveLine(name, _points((row.size_bytes, row.time_us) for row in each)) for name, each in lines.items()
    )
    limit = _points((row.size_bytes, row.limit_gb_s) for row in rows)
    expected = _points((row.size_bytes, row.expected_gb_s) for row in rows)
    expected_times = _points((row.size_bytes, row.expected_us) for row in rows)
    return [
        Chart(f"{what}: bus bandwidth", "GB/s", bandwidth, limit, expected),
        Chart(f"{what}: time", "µs", times, expected=expected_times, logarithmic=True),
    ]


def _pairs(rows: Sequence[report.PairRow]) -> list[Chart]:
    access = f"peer access {rows[0].peer}" if rows[0].peer else ""
    what = "copies: " + ", ".join(filter(None, (rows[0].engine, rows[0].direction, access)))
    limit = _points((row.size_bytes or 0, row.limit_gb_s) for row in rows)
    expected = _points((row.size_bytes or 0, row.expected_gb_s) for row in rows)
    expected_times = _points((row.size_bytes or 0, row.expected_us) for row in rows)
    bandwidth, times = (_pair_lines(rows, attrgetter(name)) for name in ("bandwidth_gb_s", "latency_us"))
    return [
        Chart(f"{what}: bandwidth", "GB/s", bandwidth, limit, expected),
        Chart(f"{what}: time", "µs", times, expected=expected_times, logarithmic=True),
    ]


def _pair_lines(
    rows: Sequence[report.PairRow], value: Callable[[report.PairRow], float | None]
) -> tuple[CurveLine, ...]:
    """A line a pair; of many pairs the highest and the lowest value of all."""
    by_pair = group_by(rows, lambda row: (row.source, row.destination)).values()
    if len(by_pair) <= _MOST_LINES:
        return tuple(
            CurveLine(
                f"{members[0].source} → {members[0].destination}",
                _points((row.size_bytes or 0, value(row)) for row in members),
            )
            for members in by_pair
        )
    known = sorted((row.size_bytes or 0, each) for row in rows if (each := value(row)) is not None)
    by_size = [(size, [each for _, each in found]) for size, found in groupby(known, key=lambda item: item[0])]
    return (
        CurveLine(f"highest of {len(by_pair)} pairs", tuple((size, max(found)) for size, found in by_size)),
        CurveLine("lowest", tuple((size, min(found)) for size, found in by_size)),
    )


def _points(values: Iterable[tuple[int, float | None]]) -> Points:
    return tuple(sorted({size: value for size, value in values if value is not None}.items()))
