"""What earlier results of a machine let a run expect, and what is left out."""

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.results.history import LEAST_RESULTS, PastFigures, PastResult, ResultHead, why_unfit
from gpubench.model.results.report import CollectiveRow, Metadata
from tests.formats.sample import METADATA, PAIR, ROW

OWN_METADATA = replace(METADATA, run_id="now", started_at="2026-12-01T08:00:00+00:00")


def head(metadata: Metadata = METADATA, verdict: str = "PASS", *, complete: bool = True, **options: Any) -> ResultHead:
    changed = replace(metadata, options=dict(metadata.options) | options)
    return ResultHead.of(json.loads(json.dumps(changed.to_record())), "x.json", verdict, complete=complete)


OWN = head(OWN_METADATA, "ERROR", complete=False)


def on_day(day: int, **changes: Any) -> Metadata:
    return replace(
        METADATA, run_id=f"run {day}", started_at=f"2026-{1 + day // 28:02}-{1 + day % 28:02}T08:00:00+00:00", **changes
    )


def timed(time_us: float, **changes: Any) -> CollectiveRow:
    return replace(ROW, time_us=time_us, busbw_gb_s=1.5 / time_us, **changes)


def of_times(times: Iterable[float], **changes: Any) -> PastFigures:
    results = [PastResult(head(on_day(day)), [timed(time_us, **changes)]) for day, time_us in enumerate(times)]
    return PastFigures.of(results, OWN, "results/")


def test_few_results_expect_nothing() -> None:
    few = of_times([10.0] * (LEAST_RESULTS - 1))
    assert few.collective_figure(ROW) is None
    assert few.note == "this machine's past: 4 results of results/, but judging a row needs at least 5"
    assert PastFigures.of([], OWN, "results/").note == ""


def test_a_figure_tells_its_source_and_noise() -> None:
    found = of_times([10.0, 10.2, 10.1, 10.3, 10.1, 10.2]).collective_figure(ROW)
    assert found is not None
    assert (found.runs, found.source) == (6, "this machine's past, 6 results of results/")
    assert 0.002 < found.deviation < 0.03
    assert found.gb_s == pytest.approx(1.5 / 10.1)


def test_a_slow_decline_is_held_against_the_better_days() -> None:
    declining = [10.0 * 1.02**week for week in range(30)]
    found = of_times(declining).collective_figure(ROW)
    assert found is not None
    assert found.time_us is not None
    assert declining[-1] > 1.4 * found.time_us
    assert found.deviation < 0.01, "what declines steadily is no noise"


@pytest.mark.parametrize(("noise", "runs"), [(0.01, 5), (0.05, 8), (0.2, 5)])
def test_chance_is_not_slow_and_half_as_fast_is(noise: float, runs: int) -> None:
    chance, sizes = random.Random(7), [2**power for power in range(10, 30)]
    alarms, found_slow, judged = 0, 0, 0
    for _ in range(10):
        days = [
            PastResult(
                head(on_day(day)), [timed(10 * chance.lognormvariate(0, noise), size_bytes=each) for each in sizes]
            )
            for day in range(runs)
        ]
        past = PastFigures.of(days, OWN, "results/")
        for size in sizes:
            figure = past.collective_figure(replace(ROW, size_bytes=size))
            assert figure is not None
            assert figure.time_us is not None
            times = 10 * chance.lognormvariate(0, noise) / figure.time_us
            alarms += times > figure.slow_beyond(len(sizes))
            found_slow += 2 * times > figure.slow_beyond(len(sizes))
            judged += 1
    assert alarms == 0
    assert found_slow > 0.9 * judged or noise > 0.1


@pytest.mark.parametrize("bad", [{"verdict": "FAIL"}, {"verdict": "WARN"}, {"verdict": "INCONCLUSIVE"}, {"wrong": 1}])
def test_slow_and_wrong_rows_are_no_norm(bad: dict[str, Any]) -> None:
    assert of_times([10.0] * 6, **bad).collective_figure(ROW) is None


@pytest.mark.parametrize(
    "other",
    [
        {"size_bytes": 2048},
        {"ranks": 4},
        {"nodes": 2},
        {"dtype": "bfloat16"},
        {"op": "max"},
        {"root": 1},
        {"placement": "in_place"},
        {"mode": "latency"},
        {"graph": 5},
        {"setting": "ring"},
        {"group": "a"},
        {"backend": "host"},
        {"collective": "allgather"},
    ],
)
def test_only_the_same_row_is_a_measure(other: dict[str, Any]) -> None:
    past = of_times([10.0] * 6)
    assert past.collective_figure(ROW) is not None
    assert past.collective_figure(replace(ROW, **other)) is None


def test_pairs_are_known_by_bus_id_and_kind_of_host_memory() -> None:
    pinned = replace(PAIR, source="host", source_bus_id=None, bandwidth_gb_s=55.0, note="pinned host memory")
    pageable = replace(pinned, bandwidth_gb_s=9.0, note="pageable host memory")
    results = [PastResult(head(on_day(day)), (), [PAIR, pinned, pageable]) for day in range(5)]
    past = PastFigures.of(results, OWN, "results/")
    found = past.pair_figure(replace(PAIR, source="GPU7", bandwidth_gb_s=1.0))
    assert found is not None
    assert (found.gb_s, found.time_us) == (390.0, 700.0)
    of_host = [past.pair_figure(pinned), past.pair_figure(pageable)]
    assert [each.gb_s for each in of_host if each] == [55.0, 9.0]
    assert past.pair_figure(replace(PAIR, peer="off")) is None
    assert past.pair_figure(replace(PAIR, destination_bus_id="0000:02:00.0")) is None


