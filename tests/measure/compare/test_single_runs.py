"""Differences between single runs of healthy machines, and slowdowns that exceed them."""

from collections.abc import Sequence
from functools import cache

import pytest
from msgspec.structs import replace

from gpubench.measure.compare.noise import combine_with_usual_noise, single_run_floor
from gpubench.measure.compare.report import compare
from gpubench.model.results.compare import RowKey
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.statistics import Noise
from gpubench.model.terms.verdict import Verdict
from tests.fakes.noisy_results import collective_row
from tests.fakes.sibling_nodes import Slowdown, node_run, unchanged

seeds = pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.slow)])


@cache
def healthy_run(seed: str) -> ResultFile:
    return node_run(seed)


def failures(slowdown: Slowdown, seeds: int) -> int:
    sides = [([healthy_run(f"{seed} old")], [node_run(f"{seed} new", slowdown)]) for seed in range(seeds)]
    return sum(compare(*side).verdict is Verdict.FAIL for side in sides)


@seeds
def test_healthy_siblings_do_not_fail(seeds: int) -> None:
    assert failures(unchanged, seeds) <= min(1, seeds // 20)


@seeds
@pytest.mark.parametrize(
    "slowdown",
    [
        lambda _collective, _size: 1.05,
        lambda collective, _size: 1.10 if collective == "alltoall" else 1.0,
        lambda collective, _size: 1.10 if collective == "allgather" else 1.0,
        lambda collective, size: 1.15 if collective == "alltoall" and size >= 2**31 else 1.0,
        lambda collective, size: 1.15 if collective == "allreduce" and 2**27 <= size <= 2**30 else 1.0,
        lambda collective, size: 1.25 if collective == "allreduce" and size == 2**30 else 1.0,
    ],
    ids=["all 5 %", "alltoall 10 %", "allgather 10 %", "large alltoall 15 %", "four sizes 15 %", "one size 25 %"],
)
def test_slowdowns_between_siblings_are_found(slowdown: Slowdown, seeds: int) -> None:
    assert failures(slowdown, seeds) >= 0.9 * seeds


def key(collective: str | None = "allreduce", size: int = 2**28, **columns: object) -> RowKey:
    return replace(RowKey(collective=collective, size_bytes=size), **columns)


@pytest.mark.parametrize(
    ("row", "other_hosts", "floor"),
    [
        (key(), False, 0.02),
        (key(size=2**20), False, 0.05),
        (key(nodes=1), True, 0.02),
        (key(nodes=2), False, 0.02),
        (key(nodes=2, size=2**20), False, 0.10),
        (key(nodes=2), True, 0.15),
        (key(nodes=2, size=2**20), True, 0.15),
        (key(None, engine="cpu"), False, 0.25),
    ],
)
def test_what_runs_differ_by_as_a_whole(row: RowKey, *, other_hosts: bool, floor: float) -> None:
    assert single_run_floor(row, 100.0, other_hosts=other_hosts) == floor


@pytest.mark.parametrize(
    ("row", "usual"),
    [
        (key(), 0.01),
        (key("sendrecv"), 0.01),
        (key("alltoall"), 0.03),
        (key("gather"), 0.03),
        (key("alltoall", 2**31), 0.01),
    ],
)
def test_the_usual_noise_stands_where_nothing_else_tells(row: RowKey, usual: float) -> None:
    found = combine_with_usual_noise(row, None)
    assert found is not None
    assert found.deviation == usual


@pytest.mark.parametrize("row", [key(None), key(size=2**20)])
def test_pairs_and_small_sizes_have_a_floor_alone(row: RowKey) -> None:
    assert combine_with_usual_noise(row, None) is None
    assert combine_with_usual_noise(row, Noise(0.001, 10)) == Noise(0.001, 10)


def of_rows(times_us: list[float], nodes: int = 1) -> ResultFile:
    rows = [collective_row((64 + step) * 2**20, time_us=time, nodes=nodes) for step, time in enumerate(times_us)]
    return result_file(rows)


def result_file(rows: Sequence[CollectiveRow]) -> ResultFile:
    return ResultFile(name="f", kind="made", circumstances=FileCircumstances(tool=""), rows=tuple(rows))


@pytest.mark.parametrize(
    ("slow", "verdict"), [(3, Verdict.INCONCLUSIVE), (30, Verdict.FAIL)], ids=["a hiccup", "a third of them"]
)
def test_rows_measured_one_after_the_other_have_a_hiccup_in_common(slow: int, verdict: Verdict) -> None:
    base = [1000.0 + step for step in range(90)]
    new = [time * (1.5 if 40 <= step < 40 + slow else 1.0) for step, time in enumerate(base)]
    assert compare([of_rows(base)], [of_rows(new)]).verdict is verdict


@pytest.mark.parametrize(("slower", "verdict"), [(1.09, Verdict.PASS), (1.105, Verdict.INCONCLUSIVE)])
def test_what_noise_hides_is_unsure_from_ten_percent_on(slower: float, verdict: Verdict) -> None:
    """Five sizes of an all-to-all, with a noise of 12 %."""
    base = [collective_row(2**power, time_us=1000.0, collective="alltoall") for power in range(25, 30)]
    new = [replace(row, time_us=1000.0 * slower) for row in base]
    assert compare([result_file(base)], [result_file(new)]).verdict is verdict


@pytest.mark.parametrize(
    ("hosts", "verdict"),
    [(("n1", "n2"), Verdict.FAIL), (("n1", "n3"), Verdict.INCONCLUSIVE), ((), Verdict.FAIL)],
    ids=["same nodes", "other nodes", "unknown"],
)
@pytest.mark.parametrize("runs", [1, 3])
def test_between_other_nodes_lies_another_part_of_the_network(
    hosts: tuple[str, ...], verdict: Verdict, runs: int
) -> None:
    def side(time_us: float, hosts: tuple[str, ...]) -> list[ResultFile]:
        file = of_rows([time_us] * 4, nodes=2)
        return [replace(file, circumstances=FileCircumstances(tool="", hosts=hosts))] * runs

    assert compare(side(1000.0, ("n1", "n2")), side(1120.0, hosts)).verdict is verdict


def test_a_long_operation_that_takes_twice_as_long_is_no_hiccup() -> None:
    base = [collective_row(2**power, time_us=2.0**power / 1e5) for power in range(20, 33)]
    new = [*base[:-1], replace(base[-1], time_us=2 * base[-1].time_us)]
    assert compare([result_file(base)], [result_file(new)]).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("before", "verdict"), [("PASS", Verdict.FAIL), ("WARN", Verdict.FAIL), ("FAIL", Verdict.PASS)]
)
def test_a_result_that_failed_by_itself_is_no_pass(before: str, verdict: Verdict) -> None:
    rows = [collective_row(2**power, time_us=1000.0) for power in range(25, 30)]
    base, new = (replace(result_file(rows), verdict=each) for each in (before, "FAIL"))
    assert compare([base], [new]).verdict is verdict


@pytest.mark.parametrize(
    ("milliseconds", "iterations", "backend", "verdict"),
    [
        (2.0, 20, "nccl", Verdict.FAIL),
        (0.2, 200, "nccl", Verdict.FAIL),
        (0.55, 20, "nccl", Verdict.FAIL),
        (0.2, 20, "nccl", Verdict.INCONCLUSIVE),
        (2.0, 20, "host", Verdict.INCONCLUSIVE),
    ],
    ids=["40 ms", "40 ms of short ones", "11 ms", "4 ms", "CPU ranks"],
)
def test_a_last_row_that_takes_longer_by_more_than_a_hiccup_is_slower(
    milliseconds: float, iterations: int, backend: str, verdict: Verdict
) -> None:
    """The longest hiccup on a GPU lasted 10 ms."""
    last = 1000 * milliseconds
    base = [
        collective_row(2**power, time_us=last * 2.0 ** (power - 30), iterations=iterations, backend=backend)
        for power in range(20, 31)
    ]
    for slow, expected in ((-1, verdict), (-3, Verdict.INCONCLUSIVE)):
        new = list(base)
        new[slow] = replace(base[slow], time_us=2 * base[slow].time_us)
        assert compare([result_file(base)], [result_file(new)]).verdict is expected
