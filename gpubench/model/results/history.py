"""Earlier results of a machine: dated files in a folder, expected values from them, and trends from run to run."""

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
"""Options that change no number: how it is judged and told, by which past, a simulation's noise, how long a driver may
think. `gpus`
are devices and no option; which models they are counts by itself."""

CUT_SHORT = "cut short, or still running"  # Why a result without an end is left out
_TOLD_BY_ROWS = (
    *SHOWN_BY_ROWS,
    *("mode", "graph", "settings", "groups", "ranks", "backend", "check"),
)
"""Options that say which rows there are, and so change none of them; nor does it whether data are verified, which
happens after the clock has stopped."""

_MOVE_NO_DATA = ("numpy", "CuPy")  # Libraries that hold buffers, and are not asked while the clock runs
_NO_SETTING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE")
"""Variables that change no number: which GPUs they leave counts by itself."""

_LOG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
"""They change a number only where NCCL logs every operation; gpubench has its start logged itself."""


class DatedName(Struct, frozen=True, order=True):
    """The name of a result: its begin in UTC, `number` in that second, command and host, in order of time."""

    stamp: str
    number: int
    command: str
    host: str

    def __str__(self) -> str:
        number = f"~{self.number}" if self.number > 1 else ""
        return f"{self.stamp}-{self.command}-{self.host}{number}.json"

    @classmethod
    def of(cls, metadata: Metadata, number: int = 1) -> "DatedName":
        """The name of a run: its first host, and behind a + how many others took part."""
        began = datetime.fromisoformat(metadata.started_at).astimezone(UTC)
        return cls(began.strftime("%Y-%m-%dT%H%M%SZ"), number, metadata.subject, cls.host_of(metadata.hosts))

    @staticmethod
    def host_of(hosts: Sequence[str]) -> str:
        """The hosts of a run as names of files spell them."""
        different = list(dict.fromkeys(hosts))
        first = _NOT_IN_NAMES.sub("_", different[0])[:_MOST_HOST_CHARACTERS]
        return first + (f"+{len(different) - 1}" if len(different) > 1 else "")

    @classmethod
    def parse(cls, text: str) -> "DatedName | None":
        """The parts of a file's name; None where it is no name of a dated result."""
        found = _NAME.fullmatch(text)
        return found and cls(found["stamp"], int(found["number"] or 1), found["command"], found["host"])


