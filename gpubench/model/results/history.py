"""Earlier results of a machine: dated files in a folder, expected values from them, and trends over time."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import NormalDist, median
from typing import Any

from msgspec import Struct, field

from gpubench.model.facts.environment import logs_every_operation
from gpubench.model.results.compare import HOST, RowKey, collective_key, pair_key, siblings
from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Row
from gpubench.model.results.result_file import SHOWN_BY_ROWS
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.statistics import MEDIAN_EFFICIENCY, Noise, robust_deviation
from gpubench.model.terms.units import group_by, plural, shorten
from gpubench.model.terms.verdict import Verdict

_NAME = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\dT\d{6}Z)-(?P<command>[a-z0-9]+)-(?P<host>[\w.+-]+)(?:~(?P<number>\d{1,9}))?\.json",
    re.ASCII,
)
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_MOST_HOST_CHARACTERS = 100
_MOST_VALUE_CHARACTERS = 40

_NO_KIND = ("strict", "evidence", "seed", "timeout_s", "gpus", "past")
"""Options that may differ between comparable results. `gpus` names devices, whose models are compared separately."""

CUT_SHORT = "incomplete, or still running"  # Why an incomplete result is not used
_TOLD_BY_ROWS = (
    *SHOWN_BY_ROWS,
    *("mode", "graph", "settings", "groups", "ranks", "backend", "check"),
)
"""Options that select rows or verify data outside the timed loop. They do not change times."""

_MOVE_NO_DATA = ("numpy", "CuPy")  # Libraries that only allocate buffers and do nothing in the timed loop
_NO_SETTING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE")
"""Variables that do not change times. Some of them select GPUs, which are compared separately."""

_LOG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
"""Variables that change times only if NCCL logs every operation. gpubench sets them itself during start-up."""


class DatedName(Struct, frozen=True, order=True):
    """The file name of a dated result: start in UTC, number within the second, command and host. Names sort by time."""

    stamp: str
    number: int
    command: str
    host: str

    def __str__(self) -> str:
        number = f"~{self.number}" if self.number > 1 else ""
        return f"{self.stamp}-{self.command}-{self.host}{number}.json"

    @classmethod
    def of(cls, metadata: Metadata, number: int = 1) -> "DatedName":
        """Return the file name for a run."""
        began = datetime.fromisoformat(metadata.started_at).astimezone(UTC)
        return cls(began.strftime("%Y-%m-%dT%H%M%SZ"), number, metadata.subject, cls.format_hosts(metadata.hosts))

    @staticmethod
    def format_hosts(hosts: Sequence[str]) -> str:
        """Return the first host with safe characters for a file name, then '+' and the number of other hosts."""
        different = list(dict.fromkeys(hosts))
        first = _NOT_IN_NAMES.sub("_", different[0])[:_MOST_HOST_CHARACTERS]
        return first + (f"+{len(different) - 1}" if len(different) > 1 else "")

    @classmethod
    def parse(cls, text: str) -> "DatedName | None":
        """Parse a file name. Return None if it is not the name of a dated result."""
        found = _NAME.fullmatch(text)
        return found and cls(found["stamp"], int(found["number"] or 1), found["command"], found["host"])


class ResultHead(Struct, frozen=True, kw_only=True):
    """The part of a result's metadata that decides whether it is comparable with another result.

    `models` has one entry per GPU, sorted. It is empty if unknown. `options` contains JSON values. `places` are UUIDs
    or PCI addresses of GPUs, or host names for ranks without a GPU. `libraries` contains versions without file names.
    """

    name: str
    run_id: str
    started_at: str
    command: str
    verdict: str
    complete: bool
    origin: str
    hosts: tuple[str, ...]
    models: tuple[str, ...]
    options: Mapping[str, str]
    places: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any], name: str, verdict: str, *, complete: bool) -> "ResultHead":
        """Read metadata in plain form. Raise KeyError, TypeError, AttributeError or ValueError if it is malformed."""
        options = dict(metadata["options"])
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        described = [str(text).partition(" ") for text in options.get("gpus", {}).values()]
        places = [rank["gpu_uuid"] or rank["gpu_bus_id"] or rank["host"] for rank in metadata["ranks"]]
        if "sizes" in options:
            # Compare the requested sizes, because free memory decides which sizes are dropped
            dropped = [dropped["size_bytes"] for dropped in metadata["dropped_sizes"]]
            options["sizes"] = sorted({*(options["sizes"] or ()), *dropped})
        options |= {"backend": metadata["backend"], "ranks": len(metadata["ranks"])}
        return cls(
            name=name,
            run_id=str(metadata["run_id"]),
            started_at=datetime.fromisoformat(metadata["started_at"]).astimezone(UTC).isoformat(timespec="seconds"),
            command=str(metadata["subject"]),
            verdict=verdict,
            complete=complete,
            origin=str(metadata["origin"]),
            hosts=tuple(sorted({str(host) for host in metadata["hosts"]})),
            models=tuple(sorted(models or [model for _, _, model in described])),
            options={key: json.dumps(value, sort_keys=True) for key, value in options.items() if key not in _NO_KIND},
            places=tuple(sorted(map(str, places or [bus_id for bus_id, _, _ in described]))),
            libraries={str(name): str(text).partition(" from ")[0] for name, text in metadata["libraries"].items()},
            settings=_settings_that_change_times(metadata["environment"]),
            topology=metadata["topology"],
        )

    @property
    def machine(self) -> tuple[object, ...]:
        """The origin and the hosts, which identify a machine. A replayed or simulated machine never equals the real
        one.
        """
        return self.origin, self.hosts

    @property
    def kind(self) -> tuple[object, ...]:
        """Command, machine, GPU models and options. They are equal for comparable results."""
        return self.command, self.machine, self.models, tuple(sorted(self.options.items()))

    def find_differences(self, other: "ResultHead") -> Iterator[str]:
        """Yield the differences from another result of the same command: 'another machine: node8, not node7'."""
        yield from self._machine_differences(other)
        changed = []
        for name in {**self.options, **other.options}:
            own, others = (head.options.get(name, "missing") for head in (self, other))
            if own != others:
                texts = [value.replace('"', "").strip("[]") for value in (own, others)]
                is_short = max(map(len, texts)) <= _MOST_VALUE_CHARACTERS
                changed.append(f"{name} {texts[0]}, not {texts[1]}" if is_short else name)
        if changed:
            yield f"other options: {'; '.join(changed)}"

    def find_obstacles(self, other: "ResultHead") -> Iterator[str]:
        """Yield why this result cannot be the reference for another one: 'another driver: 570.1, not 580.2'.

        The sets of rows may differ. On the same GPUs the topology may differ too, so that a lost link shows as a
        slowdown.
        """
        yield from self._machine_differences(other)
        if self.places != other.places:
            yield f"other ranks or GPUs: {_different_place(self, other)}, not {_different_place(other, self)}"
        if not self.places and self.has_other_topology(other):
            yield f"another topology: {self.topology}, not {other.topology}"
        for name in dict.fromkeys((*self.libraries, *other.libraries)):
            if name not in _MOVE_NO_DATA and self.libraries.get(name) != other.libraries.get(name):
                yield f"another {name}: {_against(name, self.libraries, other.libraries)}"
        for what, own, others in (
            ("settings", self.settings, other.settings),
            ("options", self.options, other.options),
        ):
            names = [name for name in {**own, **others} if what == "settings" or name not in _TOLD_BY_ROWS]
            changed = [name for name in names if own.get(name) != others.get(name)]
            if changed:
                yield f"other {what}: " + "; ".join(f"{name} {_against(name, own, others)}" for name in changed)

    def has_other_topology(self, other: "ResultHead") -> bool:
        """Return whether both topologies are known and differ."""
        return None not in (self.topology, other.topology) and self.topology != other.topology

    def _machine_differences(self, other: "ResultHead") -> Iterator[str]:
        if self.origin != other.origin:
            yield f"another origin: {self.origin}, not {other.origin}"
        if self.hosts != other.hosts:
            hosts = [shorten(head.hosts, 1) or "none" for head in (self, other)]
            yield f"another machine: {hosts[0]}, not {hosts[1]}"
        if self.models != other.models:
            yield f"other GPUs: {_models(self)}, not {_models(other)}"


def _settings_that_change_times(environment: Mapping[str, str]) -> dict[str, str]:
    level, subsystems = (str(environment.get(name, "")) for name in _LOG)
    silent = _NO_SETTING if logs_every_operation(level, subsystems) else (*_NO_SETTING, *_LOG)
    return {str(name): str(value) for name, value in environment.items() if name not in silent}


def _different_place(head: ResultHead, other: ResultHead) -> str:
    """Return the first place that only `head` has. If the numbers of places differ, return the number."""
    if len(head.places) != len(other.places):
        return str(len(head.places))
    return shorten_value(next(place for place in head.places if head.places.count(place) > other.places.count(place)))


def _against(name: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    values = (shorten_value(texts.get(name, "none").replace('"', "").strip("[]")) for texts in (own, other))
    return ", not ".join(values)


def shorten_value(text: str) -> str:
    return text if len(text) <= _MOST_VALUE_CHARACTERS else text[: _MOST_VALUE_CHARACTERS - 1] + "…"


def _models(head: ResultHead) -> str:
    """Return the GPU models with their counts, in words."""
    return " and ".join(f"{count} × {model}" for model, count in Counter(head.models).items()) or "none known"


LEAST_RESULTS = 5
"""With fewer results there is no expectation. Of five results, the second fastest is expected, so that one odd run
does not decide. Five results have four differences between consecutive runs, which give the noise. `gpubench
compare` also needs five.
"""

_NEAR_SIZES = 64  # Rows whose sizes differ by at most this factor share their noise
_QUARTILE = NormalDist().inv_cdf(0.75)  # The median of the fastest half is the first quartile of all runs
_MOST_LOG = 20.0  # Limit for the argument of exp(), because five noisy results may give an infinite threshold
_BAD_RUN = (Verdict.FAIL, Verdict.ERROR)
_WELL = (None, Verdict.PASS, Verdict.SKIP)


class PastResult(Struct, frozen=True):
    head: ResultHead
    rows: Sequence[CollectiveRow] = ()
    pairs: Collection[PairRow] = ()


class PastFigure(Struct, frozen=True):
    """The expected time and bandwidth of a row from earlier results, and the noise between runs.

    The expected values come from the median of the fastest half of the runs. `gb_s` is the bus bandwidth of a
    collective, or the bandwidth of a pair. `noise` is the noise of the logarithm of the time.
    """

    time_us: float | None
    gb_s: float | None
    noise: Noise
    runs: int
    source: str

    @property
    def deviation(self) -> float:
        """The standard deviation between runs, relative to the time."""
        return math.expm1(self.noise.deviation)

    def slow_beyond(self, rows: int) -> float:
        """Return how many times slower than expected a row must be to exceed noise, in a run with this many rows.

        The expected time is the first quartile, so the factor includes the distance from there to the median.
        """
        return math.exp(min(_MOST_LOG, _QUARTILE * self.noise.deviation + self.noise.bound(rows)))


class LeftOut(Struct, frozen=True):
    """Results that were not used for the same reason ('of another driver'), with an example ('570.1, not 580.2')."""

    reason: str
    example: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.reason}" + (f" ({self.example})" if self.example else "")


class PastFigures(Struct, frozen=True):
    """The expected values of all rows from earlier results. `problem` is the reason if a folder has none.

    `used` is the number of results. `other_topology_count` is the number of those with a topology that differs from the
    run's.
    """

    folder: str
    used: int = 0
    other_topology_count: int = 0
    left_out: tuple[LeftOut, ...] = ()
    problem: str = ""
    figures: Mapping[RowKey, PastFigure] = field(default_factory=dict)

    @classmethod
    def of(
        cls, results: Iterable[PastResult], own: ResultHead, folder: str, left_out: Iterable[LeftOut] = ()
    ) -> "PastFigures":
        """Compute expected values from the results that are comparable with the run `own`.

        `left_out` are results that could not be read.
        """
        newest_first = sorted(results, key=lambda result: result.head.started_at, reverse=True)
        unfit = [reason for result in newest_first if (reason := why_unfit(result.head, own)) is not None]
        fit = [result for result in newest_first if why_unfit(result.head, own) is None]
        return cls(
            folder,
            used=len(fit),
            other_topology_count=sum(result.head.has_other_topology(own) for result in fit),
            left_out=(*left_out, *count_reasons(unfit)),
            figures=_figures(fit[::-1], folder),
        )

    def collective_figure(self, row: CollectiveRow) -> PastFigure | None:
        """Return the expected values of a collective row, or None if too few results contain it."""
        return self.figures.get(collective_key(row))

    def pair_figure(self, row: PairRow) -> PastFigure | None:
        """Return the expected values of a pair by its PCI addresses, or None if too few results contain it."""
        return self.figures.get(pair_key(row))

    @property
    def note(self) -> str:
        """A sentence about the used and unused results. Empty if there are no earlier results."""
        if self.problem:
            return f"this machine's past is unknown: {self.problem}"
        if not self.used and not self.left_out:
            return ""
        text = f"this machine's past: {plural(self.used, 'result')} of {self.folder}"
        if self.used < LEAST_RESULTS:
            text += f", but judging a row needs at least {LEAST_RESULTS}"
        if self.other_topology_count:
            text += f"; links or NICs have changed since {self.other_topology_count} of them (another topology)"
        return text + (f"; left out: {', '.join(map(str, self.left_out))}" if self.left_out else "")


def why_unfit(head: ResultHead, own: ResultHead) -> tuple[str, str] | None:
    """Return why a result is not comparable with the run `own`, with the values that differ. None if it is
    comparable.
    """
    if not head.complete:
        return CUT_SHORT, ""
    if head.started_at > own.started_at:
        return "started after this run", ""
    if head.verdict in _BAD_RUN:
        return f"whose verdict is {head.verdict}", ""
    obstacle = next(head.find_obstacles(own), None)
    if obstacle is None:
        return None
    reason, _, example = obstacle.partition(": ")
    return f"of {reason}", example


def count_reasons(reasons: Iterable[tuple[str, str]]) -> tuple[LeftOut, ...]:
    """Count results by reason. The first result with a reason, which is the newest, is the example."""
    known = list(reasons)
    counts = Counter(reason for reason, _ in known)
    examples = dict(reversed(known))
    return tuple(LeftOut(reason, examples[reason], count) for reason, count in counts.items())


class _Measured(Struct, frozen=True):
    time_us: float | None
    gb_s: float | None

    @property
    def cost(self) -> float:
        """A value proportional to the time. All rows with the same key have the same factor."""
        return 1 / self.gb_s if self.gb_s else self.time_us or 0.0


def _figures(oldest_first: Sequence[PastResult], folder: str) -> dict[RowKey, PastFigure]:
    measured: dict[RowKey, list[_Measured]] = {}
    for result in oldest_first:
        for key, figure in _measured_rows(result).items():
            measured.setdefault(key, []).append(figure)
    known = {key: runs for key, runs in measured.items() if len(runs) >= LEAST_RESULTS}
    noise = _widen_by_neighbours({key: _run_noise(runs) for key, runs in known.items()})
    return {key: _figure(runs, noise[key], folder) for key, runs in known.items()}


def _figure(runs: Sequence[_Measured], noise: Noise, folder: str) -> PastFigure:
    """Return the median of the fastest half as the expected value, so that a slow decline does not lower it."""
    fastest = sorted(runs, key=lambda run: run.cost)[: (len(runs) + 1) // 2]
    level = fastest[len(fastest) // 2]
    source = f"this machine's past, {plural(len(runs), 'result')} of {folder}"
    return PastFigure(level.time_us, level.gb_s, noise, len(runs), source)


def _measured_rows(result: PastResult) -> dict[RowKey, _Measured]:
    found = [
        (collective_key(row), _Measured(row.time_us, row.busbw_gb_s))
        for row in result.rows
        if row.verdict in _WELL and not row.wrong
    ]
    found += [
        (pair_key(pair), _Measured(pair.latency_us, pair.bandwidth_gb_s))
        for pair in result.pairs
        if pair.verdict in _WELL
    ]
    alike = group_by([item for item in found if item[1].cost > 0], lambda item: item[0])
    ordered = {key: sorted((run for _, run in rows), key=lambda run: run.cost) for key, rows in alike.items()}
    return {key: rows[len(rows) // 2] for key, rows in ordered.items()}


def _run_noise(runs: Sequence[_Measured]) -> Noise:
    """Return the noise between consecutive runs, from the robust deviation of the differences of logarithms.

    A slow decline does not add to this noise. `measure.compare.noise` uses all pairs of runs instead, because its
    runs have no order in time.
    """
    steps = [math.log(later.cost / earlier.cost) for earlier, later in pairwise(runs)]
    found = robust_deviation(steps)
    return Noise(found.deviation / math.sqrt(2), found.freedom) if found is not None else Noise(0.0, math.inf)


def _widen_by_neighbours(noise: Mapping[RowKey, Noise]) -> dict[RowKey, Noise]:
    """Raise the noise of each row to at least the median over rows of similar size, and add half their degrees of
    freedom.

    A row with few differences may have little noise by chance. Rows in the same run share part of their noise, so only
    half of the degrees of freedom is independent.
    """
    found: dict[RowKey, Noise] = {}
    for family in siblings(noise):
        for key in family:
            size = key.size_bytes or 1
            near = [
                noise[other] for other in family if size / _NEAR_SIZES <= (other.size_bytes or 1) <= size * _NEAR_SIZES
            ]
            deviation = max(noise[key].deviation, median(other.deviation for other in near))
            freedom = MEDIAN_EFFICIENCY * sum(other.freedom for other in near) / 2
            found[key] = Noise(deviation, max(noise[key].freedom, freedom))
    return found


class TrendPoint(Struct, frozen=True):
    """The value from one run in GB/s, with the start (ISO 8601, UTC) and the verdict of that run."""

    started_at: str
    gb_s: float
    verdict: Verdict


class Trend(Struct, frozen=True):
    """A value over time, the oldest run first."""

    name: str
    points: tuple[TrendPoint, ...]


def headline_figures(rows: Iterable[Row]) -> dict[str, float]:
    """Return a run's main values in GB/s: the peak bus bandwidth of each collective, and the slowest GPU pair and
    host copy.

    Pairs count at the largest size, in one direction, with peer access, by copy engine or NCCL. Host memory is pinned.
    """
    known = list(rows)
    return {
        **_peaks([row for row in known if isinstance(row, CollectiveRow)]),
        **_slowest([row for row in known if isinstance(row, PairRow)]),
    }


def _peaks(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    most = max((row.ranks for row in rows), default=0)
    for row in rows:
        name = f"{row.collective}: peak busbw"
        if row.mode == "throughput" and row.busbw_gb_s is not None and (row.group or row.ranks == most):
            peaks[name] = max(row.busbw_gb_s, peaks.get(name, 0.0))
    return peaks


def _slowest(rows: Sequence[PairRow]) -> dict[str, float]:
    ways: dict[str, list[PairRow]] = {}
    for row in rows:
        name = _way(row)
        if name is not None and row.bandwidth_gb_s is not None:
            ways.setdefault(name, []).append(row)
    slowest = {}
    for name, members in ways.items():
        largest = max(row.size_bytes or 0 for row in members)
        slowest[name] = min(row.bandwidth_gb_s or 0.0 for row in members if (row.size_bytes or 0) == largest)
    return slowest


def _way(row: PairRow) -> str | None:
    if HOST in (row.source, row.destination):
        if HostMemory.parse_note(row.note) is not HostMemory.PINNED:
            return None
        return "host memory to GPU: slowest" if row.source == HOST else "GPU to host memory: slowest"
    one_way = row.direction in ("write", "read") and row.engine in ("ce", "nccl") and row.peer != "off"
    return "p2p: slowest pair" if one_way else None


def trends(runs: Iterable[tuple[str, Verdict, Mapping[str, float]]]) -> Iterator[Trend]:
    """Yield one trend per value. Each run is a start time, a verdict, and values by name."""
    points: dict[str, list[TrendPoint]] = {}
    for started_at, verdict, figures in sorted(runs, key=lambda run: run[0]):
        for name, gb_s in figures.items():
            points.setdefault(name, []).append(TrendPoint(started_at, gb_s, verdict))
    yield from (Trend(name, tuple(values)) for name, values in points.items())
