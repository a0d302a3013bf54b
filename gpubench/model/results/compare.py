"""The rows of `gpubench compare`, the keys that match rows of two results, groups of similar rows, and charts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results import report
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import format_size, group_by, plural
from gpubench.model.terms.verdict import Verdict


class Status(StrEnum):
    """Which results have the row: both, only the old one, or only the new one."""

    COMPARED = "compared"
    MISSING = "missing"
    ADDED = "added"


class Change(StrEnum):
    """Whether the time changed by more than noise, and in which direction."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


def bandwidth_lost(slower_percent: float) -> float:
    """Convert an increase in time to a loss of bandwidth, both in percent. A negative result is a gain."""
    return 100 * slower_percent / (100 + slower_percent)


class RowKey(report.Record, frozen=True):
    """The columns that identify a row. Two rows with equal keys measured the same operation."""

    collective: str | None = None  #: name of the collective (null for a pair)
    backend: str | None = None  #: backend (simulated NCCL counts as nccl)
    group: str | None = None  #: group of ranks that ran the collective (null for the whole job)
    ranks: Annotated[int | None, {"minimum": 1}] = None  #: number of ranks in the group
    nodes: Annotated[int | None, {"minimum": 1}] = None  #: number of hosts in the group
    #: source of a pair: PCI address if both results have the same hosts, otherwise device name
    source: str | None = None
    destination: str | None = None  #: destination of a pair: PCI address or device name
    source_node: str | None = None  #: host of the source, or 'node 0' if the results have different hosts
    destination_node: str | None = None  #: host of the destination, or 'node 0' if the results have different hosts
    scope: str | None = None  #: scope of the copy: process, ipc or network
    direction: str | None = None  #: direction of the copy: write, read or both
    engine: str | None = None  #: engine of the copy: ce, sm, nccl or cpu
    peer: str | None = None  #: peer access: on or off
    size_bytes: int | None = None  #: size in bytes
    dtype: str | None = None  #: element type, for example float32
    op: str | None = None  #: reduction operation (null if the collective only moves data)
    root: int | None = None  #: root rank (null if the collective has no root)
    placement: str | None = None  #: placement of the result: out_of_place or in_place
    mode: str | None = None  #: timing mode: throughput or latency
    graph: int | None = None  #: number of replays of a captured CUDA graph
    #: other property that distinguishes rows: algorithm and protocol in a sweep, or type of host memory
    setting: str | None = None

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The source and destination of a pair."""
        return self.source, self.destination

    @property
    def name(self) -> str:
        """The key in words, without default values: 'allreduce 1M in place', 'GPU0 → GPU1 256M write ce'."""
        size = None if self.size_bytes is None else format_size(self.size_bytes)
        if self.collective is None:
            peer = "peer off" if self.peer == "off" else None
            parts: tuple[str | None, ...] = (
                " → ".join(map(str, self.ends)),
                size,
                self.direction,
                self.engine,
                peer,
                self.setting,
            )
        else:
            usual = ("float32", "sum", "throughput")
            dtype, op, mode = (None if column in usual else column for column in (self.dtype, self.op, self.mode))
            root = f"root {self.root}" if self.root else None
            place = "in place" if self.placement == "in_place" else None
            graph = "graph" if self.graph else None
            parts = (self.collective, size, dtype, op, root, place, mode, graph, self.setting, self.group)
        return " ".join(filter(None, parts))


class ComparisonRow(RowKey, frozen=True, kw_only=True):
    """A row of the old result, the new result or both."""

    section = "comparison"
    on_page = report.OnPage(most=1000, folds=True)

    #: compared (both results have the row), missing (only the old one) or added (only the new one)
    status: Annotated[str, Status]
    #: change of the time beyond noise (null if one of the results has no time)
    change: Annotated[str | None, Change] = None
    verdict: Annotated[str, Verdict]  #: verdict on the change
    #: how much longer the new operation takes, in percent (negative if faster)
    slower_percent: Annotated[float | None, report.SIGNED] = None
    noise_percent: float | None = None  #: change in percent that noise can explain
    noise_source: str | None = None  #: source of noise_percent
    base_time_us: float | None = None  #: time of one operation in the old result in microseconds, median over runs
    new_time_us: float | None = None  #: time of one operation in the new result in microseconds, median over runs
    base_gb_s: float | None = None  #: bandwidth (for collectives bus bandwidth) in the old result in GB/s
    new_gb_s: float | None = None  #: bandwidth (for collectives bus bandwidth) in the new result in GB/s
    base_runs: int = 0  #: number of old runs with this row
    new_runs: int = 0  #: number of new runs with this row
    base_origin: str | None = None  #: origin of the old values: measured, simulated or recorded
    new_origin: str | None = None  #: origin of the new values: measured, simulated or recorded
    base_transport: str | None = None  #: NCCL transport in the old result
    new_transport: str | None = None  #: NCCL transport in the new result
    base_host_staged: bool | None = None  #: whether data went through host memory in the old result
    new_host_staged: bool | None = None  #: whether data went through host memory in the new result
    base_verdict: Annotated[str | None, Verdict] = None  #: worst verdict in the old runs (null if not judged)
    new_verdict: Annotated[str | None, Verdict] = None  #: worst verdict in the new runs (null if not judged)
    reason: str | None = None  #: reason for the verdict
    #: newest result in this comparison of dated results (null if two named files were compared)
    series: str | None = None
    source_device: str | None = None  #: device name of the source
    destination_device: str | None = None  #: device name of the destination

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The device names of a pair, which are easier to recognize than PCI addresses."""
        return self.source_device or self.source, self.destination_device or self.destination