class ResultHead(Struct, frozen=True, kw_only=True):
    """The metadata of a result, which stand before its rows: they decide which other results it may be compared with.

    `models` are its GPUs' in order of name, one a GPU, none where it does not tell; `options` has values as JSON.
    `places` are the UUIDs or bus ids of its GPUs, of a rank without one its host; `libraries` have no file names.
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
        """The head of a result from plain metadata. Raises KeyError, TypeError, AttributeError or ValueError."""
        options = dict(metadata["options"])
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        described = [str(text).partition(" ") for text in options.get("gpus", {}).values()]
        places = [rank["gpu_uuid"] or rank["gpu_bus_id"] or rank["host"] for rank in metadata["ranks"]]
        if "sizes" in options:
            # What was asked for is the kind; how much memory was free decides what is dropped of it.
            dropped = [each["size_bytes"] for each in metadata["dropped_sizes"]]
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
            settings=_bearing_on_speed(metadata["environment"]),
            topology=metadata["topology"],
        )

    @property
    def machine(self) -> tuple[object, ...]:
        """The machine: the same for two results of it. A replayed or simulated one is a machine of its own."""
        return self.origin, self.hosts

    @property
    def kind(self) -> tuple[object, ...]:
        """The command, machine, GPUs and options: the same for results that may be compared."""
        return self.command, self.machine, self.models, tuple(sorted(self.options.items()))

    def differences_from(self, other: "ResultHead") -> Iterator[str]:
        """In what this is another kind than a result of the same command: 'another machine: node8, not node7'."""
        yield from self._machine_differences(other)
        changed = [name for name in {**self.options, **other.options} if _option(self, name) != _option(other, name)]
        if changed:
            yield "other options: " + "; ".join(_changed(name, self, other) for name in changed)

    def obstacles_to(self, other: "ResultHead") -> Iterator[str]:
        """Why the rows of this are no measure of another's of the same command: 'another driver: 570.1, not 580.2'.

        Which rows there are may differ. So may the topology where the GPUs are the same: a lost link is what the past
        is to show.
        """
        yield from self._machine_differences(other)
        if self.places != other.places:
            yield f"other ranks or GPUs: {_place_beside(self, other)}, not {_place_beside(other, self)}"
        if not self.places and self.is_wired_otherwise(other):
            yield f"another topology: {self.topology}, not {other.topology}"
        for name in dict.fromkeys((*self.libraries, *other.libraries)):
            if name not in _MOVE_NO_DATA and self.libraries.get(name) != other.libraries.get(name):
                yield f"another {name}: {_against(name, self.libraries, other.libraries)}"
        for what, own, others in (
            ("settings", self.settings, other.settings),
            ("options", _options_beside_rows(self.options), _options_beside_rows(other.options)),
        ):
            changed = [name for name in {**own, **others} if own.get(name) != others.get(name)]
            if changed:
                yield f"other {what}: " + "; ".join(f"{name} {_against(name, own, others)}" for name in changed)

    def is_wired_otherwise(self, other: "ResultHead") -> bool:
        """True where both tell of a topology, and it is not the same."""
        return None not in (self.topology, other.topology) and self.topology != other.topology

    def _machine_differences(self, other: "ResultHead") -> Iterator[str]:
        if self.origin != other.origin:
            yield f"another origin: {self.origin}, not {other.origin}"
        if self.hosts != other.hosts:
            yield f"another machine: {_hosts(self)}, not {_hosts(other)}"
        if self.models != other.models:
            yield f"other GPUs: {_models(self)}, not {_models(other)}"


def _bearing_on_speed(environment: Mapping[str, str]) -> dict[str, str]:
    """The recorded settings without those that change no number."""
    level, subsystems = (str(environment.get(name, "")) for name in _LOG)
    silent = _NO_SETTING if logs_every_operation(level, subsystems) else (*_NO_SETTING, *_LOG)
    return {str(name): str(value) for name, value in environment.items() if name not in silent}


def _options_beside_rows(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in _TOLD_BY_ROWS}


def _place_beside(head: ResultHead, other: ResultHead) -> str:
    """The first place that only one of two has; how many there are, where their numbers differ."""
    if len(head.places) != len(other.places):
        return str(len(head.places))
    return shortened(next(place for place in head.places if head.places.count(place) > other.places.count(place)))


def _against(name: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    values = (shortened(each.get(name, "none").replace('"', "").strip("[]")) for each in (own, other))
    return ", not ".join(values)


def shortened(text: str) -> str:
    """The beginning of a value that another's file has."""
    return text if len(text) <= _MOST_VALUE_CHARACTERS else text[: _MOST_VALUE_CHARACTERS - 1] + "…"


def _hosts(head: ResultHead) -> str:
    return shorten(head.hosts, 1) or "none"


def _models(head: ResultHead) -> str:
    """The GPU models of a node, however many of each: one with a GPU less is still of the kind."""
    return " and ".join(f"{count} × {model}" for model, count in Counter(head.models).items()) or "none known"


def _option(head: ResultHead, name: str) -> str:
    return head.options.get(name, "not there")


def _changed(name: str, one: ResultHead, other: ResultHead) -> str:
    values = [_option(head, name).replace('"', "").strip("[]") for head in (one, other)]
    return f"{name} {values[0]}, not {values[1]}" if max(map(len, values)) <= _MOST_VALUE_CHARACTERS else name


LEAST_RESULTS = 5
"""Fewer results expect nothing of a row. With five the level is the second fastest, so that no single odd run makes it,
and four steps from run to run say how steady the row is; `gpubench compare` too lets a row count alone from five on."""

