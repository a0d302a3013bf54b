"""nccl-tests' text and JSON: recorded on four H200s, made after its source, and mangled."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.operation import nccl_version
from gpubench.readers.registry import read_results
from gpubench.readers.results.nccl_tests.json import read as read_nccl_tests_json
from gpubench.readers.results.nccl_tests.table import COLLECTIVE_NAMES
from gpubench.readers.results.nccl_tests.text import read as read_nccl_tests
from tests.fakes.nccl_tests import Half, Output, Result

RECORDED = Path(__file__).parents[3] / "results" / "h200x4"
ALL_REDUCE = (RECORDED / "all_reduce.txt").read_text()


def read(text: str) -> ResultFile:
    return read_nccl_tests(text, "out.txt")


WHOLE = read(ALL_REDUCE)


@pytest.mark.parametrize(
    ("name", "collective", "last_gb_s", "wrong", "op", "root"),
    [
        ("all_reduce", "allreduce", 362.66, 0, "sum", None),
        ("all_gather", "allgather", 351.9, 0, None, None),
        ("reduce_scatter", "reducescatter", 346.04, 0, "sum", None),
        ("broadcast", "broadcast", 362.97, 0, None, 0),
        ("reduce", "reduce", 366.09, 0, "sum", 0),
        ("alltoall", "alltoall", 349.48, None, None, None),
        ("sendrecv", "sendrecv", 364.62, None, None, None),
    ],
)
def test_recorded(
    name: str, collective: str, last_gb_s: float, wrong: int | None, op: str | None, root: int | None
) -> None:
    found = read_results(RECORDED / f"{name}.txt")
    assert (len(found.rows), found.complete, found.remarks) == (24, True, ())
    assert {row.collective for row in found.rows} == {collective}
    assert {(row.ranks, row.nodes, row.origin, row.backend) for row in found.rows} == {(4, 1, "recorded", "nccl")}
    assert {(row.op, row.root, row.dtype, row.iterations) for row in found.rows} == {(op, root, "float32", 20)}
    last = found.rows[-1]
    assert (last.size_bytes, last.placement, last.busbw_gb_s, last.wrong) == (2**32, "in_place", last_gb_s, wrong)
    assert last.verified == ("no" if wrong is None else "repeat")
    assert (last.time_us_fastest_rank, last.slowest_rank, last.p99_us) == (None, None, None)


def test_ranks_that_mpich_puts_before_every_piece_are_taken_away() -> None:
    pieces = re.sub(r"(?<=\S)(?=    +\d+\.\d\d )", "[0]", re.sub("(?m)^", "[0] ", ALL_REDUCE))
    assert "[0]  " in pieces
    assert read(pieces) == read(ALL_REDUCE)


def test_two_runs_in_one_file() -> None:
    both = read(ALL_REDUCE + (RECORDED / "broadcast.txt").read_text())
    assert [row.collective for row in both.rows] == ["allreduce"] * 24 + ["broadcast"] * 24


MANGLINGS = {
    "mpirun --tag-output": lambda line: f"[1,0]<stdout>:{line}",
    "newer --tag-output": lambda line: f"[prterun-n1-1@1,0]<stdout>: {line}",
    "srun -l": lambda line: f"0: {line}",
    "rank": lambda line: f"[rank0]: {line}",
    "clock": lambda line: f"2026-11-20T08:00:00.123456+00:00 {line}",
    "colour": lambda line: f"\x1b[32m{line}\x1b[0m",
    "Windows": lambda line: f"{line}\r",
    "spaces": lambda line: f"{line}  ",
}


@pytest.mark.parametrize("how", MANGLINGS)
def test_launchers_and_terminals_change_nothing(how: str) -> None:
    mangled = "\n".join(map(MANGLINGS[how], ALL_REDUCE.split("\n")))
    assert read(mangled).rows == read(ALL_REDUCE).rows


@given(st.integers(0, len(ALL_REDUCE)))
def test_cut_off_anywhere(length: int) -> None:
    try:
        found = read(ALL_REDUCE[:length])
    except UsageError as error:
        refused_at = length if "out.txt" in str(error) else len(ALL_REDUCE)
        assert refused_at < ALL_REDUCE.index(" 0\n", ALL_REDUCE.index("        1024 ")) + 3
        return
    assert found.rows == WHOLE.rows[: len(found.rows)]
    assert found.complete == (len(found.rows) == 24 and "Out of bounds values : 0 OK" in ALL_REDUCE[:length])
    assert found.complete or found.remarks


@given(st.data())
def test_damage_never_invents_a_row(data: st.DataObject) -> None:
    lines = ALL_REDUCE.split("\n")
    number = data.draw(st.integers(0, len(lines) - 1))
    start = data.draw(st.integers(0, len(lines[number])))
    end = data.draw(st.integers(start, len(lines[number])))
    # Digits put into a digit's place make another number, which nothing can tell from a true one.
    no_digits = st.characters(exclude_characters=".", categories=["L", "P", "S", "Zs"])
    put = data.draw(st.text(no_digits, max_size=20))
    lines[number] = lines[number][:start] + put + lines[number][end:]
    try:
        found = read("\n".join(lines))
    except UsageError:
        return
    sizes = {row.size_bytes for row in WHOLE.rows}
    assert len({row.size_bytes for row in found.rows} - sizes) <= 1
    assert len(found.rows) <= 24


@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    for reader in (read_nccl_tests, read_nccl_tests_json):
        with contextlib.suppress(UsageError):
            assert reader(text, "x").rows


SAMPLES = tuple(10.0 + each % 7 for each in range(20))


def with_busbw_of_its_ranks(output: Output) -> Output:
    """Return the output with the busbw that its number of ranks gives. Large rows of all-reduce need it."""
    factor = 2 * (1 - 1 / len(output.devices()))

    def fitting(half: Half) -> Half:
        return dataclasses.replace(half, busbw=round(half.algbw * factor, 2))

    results = (
        dataclasses.replace(result, halves=(fitting(result.halves[0]), fitting(result.halves[1])))
        for result in output.results
    )
    return dataclasses.replace(output, results=tuple(results))


OUTPUTS = st.builds(
    Output,
    program=st.sampled_from(sorted(COLLECTIVE_NAMES)),
    hosts=st.sampled_from([("n1",), ("n1", "n2"), ("n1", "n1", "n2", "n2")]),
    gpus=st.integers(1, 8),
    iters=st.just(20),
    aggregated=st.sampled_from([1, 4]),
    graph=st.sampled_from([0, 10]),
    blocking=st.booleans(),
    cpu_time=st.booleans(),
    per_iteration=st.booleans(),
    results=st.lists(
        st.builds(
            Result,
            size=st.sampled_from([0, 1024, 2**32]),
            kind=st.sampled_from(["float", "half", "bfloat16", "uint8", "f8e4m3"]),
            op=st.sampled_from(["none", "sum", "mulsum"]),
            root=st.sampled_from([-1, 0, 3]),
            halves=st.tuples(
                *[
                    st.builds(
                        Half,
                        time_us=st.integers(1, 99999).map(lambda hundredths: hundredths / 100),
                        wrong=st.sampled_from([None, 0, 17]),
                        times_us=st.just(SAMPLES),
                    )
                ]
                * 2
            ),
        ),
        min_size=1,
        max_size=5,
    ).map(tuple),
).map(with_busbw_of_its_ranks)


@given(OUTPUTS)
def test_text_and_json_say_the_same(output: Output) -> None:
    moved = sum(result.size > 0 for result in output.results)
    if not moved:
        for reader, written in ((read_nccl_tests, output.text()), (read_nccl_tests_json, output.json())):
            with pytest.raises(UsageError, match="only rows of size 0"):
                reader(written, "x")
        return
    text, plain = read_nccl_tests(output.text(), "x"), read_nccl_tests_json(output.json(), "x")
    assert len(text.rows) == len(plain.rows) == 2 * moved
    for one, other in zip(text.rows, plain.rows, strict=True):
        # The text has neither median nor 95th percentile, and two decimals of the others.
        rounded = replace(other, p50_us=None, p95_us=None, batch_cv=one.batch_cv, ci95_percent=one.ci95_percent)
        assert one == rounded
        assert other.batch_cv == pytest.approx(one.batch_cv, abs=1e-4)
    assert text.circumstances.gpus == plain.circumstances.gpus


def test_percentiles_and_ranks_of_json() -> None:
    slow = tuple(sample + 5 for sample in SAMPLES)
    half = Half(time_us=17.95, times_us=slow, by_process=(SAMPLES, slow))
    output = Output(hosts=("n1", "n2"), gpus=4, per_iteration=True, skip=2, results=(Result(halves=(half, half)),))
    row = read_nccl_tests_json(output.json(), "x").rows[0]
    kept = slow[2:]
    assert (row.p50_us, row.p95_us, row.p99_us) == (sorted(kept)[9], 21.0, 21.0)
    assert row.slowest_rank == 4
    assert row.time_us_slowest_rank == pytest.approx(sum(kept) / 18)
    assert row.time_us_fastest_rank == pytest.approx(sum(kept) / 18 - 5)
    assert row.ci95_percent == pytest.approx(196 * (row.batch_cv or 0) / 18**0.5)
    assert read(output.text()).rows[0].ci95_percent == pytest.approx(row.ci95_percent, abs=0.01)


@pytest.mark.parametrize(("average", "fastest", "slowest"), [(0, None, None), (2, 20.0, None), (3, None, 20.0)])
def test_which_rank_the_time_is_of(average: int, fastest: float | None, slowest: float | None) -> None:
    output = Output(args=("-b", "8", "-a", str(average)))
    command = f"+ mpirun -n 4 ./build/all_reduce_perf -b 8 -a {average}\n"
    for row in (read_nccl_tests_json(output.json(), "x").rows[0], read(command + output.text()).rows[0]):
        assert (row.time_us_fastest_rank, row.time_us_slowest_rank) == (fastest, slowest)
        assert f"(-a {average})" in (row.note or "")


def test_json_that_was_killed_keeps_what_it_has() -> None:
    text = Output(results=(Result(), Result(size=2048), Result(size=4096))).json()
    cut = text[: text.index('"size":4096') + 20]
    found = read_nccl_tests_json(cut, "x")
    assert [row.size_bytes for row in found.rows] == [1024, 1024, 2048, 2048]
    assert not found.complete
    assert found.remarks[0] == "the file has no end: the run was killed"


def test_a_newer_json_is_refused() -> None:
    with pytest.raises(UsageError, match="has version 4 of nccl-tests' JSON"):
        read_nccl_tests_json(Output(version=4).json(), "x")


@given(st.data())
def test_damaged_json_gives_one_error(data: st.DataObject) -> None:
    document = json.loads(Output().json())
    part = data.draw(st.sampled_from([document, document["config"], document["results"][0]]))
    key = data.draw(st.sampled_from(sorted(part)))
    part[key] = data.draw(st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2))
    with contextlib.suppress(UsageError):
        assert read_nccl_tests_json(json.dumps(document), "x").rows


OLD = """# nThread 1 nGpus 8 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw {last}     time   algbw   busbw {last}
   {row}
