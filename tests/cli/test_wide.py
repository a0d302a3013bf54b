"""`--wide`: lines of CSV that say of which run they are."""

import csv
import io
import json
from pathlib import Path

import pytest

from gpubench.formats.frame import read_frame
from gpubench.model.results.result_file import WIDE_COLUMNS
from tests.cli.running import gpubench

GPUS = ("--simulate", "hgx-h100-8*2", "--sizes", "1M,64M")


@pytest.mark.parametrize(
    "arguments",
    [
        ("allreduce", *GPUS),
        ("p2p", "--simulate", "hgx-h200-2"),
        ("kv", "--simulate", "hgx-h200-2"),
        ("topo", "--simulate", "hgx-h100-8*2", "--section", "gpus"),
        ("topo", "--simulate", "hgx-h100-8", "--section", "matrix"),
        ("check", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12"),
    ],
)
def test_every_line_says_of_which_run_it_is(arguments: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    wide = gpubench(*arguments, "--format", "csv", "--wide", "-o", str(path)).stdout
    plain = gpubench(*arguments, "--format", "csv").stdout
    metadata = json.loads(path.read_text())["metadata"]
    rows = list(csv.reader(io.StringIO(wide)))
    assert len(rows) == len(plain.splitlines()) > 1
    assert tuple(rows[0][-6:]) == WIDE_COLUMNS
    assert {len(row) for row in rows} == {len(rows[0])}
    assert {row[-6] for row in rows[1:]} == {metadata["run_id"]}
    assert {row[-4] for row in rows[1:]} == {";".join(metadata["hosts"])}
    assert [row[:-6] for row in rows[:1]] == [plain.splitlines()[0].split(",")]


def test_gpus_and_driver_are_there_where_they_are_known() -> None:
    report = gpubench("report", "tests/results/h200x2/gpubench.json", "--format", "csv", "--section", "rows", "--wide")
    (line, _) = csv.DictReader(io.StringIO(report.stdout))
    assert (line["run_gpus"], line["run_driver"], line["run_hosts"]) == ("NVIDIA H200", "580.159.04", "vm")


def test_wide_lines_are_read_again(tmp_path: Path) -> None:
    wide, plain = tmp_path / "wide.csv", tmp_path / "plain.csv"
    gpubench("allreduce", *GPUS, "--wide", "-o", str(wide))
    gpubench("allreduce", *GPUS, "-o", str(plain))
    assert gpubench("compare", str(plain), str(wide)).returncode == 0
    assert set(read_frame(wide).columns) - set(read_frame(plain).columns) == set(WIDE_COLUMNS)


def test_without_csv_it_is_refused() -> None:
    result = gpubench("topo", "--simulate", "hgx-h100-8", "--wide")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("gpubench: error: --wide without csv\n")