class CircumstanceRow(report.Record, frozen=True, kw_only=True):
    """A property of the runs that may change results."""

    section = "circumstances"

    name: str  #: property: a version, the GPUs, the topology, an option, or a variable
    base: str | None  #: value in the old result (null if unknown)
    new: str | None  #: value in the new result (null if unknown)
    changed: bool  #: whether both values are known and differ
    #: newest result in this comparison of dated results (null if two named files were compared)
    series: str | None = None


class MachineRow(report.Record, frozen=True, kw_only=True):
    """One collective, or one type of copy between GPUs, on two machines."""

    section = "machines"

    what: str  #: collective, with its data type and reduction if unusual, or type of copy
    base_gpus: int | None  #: number of GPUs used on the old machine
    new_gpus: int | None  #: number of GPUs used on the new machine
    base_nodes: int | None  #: number of nodes used on the old machine
    new_nodes: int | None  #: number of nodes used on the new machine
    size_bytes: int | None  #: largest common size, to which base_gb_s and new_gb_s refer (null if both are peak values)
    base_gb_s: float  #: bandwidth per GPU on the old machine in GB/s; for copies: median over pairs
    new_gb_s: float  #: bandwidth per GPU on the new machine in GB/s; for copies: median over pairs
    ratio: float  #: new_gb_s divided by base_gb_s
    base_node_gb_s: float | None  #: base_gb_s times the number of GPUs in a node
    new_node_gb_s: float | None  #: new_gb_s times the number of GPUs in a node
    base_peak_gb_s: float  #: highest bandwidth over all sizes on the old machine, in GB/s
    new_peak_gb_s: float  #: highest bandwidth over all sizes on the new machine, in GB/s
    base_peak_bytes: int  #: size with the highest bandwidth on the old machine, in bytes
    new_peak_bytes: int  #: size with the highest bandwidth on the new machine, in bytes
    base_half_bytes: int  #: smallest measured size that reaches half of base_peak_gb_s, in bytes
    new_half_bytes: int  #: smallest measured size that reaches half of new_peak_gb_s, in bytes
    #: smallest common size, to which the latencies refer (null if they are not compared, see reason)
    latency_bytes: int | None
    base_latency_us: float | None  #: time of one operation on the old machine in microseconds
    new_latency_us: float | None  #: time of one operation on the new machine in microseconds
    reason: str | None = None  #: why latencies are not compared