def test_a_copy_that_has_only_a_time() -> None:
    small = replace(PAIR, bandwidth_gb_s=None, latency_us=2.0)
    slower = replace(small, latency_us=3.0)
    results = [PastResult(head(on_day(day)), (), [slower if day % 2 else small]) for day in range(5)]
    found = PastFigures.of(results, OWN, "results/").pair_figure(small)
    assert found is not None
    assert (found.time_us, found.gb_s) == (2.0, None)


UUIDS = tuple(replace(rank, gpu_uuid=f"GPU-9{rank.rank}") for rank in METADATA.ranks)
HOST_RANKS = tuple(replace(rank, gpu=None, gpu_uuid=None, gpu_bus_id=None) for rank in METADATA.ranks)
WITH_DRIVER = replace(OWN_METADATA, libraries={**METADATA.libraries, "driver": "580.1 (runs CUDA 13.0)"})


@pytest.mark.parametrize(
    ("past", "own", "reason", "example"),
    [
        (head(replace(METADATA, hosts=("n2",))), OWN, "of another machine", "n2, not n1"),
        (head(replace(METADATA, origin="simulated")), OWN, "of another origin", "simulated, not measured"),
        (head(replace(METADATA, ranks=UUIDS)), OWN, "of other ranks or GPUs", "GPU-90, not GPU-0"),
        (
            head(replace(METADATA, ranks=METADATA.ranks[:1])),
            OWN,
            "of other GPUs",
            "1 × NVIDIA H200, not 2 × NVIDIA H200",
        ),
        (
            head(replace(METADATA, ranks=HOST_RANKS[:1])),
            head(replace(OWN_METADATA, ranks=HOST_RANKS)),
            "of other ranks or GPUs",
            "1, not 2",
        ),
        (
            head(replace(METADATA, topology="a", ranks=())),
            head(replace(OWN_METADATA, topology="b", ranks=())),
            "of another topology",
            "a, not b",
        ),
        (head(), head(WITH_DRIVER), "of another driver", "none, not 580.1 (runs CUDA 13.0)"),
        (
            head(replace(METADATA, libraries={"NCCL": "2.27.3 from /x", "MPI": "Open MPI v5.0.11"})),
            OWN,
            "of another NCCL",
            "2.27.3, not 2.28.9",
        ),
        (
            head(replace(METADATA, libraries={**METADATA.libraries, "MPI": "MPICH " + 60 * "x"})),
            OWN,
            "of another MPI",
            "MPICH " + 33 * "x" + "…, not Open MPI v5.0.11",
        ),
        (head(replace(METADATA, environment={})), OWN, "of other settings", "NCCL_ALGO none, not Ring"),
        (
            head(replace(METADATA, environment={"NCCL_ALGO": "Ring", "NCCL_DEBUG": "TRACE"})),
            OWN,
            "of other settings",
            "NCCL_DEBUG TRACE, not none",
        ),
        (head(allocator="nccl"), OWN, "of other options", "allocator nccl, not cuda"),
        (head(verdict="FAIL"), OWN, "whose verdict is FAIL", ""),
        (head(verdict="ERROR"), OWN, "whose verdict is ERROR", ""),
        (head(complete=False), OWN, "incomplete, or still running", ""),
        (head(replace(METADATA, started_at="2027-01-01T08:00:00+00:00")), OWN, "started after this run", ""),
    ],
)
def test_other_circumstances_are_left_out_and_named(
    past: ResultHead, own: ResultHead, reason: str, example: str
) -> None:
    assert why_unfit(past, own) == (reason, example)
    results = [
        PastResult(past, [ROW]),
        *(PastResult(replace(own, verdict="PASS", complete=True), [ROW]) for _ in range(5)),
    ]
    found = PastFigures.of(results, own, "results/")
    assert found.used == 5
    shown = f" ({example})" if example else ""
    assert found.note == f"this machine's past: 5 results of results/; left out: 1 {reason}{shown}"


@pytest.mark.parametrize(
    "metadata",
    [
        replace(METADATA, environment={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}),
        replace(METADATA, libraries={"NCCL": "2.28.9 from /elsewhere", "MPI": "Open MPI v5.0.11", "numpy": "2"}),
        replace(METADATA, options=dict(METADATA.options) | {"sizes": [4], "check": False, "dtypes": ["int8"]}),
        replace(METADATA, topology="known"),
        replace(METADATA, gpubench_version="0.2"),
    ],
)
def test_what_changes_no_row_leaves_nothing_out(metadata: Metadata) -> None:
    assert why_unfit(head(metadata), OWN) is None


def test_a_lost_link_is_held_against_the_days_before() -> None:
    own = head(replace(OWN_METADATA, topology="b"))
    results = [PastResult(head(on_day(day, topology="b" if day == 5 else "a")), [ROW]) for day in range(6)]
    found = PastFigures.of(results, own, "results/")
    assert found.collective_figure(ROW) is not None
    assert found.note == (
        "this machine's past: 6 results of results/; links or NICs have changed since 5 of them (another topology)"
    )


def test_reasons_are_counted_with_the_newest_example() -> None:
    others = [head(on_day(day, libraries={"NCCL": f"2.{day}", "MPI": "Open MPI v5.0.11"})) for day in range(3)]
    found = PastFigures.of([PastResult(other) for other in others], OWN, "results/")
    assert [str(each) for each in found.left_out] == ["3 of another NCCL (2.2, not 2.28.9)"]
