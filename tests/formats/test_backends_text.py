"""Backends side by side, and what an MPI made of GPU memory, as tables."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gpubench.formats.registry import TABLE
from gpubench.formats.text.collective import collective_lines
from gpubench.model.facts.process import OperationTrial, TrialOutcome
from gpubench.model.results.backends import BackendRow, MpiTrialRow, compare_with_first
from gpubench.model.results.report import Record, Report, Table, make_record
from gpubench.model.terms.verdict import Verdict
from tests.fakes.measured_rows import row
from tests.formats.sample import METADATA
from tests.formats.test_formats import written

ROWS = compare_with_first(
    [
        row(1024, 8.0, 1.0, issue_us=5.0),
        row(1024, 8.0, 1.0, backend="torch:nccl", issue_us=24.0),
        row(1024, 0.5, 1.0, backend="host"),
        row(2**24, 80.0, 1.0, issue_us=5.0),
        row(2**24, 80.0, 1.0, backend="torch:nccl", issue_us=24.0, placement="out_of_place"),
        row(2**24, 80.0, 1.0, placement="in_place"),
        row(2**24, 100.0, 1.0, backend="torch:nccl", placement="in_place", note="copied first"),
    ]
)


def shown_below(kind: type[Record], rows: Sequence[Record], width: int = 100) -> list[str]:
    report = Report(
        verdict=Verdict.PASS, complete=True, sections={kind.section: Table(kind.columns(), lambda: [*rows])}
    )
    lines = written(TABLE, rows=(), report=report, width=width).splitlines()
    return lines[lines.index("no row was measured") + 1 :]


def test_a_table_has_the_speed_of_each_and_what_the_host_takes() -> None:
    shown = shown_below(BackendRow, ROWS)
    assert shown[1:5] == [
        "speed, % of nccl's, float32, sum, out of place",
        "size  nccl µs  torch:nccl  host  issued in µs:  nccl  torch:nccl",
        "  1K     8.00       100.0  16 ×                 5.00       24.00",
        " 16M    80.00       100.0     -                 5.00       24.00",
    ]
    assert "  torch:nccl: copied first" in shown
    assert "beside            torch:nccl is as fast as nccl, within 2 %, from 1K to 16M out of place; for" in shown
    narrow = shown_below(BackendRow, ROWS, 40)
    assert narrow[2] == "size  nccl µs  torch:nccl  host"


def test_the_header_says_by_which_clock_each_backend_is_timed() -> None:
    def said(clock: str | None, *settings: str) -> list[str]:
        options = {**METADATA.options, "settings": list(settings)} | ({} if clock is None else {"clock": clock})
        lines = collective_lines(replace(METADATA, options=options), verbose=False)
        return [line.strip() for line in lines if "timed by" in line]

    gate = "timed by the GPU, starting when a gate releases the queued operations"
    assert said("gate", "torch:nccl", "torch:gloo", "host") == [
        f"nccl and torch:nccl: {gate}",
        "torch:gloo and host: timed by the host, which waits for every operation",
    ]
    assert said("gate", "torch:nccl") == [f"nccl and torch:nccl: {gate}"]
    assert said(None, "host") == [], "one clock for all, the host's"


def lines_of(collective: str) -> list[str]:
    changed = {"settings": ["torch:nccl", "host"], "placements": ["in_place"], "mode": "throughput"}
    options = {**METADATA.options, **changed}
    metadata = replace(METADATA, options=options, collective=collective)
    of_all: dict[str, Any] = {"collective": collective, "placement": "in_place", "wrong": 0, "limit_gb_s": None}
    rows = [
        row(2**20, 20.0, 80.0, **of_all, algorithm="RING", protocol="LL"),
        row(2**20, 19.0, 84.0, **of_all, backend="torch:nccl"),
        row(2**20, 2.5, 600.0, **of_all, backend="host"),
    ]
    done = Report(verdict=Verdict.PASS, complete=True)
    return written(TABLE, metadata=metadata, rows=tuple(rows), report=done, width=70).splitlines()


def test_what_nccl_took_is_asked_of_nccl_alone_and_where_it_chooses() -> None:
    taken = {line.split()[0]: line.split()[-1] for line in lines_of("allreduce") if " 1M " in line}
    assert (taken["nccl"], taken["torch:nccl"], taken["host"]) == ("ring/ll", "?", "-")
    assert not any("took" in line or "?" in line for line in lines_of("scatter")), (
        "sends and receives: nothing to choose"
    )


def test_the_figures_below_a_table_are_of_the_backend_that_is_judged() -> None:
    assert "at the smallest   20.00 µs at 1M, float32, in place" in lines_of("allreduce")


def test_every_trial_of_mpi_is_shown_with_its_end() -> None:
    trials = [
        OperationTrial(
            operation="allreduce", size_bytes=1024, outcome=TrialOutcome.CRASHED, seconds=5.6, said="signal 11"
        ),
        OperationTrial(operation="allreduce", size_bytes=2**20, outcome=TrialOutcome.UNKNOWN),
        OperationTrial(operation="sendrecv", size_bytes=1024, outcome=TrialOutcome.RIGHT, seconds=6.1),
        OperationTrial(operation="sendrecv", size_bytes=2**20, outcome=TrialOutcome.WRONG, seconds=6.1, said="3 wrong"),
    ]
    rows = [make_record(MpiTrialRow, trial) for trial in trials]
    assert shown_below(MpiTrialRow, rows)[1:5] == [
        "MPI on GPU memory, each operation in a separate job",
        "operation  1K       1M          after s  its words",
        "allreduce  crashed  not tried       5.6  signal 11",
        "sendrecv   right    wrong data      6.1  3 wrong",
    ]
