"""Rows that compare backends, algorithms and settings of a collective, and the rows of `gpubench topo --software`.

A candidate is a backend or a setting that can run the collective. The code calls it a way.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from statistics import fmean, median
from typing import Annotated, NamedTuple

from msgspec import Struct

from gpubench.model.facts.process import TrialOutcome
from gpubench.model.results.report import BACKENDS, SIGNED, CollectiveRow, Record, make_record
from gpubench.model.terms import settings
from gpubench.model.terms.operation import KERNELS, NCCL, TORCH_NCCL, DataType, Placement, ReduceOp
from gpubench.model.terms.statistics import Mode, Noise, robust_deviation
from gpubench.model.terms.units import format_size, group_by, plural
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Origin, Verdict


class CaseKey(Record, frozen=True, kw_only=True):
    """The columns that identify one measured case, independent of the backend or setting that ran it."""

    #: name of the collective: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or
    #: sendrecv
    collective: str
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    ranks: int  #: number of ranks in the group
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type, for example float32
    op: Annotated[str | None, ReduceOp]  #: reduction operation (null if the collective only moves data)
    #: out_of_place (separate result buffer) or in_place (the result overwrites the input)
    placement: Annotated[str, Placement]
    mode: Annotated[str, Mode]  #: throughput (operations back to back) or latency (one operation at a time)


class BackendRow(CaseKey, frozen=True, kw_only=True):
    """One size with one backend, compared with the first backend in the table (the reference)."""

    section = "backends"

    backend: Annotated[str, BACKENDS]  #: backend in this row
    time_us: float  #: time of one operation in microseconds
    busbw_gb_s: float  #: bus bandwidth in GB/s (1e9 bytes)
    issue_us: float | None  #: host time to issue one operation, in microseconds (null if included in time_us)
    first: Annotated[str, BACKENDS]  #: reference: the first backend of the table
    first_time_us: float  #: time of one operation with the reference in microseconds, mean of both measurements
    first_issue_us: float | None  #: host time to issue one operation with the reference, in microseconds
    speed_percent: float  #: first_time_us as a percentage of time_us; above 100: faster than the reference
    #: slowdown of the reference from its first to its second measurement, in percent
    first_drift_percent: Annotated[float | None, SIGNED]
    transport: str | None  #: transport as NCCL names it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    first_transport: str | None  #: transport of the reference
    host_staged: bool | None  #: whether data went through host memory
    note: str | None  #: library calls in one operation, if there are several


class MpiTrialRow(Record, frozen=True, kw_only=True):
    """One MPI operation on GPU memory, tried in a separate job because it may crash or hang."""

    section = "mpi_support"

    operation: str  #: name of the MPI operation
    size_bytes: int  #: size of the larger buffer in bytes
    #: outcome of the trial: right, wrong data, crashed, refused, hung, or not tried
    outcome: Annotated[str, TrialOutcome]
    seconds: float | None  #: duration of the job in seconds, including its start
    said: str  #: last output of the job


def compare_with_first(rows: Sequence[CollectiveRow]) -> list[BackendRow]:
    """Compare each row of the other backends with the first row's backend at the same size.

    Skip rows with wrong data.
    """
    found: list[BackendRow] = []
    for here in group_by(rows, lambda row: (row.dtype, row.op, row.placement, row.size_bytes)).values():
        own = [
            row
            for row in here
            if row.backend == rows[0].backend and row.setting in (None, settings.AGAIN) and not row.wrong
        ]
        others = [row for row in here if row.backend != rows[0].backend and row.setting is None and not row.wrong]
        found += [_compare(row, own) for row in others if own]
    return found


def _compare(row: CollectiveRow, own: Sequence[CollectiveRow]) -> BackendRow:
    first = own[0]
    time_us = fmean(map(_time_of_way_us, own))
    issued = [row.issue_us for row in own if row.issue_us is not None]
    return make_record(
        BackendRow,
        row,
        time_us=_time_of_way_us(row),
        first=first.backend,
        first_time_us=time_us,
        first_issue_us=min(issued, default=None),
        speed_percent=100 * time_us / _time_of_way_us(row),
        first_drift_percent=100 * (_time_of_way_us(own[1]) / _time_of_way_us(first) - 1) if len(own) > 1 else None,
        first_transport=first.transport,
    )


FRAMEWORK_SLOWER = "framework-slower"  # ID of the finding that a framework is slower than the library it calls
LARGE_BYTES = 16 * 2**20  # From this size on, an H200 needs longer to run an operation than Python needs to issue it
_SMALL_BYTES = 64 * 2**10
_WITHIN_PERCENT = 2.0  # Backends whose speeds differ by at most this count as equally fast
# Below this share of the reference's speed, report the framework as slower. The reference time is the slower of two
# measurements, which differed by up to 4 % at 16M on two H200s.
_SLOWER_PERCENT = 95.0


def find_newly_staged(rows: Sequence[BackendRow]) -> tuple[Finding, ...]:
    """Return a finding for each backend that uses host memory while the first backend uses another transport."""
    found = []
    for backend, here in group_by(rows, lambda row: row.backend).items():
        staged = [row for row in here if row.host_staged and row.transport != row.first_transport]
        if staged:
            worst = min(staged, key=lambda row: row.speed_percent)
            found.append(
                Finding(
                    id=HOST_STAGED,
                    severity=Verdict.FAIL,
                    subject=backend,
                    seen=f"{worst.transport} through host memory, {worst.speed_percent:.3g} % of the speed of "
                    f"{worst.first}, which uses {worst.first_transport}",
                    expected=f"the path that {worst.first} uses in the same process",
                    cause="settings that changed between the two communicators, or another libnccl",
                    cure=Cure.of(f"gpubench {worst.collective.removesuffix('v')} --backend {backend} --evidence"),
                )
            )
    return tuple(found)


def find_slower_framework(rows: Sequence[BackendRow]) -> tuple[Finding, ...]:
    """Return a finding if torch.distributed is slower at large sizes than the NCCL that it calls.

    Ignore operations that consist of several calls, and rows in latency mode.
    """
    slow = [
        row
        for row in rows
        if (row.backend, row.first) == (TORCH_NCCL, NCCL)
        and row.note is None
        and row.mode != Mode.LATENCY
        and row.size_bytes >= LARGE_BYTES
        and _slower_first_us(row) < row.time_us * _SLOWER_PERCENT / 100
    ]
    if not slow:
        return ()
    worst = min(slow, key=lambda row: row.speed_percent)
    finding = Finding(
        id=FRAMEWORK_SLOWER,
        severity=Verdict.WARN,
        subject=worst.backend,
        seen=f"{_percent(slow)} of the speed of {worst.first} {_span(slow)}, {_placements(slow)}",
        expected=f"{_SLOWER_PERCENT:g} % of the speed of {worst.first}, in the slower of its two measurements",
        cause="GPU work that torch adds around the NCCL call, such as a copy",
        cure=Cure.of(
            f"gpubench {worst.collective.removesuffix('v')} --backend {worst.first},{worst.backend} "
            f"--sizes {format_size(worst.size_bytes)}"
        ),
    )
    return (finding,)


def _slower_first_us(row: BackendRow) -> float:
    """Return the slower of the reference's two times in microseconds, from their mean and relative difference."""
    drift = (row.first_drift_percent or 0.0) / 100
    return row.first_time_us * max(1.0, 1 + drift) / (1 + drift / 2)


