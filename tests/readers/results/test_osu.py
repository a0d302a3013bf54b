"""OSU's text of collectives and of osu_bw, made here after its source: no run was made for it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.measure.compare.report import compare
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.osu import read, recognises


def a_run(
    title: str = "MPI-CUDA Allreduce Latency Test",
    command: str = "",
    columns: str = "   Avg Latency(us)",
    rows: tuple[str, ...] = ("4                 10.00", "1048576          1000.00"),
    version: str = " v7.4",
    datatype: str = "# Datatype: MPI_FLOAT.\n",
) -> str:
    table = "\n".join(rows)
    return f"{command}\n# OSU {title}{version}\n{datatype}# Size    {columns}\n{table}\n"


def read_run(text: str) -> ResultFile:
    assert recognises(text)
    return read(text, "osu.txt")


@pytest.mark.parametrize(
    ("command", "ranks", "busbw"),
    [
        ("", None, None),
        ("$ mpirun -np 4 ./osu_allreduce -d cuda", 4, 1.5 * 1.048576),
        ("srun -N2 --ntasks=8 --mpi=pmix ./pt2pt/osu_allreduce", 8, 1.75 * 1.048576),
        ("+ mpirun_rsh -n 2 a b MV2_USE_CUDA=1 osu_allreduce", 2, 1.048576),
        ("mpirun ./osu_allreduce -n 4", None, None),
    ],
)
def test_bus_bandwidth_needs_the_ranks_of_a_command_line(command: str, ranks: int | None, busbw: float | None) -> None:
    found = read_run(a_run(command=command))
    assert [(row.size_bytes, row.time_us, row.ranks) for row in found.latencies] == [
        (4, 10.0, ranks),
        (1048576, 1000.0, ranks),
    ]
    assert found.latencies[1].busbw_gb_s == (None if busbw is None else pytest.approx(busbw))
    assert bool(found.remarks) == (ranks is None)
    row = found.latencies[0]
    assert (row.collective, row.backend, row.dtype, row.op, row.mode) == (
        "allreduce",
        "mpi",
        "float32",
        "sum",
        "latency",
    )
    assert (row.wrong, row.verified, row.iterations) == (None, "no", None)
    assert found.circumstances.tool == "OSU 7.4"


@pytest.mark.parametrize(
    ("name", "collective", "size", "size_without_ranks", "op", "root"),
    [
        ("Reduce", "reduce", 64, 64, "sum", 0),
        ("Broadcast", "broadcast", 64, 64, None, 0),
        ("Reduce_scatter", "reducescatter", 64, 64, "sum", None),
        ("Reduce_scatter_block", "reducescatter", 64, 64, "sum", None),
        ("Allgather", "allgather", 256, 64, None, None),
        ("All-to-All Personalized Exchange", "alltoall", 256, 64, None, None),
        ("Gather", "gather", 256, 64, None, 0),
        ("Scatter", "scatter", 256, 64, None, 0),
    ],
)
def test_sizes_are_those_of_nccl_tests(
    name: str, collective: str, size: int, size_without_ranks: int, op: str | None, root: int | None
) -> None:
    run = {"title": f"MPI {name} Latency Test", "rows": ("64     3.00",), "datatype": ""}
    (row,) = read_run(a_run(command="mpiexec -n 4 osu_x", **run)).latencies  # type: ignore[arg-type]
    assert (row.collective, row.backend, row.size_bytes, row.op, row.root) == (collective, "host", size, op, root)
    assert row.dtype == ("float32" if op else "int8")
    assert "OSU's default" in (row.note or "")
    (row,) = read_run(a_run(**run)).latencies  # type: ignore[arg-type]
    assert row.size_bytes == size_without_ranks
    assert ("one rank's block" in (row.note or "")) == (size != size_without_ranks)


@pytest.mark.parametrize(
    ("library", "backend"), [("MPI", "host"), ("MPI-ROCM", "mpi"), ("NCCL-CUDA", "nccl"), ("RCCL", "rccl")]
)
def test_backends(library: str, backend: str) -> None:
    assert {row.backend for row in read_run(a_run(f"{library} Allreduce Latency Test")).latencies} == {backend}


BANDWIDTH = {
    "title": "MPI-CUDA Bandwidth Test",
    "columns": "Bandwidth (MB/s)        Validation",
    "rows": ("1       0.92         Pass", "1048576    23885.04     Pass"),
}


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("", ("rank 0", "rank 1")),
        ("$ mpirun -n 2 osu_bw -d cuda D D", ("rank 0 (device)", "rank 1 (device)")),
        ("$ mpirun -n 2 osu_bw -d cuda H D", ("rank 0 (host)", "rank 1 (device)")),
    ],
)
def test_bandwidth_of_a_pair(command: str, ends: tuple[str, str]) -> None:
    found = read_run(a_run(command=command, **BANDWIDTH))  # type: ignore[arg-type]
    last = [*found.pairs][-1]
    assert (last.source, last.destination) == ends
    assert (last.size_bytes, last.bandwidth_gb_s, last.latency_us) == (1048576, 23.88504, None)
    assert (last.verified, last.verdict, last.direction, last.path_class) == ("last", None, None, None)
    assert found.circumstances.wrong_elements is None


def test_older_versions_say_where_buffers_are() -> None:
    text = a_run(**BANDWIDTH).replace("# Size", "# Send Buffer on DEVICE (D) and Receive Buffer on HOST (H)\n# Size")  # type: ignore[arg-type]
    assert {(row.source, row.destination) for row in read_run(text).pairs} == {("rank 0 (device)", "rank 1 (host)")}


def verdict_of(base: str, new: str) -> Verdict:
    return compare([read_run(base)], [read_run(new)]).verdict


def test_compared_with_each_other() -> None:
    pair = a_run(**BANDWIDTH)  # type: ignore[arg-type]
    for text, figure, slower in ((a_run(), "1000.00", "2000.00"), (pair, "23885.04", "11885.04")):
        assert verdict_of(text, text) == Verdict.PASS
        three = text.replace("1048576 ", "524288 ")
        assert verdict_of(text + three, (text + three).replace(figure, slower)) == Verdict.FAIL
    assert verdict_of(pair, pair.replace("Pass", "Fail")) == Verdict.FAIL


def test_a_failed_validation_has_no_figure_that_outvotes_it() -> None:
    (_, last) = read_run(a_run(**BANDWIDTH).replace("23885.04     Pass", "23885.04     Fail")).pairs  # type: ignore[arg-type]
    assert (last.bandwidth_gb_s, last.verdict, last.verified) == (None, "FAIL", "last")
    run = a_run(columns="   Avg Latency(us)        Validation", rows=("64    3.00    Fail", "128    3.00    Pass"))
    rows = read_run(run).latencies
    assert [(row.wrong, row.verified) for row in rows] == [(1, "last"), (0, "last")]
    assert verdict_of(run.replace("Fail", "Pass"), run) == Verdict.FAIL


def test_what_stands_between_rows_is_passed_over_and_damage_is_counted() -> None:
    rows = (
        "4                 10.00",
        "[a100:mpi_rank_0][dreg_register] 8196 entries were evicted",
        "8                 11.0",
        "16",
        "32                 inf",
        "64                 12.00",
    )
    found = read_run(a_run(rows=rows))
    assert not found.complete
    assert [row.size_bytes for row in found.latencies] == [4, 64]
    assert [line.split(" ")[2].strip("():") for line in found.left_out] == ["8", "16", "32"]


@pytest.mark.parametrize("prefix", ["0: ", "[1,0]<stdout>:", "2026-01-02T08:00:00 n1 "])
def test_behind_launchers_prefixes(prefix: str) -> None:
    labelled = "\n".join(prefix + line for line in a_run().split("\n"))
    assert read_run(labelled).latencies == read_run(a_run()).latencies


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (a_run("MPI Barrier Latency Test", columns="   Avg Latency(us)", rows=()), "is of OSU's Barrier test"),
        (a_run("MPI Latency Test"), "is of OSU's Latency test"),
        (a_run("MPI-CUDA Non-blocking Allreduce Latency Test"), "is of OSU's Non-blocking Allreduce test"),
        (a_run(rows=()), "has no measured values"),
        (a_run(rows=("4", "8  1.0")), "has no complete row: 2 rows left out"),
        ("# OSU MPI Allreduce", "has no measured values"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(text, "osu.txt")


@given(st.data())
def test_any_damage_gives_rows_or_one_error(data: st.DataObject) -> None:
    text = a_run(command="mpirun -np 4 osu_allreduce") + a_run(**BANDWIDTH)  # type: ignore[arg-type]
    start = data.draw(st.integers(0, len(text)))
    put = data.draw(st.text(max_size=10))
    with contextlib.suppress(UsageError):
        read(text[:start] + put + text[data.draw(st.integers(start, len(text))) :], "x")
