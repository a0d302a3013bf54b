"""The fastest way of running a collective at each size, and the loss of the library's own choice."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from gpubench.model.results.report import BACKENDS, SIGNED, CollectiveRow, Record, made_of
from gpubench.model.results.rows.case_key import CaseKey
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.nccl_choice import AGAIN, OWN_CHOICE, NcclChoice, taken_name
from gpubench.model.terms.statistics.noise import Noise, robust_deviation

WINNERS_SECTION = "winners"
REFUSED_SECTION = "refused"

_NEAREST_PAIRS = 16
_FEWEST_PAIRS = 6
_REACH = math.log2(16)
"""Times of sizes further away, in powers of two, vary in another way: of 10 µs by more than of a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerRow(CaseKey):
    """The fastest way at one size of a sweep over settings, and what the library's own choice loses."""

    candidates: Annotated[int, {"minimum": 1}]  #: ways that ran right and as they were asked to
    fastest: str  #: name of the fastest: a setting, a backend, or own choice
    backend: Annotated[str, BACKENDS]  #: what moved the data: nccl, or host (MPI on CPU buffers); simulated moved none
    setting: str | None  #: as in its row
    time_us: float  #: of the fastest, microseconds an operation; in latency mode the median
    algorithm: str | None  #: that it took, as NCCL names it
    protocol: str | None  #: that it took, as NCCL names it
    own_backend: str  #: whose own choice is beside it
    own_algorithm: str | None  #: that NCCL takes by itself
    own_protocol: str | None  #: that NCCL takes by itself
    #: of the own choice: mean of before and after all others, or median with the setting that it took
    own_time_us: float
    own_drift_percent: Annotated[float | None, SIGNED]  #: by how much the own choice was slower the second time
    loss_percent: Annotated[float, SIGNED]  #: by how much the own choice takes longer than the fastest
    noise_percent: float | None  #: what chance alone may make of that; null: not known
    beyond_noise: bool | None  #: whether the loss is more than that
    displaces: str | None = None  #: what was the fastest at smaller sizes, and is beaten here beyond the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow(Record):
    """A setting of a sweep that could not run."""

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    backend: Annotated[str, BACKENDS]  #: what moved the data: nccl, or host (MPI on CPU buffers); simulated moved none
    setting: str  #: what was asked for
    dtype: str | None  #: element type; null: it could not even begin
    op: str | None  #: reduction
    size_bytes: int | None  #: from which size on
    reason: str  #: in the library's words


@dataclass(frozen=True, slots=True)
class _Place:
    """All ways at one size, by name, the own choice's two rows apart; `own_way` is the one that it took."""

    ways: Mapping[str, CollectiveRow]
    own: CollectiveRow
    again: CollectiveRow | None
    own_way: str | None

    @property
    def own_time_us(self) -> float:
        """The median of the own choice's times: two, or three where the setting that it took is one of the ways."""
        chosen = None if self.own_way is None else self.ways[self.own_way]
        return median(_time_us(row) for row in (self.own, self.again, chosen) if row is not None)

    @property
    def drift(self) -> float | None:
        """By how much the own choice was slower the second time, as a part of the first."""
        return None if self.again is None else _time_us(self.again) / _time_us(self.own) - 1

    def time_us(self, name: str) -> float:
        """The time of a way; of the own choice all its measurements count."""
        row = self.ways[name]
        return self.own_time_us if row is self.own or name == self.own_way else _time_us(row)


def winners(rows: Sequence[CollectiveRow]) -> list[WinnerRow]:
    """Of the rows of a sweep over settings; of each size the first without one is the library's own choice.

    Rows with wrong data, and those that did not run as they were asked to, are no candidates.
    """
    several = len({row.backend for row in rows}) > 1
    found: list[WinnerRow] = []
    for alike in grouped(rows, lambda row: (row.dtype, row.op)).values():
        series = [_places(same, several=several) for same in grouped(alike, lambda row: row.placement).values()]
        drifts = [(place.own.size_bytes, place.drift) for places in series for place in places]
        known = [(size, drift) for size, drift in drifts if drift is not None]
        for places in series:
            found += _series(places, known)
    return found


def took_another(row: CollectiveRow) -> bool:
    """True where NCCL's log names another algorithm or protocol than the row was to have."""
    return NcclChoice.of(row.setting).differs(row.algorithm, row.protocol)