class FindingStatus(StrEnum):
    """How a finding changed from the old result to the new one. The worst change comes first."""

    NEW = "new"
    GRAVER = "graver"
    SAME = "same"
    MILDER = "milder"
    GONE = "gone"


class FindingChangeRow(report.Record, frozen=True, kw_only=True):
    """A finding of `check` or `topo` on one subject, in the old and the new result."""

    section = "finding_changes"

    finding: str  #: ID of the finding
    subject: str  #: subject of the finding: a GPU, node or pair
    status: Annotated[str, FindingStatus]  #: status of the finding: new, graver or milder than before, same, or gone
    verdict: Annotated[str, Verdict]  #: verdict on the change; for a new or graver finding its severity
    base_severity: str | None  #: severity in the old result (null if not found)
    new_severity: str | None  #: severity in the new result (null if not found)
    base_seen: str | None  #: observation in the old result
    new_seen: str | None  #: observation in the new result
    #: newest result in this comparison of dated results (null if two named files were compared)
    series: str | None = None


class Use(StrEnum):
    """How a comparison uses a dated result."""

    NEW = "new"
    BASE = "base"
    LEFT_OUT = "left out"


class HistoryRow(report.Record, frozen=True, kw_only=True):
    """One file in a folder of dated results."""

    section = "history"

    file: str  #: name of the file in the folder
    started_at: str | None = None  #: start of the run in UTC (null if the file was not read)
    command: str | None = None  #: command of the run (null if the file name is not that of a dated result)
    host: str | None = None  #: name of the first host, and the number of other hosts
    run_verdict: str | None = None  #: verdict of the run (null if the file was not read)
    #: new (compared with earlier results), base (one of the earlier results) or left out (not compared)
    use: Annotated[str, Use]
    series: str | None = None  #: newest result in the comparison that uses the file
    reason: str | None = None  #: why the file was left out


def collective_key(row: report.CollectiveRow) -> RowKey:
    """Return the key of a collective row. Simulated NCCL is compared with NCCL."""
    return report.make_record(RowKey, row, backend="nccl" if row.backend == "simulated" else row.backend)


def pair_key(row: report.PairRow) -> RowKey:
    """Return the key of a pair by PCI addresses, for comparison on the same machine."""
    return next(pair_keys([row]))


def pair_keys(rows: Iterable[report.PairRow], nodes: Mapping[str, int] | None = None) -> Iterator[RowKey]:
    """Yield the keys of pairs.

    Without `nodes`, keys contain PCI addresses and host names. If the two results have different hosts, `nodes` numbers
    the hosts, and keys contain device names and these numbers.
    """
    hosts = None if nodes is None else {name: f"node {place}" for name, place in nodes.items()}
    kinds = {note: HostMemory.parse_note(note) for note in {note for (note,) in report.column_values(rows, "note")}}
    settings = {note: memory.full_name if memory else None for note, memory in kinds.items()}
    for source, to, source_bus, to_bus, source_node, to_node, *kind, size, note in report.column_values(
        rows, *_OF_PAIR
    ):
        if hosts is None:
            source, to = source if source_bus is None else source_bus, to if to_bus is None else to_bus
        else:
            source_node, to_node = hosts[source_node], hosts[to_node]
        ends = source, to, source_node, to_node
        cells: tuple[Any, ...] = (*_NO_COLLECTIVE, *ends, *kind, size, *_NOTHING_REDUCED, settings[note])
        yield RowKey(*cells)


_OF_PAIR = (
    *("source", "destination", "source_bus_id", "destination_bus_id", "source_node", "destination_node"),
    *("scope", "direction", "engine", "peer", "size_bytes", "note"),
)
_NO_COLLECTIVE = (None,) * RowKey.columns().index("source")
_NOTHING_REDUCED = (None,) * (RowKey.columns().index("setting") - RowKey.columns().index("dtype"))


