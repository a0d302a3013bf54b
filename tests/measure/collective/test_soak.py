"""End, progress lines and wrong data of a repeated sweep."""

import pytest
from msgspec.structs import replace

from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.alltoall import skewed
from gpubench.machine.nvml import Driver
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.sweep import Observers
from gpubench.measure.collective.variants import SECONDS_BETWEEN_LINES, Soak
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp
from gpubench.model.terms.verdict import Verdict
from gpubench.ports.backend import Array
from tests.fakes import cupy_on_numpy, faults
from tests.fakes.one_variant import measure
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.formats.sample import ROW
from tests.measure.collective.test_sweep import ReceivedRows, identity, request_for, run_sweep

CASES = [Case(DataType.FLOAT32, ReduceOp.SUM, Placement.OUT_OF_PLACE, Layout(size, size, size)) for size in (256, 512)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def repeated(soak: Soak, clock: Clock, seconds_a_row: float, times: dict[int, float] | None = None) -> None:
    for case in CASES:
        soak.begin(case, replace(ROW, time_us=10.0))
    while True:
        soak.cycle += 1
        for case in CASES:
            if soak.is_over():
                return
            clock.now += seconds_a_row
            soak.add(case, replace(ROW, time_us=(times or {}).get(soak.cycle, 10.0), wrong=int(soak.cycle == 3)))


@pytest.mark.parametrize("cycles", [2, 5])
def test_a_soak_runs_the_requested_cycles(cycles: int) -> None:
    clock, said = Clock(), list[str]()
    soak = Soak(cycles, said.append, clock=clock)
    repeated(soak, clock, 0.1)
    assert soak.rows == cycles * len(CASES)
    assert said == [], "all within a minute"
    wrong = "2 wrong elements" if cycles > 2 else "0 wrong elements"
    assert soak.line().startswith(f"soak: 0 min, {cycles} cycles, {cycles * 2} rows, {wrong}; slowest since")


def test_a_line_per_minute_names_the_slowest_row_since_the_last_line() -> None:
    clock, said = Clock(), list[str]()
    soak = Soak(10, said.append, clock=clock)
    repeated(soak, clock, SECONDS_BETWEEN_LINES / 4, {3: 2500.0, 5: 11.0})
    assert len(said) == 4
    assert said[0].startswith("soak: 1 min, 2 cycles, 6 rows, 2 wrong elements; slowest since the last line: 1K out of")
    assert said[0].endswith("2.50 ms, 10.0 µs in the first cycle")
    assert said[1].endswith("11.0 µs, 10.0 µs in the first cycle")
    assert "2.50 ms" not in "".join(said[1:])


@pytest.mark.parametrize("cycles_until_wrong", [2, 10])
def test_wrong_data_in_a_later_cycle_are_shown_and_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, cycles_until_wrong: int
) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(2), cupy_on_numpy.Nccl(2))
    request = request_for(ALLREDUCE, sizes=(65536,), placements=(Placement.OUT_OF_PLACE,), warmup=2)
    timed_before = 1 + cycles_until_wrong - 1  # A discarded row comes before the first cycle
    timed: list[int] = []

    def late(data: Array) -> None:
        timed.append(1)
        if len(timed) == timed_before + 1:
            faults.wrong_block(data)

    def body(group: ThreadGroup) -> tuple[Report, list[CollectiveRow]]:
        device = open_device(group.rank, 2, "n0", Driver(version="580.1"))
        backend = NcclBackend(group, device, NcclLibrary())
        spoilt = faults.FaultyBackend(backend, late if group.rank == 0 else None, timed=3)
        recorder, soak = ReceivedRows(), Soak(4, lambda _line: None)
        identities = [identity(rank) for rank in range(2)]
        report = measure(request, group, spoilt, identities, recorder, Observers(soak=soak))
        backend.close()
        assert soak.rows == 4
        return report, recorder.rows

    report, rows = run_ranks(2, body)[0]
    if cycles_until_wrong > 4:
        assert (report.verdict, len(rows)) == (Verdict.PASS, 1)
        return
    assert report.verdict is Verdict.FAIL
    assert [bool(row.wrong) for row in rows] == [False, True]
    assert report.findings[0].id == "wrong-data"


def test_unequal_blocks_arrive_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 2, 5):
        request = request_for(skewed(0.5), dtypes=(DataType.INT8, DataType.FLOAT64))
        report, rows, _ = run_sweep(monkeypatch, ranks, request)
        assert {(row.collective, row.wrong) for row in rows} == {("alltoallv", 0)}
        assert report.verdict in (Verdict.PASS, Verdict.SKIP)
