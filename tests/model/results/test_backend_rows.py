"""Backends against the first of a table: what the figures are made of, and what is said of them."""

from typing import Any

import pytest

from gpubench.model.facts.backends import composed, divides, gated
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.rows.backends import BackendRow, against_first, path_words, speed_words, staged_beside
from gpubench.model.terms.nccl_choice import AGAIN
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.verdict import Finding
from tests.fakes.measured_rows import row as measured_row


def row(backend: str, size_bytes: int, time_us: float, **more: Any) -> CollectiveRow:
    return measured_row(size_bytes, time_us, 1.0, **({"backend": backend, "issue_us": None, "note": None} | more))


def table(*speeds: float, backend: str = "torch:nccl", **more: object) -> list[BackendRow]:
    """Of sizes from 1K on, each 16 times the one before, a backend with these speeds in percent."""
    rows = []
    for number, speed in enumerate(speeds):
        size = 1024 * 16**number
        rows += [row("nccl", size, 10.0, issue_us=5.0), row("nccl", size, 10.0, setting=AGAIN)]
        rows.append(row(backend, size, 1000.0 / speed, **{"issue_us": 24.0, **more}))
    return against_first(rows)


def test_a_row_is_held_against_the_mean_of_the_first_before_and_after() -> None:
    (found,) = against_first(
        [
            row("nccl", 1024, 10.0, transport="P2P/CUMEM", issue_us=6.0),
            row("nccl", 1024, 9.0, setting="ring/ll"),
            row("torch:nccl", 1024, 12.0, transport="P2P/CUMEM", issue_us=30.0),
            row("torch:nccl", 2048, 12.0),
            row("nccl", 1024, 14.0, setting=AGAIN, issue_us=5.0),
        ]
    )
    assert (found.first, found.first_time_us, found.speed_percent) == ("nccl", 12.0, 100.0)
    assert (found.issue_us, found.first_issue_us) == (30.0, 5.0)
    assert found.first_drift_percent == pytest.approx(40.0)


def test_wrong_data_are_no_comparison() -> None:
    assert against_first([row("nccl", 1024, 10.0, wrong=1), row("mpi", 1024, 10.0)]) == []
    assert against_first([row("nccl", 1024, 10.0), row("mpi", 1024, 10.0, wrong=1)]) == []
    (alone,) = against_first([row("nccl", 1024, 10.0), row("mpi", 1024, 20.0)])
    assert (alone.speed_percent, alone.first_drift_percent) == (50.0, None)


def test_of_operations_alone_the_medians_are_compared() -> None:
    (found,) = against_first([row("nccl", 1024, 99.0, p50_us=10.0), row("mpi", 1024, 1.0, p50_us=40.0)])
    assert found.speed_percent == 25.0


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ((99.0, 101.0, 98.0), "torch:nccl is as fast as nccl, within 2 %, at all sizes"),
        ((70.0, 80.0, 99.0), "torch:nccl is within 2 % of nccl from 256K on"),
        ((99.0, 99.0, 99.0, 60.0), "torch:nccl reaches 60 % of the speed of nccl at large sizes"),
        ((50.0,), "torch:nccl reaches 50 % of the speed of nccl at large sizes"),
        ((50.0, 50.0, 50.0, 50.0, 40.0, 45.0), "torch:nccl reaches 40 to 45 % of the speed of nccl at large sizes"),
    ],
)
def test_the_speed_of_a_backend_in_words(speeds: tuple[float, ...], said: str) -> None:
    assert speed_words(table(*speeds)) == f"{said}; its host takes 24 µs to issue an operation, nccl 5"


def test_what_is_made_of_several_calls_does_not_speak_for_the_rest() -> None:
    slow = table(50.0, 50.0, note="torch's all_reduce has one buffer: copied into it first")
    assert speed_words([*table(99.0, 99.0), *slow]).startswith("torch:nccl is as fast as nccl")
    assert "reaches 50 to 50 %" not in speed_words(slow[:1])
    assert speed_words(table(99.0, backend="mpi", issue_us=None)) == "mpi is as fast as nccl, within 2 %, at all sizes"


def test_paths_in_words() -> None:
    def of(own: str | None, first: str | None) -> str:
        rows = against_first([row("nccl", 1024, 1.0, transport=first), row("torch:nccl", 1024, 1.0, transport=own)])
        return path_words(rows)

    assert of("P2P/CUMEM", "P2P/CUMEM") == "over the same path (P2P/CUMEM)"
    assert of("SHM/direct", "P2P/CUMEM") == "over another path: SHM/direct, nccl P2P/CUMEM"
    assert of(None, "P2P/CUMEM") == ""


def test_a_framework_that_goes_through_host_memory_beside_a_direct_library_fails() -> None:
    def of(transport: str | None, *, staged: bool | None, first: str = "P2P/CUMEM") -> tuple[Finding, ...]:
        own = row("torch:nccl", 1024, 40.0, transport=transport, host_staged=staged)
        return staged_beside(against_first([row("nccl", 1024, 10.0, transport=first), own]))

    (found,) = of("SHM/direct", staged=True)
    assert (found.id, found.severity, found.subject) == ("host-staged", "FAIL", "torch:nccl")
    assert found.seen == "SHM/direct through host memory, 25 % of the speed of nccl, which takes P2P/CUMEM"
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
        ("mpi", "reduce", DataType.FLOAT32, ReduceOp.AVG, Placement.IN_PLACE, "mpi has no average of float32: a sum"),
        ("torch:gloo", "sendrecv", DataType.INT8, None, Placement.OUT_OF_PLACE, "Gloo sends no CUDA tensors"),
    ],
)
def test_what_is_composed_is_said(
    backend: str, collective: str, dtype: DataType, op: ReduceOp | None, placement: Placement, said: str
) -> None:
    text = composed(backend, collective, dtype, op, placement)
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_what_can_wait_behind_a_gate_does_so_where_one_of_a_table_has_to() -> None:
    four = ("nccl", "torch:nccl", "torch:gloo", "host")
    assert gated(four) == ("nccl", "torch:nccl")
    assert gated(("torch:nccl",)) == ("torch:nccl",)
    assert gated(("nccl", "host")) == (), "nccl-tests' clock, which both can be timed by"
    assert gated(("nccl",)) == ()
    assert gated(four, alone=True) == (), "operations alone are timed with their launch"


def test_averages_are_divided_where_there_are_none() -> None:
    assert divides("torch:gloo", DataType.INT32)
    assert not divides("torch:gloo", DataType.BFLOAT16)
    assert not divides("torch:nccl", DataType.INT32)
