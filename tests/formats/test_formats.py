"""Every format: to a stream, to a file, row by row, and cut short."""

import io
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.formats import json as json_format
from gpubench.formats.frame import read_frame
from gpubench.formats.json import replace_atomically
from gpubench.formats.registry import CSV, FORMATS, TABLE, Format, Presentation, Target
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    CollectiveRow,
    Metadata,
    PairRow,
    Report,
    RowsOfNode,
    Table,
)
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Origin, Verdict
from tests.formats.sample import IN_PLACE, JSON, JSONL, LARGE, METADATA, REPORT, ROW, ROWS
from tests.formats.schema import SCHEMA, VALIDATOR, validate


def written(
    format_: Format,
    *,
    metadata: Metadata = METADATA,
    rows: tuple[CollectiveRow, ...] = ROWS,
    report: Report = REPORT,
    **look: Any,
) -> str:
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Presentation(**look))
    writer.begin(metadata, COLLECTIVE_COLUMNS)
    for row in rows:
        writer.row(row)
    writer.end(report)
    return stream.getvalue()


def test_formats_have_names_and_suffixes_of_their_own() -> None:
    assert len({each.name for each in FORMATS}) == len(FORMATS)
    suffixes = [each.suffix for each in FORMATS if each.suffix is not None]
    assert len(set(suffixes)) == len(suffixes)


def test_the_list_of_formats_imports_none_of_them() -> None:
    code = "import sys, gpubench.formats.registry; print(*(name for name in sys.modules if '.formats.' in name))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) == {"gpubench.formats.registry"}


def test_json_validates_against_the_schema() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == VALIDATOR.META_SCHEMA["$id"]
    document = json.loads(written(JSON))
    VALIDATOR.validate(document)
    assert document["verdict"] == "FAIL"
    assert document["complete"] is True
    assert document["rows"][2]["wrong"] == 3
    assert document["metadata"]["ranks"][1]["gpu_bus_id"] == "0000:01:00.0"
    assert document["findings"][0]["id"] == "wrong-data"