# Out of bounds values : 0 OK
"""
DEVICES = "\n".join(f"#   Rank  {gpu} Pid  812 on  n1 device  {gpu} [0x0{gpu}] A100-SXM4-40GB" for gpu in range(8))


@pytest.mark.parametrize(
    ("row", "collective"),
    [
        ("1048576  262144  float  sum  -1  60.00  17.48  30.58  0  59.00  17.77  31.10  0", "allreduce"),
        ("1048576  32768  float  sum  -1  60.00  17.48  15.29  0  59.00  17.77  15.55  0", "reducescatter"),
        ("1048576  262144  float  sum  0  60.00  17.48  17.48  0  59.00  17.77  17.77  0", "reduce"),
        ("1048576  262144  float  none  0  60.00  17.48  17.48  0  59.00  17.77  17.77  0", "broadcast"),
    ],
)
def test_old_outputs_do_not_name_the_collective(row: str, collective: str) -> None:
    found = read(OLD.format(devices=DEVICES, row=row, last="#wrong"))
    assert found.rows[0].collective == collective
    assert "by the shape of its rows" in (found.rows[0].note or "")
    assert (found.rows[0].ranks, found.circumstances.tool) == (8, "nccl-tests")


def test_a_shape_of_several_collectives_is_refused_unless_the_command_stands_above() -> None:
    row = "1048576  32768  float  none  -1  60.00  17.48  15.29  0  59.00  17.77  15.55  0"
    text = OLD.format(devices=DEVICES, row=row, last="#wrong")
    with pytest.raises(UsageError, match="the collective is not named"):
        read(text)
    assert read(f"$ ./build/all_gather_perf -b 1M -g 8\n{text}").rows[0].collective == "allgather"


def test_the_largest_error_of_old_outputs_counts_no_elements() -> None:
    row = "1048576  262144  float  sum  -1  60.00  17.48  30.58  5e-07  59.00  17.77  31.10  0e+00"
    found = read(OLD.format(devices=DEVICES, row=row, last=" error"))
    assert [each.wrong for each in found.rows] == [None, 0]


def test_wrong_elements_are_counted() -> None:
    result = Result(halves=(Half(wrong=1.23457e06), Half(wrong=0)))
    assert [row.wrong for row in read(Output(results=(result,)).text()).rows] == [1234570, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Using devices\n", "has no measured values"),
        ("1024 256 float sum -1 20.0 1.0\n", "has no complete row: 1 row damaged"),
        ("1024 256 float sum -1 20.0 1.0 1.0 0 20.0 1.0 1.0 0\n", "with the number of ranks and iterations"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(text)


@pytest.mark.parametrize(("code", "text"), [(22809, "2.28.9"), (2708, "2.7.8"), (21005, "2.10.5")])
def test_versions(code: int, text: str) -> None:
    assert nccl_version(code) == text


def test_more_ranks_than_there_can_be_are_refused() -> None:
    document = json.loads(Output().json())
    document["config"]["ngpus"] = 10**9
    with pytest.raises(UsageError, match="a run with 1000000000 ranks"):
        read_nccl_tests_json(json.dumps(document), "x")