def describe_speed(rows: Sequence[BackendRow], *, composed: bool = True) -> str:
    """Describe the speed of one backend relative to the reference.

    'torch:nccl is as fast as nccl, within 2 %, from 1M to 1G in place, and has 94 to 103 % of its speed from 1K to 64K;
    its host takes 24 µs to issue an operation, nccl 5'. Operations that consist of several calls get their own
    sentence. Without `composed`, they are omitted, unless there are no other operations.
    """
    single = [row for row in rows if row.note is None]
    several = [row for row in rows if row.note is not None] if composed or not single else []
    said = [_describe_series(rows[0].backend, single)] if single else []
    if several:
        said.append(
            _describe_series(f"for collectives made of several calls, {'it' if single else rows[0].backend}", several)
        )
    return "; ".join(
        filter(None, (*said, _describe_drift([*single, *several]), _describe_issue_times([*single, *several])))
    )


def _describe_series(subject: str, rows: Sequence[BackendRow]) -> str:
    by_size = [here for _, here in sorted(group_by(rows, lambda row: row.size_bytes).items())]
    first, where = rows[0].first, _placements(rows)
    alike = list(
        takewhile(lambda here: all(abs(row.speed_percent - 100) <= _WITHIN_PERCENT for row in here), reversed(by_size))
    )
    if alike:
        rest = by_size[: len(by_size) - len(alike)]
        said = f"{subject} is as fast as {first}, within {_WITHIN_PERCENT:g} %, {_span(_flatten(alike))} {where}"
        return f"{said}, and reaches {_percent(_flatten(rest))} of its speed {_span(_flatten(rest))}" if rest else said
    smallest_large = min(LARGE_BYTES, by_size[-1][0].size_bytes)
    large = [row for row in rows if row.size_bytes >= smallest_large]
    small = [row for row in rows if row.size_bytes < smallest_large]
    said = f"{subject} reaches {_percent(large)} of the speed of {first} {_span(large)} {where}"
    return f"{said}, and {_percent(small)} {_span(small)}" if small else said