@pytest.mark.parametrize(
    "change", [{"dtype": "float31"}, {"time_us": None}, {"wrong": -1}, {"wrong": 0.5}, {"verdict": "FINE"}, {"note": 3}]
)
@pytest.mark.parametrize("place", [0, -1])
def test_the_schema_refuses_what_no_row_can_be(place: int, change: dict[str, object]) -> None:
    document = json.loads(written(JSON, rows=ROWS * 9))
    validate(document)
    document["rows"][place] |= change
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_a_json_file_is_whole_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    writer = JSON.writer(Target(path=path), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for count, row in enumerate(ROWS):
        document = json.loads(path.read_text())
        VALIDATOR.validate(document)
        assert (document["complete"], document["verdict"], len(document["rows"])) == (False, "ERROR", count)
        writer.row(row)
    writer.end(REPORT)
    assert json.loads(path.read_text())["complete"] is True
    assert list(tmp_path.iterdir()) == [path]


def test_of_thousands_of_rows_a_json_file_is_not_written_anew_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, whole = list[int](), ""

    def counting(_path: Path, text: Iterable[str]) -> None:
        nonlocal whole
        whole = "".join(text)
        sizes.append(whole.count('"busbw_gb_s"'))

    monkeypatch.setattr(json_format, "replace_atomically", counting)
    writer = JSON.writer(Target(path=tmp_path / "result.json"), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for number in range(1, 1501):
        writer.row(ROW)
        assert 0 <= number - sizes[-1] <= number // 500
    writer.end(REPORT)
    assert sizes[-1] == len(json.loads(whole)["rows"]) == 1500
    assert sum(sizes) < sum(range(1501)) / 2


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    replace_atomically(path, "old")

    def fail(*_: object) -> None:
        message = "disk full"
        raise OSError(message)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_nodes_share_are_written_as_each_nodes_own() -> None:
    """Whatever names hosts have: with quotes, '##', or what others' rows hold."""
    own = [pair("one", note="seen from one"), pair("one", note='"one" ##')]
    other = [pair("odd")]
    nodes: Sequence[tuple[list[PairRow], str]] = (
        (own, "one"),
        ([], "bare"),
        (own, 'a "b" ##c'),
        (own, "\u00e9\n"),
        (other, "odd"),
        (own, "one"),
    )
    parts = [RowsOfNode(rows, ("source_node", "destination_node"), host) for rows, host in nodes]
    table = Table.of_nodes(PairRow.columns(), lambda: parts)
    single = Table(table.columns, table.rows)
    texts = [written(JSON, rows=(), report=replace(REPORT, sections={"pairs": each})) for each in (table, single)]
    assert texts[0] == texts[1]
    found = json.loads(texts[0])["pairs"]
    assert [row["source_node"] for row in found[2:4]] == ['a "b" ##c'] * 2
    assert [row["note"] for row in found[:2]] == [row["note"] for row in found[-2:]] == ["seen from one", '"one" ##']


def pair(host: str, note: str | None = None) -> PairRow:
    return PairRow(
        source="GPU0",
        destination="GPU1",
        source_bus_id=None,
        destination_bus_id=None,
        source_node=host,
        destination_node=host,
        origin=Origin.SIMULATED,
        limit_gb_s=450.0,
        path_class="NV18",
        note=note,
    )


@pytest.mark.parametrize("format_", [CSV, JSONL, TABLE], ids=lambda each: each.name)
def test_rows_are_on_disk_as_soon_as_they_are_measured(tmp_path: Path, format_: Format) -> None:
    path = tmp_path / f"result{format_.suffix}"
    writer = format_.writer(Target(path=path), Presentation())
    assert not path.exists()
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    sizes = [path.stat().st_size]
    for first, second in ((ROWS[0], ROWS[1]), (ROWS[2], ROWS[3])):
        writer.row(first)
        writer.row(second)
        sizes.append(path.stat().st_size)
    assert sizes[0] < sizes[1] < sizes[2]
    writer.end(REPORT)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl"])
def test_results_become_data_frames(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"result{suffix}"
    format_ = next(each for each in FORMATS if each.suffix == suffix)
    writer = format_.writer(Target(path=path), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for row in ROWS:
        writer.row(row)
    writer.end(REPORT)
    frame = read_frame(path)
    assert frame["busbw_gb_s"].max() == 354.15
    assert frame["wrong"].sum() == 3
    assert frame["limit_gb_s"].isna().all()
    assert list(frame.columns) == list(COLLECTIVE_COLUMNS)


def test_a_table_cannot_be_read_back() -> None:
    with pytest.raises(UsageError, match="no readable rows"):
        read_frame("result.txt")


EXPECTED_TABLE = """\
gpubench 0.1.0  allreduce  backend nccl  2 ranks on 1 host
  rank 0-1 on n1: GPU 0-1, NVIDIA H200
  NCCL 2.28.9; MPI Open MPI v5.0.11
  ! affects performance: NCCL_ALGO=Ring
  float32, sum; 5 warm-up, then 20 iterations; mean over ranks; data verified on every rank
  size: larger buffer of a rank; K, M, G are 1024-based; GB/s is 1e9 bytes/s
  not measured: 8G: 2 buffers of that size do not fit

                                  out of place                             in place
     size  time µs  algbw  busbw   % exp wrong  time µs  algbw  busbw   % exp wrong
       1K     9.81   0.10   0.15       -     0     9.50   0.10   0.15       -     0
       1G   4547.9 236.10 354.15       -     3   4547.9 236.10 353.46       -     0

peak busbw        354.15 GB/s at 1G, float32, out of place
at the largest    354.15 GB/s busbw at 1G, float32, out of place
at the smallest   9.50 µs at 1K, float32, in place
expected          unknown, so speed is not judged
wrong elements    3
FAIL wrong-data: rank 1 on n1 (GPU 1, 0000:01:00.0)
  seen:     3 wrong elements in 1 rows
  expected: every element as computed
  likely:   data damaged on the way
  try:      gpubench allreduce
verdict: FAIL
"""


def test_the_table_byte_for_byte() -> None:
    assert written(TABLE) == EXPECTED_TABLE


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_is_wider_than_the_page(width: int) -> None:
    for rows, placements in ((ROWS, ["out_of_place", "in_place"]), ((ROW, LARGE), ["out_of_place"])):
        metadata = replace(METADATA, options=dict(METADATA.options) | {"placements": placements})
        text = written(TABLE, metadata=metadata, rows=rows, width=width)
        assert max(map(len, text.splitlines())) <= width


def options_with(**changes: object) -> Metadata:
    return replace(METADATA, options=dict(METADATA.options) | changes)


def test_operations_alone_show_percentiles_and_no_bandwidth() -> None:
    rows = tuple(replace(row, mode="latency", p50_us=8.25, p95_us=9.5, p99_us=12345.6) for row in ROWS)
    text = written(TABLE, metadata=options_with(mode="latency", iters=200), rows=rows)
    assert "float32, sum; 5 warm-up, then 200 operations, one at a time; mean over ranks" in " ".join(text.split())
    line = next(line for line in text.splitlines() if line.lstrip().startswith("1K "))
    assert line.split() == ["1K", "9.81", "8.25", "9.50", "12345.6", "0", "9.50", "8.25", "9.50", "12345.6", "0"]
    assert "busbw" not in text
    slow = tuple(replace(row, verdict="WARN") for row in rows)
    assert "8.25*" in row_of(written(TABLE, metadata=options_with(mode="latency", iters=200), rows=slow), "1K")
    assert "at the smallest   8.25 µs (p50), 12.3 ms (p99) at 1K, float32, in place" in text
    assert max(map(len, text.splitlines())) <= 100


def test_as_many_as_it_takes_show_how_sure_the_mean_is() -> None:
    known = (replace(ROW, ci95_percent=0.42), replace(IN_PLACE, ci95_percent=None))
    metadata = options_with(mode="throughput", iters="auto", budget_s=0.5)
    text = written(TABLE, metadata=metadata, rows=known)
    said = "5 warm-up, then iterations until ±1% (95 % confidence) or 0.5 s per row"
    assert said in " ".join(text.split())
    line = next(line for line in text.splitlines() if line.lstrip().startswith("1K "))
    assert line.split() == ["1K", "9.81", "0.42", "0.10", "0.15", "-", "0", "9.50", "?", "0.10", "0.15", "-", "0"]
    wide = written(TABLE, metadata=metadata, rows=tuple(replace(row, ci95_percent=61.7) for row in known))
    assert " 62 " in wide


def test_groups_have_a_line_each_and_the_slowest_is_named() -> None:
    names = ["node n0", "node n1", "node n2"]
    rows = tuple(
        replace(row, group=name, time_us=row.time_us * (1.5 if name == "node n1" else 1))
        for row in ROWS
        for name in names
    )
    text = written(TABLE, metadata=options_with(groups=names), rows=rows, width=120)
    lines = [line for line in text.splitlines() if line.startswith("node n")]
    assert [line.split()[:3] for line in lines] == [
        ["node", name[-2:], size] for size in ("1K", "1G") for name in names
    ]
    assert lines[0].split()[3:] == ["9.81", "0.10", "0.15", "-", "0", "9.50", "0.10", "0.15", "-", "0"]
    assert "slowest group     node n1: 6.82 ms, 50.0% over the median of groups" in text
    assert "GB/s at 1G, float32, out of place, node n0" in text
    assert "slowest group" not in written(TABLE)


HEALTHY = replace(
    LARGE,
    wrong=0,
    verdict="PASS",
    limit_gb_s=450.0,
    limit_percent=78.7,
    expected_percent=98.4,
    expected_source="profile hgx-h200-4",
)
SLOW = replace(HEALTHY, placement="in_place", busbw_gb_s=25.0, expected_percent=7.34, verdict="FAIL")


def row_of(text: str, size: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip().startswith(f"{size} "))


def test_the_limit_stands_in_where_nothing_is_expected() -> None:
    large = [
        replace(each, expected_percent=None, expected_source=None)
        for each in (HEALTHY, replace(SLOW, limit_percent=5.56))
    ]
    small = [replace(each, size_bytes=1024, limit_percent=0.1) for each in large]
    text = written(TABLE, rows=(*small, *large))
    assert row_of(text, "1G").count("lim") == 2
    assert "79 lim" in row_of(text, "1G")
    assert "5.6!lim" in row_of(text, "1G")
    assert "lim" not in row_of(text, "1K"), "the share of a limit says nothing of a launch"
    assert "expected          unknown, so speed is not judged; lim: % of the limit" in text
    mixed = written(TABLE, rows=(*small, HEALTHY, SLOW))
    assert "expected          profile hgx-h200-4; speed judged from 1G\n" in mixed
    other = written(TABLE, rows=(*large, HEALTHY, SLOW))
    assert "expected          profile hgx-h200-4; speed judged for 2 of 4 rows; lim: % of the limit\n" in other


def test_both_placements_with_all_that_judges_them_fit_eighty_columns() -> None:
    metadata = options_with(mode="throughput", iters="auto", budget_s=0.1)
    rows = tuple(replace(each, ci95_percent=0.31, time_us=99999.94) for each in (HEALTHY, SLOW))
    text = written(TABLE, metadata=metadata, rows=rows, width=80)
    words = {"size", "time", "µs", "±%", "busbw", "%", "exp", "wrong"}
    assert words == set(next(line for line in text.splitlines() if "busbw" in line).split())
    assert max(map(len, text.splitlines())) <= 80


def test_figures_never_run_together() -> None:
    text = written(TABLE, rows=tuple(replace(each, wrong=268435456) for each in (HEALTHY, SLOW)), width=80)
    assert row_of(text, "1G").split().count("268435456") == 2


def test_a_header_in_full_has_every_rank_library_and_setting() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}
    metadata = replace(METADATA, environment=environment)
    full = written(TABLE, metadata=metadata, verbose=True).splitlines()[1:8]
    assert full == [
        "  rank 0 on n1: GPU 0 0000:00:00.0 NVIDIA H200",
        "  rank 1 on n1: GPU 1 0000:01:00.0 NVIDIA H200",
        "  NCCL 2.28.9 from /lib/libnccl.so.2",
        "  MPI Open MPI v5.0.11",
        "  CUDA_VISIBLE_DEVICES=0,1",
        "  NCCL_ALGO=Ring  ! affects performance",
        "  NCCL_DEBUG=INFO",
    ]
    short = written(TABLE, metadata=metadata).splitlines()
    assert "  ! affects performance: NCCL_ALGO=Ring" in short
    assert "  2 other settings: -v shows all" in short


def test_the_header_of_a_large_job_is_a_few_lines() -> None:
    ranks = tuple(
        replace(METADATA.ranks[0], rank=number, host=f"n{number // 8}", node=number // 8, gpu_index=number % 8)
        for number in range(64)
    )
    for width in (80, 100):
        text = written(TABLE, metadata=replace(METADATA, ranks=ranks[:8], dropped_sizes=()), width=width)
        assert text.splitlines().index("") <= 10
        text = written(TABLE, metadata=replace(METADATA, ranks=ranks, dropped_sizes=()), width=width)
        assert "  rank 0-63 on 8 hosts: n0-7: NVIDIA H200" in text
        assert text.splitlines().index("") <= 10


def test_unchecked_data_are_not_called_right() -> None:
    row = replace(ROW, wrong=None, verified="no", verdict=None)
    metadata = replace(METADATA, options=dict(METADATA.options) | {"check": False, "placements": ["out_of_place"]})
    text = written(TABLE, metadata=metadata, rows=(row,), report=Report(verdict=Verdict.SKIP, complete=True))
    assert "wrong elements    not checked" in text
    assert "data not verified" in text


def test_a_run_cut_short_shows_its_last_row_and_says_so() -> None:
    text = written(TABLE, rows=ROWS[:3], report=Report(verdict=Verdict.ERROR, complete=False))
    assert "1G   4547.9" in text
    assert "verdict: ERROR: the run was cut short" in text
    empty = written(TABLE, rows=(), report=Report(verdict=Verdict.ERROR, complete=False))
    assert "no row was measured" in empty


def test_host_results_and_simulations_are_labelled() -> None:
    ranks = tuple(RankIdentity(rank=rank, host="laptop", node=0, local_rank=rank, pid=1) for rank in range(20))
    text = written(TABLE, metadata=replace(METADATA, backend="host", ranks=ranks, origin="simulated"))
    assert "does not apply to GPUs" in text
    assert "(SIMULATED)" in text
    assert "rank 0-19 on laptop" in text


def test_several_types_get_a_heading_each() -> None:
    metadata = replace(METADATA, options=dict(METADATA.options) | {"dtypes": ["float32", "int8"]})
    rows = (*ROWS[:2], *(replace(row, dtype="int8") for row in ROWS[:2]))
    lines = written(TABLE, metadata=metadata, rows=rows).splitlines()
    assert "float32 sum" in lines
    assert "int8 sum" in lines


def test_a_writer_that_never_began_ends_quietly(tmp_path: Path) -> None:
    for each in FORMATS:
        path = tmp_path / f"x{each.suffix}"
        writer = each.writer(Target(path=path), Presentation())
        writer.end(Report(verdict=Verdict.ERROR, complete=False))
        assert not path.exists()


def test_without_percentiles_the_footer_of_latencies_has_the_mean() -> None:
    rows = tuple(replace(row, mode="latency") for row in ROWS)
    text = written(TABLE, metadata=options_with(mode="latency", iters=200), rows=rows)
    assert " µs (mean) at " in text
    assert "- µs" not in text


def test_the_last_line_is_broken_on_a_terminal_alone_and_its_command_stays_whole() -> None:
    line = "FAIL: node3 GPU5 has 6 of 18 NVLinks down, all-reduce at 84 %. Try: nvidia-smi --gpu-reset -i 0000:1b:00.0"
    report = Report(verdict=Verdict.FAIL, complete=True, sentence=line)
    broken = written(TABLE, report=report, width=60, terminal=True).splitlines()[-3:]
    assert broken == [
        "FAIL: node3 GPU5 has 6 of 18 NVLinks down, all-reduce at 84",
        "    %.",
        "Try: nvidia-smi --gpu-reset -i 0000:1b:00.0",
    ]
    assert written(TABLE, report=report, width=60).splitlines()[-1] == line


def test_the_summary_below_a_table_has_numbers_as_people_write_them() -> None:
    slow = tuple(replace(row, time_us=88306.6, algbw_gb_s=1.2e-5, busbw_gb_s=1.2e-5) for row in ROWS)
    text = written(TABLE, rows=slow)
    assert "peak busbw        12 kB/s at" in text
    assert "at the smallest   88.3 ms at" in text