def siblings(keys: Iterable[RowKey]) -> Iterator[list[RowKey]]:
    """Group keys whose rows share noise: collectives that differ only in size and placement, or copies of different
    pairs.
    """
    yield from group_by(keys, lambda key: (_BUT_PAIR if key.collective is None else _BUT_SIZE)(key)).values()


_BUT_SIZE, _BUT_PAIR = (
    attrgetter(*(name for name in RowKey.columns() if name not in others))
    for others in (("size_bytes", "placement"), ("source", "destination", "source_node", "destination_node"))
)


LEAST_OTHERS = 2
"""With only one other group, no group is typical. Then both groups should be as fast as the faster one."""


class SiblingFigure(Struct, frozen=True):
    """The time and bandwidth of similar groups in the same run, with the number of these groups and a description."""

    time_us: float
    busbw_gb_s: float
    others: int
    source: str


def find_sibling_figures(rows: Sequence[report.CollectiveRow]) -> list[SiblingFigure | None]:
    """Return for each row what similar groups of ranks in the same run reach, or None without similar groups.

    Groups are similar if their collective, size, ranks, nodes and limit are the same. The reference is the median of
    the other groups, or the faster of the two middle ones. So one slow group among three is never the reference. Of two
    groups, the faster one is the reference. Rows with wrong data do not count.
    """
    keys = [(replace(collective_key(row), group=None), row.limit_gb_s) for row in rows]
    siblings_by_key = group_by(range(len(rows)), lambda number: keys[number])
    figures: list[SiblingFigure | None] = []
    for number, row in enumerate(rows):
        right = [rows[other] for other in siblings_by_key[keys[number]] if other != number and not rows[other].wrong]
        others = len(right)
        if not others:
            figures.append(None)
            continue
        if others < LEAST_OTHERS:
            fastest = min((*([] if row.wrong else [row]), *right), key=lambda row: row.time_us)
            reference, source = fastest, "the faster of the two groups in this run"
        else:
            reference = sorted(right, key=lambda row: row.time_us)[(others - 1) // 2]
            source = f"{plural(others, 'other group')} of this run"
        figures.append(SiblingFigure(reference.time_us, reference.reached_gb_s, others, source))
    return figures


Points = tuple[tuple[int, float], ...]
"""Sizes in bytes with a value each, by ascending size."""

_MOST_LINES = 4
_FEWEST_SIZES = 3
HOST = "host"
_ENGINES = {"ce": "copy engine", "sm": "kernel"}
OPEN_ENDED = "limit and expected value are unknown, so the axis ends at the highest measured value"


class CurveLine(Struct, frozen=True):
    name: str
    points: Points


class Chart(Struct, frozen=True):
    """Curves over size with the same unit, and for comparison the limit of the links and the expected values.

    `axis` names the horizontal axis. `marks` has values on it, each with the words to show there.
    """

    title: str
    unit: str
    lines: tuple[CurveLine, ...]
    limit: Points = ()
    expected: Points = ()
    logarithmic: bool = False
    axis: str = "size, log scale"
    marks: tuple[tuple[int, str], ...] = ()

    @property
    def highest(self) -> float:
        """The highest value among curves, limits and expectations, so that the axis shows how far a curve is below
        its limit.
        """
        drawn = (*(line.points for line in self.lines), self.limit, self.expected)
        return max((value for points in drawn for _, value in points), default=0.0)

    @property
    def is_open_ended(self) -> bool:
        """Whether the chart has nothing to compare its curves with. Then even the highest curve may be slow."""
        return not (self.limit or self.expected or self.logarithmic or self.is_comparison)

    @property
    def is_comparison(self) -> bool:
        """Whether the curves are the old and the new result."""
        return [line.name for line in self.lines] == ["before", "after"]


def charts(rows: Sequence[report.Row]) -> list[Chart]:
    """Return a bandwidth chart and a time chart per type of measurement, if it has at least three sizes."""
    collectives = [row for row in rows if isinstance(row, report.CollectiveRow)]
    pairs = [row for row in rows if isinstance(row, report.PairRow) and HOST not in (row.source, row.destination)]
    found: list[Chart] = []
    for members in group_by(collectives, lambda row: (row.dtype, row.op, row.group, row.backend, row.setting)).values():
        found += _collective_charts(members)
    for copies in group_by(pairs, lambda row: (row.engine, row.direction, row.peer)).values():
        found += _pair_charts(copies)
    return [chart for chart in found if any(len(line.points) >= _FEWEST_SIZES for line in chart.lines)]


def compared_charts(rows: Sequence[ComparisonRow]) -> list[Chart]:
    """Return one chart with the old and the new result per series with at least three sizes.

    If a series has several pairs, show the slowest pair at each size.
    """
    both = [row for row in rows if row.status == Status.COMPARED and row.size_bytes is not None]
    found = []
    for name, members in group_by(both, _series_name).items():
        lowest: dict[str, dict[int, float]] = {"base_gb_s": {}, "new_gb_s": {}}
        for row in members:
            for field, by_size in lowest.items():
                if (value := getattr(row, field)) is not None:
                    by_size[row.size_bytes or 0] = min(value, by_size.get(row.size_bytes or 0, value))
        lines = tuple(
            CurveLine(side, _points(by_size.items()))
            for side, by_size in zip(("before", "after"), lowest.values(), strict=True)
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
    return " ".join(
        filter(None, ("copies:", _ENGINES.get(row.engine or "", row.engine), row.direction, peer, row.setting, ends))
    )


def _collective_charts(rows: Sequence[report.CollectiveRow]) -> list[Chart]:
    what = " ".join(filter(None, (rows[0].collective, rows[0].dtype, rows[0].op, rows[0].group, rows[0].setting)))
    lines = {
        name.replace("_", " "): [row for row in rows if row.placement == name]
        for name in dict.fromkeys(row.placement for row in rows)
    }
    bandwidth = tuple(
        CurveLine(name, _points((row.size_bytes, row.busbw_gb_s) for row in members)) for name, members in lines.items()
    )
    times = tuple(
        CurveLine(name, _points((row.size_bytes, row.time_us) for row in members)) for name, members in lines.items()
    )
    limit = _points((row.size_bytes, row.limit_gb_s) for row in rows)
    expected = _points((row.size_bytes, row.expected_gb_s) for row in rows)
    expected_times = _points((row.size_bytes, row.expected_us) for row in rows)
    return [
        Chart(f"{what}: bus bandwidth", "GB/s", bandwidth, limit, expected),
        Chart(f"{what}: time", "µs", times, expected=expected_times, logarithmic=True),
    ]


def _pair_charts(rows: Sequence[report.PairRow]) -> list[Chart]:
    access = f"peer access {rows[0].peer}" if rows[0].peer else ""
    engine = _ENGINES.get(rows[0].engine or "", rows[0].engine)
    what = "copies: " + ", ".join(filter(None, (engine, rows[0].direction, access)))
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
    """Return one line per pair. If there are too many pairs, return the highest and the lowest values."""
    by_pair = group_by(rows, lambda row: (row.source, row.destination)).values()
    if len(by_pair) <= _MOST_LINES:
        return tuple(
            CurveLine(
                f"{members[0].source} → {members[0].destination}",
                _points((row.size_bytes or 0, value(row)) for row in members),
            )
            for members in by_pair
        )
    known = sorted((row.size_bytes or 0, figure) for row in rows if (figure := value(row)) is not None)
    by_size = [(size, [figure for _, figure in found]) for size, found in groupby(known, key=lambda item: item[0])]
    return (
        CurveLine(f"highest of {len(by_pair)} pairs", tuple((size, max(found)) for size, found in by_size)),
        CurveLine("lowest", tuple((size, min(found)) for size, found in by_size)),
    )


def _points(values: Iterable[tuple[int, float | None]]) -> Points:
    return tuple(sorted({size: value for size, value in values if value is not None}.items()))
