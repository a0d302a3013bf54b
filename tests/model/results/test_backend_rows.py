"""Backends against the first of a table: what the figures are made of, and what is said of them."""

import random
import re
from typing import Any

import pytest

from gpubench.model.results.backends import (
    BackendRow,
    compare_with_first,
    describe_paths,
    describe_speed,
    find_newly_staged,
    find_slower_framework,
)
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import (
    DataType,
    Placement,
    ReduceOp,
    choose_kernel,
    describe_composition,
    gated_backends,
)
from gpubench.model.terms.settings import AGAIN
from gpubench.model.terms.units import parse_size
from gpubench.model.terms.verdict import Finding
from tests.fakes.measured_rows import row as measured_row


def row(backend: str, size_bytes: int, time_us: float, **more: Any) -> CollectiveRow:
    own = {"backend": backend, "issue_us": None, "note": None, "placement": Placement.IN_PLACE}
    return measured_row(size_bytes, time_us, 1.0, **(own | more))


def table(*speeds: float, backend: str = "torch:nccl", **more: object) -> list[BackendRow]:
    """Of sizes from 1K on, each 16 times the one before, a backend with these speeds in percent."""
    rows = []
    for number, speed in enumerate(speeds):
        size = 1024 * 16**number
        place = {"placement": more.get("placement", Placement.IN_PLACE)}
        rows += [row("nccl", size, 10.0, issue_us=5.0, **place), row("nccl", size, 10.0, setting=AGAIN, **place)]
        rows.append(row(backend, size, 1000.0 / speed, **{"issue_us": 24.0, **more}))
    return compare_with_first(rows)


def test_wrong_data_are_no_comparison() -> None:
    assert compare_with_first([row("nccl", 1024, 10.0, wrong=1), row("mpi", 1024, 10.0)]) == []
    assert compare_with_first([row("nccl", 1024, 10.0), row("mpi", 1024, 10.0, wrong=1)]) == []
    (alone,) = compare_with_first([row("nccl", 1024, 10.0), row("mpi", 1024, 20.0)])
    assert (alone.speed_percent, alone.first_drift_percent) == (50.0, None)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ((99.0, 101.0, 98.0), "is as fast as nccl, within 2 %, from 1K to 256K in place"),
        (
            (70.0, 80.0, 99.0),
            "is as fast as nccl, within 2 %, at 256K in place, and reaches 70 to 80 % of its speed from 1K to 16K",
        ),
        (
            (160.0, 142.0, 106.0, 101.0),
            "is as fast as nccl, within 2 %, at 4M in place, and reaches 106 to 160 % of its speed from 1K to 256K",
        ),
        ((99.0, 99.0, 99.0, 60.0), "reaches 60 % of the speed of nccl at 4M in place, and 99 % from 1K to 256K"),
        ((50.0,), "reaches 50 % of the speed of nccl at 1K in place"),
        ((103.0,), "reaches 103 % of the speed of nccl at 1K in place"),
        ((1640.0, 0.25), "reaches 0.25 % of the speed of nccl at 16K in place, and 1640 % at 1K"),
        (
            (99.0, 50.0, 50.0, 50.0, 40.0, 45.0),
            "reaches 40 to 45 % of the speed of nccl from 64M to 1G in place, and 50 to 99 % from 1K to 4M",
        ),
    ],
)
def test_the_speed_of_a_backend_in_words(speeds: tuple[float, ...], said: str) -> None:
    assert describe_speed(table(*speeds)) == f"torch:nccl {said}; its host needs 24 µs to issue an operation, nccl 5"


@pytest.mark.parametrize(("issue_us", "said"), [(4.26, "4.3"), (73.7, "74"), (137.2, "137")])
def test_time_to_issue_has_no_exponent(issue_us: float, said: str) -> None:
    assert describe_speed(table(99.0, issue_us=issue_us)).endswith(
        f"its host needs {said} µs to issue an operation, nccl 5"
    )


