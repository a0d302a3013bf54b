"""gpubench's own results read back, also as a person, a spreadsheet or a crash left them."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.formats.registry import CSV, Format, Presentation, Target
from gpubench.model.results.report import COLLECTIVE_COLUMNS, PAIR_COLUMNS, CollectiveRow, PairRow
from gpubench.readers.registry import read_results
from gpubench.readers.results.gpubench_csv import read as read_gpubench_csv
from gpubench.readers.results.gpubench_json import read as read_gpubench_json
from tests.formats.sample import JSON, JSONL, METADATA, REPORT, ROWS

PAIR = PairRow(
    source="GPU0",
    destination="GPU1",
    source_bus_id="0000:01:00.0",
    destination_bus_id=None,
    source_node="n1",
    destination_node="n1",
    origin="measured",
    size_bytes=2**28,
    bandwidth_gb_s=395.25,
    latency_us=2.5,
    limit_gb_s=None,
    path_class="NV18",
    host_staged=False,
    verdict="PASS",
    note='a "note", with a comma',
)


def written(format_: Format, rows: tuple[Any, ...] = ROWS) -> str:
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Presentation())
    pairs = isinstance(rows[0], PairRow)
    metadata = replace(METADATA, collective=None, subject="p2p") if pairs else METADATA
    writer.begin(metadata, PAIR_COLUMNS if pairs else COLLECTIVE_COLUMNS)
    for row in rows:
        writer.row(row)
    writer.end(REPORT)
    return stream.getvalue()


READ: dict[str, tuple[Format, Callable[[str, str], Any]]] = {
    "csv": (CSV, read_gpubench_csv),
    "json": (JSON, read_gpubench_json),
    "jsonl": (JSONL, read_gpubench_json),
}


@pytest.mark.parametrize("suffix", READ)
def test_what_is_written_is_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"any-name.{suffix}"
    path.write_text(written(READ[suffix][0]))
    found = read_results(path)
    assert (found.rows, [*found.pairs], found.complete) == (ROWS, [], True)
    if suffix != "csv":
        assert found.circumstances.gpus == ("NVIDIA H200",) * 2
        assert found.circumstances.environment == {"NCCL_ALGO": "Ring"}
        assert found.circumstances.options["iters"] == "20"


@pytest.mark.parametrize("suffix", READ)
def test_pairs_are_read(suffix: str) -> None:
    format_, read = READ[suffix]
    assert [*read(written(format_, (PAIR,)), "x").pairs] == [PAIR]


@given(
    st.floats(1e-3, 1e9),
    st.none() | st.floats(0, 1e6),
    st.none() | st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1),
    st.none() | st.booleans(),
)
def test_any_row_survives_any_format(
    time_us: float, limit: float | None, note: str | None, staged: bool | None
) -> None:
    row = replace(ROWS[0], time_us=time_us, limit_gb_s=limit, note=note, host_staged=staged)
    for format_, read in READ.values():
        assert read(written(format_, (row,)), "x").rows == (row,)


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("time_us", "9,81", r"line 2, column time_us: '9,81'"),
        ("time_us", "fast", "x.csv, line 2, column time_us: 'fast'"),
        ("time_us", "0", "x.csv, line 2, column time_us: '0'"),
        ("time_us", "", "x.csv, line 2, column time_us: ''"),
        ("time_us", "nan", "x.csv, line 2, column time_us: 'nan'"),
        ("ranks", "2.0", "x.csv, line 2, column ranks: '2.0'"),
        ("host_staged", "yes", "x.csv, line 2, column host_staged: 'yes'"),
        ("placement", "In-Place", "x.csv, line 2, column placement: 'In-Place'"),
        ("verdict", "OK", "x.csv, line 2, column verdict: 'OK'"),
        ("wrong", "-1", "x.csv, line 2, column wrong: '-1'"),
        ("origin", "guessed", "x.csv, line 2, column origin: 'guessed'"),
    ],
)
def test_a_csv_edited_by_hand_is_refused_with_line_and_column(column: str, cell: str, said: str) -> None:
    lines = list(csv.reader(written(CSV).splitlines()))
    lines[1][lines[0].index(column)] = cell
    stream = io.StringIO()
    csv.writer(stream).writerows(lines)
    with pytest.raises(UsageError, match=said):
        read_gpubench_csv(stream.getvalue(), "x.csv")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("time_us,", "time_ms,", 1), "line 1: column 'time_ms' is not known"),
        (lambda text: text.replace(",note", ",busbw_gb_s", 1), "line 1: a column twice"),
        (lambda text: text.replace(",", ";"), "line 1: its columns are not separated by commas"),
        (
            lambda text: text.replace("\n", ",\n", 2).replace(",\n", "\n", 1),
            f"line 2: {len(COLLECTIVE_COLUMNS) + 1} cells",
        ),
        (lambda text: text.replace("sum", '"sum', 1), "no CSV"),
    ],
)
def test_a_csv_of_another_shape_is_refused(change: Callable[[str], str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_gpubench_csv(change(written(CSV)), "x.csv")


def test_older_files_lack_columns_and_newer_ones_are_refused() -> None:
    record = {name: value for name, value in ROWS[0].to_record().items() if name not in ("note", "p99_us")}
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*record])
    writer.writeheader()
    writer.writerow({name: "" if value is None else value for name, value in record.items()})
    assert read_gpubench_csv(stream.getvalue(), "x.csv").rows == (ROWS[0],)
    document = json.loads(written(JSON))
    with pytest.raises(UsageError, match=r"x\.json has schema version 2"):
        read_gpubench_json(json.dumps(document | {"schema_version": 2}), "x.json")
    document["rows"][1]["new_column"] = 1
    with pytest.raises(UsageError, match=r"x\.json: rows\[1\] has an unknown field 'new_column'"):
        read_gpubench_json(json.dumps(document), "x.json")


@given(st.integers(0, len(written(JSONL))))
def test_json_lines_cut_off_anywhere(length: int) -> None:
    text = written(JSONL)
    try:
        found = read_gpubench_json(text[:length], "x")
    except UsageError:
        assert length < text.index("\n") + 1 or text[length - 1] == "}" or "{" in text[length - 1]
        return
    assert found.rows == ROWS[: len(found.rows)]
    assert found.complete == (length >= len(text) - 1)


@given(st.integers(0, len(written(CSV))))
def test_csv_cut_off_anywhere(length: int) -> None:
    text = written(CSV)
    try:
        found = read_gpubench_csv(text[:length], "x")
    except UsageError:
        return
    assert [row.size_bytes for row in found.rows] == [row.size_bytes for row in ROWS[: len(found.rows)]]


@given(st.data())
def test_damaged_json_gives_one_error(data: st.DataObject) -> None:
    document = json.loads(written(JSON))
    parts = [document, document["metadata"], document["rows"][0], document["metadata"]["ranks"][0]]
    part = data.draw(st.sampled_from(parts))
    key = data.draw(st.sampled_from(sorted(part)))
    if data.draw(st.booleans()):
        del part[key]
    else:
        part[key] = data.draw(st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2))
    try:
        found = read_gpubench_json(json.dumps(document), "x")
    except UsageError:
        return
    assert all(isinstance(row, CollectiveRow) for row in found.rows)


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    for _, read in READ.values():
        try:
            read(text, "x")
        except UsageError as error:
            assert str(error)  # noqa: PT017 - both outcomes are right