_NEAR_SIZES = 64  # Rows up to so many times larger or smaller lend a row their noise
_QUARTILE = NormalDist().inv_cdf(0.75)  # The middle of the fastest half is the fastest quarter
_MOST_LOG = 20.0  # Five results of a busy host know so little of their noise that no time at all stands out
_BAD_RUN = (Verdict.FAIL, Verdict.ERROR)
_WELL = (None, Verdict.PASS, Verdict.SKIP)


class PastResult(Struct, frozen=True):
    """An earlier result: its metadata and verdict, its rows and pairs."""

    head: ResultHead
    rows: Sequence[CollectiveRow] = ()
    pairs: Collection[PairRow] = ()


class PastFigure(Struct, frozen=True):
    """The level of a row in the past: the median of the fastest half of its results, and the noise between runs.

    `gb_s` is the busbw of a collective and the bandwidth of a pair; `noise` is that of the logarithm of the time.
    """

    time_us: float | None
    gb_s: float | None
    noise: Noise
    runs: int
    source: str

    @property
    def deviation(self) -> float:
        """The standard deviation from run to run, as a share of the time."""
        return math.expm1(self.noise.deviation)

    def slow_beyond(self, rows: int) -> float:
        """How many times the level a time has to exceed for chance not to explain it, in a run of so many rows.

        The usual time is that much above the level which the middle of the fastest half lies below it.
        """
        return math.exp(min(_MOST_LOG, _QUARTILE * self.noise.deviation + self.noise.bound(rows)))


class LeftOut(Struct, frozen=True):
    """Results that were left out for one reason ('of another driver'), and the newest one's ('570.1, not 580.2')."""

    reason: str
    example: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.reason}" + (f" ({self.example})" if self.example else "")


class PastFigures(Struct, frozen=True):
    """What the rows of a run may be held against. `problem` is why a folder tells nothing.

    `used` is the number of results, of which `wired_otherwise` have another topology than the run.
    """

    folder: str
    used: int = 0
    wired_otherwise: int = 0
    left_out: tuple[LeftOut, ...] = ()
    problem: str = ""
    figures: Mapping[RowKey, PastFigure] = field(default_factory=dict)

    @classmethod
    def of(
        cls, results: Iterable[PastResult], own: ResultHead, folder: str, left_out: Iterable[LeftOut] = ()
    ) -> "PastFigures":
        """The figures of those results that compare with the run `own`; `left_out` are unread ones."""
        newest_first = sorted(results, key=lambda each: each.head.started_at, reverse=True)
        unfit = [reason for each in newest_first if (reason := why_unfit(each.head, own)) is not None]
        fit = [each for each in newest_first if why_unfit(each.head, own) is None]
        return cls(
            folder,
            used=len(fit),
            wired_otherwise=sum(each.head.is_wired_otherwise(own) for each in fit),
            left_out=(*left_out, *tallied(unfit)),
            figures=_figures(fit[::-1], folder),
        )

    def time_of(self, row: CollectiveRow) -> PastFigure | None:
        """The level of a row of a collective; None where too few results have it."""
        return self.figures.get(collective_key(row))

    def copy_of(self, row: PairRow) -> PastFigure | None:
        """The level of a pair, known by bus id; None where too few results have it."""
        return self.figures.get(pair_key(row))

    @property
    def note(self) -> str:
        """What was used and what was left out, in a sentence; empty where there is no earlier result."""
        if self.problem:
            return f"this machine's past is not known: {self.problem}"
        if not self.used and not self.left_out:
            return ""
        text = f"this machine's past: {plural(self.used, 'result')} of {self.folder}"
        if self.used < LEAST_RESULTS:
            text += f", and {LEAST_RESULTS} are the least that a row is judged by"
        if self.wired_otherwise:
            text += f"; since {self.wired_otherwise} of them links or NICs came or went (another topology)"
        return text + (f"; left out: {', '.join(map(str, self.left_out))}" if self.left_out else "")


def why_unfit(head: ResultHead, own: ResultHead) -> tuple[str, str] | None:
    """Why a result says nothing of what the run `own` should reach, and the values that differ; None where it does."""
    if not head.complete:
        return CUT_SHORT, ""
    if head.started_at > own.started_at:
        return "begun after this run", ""
    if head.verdict in _BAD_RUN:
        return f"whose run ended with {head.verdict}", ""
    obstacle = next(head.obstacles_to(own), None)
    if obstacle is None:
        return None
    reason, _, example = obstacle.partition(": ")
    return f"of {reason}", example