def test_what_is_made_of_several_calls_is_told_apart() -> None:
    note = "torch's all_reduce has one buffer, so the input is copied into it first"
    slow = table(92.0, 88.4, note=note, placement="out_of_place")
    both = describe_speed([*table(99.0, 99.0), *slow])
    assert both.startswith(
        "torch:nccl is as fast as nccl, within 2 %, from 1K to 16K in place; for collectives made of several calls, it "
    )
    several = "for collectives made of several calls, it reaches 88.4 % of the speed of nccl at 16K out of place"
    assert f"; {several}, and 92 % at 1K; its" in both
    assert "several calls" not in describe_speed([*table(99.0, 99.0), *slow], composed=False)
    alone = describe_speed(slow, composed=False)
    assert alone.startswith(
        "for collectives made of several calls, torch:nccl reaches 88.4 % of the speed of nccl at 16K out of place"
    )


def test_a_library_that_is_not_as_fast_as_itself_is_said() -> None:
    def of(again_us: float) -> str:
        first = row("nccl", 1024, 10.0), row("nccl", 1024, again_us, setting=AGAIN)
        return describe_speed(compare_with_first([*first, row("mpi", 1024, 10.0)]))

    assert of(10.1) == "mpi is as fast as nccl, within 2 %, at 1K in place"
    assert of(7.0).endswith("; two measurements of nccl differ by up to 30 %, at 1K")


_CLAIM = re.compile(
    r"(?:(?P<alike>is as fast as nccl, within 2 %,)"
    r"|(?P<low>[\d.]+)(?: to (?P<high>[\d.]+))? %(?: of (?:its speed|the speed of nccl))?)"
    r" (?:at (?P<one>\w+)|from (?P<from>\w+) to (?P<to>\w+))"
)


@pytest.mark.parametrize("seed", range(200))
def test_every_row_is_within_what_is_claimed_of_its_size(seed: int) -> None:
    chance = random.Random(seed)
    spread = chance.choice((0.5, 3.0, 60.0))
    speeds = [[max(0.01, chance.gauss(100, spread)) for _ in range(chance.randint(1, 6))] for _ in range(2)]
    rows = [*table(*speeds[0]), *table(*speeds[1], placement="out_of_place")]
    claims = list(_CLAIM.finditer(describe_speed(rows)))
    for each in rows:
        covering = [claim for claim in claims if _covers(claim, each.size_bytes)]
        assert len(covering) == 1, (each.size_bytes, describe_speed(rows))
        (claim,) = covering
        low, high = (98.0, 102.0) if claim["alike"] else (float(claim["low"]), float(claim["high"] or claim["low"]))
        assert low * 0.995 - 0.5 * (low >= 100) <= each.speed_percent <= high * 1.005 + 0.5, describe_speed(rows)
        if claim["alike"]:
            assert abs(each.speed_percent - 100) <= 2


def _covers(claim: re.Match[str], size_bytes: int) -> bool:
    smallest, largest = (claim["one"] or claim[name] for name in ("from", "to"))
    return parse_size(smallest) <= size_bytes <= parse_size(largest)


def slower_at(*speeds: float, again_us: float = 10.0, **more: Any) -> tuple[Finding, ...]:
    """Of sizes from 16M on, each twice the one before."""
    rows = []
    for number, speed in enumerate(speeds):
        size = 2**24 * 2**number
        rows += [row("nccl", size, 10.0), row("nccl", size, again_us, setting=AGAIN)]
        rows.append(row("torch:nccl", size, (10.0 + again_us) / 2 * 100 / speed, **more))
    return find_slower_framework(compare_with_first(rows))


def test_a_framework_that_is_slower_than_its_library_is_warned_of() -> None:
    (found,) = slower_at(100.0, 88.0, 93.0, collective="scatter")
    assert (found.id, found.severity, found.subject) == ("framework-slower", "WARN", "torch:nccl")
    assert found.seen == "88 to 93 % of the speed of nccl from 32M to 64M, in place"
    assert found.next_command == "gpubench scatter --backend nccl,torch:nccl --sizes 32M"


def test_nobody_is_warned_of_a_framework_that_is_as_fast_or_faster_or_that_cannot_be_told() -> None:
    assert slower_at(100.0, 96.0, 160.0) == ()
    assert slower_at(90.0, again_us=12.0) == (), "NCCL itself was as slow the second time"
    assert slower_at(90.0, again_us=8.0) == (), "and the first time"
    assert slower_at(80.0, again_us=12.0) != ()
    assert slower_at(50.0, note="copied first") == (), "made of several calls"
    assert slower_at(50.0, mode="latency") == (), "its launch belongs to the time"
    assert find_slower_framework(table(50.0, 50.0, 50.0)) == (), "small sizes are start-up"
    assert find_slower_framework(table(*[50.0] * 6, backend="torch:gloo")) == (), "another library"
    assert find_slower_framework([]) == ()