def _flatten(sizes: Sequence[Sequence[BackendRow]]) -> list[BackendRow]:
    return [row for here in sizes for row in here]


def _percent(rows: Sequence[BackendRow]) -> str:
    speeds = [row.speed_percent for row in rows]
    return " to ".join(dict.fromkeys(_format_percent(speed) for speed in (min(speeds), max(speeds)))) + " %"


def _format_percent(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _span(rows: Sequence[BackendRow]) -> str:
    sizes = [row.size_bytes for row in rows]
    smallest, largest = format_size(min(sizes)), format_size(max(sizes))
    return f"at {largest}" if smallest == largest else f"from {smallest} to {largest}"


def _placements(rows: Sequence[BackendRow]) -> str:
    found = {row.placement for row in rows}
    return "in and out of place" if len(found) > 1 else found.pop().replace("_", " ")


def _describe_drift(rows: Sequence[BackendRow]) -> str:
    worst = max(rows, key=lambda row: abs(row.first_drift_percent or 0.0))
    drift = abs(worst.first_drift_percent or 0.0)
    if drift <= _WITHIN_PERCENT:
        return ""
    return (
        f"two measurements of {worst.first} differ by up to {_format_percent(drift)} %, at "
        f"{format_size(worst.size_bytes)}"
    )


def _describe_issue_times(rows: Sequence[BackendRow]) -> str:
    small = [row for row in rows if row.size_bytes <= _SMALL_BYTES and row.issue_us is not None] or [
        row for row in rows if row.issue_us is not None
    ]
    if not small:
        return ""
    own = median(row.issue_us for row in small if row.issue_us is not None)
    firsts = [row.first_issue_us for row in small if row.first_issue_us is not None]
    beside = f", {rows[0].first} {_microseconds(median(firsts))}" if firsts else ""
    return f"its host needs {_microseconds(own)} µs to issue an operation{beside}"


def _microseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def describe_paths(rows: Sequence[BackendRow]) -> str:
    """Return 'over the same path (P2P/CUMEM)', or how the paths differ. Return '' if a path is not in the log."""
    pairs = {(row.transport, row.first_transport) for row in rows}
    if any(None in pair for pair in pairs):
        return ""
    if all(one == other for one, other in pairs):
        return f"over the same path ({', '.join(sorted({str(one) for one, _ in pairs}))})"
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"over another path: {one}, while {rows[0].first} uses {other}"


_NEAREST_PAIRS = 16
_FEWEST_PAIRS = 6
# Largest difference between two sizes in powers of two. Sizes that are further apart differ in noise
_REACH = math.log2(16)


class WinnerRow(CaseKey, frozen=True, kw_only=True):
    """The fastest candidate (backend or setting) at one size, and how much slower the library's own choice is."""

    section = "winners"

    #: number of settings and backends that ran as requested and returned correct data
    candidates: Annotated[int, {"minimum": 1}]
    fastest: str  #: name of the fastest candidate: a setting, a backend, or the library's own choice
    backend: Annotated[str, BACKENDS]  #: backend of the fastest candidate
    setting: str | None  #: setting of the fastest candidate
    time_us: float  #: time per operation in µs with the fastest candidate (in latency mode, the median)
    algorithm: str | None  #: NCCL algorithm of the fastest candidate
    protocol: str | None  #: NCCL protocol of the fastest candidate
    own_backend: str  #: backend of the library's own choice
    own_algorithm: str | None  #: NCCL algorithm of the library's own choice
    own_protocol: str | None  #: NCCL protocol of the library's own choice
    #: time of one operation in microseconds with the library's own choice (median of the measurements)
    own_time_us: float
    #: slowdown of the own choice from its first to its second measurement, in percent
    own_drift_percent: Annotated[float | None, SIGNED]
    loss_percent: Annotated[float, SIGNED]  #: how much slower the own choice is than the fastest candidate, in percent
    noise_percent: float | None  #: part of loss_percent that noise explains (null if unknown)
    beyond_noise: bool | None  #: whether loss_percent exceeds noise_percent
    displaces: str | None = None  #: candidate that was fastest at smaller sizes and is beaten here beyond noise


class RefusedRow(Record, frozen=True, kw_only=True):
    """A setting that could not run."""

    section = "refused"

    #: name of the collective: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or
    #: sendrecv
    collective: str
    #: backend that ran the collective: nccl, host (MPI on CPU buffers), ...; simulated: no data moved
    backend: Annotated[str, BACKENDS]
    setting: str  #: requested setting
    dtype: str | None  #: element type (null if the job did not start)
    op: str | None  #: reduction operation
    size_bytes: int | None  #: first size that was refused, in bytes
    reason: str  #: error message from the library


class _Place(Struct, frozen=True):
    """All rows of one size: the candidates by name, and the library's own choice, measured at the start and at the
    end.

    `own_way` is the candidate that requests what the library chose by itself. `seconds` contains the second rows of the
    other candidates that were measured twice.
    """

    ways: Mapping[str, CollectiveRow]
    own: CollectiveRow
    repeated: CollectiveRow | None
    own_way: str | None
    seconds: Mapping[str, CollectiveRow]

    @property
    def own_time_us(self) -> float:
        """The median of the own choice's two times, or of three if a candidate requested the same."""
        chosen = None if self.own_way is None else self.ways[self.own_way]
        return median(_time_of_way_us(row) for row in (self.own, self.repeated, chosen) if row is not None)

    @property
    def drift(self) -> float | None:
        """The slowdown of the own choice from its first to its second measurement, relative to the first."""
        return None if self.repeated is None else _drift(self.own, self.repeated)

    @property
    def drifts(self) -> Mapping[str, float]:
        own = {} if self.drift is None else {settings.OWN_CHOICE: self.drift}
        return own | {name: _drift(self.ways[name], row) for name, row in self.seconds.items()}

    def time_us(self, name: str) -> float:
        """Return the time of a candidate in microseconds.

        This is the mean if it was measured twice, and the median of all measurements for the library's own choice.
        """
        row = self.ways[name]
        if row is self.own or name == self.own_way:
            return self.own_time_us
        second = self.seconds.get(name)
        return fmean(_time_of_way_us(measured) for measured in (row, second) if measured is not None)


class _Drift(NamedTuple):
    """The slowdown of a candidate from its first to its second measurement at one size, relative to the first."""

    size_bytes: int
    way: str
    part: float

    def away(self, size_bytes: int) -> float:
        return abs(math.log2(self.size_bytes / size_bytes))


def winners(rows: Sequence[CollectiveRow]) -> list[WinnerRow]:
    """Return the fastest candidate of each size, without rows with wrong data.

    The first row without a setting is the library's own choice.
    """
    several = len({row.backend for row in rows}) > 1
    found: list[WinnerRow] = []
    for alike in group_by(rows, lambda row: (row.dtype, row.op)).values():
        series = [_places(same, several=several) for same in group_by(alike, lambda row: row.placement).values()]
        known = [
            _Drift(place.own.size_bytes, *drift)
            for places in series
            for place in places
            for drift in place.drifts.items()
        ]
        for places in series:
            found += _series(places, known)
    return found


def differs_from_request(row: CollectiveRow) -> bool:
    """Return whether NCCL's log names another algorithm or protocol than the requested one."""
    return settings.NcclSetting.parse(row.setting).differs(row.algorithm, row.protocol)


def _places(rows: Iterable[CollectiveRow], *, several: bool) -> list[_Place]:
    """Group rows by size.

    If a setting requests what the library chose by itself, that setting is the candidate instead of the own choice.
    """
    found = []
    for here in group_by(rows, lambda row: row.size_bytes).values():
        own = next((row for row in here if row.setting is None), here[0])
        others = [row for row in here if row is not own]
        repeated = next((row for row in others if row.setting == settings.AGAIN and not row.wrong), None)
        true = [row for row in others if not row.wrong and not differs_from_request(row)]
        right = [row for row in true if row.setting == settings.original_name(row.setting)]
        twice = {
            settings.original_name(row.setting): row
            for row in true
            if row.setting not in (settings.AGAIN, settings.original_name(row.setting))
        }
        if right and own.setting is None and not own.wrong:
            chosen = next((row for row in right if _took_the_same(row, own)), None)
            ways = right if chosen is not None else [own, *right]
            names = {_name(row, several=several): row for row in ways}
            own_way = None if chosen is None else _name(chosen, several=several)
            seconds = {name: twice[row.setting] for name, row in names.items() if row.setting in twice}
            found.append(_Place(names, own, repeated, own_way, seconds))
    return sorted(found, key=lambda place: place.own.size_bytes)


def _drift(row: CollectiveRow, second: CollectiveRow) -> float:
    return _time_of_way_us(second) / _time_of_way_us(row) - 1


def _took_the_same(row: CollectiveRow, own: CollectiveRow) -> bool:
    """Return whether a setting only requests the algorithm and protocol that NCCL chose by itself."""
    if dict(settings.NcclSetting.parse(row.setting).values).keys() - settings.PER_COMMUNICATOR:
        return False
    taken = settings.format_choice(own.algorithm, own.protocol)
    return (
        row.backend == own.backend
        and taken is not None
        and taken == settings.format_choice(row.algorithm, row.protocol)
    )


def _name(row: CollectiveRow, *, several: bool) -> str:
    if not several:
        return row.setting or settings.OWN_CHOICE
    return " ".join(filter(None, (row.backend, row.algorithm if row.backend in KERNELS else row.setting)))


def _series(places: Sequence[_Place], drifts: Sequence[_Drift]) -> Iterator[WinnerRow]:
    """Yield the fastest candidate of each size.

    The own choice is the first winner. A winner stays until another candidate is known to be faster beyond noise.
    """
    incumbent = ""
    for place in places:
        name = min(place.ways, key=place.time_us)
        noise = _noise(place, place.ways[name], drifts)
        winner_us = place.time_us(incumbent) if incumbent in place.ways else place.own_time_us
        holds = noise is None or _relative_loss(winner_us, place.time_us(name)) <= noise
        yield _winner(place, name, noise, None if holds else incumbent or None)
        incumbent = (incumbent or place.own_way or settings.OWN_CHOICE) if holds else name


def _winner(place: _Place, name: str, noise: float | None, displaced: str | None) -> WinnerRow:
    own, fastest = place.own, place.ways[name]
    lost = _relative_loss(place.own_time_us, place.time_us(name))
    return make_record(
        WinnerRow,
        fastest,
        origin=own.origin,
        candidates=len(place.ways),
        fastest=name,
        time_us=place.time_us(name),
        own_backend=own.backend,
        own_algorithm=own.algorithm,
        own_protocol=own.protocol,
        own_time_us=place.own_time_us,
        own_drift_percent=None if place.drift is None else 100 * place.drift,
        loss_percent=100 * lost,
        noise_percent=None if noise is None else 100 * noise,
        beyond_noise=None if noise is None else lost > noise,
        displaces=displaced,
    )


def _relative_loss(time_us: float, best_us: float) -> float:
    return time_us / best_us - 1


def _noise(place: _Place, fastest: CollectiveRow, drifts: Sequence[_Drift]) -> float | None:
    """Return how much slower than the fastest candidate the own choice may appear by chance. None if unknown.

    For times with standard deviation s, the difference of two values has deviation √2 s. The difference between a mean
    of two values and one value has √1.5 s. The deviation comes from candidates that were measured twice, at the nearest
    sizes and in both placements. If these are too few, further sizes count too.

    A whole job may be faster than another, so the second jobs of settings also count as single values. Bonferroni's
    correction covers all candidates, because the fastest is selected. The result is at least the confidence interval of
    the rows, and at least the difference between the own choice's two times.
    """
    away = sorted(drifts, key=lambda drift: drift.away(place.own.size_bytes))
    near = [
        drift
        for number, drift in enumerate(away)
        if number < _FEWEST_PAIRS or drift.away(place.own.size_bytes) <= _REACH
    ]
    nearest = [drift.part for drift in near[:_NEAREST_PAIRS]]
    noise = robust_deviation(nearest) if len(nearest) >= _FEWEST_PAIRS else None
    noises = (noise, _noise_of_jobs(near) if place.seconds else None)
    noises_of_means = [
        Noise(math.sqrt(1.5 / 2) * noise.deviation, noise.freedom) for noise in noises if noise is not None
    ]
    bounds = [noise.bound(len(place.ways)) for noise in noises_of_means]
    owns = [row.ci95_percent for row in (place.own, place.repeated) if row is not None]
    if fastest.ci95_percent is not None and None not in owns:
        own = math.hypot(*(interval for interval in owns if interval is not None)) / len(owns)
        bounds.append(math.hypot(own, fastest.ci95_percent) / 100)
    return max(*bounds, abs(place.drift or 0.0)) if bounds else None


def _noise_of_jobs(drifts: Sequence[_Drift]) -> Noise:
    """Return the noise between the first and second jobs of candidates: the root mean square of one value per
    candidate.

    All sizes in a job share one deviation, so each job counts once.
    """
    shared = [median(drift.part for drift in here) for here in group_by(drifts, lambda drift: drift.way).values()]
    return Noise(math.sqrt(fmean(part**2 for part in shared)), len(shared))


def _time_of_way_us(row: CollectiveRow) -> float:
    """Return the time of a row in microseconds: the mean, or in latency mode the median, which ignores late
    operations.
    """
    return row.time_us if row.p50_us is None or row.mode != Mode.LATENCY else row.p50_us


def crossings(rows: Sequence[WinnerRow]) -> list[tuple[int, str]]:
    """Return the sizes at which another candidate becomes the fastest beyond noise, with its name.

    The first is the own choice, unless a candidate beats it there. All rows must have the same data type, reduction and
    placement.
    """
    first = rows[0]
    own = settings.format_choice(first.own_algorithm, first.own_protocol) or settings.OWN_CHOICE
    further = [(row.size_bytes, row.fastest) for row in rows if row.displaces is not None]
    return [(first.size_bytes, first.fastest if first.beyond_noise else own), *further]


class LibraryKind(StrEnum):
    """The type of a library: a shared library, a Python package that loads libraries, or a kernel module."""

    LIBRARY = "library"
    PACKAGE = "package"
    KERNEL = "kernel"


class LibraryRow(Record, frozen=True, kw_only=True):
    """A library, package or kernel module that gpubench looked for in an environment."""

    section = "libraries"

    node: str  #: host name of the node
    #: NCCL, MPI, UCX, NVSHMEM, MSCCL++, torch, nccl4py, CuPy, mpi4py, NIXL, Mooncake, dma-buf, nvidia_peermem, ...
    library: str
    #: library: a shared library; package: a Python package; kernel: a kernel module or feature
    library_kind: Annotated[str, LibraryKind]
    found: bool | None  #: whether it was found (null if unknown)
    version: str | None = None  #: version from the library, or from its package or file name if `note` says so
    path: str | None = None  #: path of the file or of the package's folder
    package: str | None = None  #: wheel or environment that contains the library
    used_by: Sequence[str] = ()  #: programs that would load the library, with their purpose
    cuda: bool | None = None  #: for MPI: whether the library reports support for GPU memory
    transports: Sequence[str] = ()  #: transport modules of UCX, such as cuda, ib or efa; plugins of NIXL
    note: str | None = None  #: remark on the row
    origin: Annotated[str, Origin]  #: origin of the values: measured or recorded


LIBRARY_SECTIONS = (LibraryRow.section, "findings")


WITHOUT_EFFECT = "request-without-effect"
"""ID of the finding that NCCL ignored a request."""

_BY_COPY_ENGINE = ("COPY_ENGINE", "HIERARCHICAL_CE")
_IN_WINDOWS = ("SYMMETRIC", *_BY_COPY_ENGINE)
_NVLS = "NVLS"
_COPIED = ("allgather", "alltoall", "gather", "scatter")
_REDUCED_IN_WINDOWS = ("allreduce", "allgather", "reducescatter")
_EFFICIENT = ("allgather", "reducescatter")
# Share of the usual time. An alltoall of 16 MiB on an H100 took 0.51 of it with windows, and 1.00 when repeated
_GAIN = 0.9

_NO_WINDOW = (
    "NCCL created no window, which needs cuMem (NCCL_CUMEM_ENABLE), NCCL_WIN_ENABLE, and load/store access to "
    "the memory of all ranks"
)


def find_ignored_requests(rows: Sequence[CollectiveRow]) -> tuple[Finding, ...]:
    """Return a finding for each request that had no effect. Without NCCL's log, return none."""
    own = [row for row in rows if row.setting is None]
    usual = [row for row in rows if row.setting in (None, settings.AGAIN)]
    if not any(row.algorithm or row.transport for row in own):
        return ()
    found = []
    for name, way in group_by(rows, lambda row: settings.original_name(row.setting)).items():
        for request, reason in _ineffective_requests(settings.NcclSetting.parse(name), own, usual, way):
            found.append(
                Finding(
                    id=WITHOUT_EFFECT,
                    severity=Verdict.WARN,
                    subject=f"--{request} in {own[0].collective}",
                    seen=f"{name}: NCCL used {_taken(way)}, and without the request {_taken(own)}",
                    expected="a different algorithm, kernel or number of channels for at least one size",
                    cause=reason,
                    cure=Cure.of(f"leave --{request.partition(' ')[0]} out"),
                )
            )
    return tuple(found)


def _ineffective_requests(
    setting: settings.NcclSetting,
    own: Sequence[CollectiveRow],
    usual: Sequence[CollectiveRow],
    way: Sequence[CollectiveRow],
) -> Iterator[tuple[str, str]]:
    algorithms = {row.algorithm for row in way}
    collective = own[0].collective
    asked = setting.requests
    unnamed = algorithms.isdisjoint(_IN_WINDOWS) and not _is_faster(way, usual)
    if asked.get(settings.REGISTER) == settings.Registration.SYMMETRIC and unnamed:
        yield f"{settings.REGISTER} {settings.Registration.SYMMETRIC}", _why_no_windows(collective, way, asked)
    if asked.get(settings.REGISTER) == settings.Registration.USER and not any(row.registered for row in way):
        yield (
            f"{settings.REGISTER} {settings.Registration.USER}",
            "NCCL returned no handle, because NCCL_LOCAL_REGISTER is 0 or NCCL copies with memcpy",
        )
    if asked.get(settings.CTA_POLICY) == settings.CtaPolicy.ZERO and algorithms.isdisjoint(_BY_COPY_ENGINE):
        yield f"{settings.CTA_POLICY} {settings.CtaPolicy.ZERO}", _why_not_copied(collective, way, asked)
    takes_nvls = all(row.algorithm == _NVLS for row in own)
    efficient = collective in _EFFICIENT and _NVLS in algorithms and not takes_nvls
    if asked.get(settings.CTA_POLICY) == settings.CtaPolicy.EFFICIENCY and not efficient:
        yield f"{settings.CTA_POLICY} {settings.CtaPolicy.EFFICIENCY}", _why_not_efficient(collective, own, asked)
    if settings.MAX_CTAS in asked:
        most = max((row.channels for row in own if row.channels is not None), default=None)
        if most is not None and most <= int(asked[settings.MAX_CTAS]):
            yield (
                f"{settings.MAX_CTAS} {asked[settings.MAX_CTAS]}",
                f"NCCL uses at most {plural(most, 'channel')} without the request",
            )


def _is_faster(way: Sequence[CollectiveRow], usual: Sequence[CollectiveRow]) -> bool:
    """Return whether the largest size is faster than usual.

    Sends between symmetric windows skip a copy, but NCCL logs no kernel for them.
    """
    largest = max((row.size_bytes for row in way), default=0)
    times = group_by([row for row in usual if row.size_bytes == largest], lambda row: row.placement)
    at_most = {placement: _GAIN * min(row.time_us for row in rows) for placement, rows in times.items()}
    return any(row.size_bytes == largest and row.time_us < at_most.get(row.placement, 0) for row in way)


def _why_no_windows(collective: str, way: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if not any(row.registered for row in way):
        return _NO_WINDOW
    if asked.get(settings.CTA_POLICY) == settings.CtaPolicy.ZERO and collective in _COPIED:
        return "the driver is older than CUDA 12.5, or some ranks cannot load from and store to each other's memory"
    if collective not in _REDUCED_IN_WINDOWS:
        return f"NCCL has symmetric kernels only for {', '.join(_REDUCED_IN_WINDOWS)}"
    return "NCCL has no symmetric kernel for this type and reduction, or expects it to be slower at these sizes"


def _why_not_copied(collective: str, way: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if collective not in _COPIED:
        return f"copy engines work only for {', '.join(_COPIED)}, because they cannot reduce"
    if asked.get(settings.REGISTER) != settings.Registration.SYMMETRIC:
        return "copy engines need windows of symmetric memory (add --register symmetric)"
    return _why_no_windows(collective, way, asked)


def _why_not_efficient(collective: str, own: Sequence[CollectiveRow], asked: Mapping[str, str]) -> str:
    if collective not in _EFFICIENT:
        return f"NCCL follows it only in {' and '.join(_EFFICIENT)}"
    if asked.get(settings.REGISTER) != settings.Registration.USER:
        return "it needs registered buffers (add --register user)"
    if all(row.algorithm == _NVLS for row in own):
        return "NCCL already uses NVLS without the request"
    return "it needs NVLS (multicast by NVSwitch) between all ranks of a node"


def _taken(rows: Sequence[CollectiveRow]) -> str:
    """Return the algorithms and protocols in the log, by ascending size: 'ring/ll and ring/simple'."""
    names = dict.fromkeys(settings.format_choice(row.algorithm, row.protocol) or "unnamed" for row in rows)
    return " and ".join(names)