def tallied(reasons: Iterable[tuple[str, str]]) -> tuple[LeftOut, ...]:
    """Results that were left out, the newest first, by reason."""
    known = list(reasons)
    counts = Counter(reason for reason, _ in known)
    examples = dict(reversed(known))
    return tuple(LeftOut(reason, examples[reason], count) for reason, count in counts.items())


class _Measured(Struct, frozen=True):
    time_us: float | None
    gb_s: float | None

    @property
    def cost(self) -> float:
        """The time, up to a factor that is the same for all rows of a key."""
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
    """The median of the fastest half: a machine that gets slower from week to week is held against its better days."""
    fastest = sorted(runs, key=lambda each: each.cost)[: (len(runs) + 1) // 2]
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
    alike = group_by([each for each in found if each[1].cost > 0], lambda each: each[0])
    ordered = {key: sorted((each for _, each in rows), key=lambda each: each.cost) for key, rows in alike.items()}
    return {key: rows[len(rows) // 2] for key, rows in ordered.items()}


def _run_noise(runs: Sequence[_Measured]) -> Noise:
    """The noise from one run to the next, which a slow decline does not widen: by robust steps of the logarithm.

    `measure.compare.noise` takes the distances of all runs of a side: these have no order in time.
    """
    steps = [math.log(later.cost / earlier.cost) for earlier, later in pairwise(runs)]
    found = robust_deviation(steps)
    return Noise(found.deviation / math.sqrt(2), found.freedom) if found is not None else Noise(0.0, math.inf)


def _widen_by_neighbours(noise: Mapping[RowKey, Noise]) -> dict[RowKey, Noise]:
    """The noise of every row, no less than that of most rows beside it, and known as well as all of these tell it.

    A few steps may be alike by chance. Rows of one run have a part of their noise in common, so that only half of what
    the others tell is new.
    """
    found: dict[RowKey, Noise] = {}
    for family in siblings(noise):
        for key in family:
            near = [noise[each] for each in family if _is_near(each, key)]
            deviation = max(noise[key].deviation, median(each.deviation for each in near))
            freedom = MEDIAN_EFFICIENCY * sum(each.freedom for each in near) / 2
            found[key] = Noise(deviation, max(noise[key].freedom, freedom))
    return found


def _is_near(one: RowKey, other: RowKey) -> bool:
    sizes = sorted((one.size_bytes or 1, other.size_bytes or 1))
    return sizes[1] <= _NEAR_SIZES * sizes[0]


class TrendPoint(Struct, frozen=True):
    """A figure of one run, in GB/s, with the verdict of that run; `started_at` is UTC, as ISO 8601."""

    started_at: str
    gb_s: float
    verdict: Verdict


class Trend(Struct, frozen=True):
    """A figure over time, the oldest run first."""

    name: str
    points: tuple[TrendPoint, ...]


def headline_figures(rows: Iterable[Row]) -> dict[str, float]:
    """Of one run, by name in GB/s: peak busbw of each collective, the slowest pair of GPUs, the slowest way to host.

    Pairs count with the largest size, peer access on, one way, as copy engines or NCCL make them; host memory pinned.
    """
    known = list(rows)
    return {
        **_peaks([row for row in known if isinstance(row, CollectiveRow)]),
        **_slowest([row for row in known if isinstance(row, PairRow)]),
    }


def _peaks(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for row in rows:
        name = f"{row.collective}: peak busbw"
        if row.mode == "throughput" and row.busbw_gb_s is not None:
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
    """A trend for each figure, of runs in any order: when each began, its verdict, its figures."""
    points: dict[str, list[TrendPoint]] = {}
    for started_at, verdict, figures in sorted(runs, key=lambda run: run[0]):
        for name, gb_s in figures.items():
            points.setdefault(name, []).append(TrendPoint(started_at, gb_s, verdict))
    yield from (Trend(name, tuple(each)) for name, each in points.items())