def test_paths_in_words() -> None:
    def of(own: str | None, first: str | None) -> str:
        rows = compare_with_first(
            [row("nccl", 1024, 1.0, transport=first), row("torch:nccl", 1024, 1.0, transport=own)]
        )
        return describe_paths(rows)

    assert of("P2P/CUMEM", "P2P/CUMEM") == "over the same path (P2P/CUMEM)"
    assert of("SHM/direct", "P2P/CUMEM") == "over another path: SHM/direct, while nccl uses P2P/CUMEM"
    assert of(None, "P2P/CUMEM") == ""


def test_a_framework_that_goes_through_host_memory_beside_a_direct_library_fails() -> None:
    def of(transport: str | None, *, staged: bool | None, first: str = "P2P/CUMEM") -> tuple[Finding, ...]:
        own = row("torch:nccl", 1024, 40.0, transport=transport, host_staged=staged)
        return find_newly_staged(compare_with_first([row("nccl", 1024, 10.0, transport=first), own]))

    (found,) = of("SHM/direct", staged=True)
    assert (found.id, found.severity, found.subject) == ("host-staged", "FAIL", "torch:nccl")
    assert found.seen == "SHM/direct through host memory, 25 % of the speed of nccl, which uses P2P/CUMEM"
    assert of("P2P/CUMEM", staged=False) == ()
    assert of("SHM/direct", staged=True, first="SHM/direct") == (), "the first's own finding says that"
    assert of(None, staged=None) == ()


@pytest.mark.parametrize(
    ("backend", "collective", "dtype", "op", "placement", "said"),
    [
        ("nccl", "allreduce", DataType.INT8, ReduceOp.AVG, Placement.OUT_OF_PLACE, ""),
        ("host", "allreduce", DataType.INT8, ReduceOp.AVG, Placement.OUT_OF_PLACE, ""),
        ("torch:nccl", "allreduce", DataType.INT8, ReduceOp.AVG, Placement.IN_PLACE, ""),
        ("torch:nccl", "allgather", DataType.INT8, None, Placement.OUT_OF_PLACE, ""),
        ("torch:nccl", "reduce", DataType.INT8, ReduceOp.SUM, Placement.OUT_OF_PLACE, "torch's reduce has one buffer"),
        (
            "mpi",
            "reduce",
            DataType.FLOAT32,
            ReduceOp.AVG,
            Placement.IN_PLACE,
            "mpi has no average of float32, so a sum",
        ),
        ("torch:gloo", "sendrecv", DataType.INT8, None, Placement.OUT_OF_PLACE, "Gloo cannot send CUDA tensors"),
    ],
)
def test_what_is_composed_is_said(
    backend: str, collective: str, dtype: DataType, op: ReduceOp | None, placement: Placement, said: str
) -> None:
    text = describe_composition(backend, collective, dtype, op, placement)
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_what_can_wait_behind_a_gate_does_so_where_one_of_a_table_has_to() -> None:
    four = ("nccl", "torch:nccl", "torch:gloo", "host")
    assert gated_backends(four) == ("nccl", "torch:nccl")
    assert gated_backends(("torch:nccl",)) == ("torch:nccl",)
    assert gated_backends(("nccl", "host")) == (), "nccl-tests' clock, which both can be timed by"
    assert gated_backends(("nccl",)) == ()
    assert gated_backends(four, one_by_one=True) == (), "operations alone are timed with their launch"
    assert gated_backends(four, graph=True) == (), "a graph is replayed without a host that issues operations"
    assert gated_backends(("nccl", "torch:symm", "host")) == ("nccl", "torch:symm")


def test_pytorchs_compiler_takes_the_one_shot_kernel_up_to_128_kib() -> None:
    assert choose_kernel("torch:symm", 2**17) == "one-shot"
    assert choose_kernel("torch:symm", 2**17 + 4) == "two-shot"
    assert choose_kernel("torch:symm", 2**17, "two-shot") == "two-shot"
    assert choose_kernel("torch:symm", 2**17, "again") == "one-shot"
    assert choose_kernel("torch:nccl", 2**17) is None