def _places(rows: Iterable[CollectiveRow], *, several: bool) -> list[_Place]:
    """By ascending size, where the own choice and anything else ran right; of several backends, names have them.

    What the own choice took is a way of its own only where it is not known to be one of the others.
    """
    found = []
    for here in grouped(rows, lambda row: row.size_bytes).values():
        own = next((row for row in here if row.setting is None), here[0])
        others = [row for row in here if row is not own]
        again = next((row for row in others if row.setting == AGAIN and not row.wrong), None)
        right = [row for row in others if row.setting != AGAIN and not row.wrong and not took_another(row)]
        if right and own.setting is None and not own.wrong:
            chosen = next((row for row in right if _took_the_same(row, own)), None)
            ways = right if chosen is not None else [own, *right]
            names = {_name(row, several=several): row for row in ways}
            own_way = None if chosen is None else _name(chosen, several=several)
            found.append(_Place(names, own, again, own_way))
    return sorted(found, key=lambda place: place.own.size_bytes)


def _took_the_same(row: CollectiveRow, own: CollectiveRow) -> bool:
    taken = taken_name(own.algorithm, own.protocol)
    return row.backend == own.backend and taken is not None and taken == taken_name(row.algorithm, row.protocol)


def _name(row: CollectiveRow, *, several: bool) -> str:
    if not several:
        return row.setting or OWN_CHOICE
    return " ".join(filter(None, (row.backend, row.setting)))


def _series(places: Sequence[_Place], drifts: Sequence[tuple[int, float]]) -> Iterator[WinnerRow]:
    """Size by size, with what is displaced: the fastest of the smallest size holds until it is beaten beyond noise."""
    incumbent = ""
    for place in places:
        name = min(place.ways, key=place.time_us)
        noise = _noise(place, place.ways[name], drifts)
        holds = incumbent in place.ways and _lost(place.time_us(incumbent), place.time_us(name)) <= (noise or 0.0)
        yield _winner(place, name, noise, None if holds else incumbent or None)
        incumbent = incumbent if holds else name


def _winner(place: _Place, name: str, noise: float | None, displaced: str | None) -> WinnerRow:
    own, fastest = place.own, place.ways[name]
    lost = _lost(place.own_time_us, place.time_us(name))
    return made_of(
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


def _lost(time_us: float, best_us: float) -> float:
    return time_us / best_us - 1


def _noise(place: _Place, fastest: CollectiveRow, drifts: Sequence[tuple[int, float]]) -> float | None:
    """By how much the own choice may seem slower by chance than the fastest of so many ways; None where nobody knows.

    How much a time differs when it is measured again is known from the own choice, which was measured twice at every
    size: of two independent values with deviation s the difference has √2 s, and a mean of two against one value
    √1.5 s; the nearest sizes count, of both placements, and further ones where those are too few. Bonferroni's share
    is over all ways, of which the fastest is picked. Nor can it be less than what the intervals of the rows leave open.
    """
    away = sorted((abs(math.log2(size / place.own.size_bytes)), drift) for size, drift in drifts)
    near = [each for number, each in enumerate(away) if number < _FEWEST_PAIRS or each[0] <= _REACH][:_NEAREST_PAIRS]
    bounds = []
    noise = robust_deviation([drift for _, drift in near]) if len(near) >= _FEWEST_PAIRS else None
    if noise is not None:
        bounds.append(Noise(math.sqrt(1.5 / 2) * noise.deviation, noise.freedom).bound(len(place.ways)))
    owns = [row.ci95_percent for row in (place.own, place.again) if row is not None]
    if fastest.ci95_percent is not None and None not in owns:
        own = math.hypot(*(each for each in owns if each is not None)) / len(owns)
        bounds.append(math.hypot(own, fastest.ci95_percent) / 100)
    return max(bounds, default=None)


def _time_us(row: CollectiveRow) -> float:
    """The time that is compared: the mean; of operations timed alone the median, which late ones do not move."""
    return row.time_us if row.p50_us is None else row.p50_us


def crossings(rows: Sequence[WinnerRow]) -> list[tuple[int, str]]:
    """The sizes from which on another way is the fastest, of rows of one type, reduction and placement."""
    return [(row.size_bytes, row.fastest) for row in rows if row is rows[0] or row.displaces is not None]
