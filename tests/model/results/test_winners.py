"""The fastest way by size, cross-overs, and when a loss is more than chance."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.results.backends import WinnerRow, crossings, differs_from_request, winners
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.settings import AGAIN, OWN_CHOICE, repeated_name
from gpubench.model.terms.statistics import Mode
from tests.formats.sample import ROW

SIZES = tuple(2**power for power in range(10, 26))
NAMES = ("ring/ll", "ring/simple", "tree/ll")


def row(size: int, setting: str | None, time_us: float, **changes: object) -> CollectiveRow:
    values: dict[str, object] = {
        "size_bytes": size,
        "setting": setting,
        "time_us": time_us,
        "wrong": 0,
        "algorithm": None,
        "protocol": None,
    }
    values |= {"placement": "out_of_place", **changes}
    return replace(ROW, **values)


def sweep(times: dict[int, dict[str | None, float]], **changes: object) -> list[CollectiveRow]:
    """Rows as they are measured: the own choice, all others, the own choice again."""
    return [row(size, name, us, **changes) for size, ways in times.items() for name, us in ways.items()]


TIMES = st.floats(1, 1e6)
WAYS: dict[str | None, st.SearchStrategy[float]] = {None: TIMES, **dict.fromkeys(NAMES, TIMES), AGAIN: TIMES}
SWEEPS = st.fixed_dictionaries({size: st.fixed_dictionaries(WAYS) for size in SIZES[:8]})


@given(SWEEPS)
def test_the_fastest_is_faster_than_all_others(times: dict[int, dict[str | None, float]]) -> None:
    found = winners(sweep(times))
    assert [each.size_bytes for each in found] == sorted(times)
    for each in found:
        ways = times[each.size_bytes]
        own = (ways[None] + ways[AGAIN]) / 2
        assert each.time_us == pytest.approx(min(own, *(ways[name] for name in NAMES)))
        assert each.own_time_us == pytest.approx(own)
        assert each.loss_percent == pytest.approx(100 * (own / each.time_us - 1), abs=1e-9)
        assert each.loss_percent >= 0
        assert each.fastest == (each.setting or OWN_CHOICE)
        assert each.candidates == 4
        assert each.noise_percent is not None
        assert each.beyond_noise == (each.loss_percent > each.noise_percent)


@given(SWEEPS)
def test_what_displaces_another_is_the_fastest_and_beats_it_beyond_noise(
    times: dict[int, dict[str | None, float]],
) -> None:
    found = winners(sweep(times))
    first = incumbent = found[0].fastest if found[0].beyond_noise else OWN_CHOICE
    assert found[0].displaces is None
    for each in found[1:]:
        ways = times[each.size_bytes] | {OWN_CHOICE: each.own_time_us}
        behind = 100 * (ways[incumbent] / each.time_us - 1)
        assert each.noise_percent is not None
        if each.displaces is None:
            assert behind <= each.noise_percent * (1 + 1e-9)
        else:
            assert each.displaces == incumbent
            assert behind > each.noise_percent
            incumbent = each.fastest
    assert [name for _, name in crossings(found)] == [first] + [
        each.fastest for each in found[1:] if each.displaces is not None
    ]


@given(SWEEPS)
def test_without_known_noise_there_is_no_cross_over(times: dict[int, dict[str | None, float]]) -> None:
    few = dict(list(times.items())[:2])
    found = winners([row for row in sweep(few) if row.setting != AGAIN])
    assert [(each.noise_percent, each.displaces) for each in found] == [(None, None)] * 2
    assert [name for _, name in crossings(found)] == [OWN_CHOICE]


def noisy(advantage: float, seed: int, deviation: float = 0.01) -> list[WinnerRow]:
    """`ring/simple` is faster by so much from 1 MiB on; `ring/ll` below, by as much."""
    chance = Random(seed)
    times: dict[int, dict[str | None, float]] = {}
    for size in SIZES:
        best = "ring/simple" if size >= 2**20 else "ring/ll"
        names = (None, *NAMES, AGAIN)
        times[size] = {
            name: 100 * (1 - advantage * (name == best)) * (1 + chance.gauss(0, deviation)) for name in names
        }
    return winners(sweep(times))


def test_a_real_cross_over_is_found_and_the_loss_named() -> None:
    for seed in range(10):
        found = noisy(0.2, seed)
        assert crossings(found) == [(1024, "ring/ll"), (2**20, "ring/simple")]
        assert all(each.beyond_noise for each in found)
        assert all(each.loss_percent == pytest.approx(25, abs=6) for each in found)


def test_chance_alone_is_seldom_called_a_loss() -> None:
    """Of the fastest of four equal ways, at most in one of a hundred rows; twice that is allowed for the estimate."""
    rows = [each for seed in range(40) for each in noisy(0.0, seed)]
    assert sum(bool(each.beyond_noise) for each in rows) <= 0.02 * len(rows)


def test_what_is_wrong_or_not_as_asked_wins_nothing() -> None:
    rows = [
        row(1024, None, 10.0),
        row(1024, "ring/ll", 1.0, wrong=3),
        replace(row(1024, "tree", 2.0), algorithm="RING", protocol="LL"),
        row(1024, "ll128", 8.0),
        row(1024, AGAIN, 10.0),
    ]
    assert differs_from_request(rows[2])
    (found,) = winners(rows)
    assert (found.fastest, found.candidates, found.loss_percent) == ("ll128", 2, 25.0)
    assert (found.noise_percent, found.beyond_noise) == (None, None), "one pair of times says nothing"


def test_backends_are_in_the_names_where_there_are_several() -> None:
    rows = [row(1024, None, 10.0, backend="nccl"), row(1024, None, 30.0, backend="host")]
    (found,) = winners([*rows, row(1024, AGAIN, 10.0, backend="nccl")])
    assert (found.fastest, found.backend, found.setting, found.loss_percent) == ("nccl", "nccl", None, 0.0)
    (found,) = winners([replace(rows[0], time_us=60.0), rows[1]])
    assert (found.fastest, found.backend, found.loss_percent) == ("host", "host", 100.0)


def test_intervals_are_noise_too() -> None:
    def known(setting: str | None, time_us: float) -> CollectiveRow:
        return replace(row(1024, setting, time_us), ci95_percent=1.0)

    (found,) = winners([known(None, 10.2), known("ring", 10.0), known(AGAIN, 10.2)])
    assert found.noise_percent == pytest.approx(1.5**0.5)
    assert found.beyond_noise is True
    alone = replace(known("ring", 10.0), p50_us=5.0, mode=Mode.LATENCY)
    assert winners([known(None, 10.2), alone, known(AGAIN, 10.2)])[0].time_us == 5.0


def test_what_the_own_choice_differs_by_itself_is_no_win() -> None:
    """All-to-all of 128 MiB on four H200s: intervals of half a percent, and 5 % between two times of the same."""
    times = ((None, 328.84, 0.57), ("register=symmetric", 331.12, 0.38), (AGAIN, 346.53, 0.61))
    rows = [replace(row(2**27, setting, time_us), ci95_percent=width) for setting, time_us, width in times]
    (found,) = winners(rows)
    assert found.loss_percent == pytest.approx(1.98, abs=0.01)
    assert found.noise_percent == pytest.approx(5.38, abs=0.01)
    assert found.beyond_noise is False


JOBS = ("NCCL_MAX_NCHANNELS=4", "NCCL_MAX_NCHANNELS=8")


def jobs(seconds: Callable[[str | None, bool, int], float]) -> list[CollectiveRow]:
    """Rows as jobs that take turns measure them: all sizes of one before the next, there and back."""
    there = [(None, False), *((name, False) for name in JOBS)]
    order = [*there, *((name, True) for name, _ in reversed(there))]
    return [
        row(size, repeated_name(name) if second else name, seconds(name, second, size))
        for name, second in order
        for size in SIZES
    ]


def test_jobs_that_differ_as_much_as_the_same_one_does_seldom_have_a_winner() -> None:
    """Every job is faster or slower as a whole by some percent, which its sizes share."""
    sweeps, false = 80, 0
    for seed in range(sweeps):
        noise = Random(seed)
        offset = {(name, second): noise.gauss(1.0, 0.03) for name in (None, *JOBS) for second in (False, True)}
        rows = jobs(lambda name, second, _size, o=offset, n=noise: 10 * o[name, second] * n.gauss(1.0, 0.002))  # type: ignore[misc]
        false += any(winner.beyond_noise for winner in winners(rows))
    assert false <= 0.04 * sweeps


def test_a_setting_that_took_what_nccl_takes_by_itself_is_still_another_way() -> None:
    rows = jobs(lambda name, _second, _size: 10.0 if name is None else 8.0)
    heard = [replace(each, algorithm="RING", protocol="LL") for each in rows]
    assert {winner.candidates for winner in winners(heard)} == {3}
    assert {winner.time_us for winner in winners(heard)} == {8.0}
