"""A folder of dated results as what a run may expect."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.jobs.compare import find_past
from gpubench.model.results.report import CollectiveRow
from gpubench.readers.results import history as module
from gpubench.readers.results.history import newest_and_spread, past_figures
from tests.formats.sample import ROW
from tests.readers.results.test_past_runs import NOW, keep

WELL = replace(ROW, verdict="PASS")
NOW_LATE = replace(NOW, started_at="2026-11-30T08:00:00+00:00")


def keep_well(folder: Path, day: int, row: CollectiveRow = WELL, **changes: Any) -> Path:
    path = keep(folder, day, row, **changes)
    document = json.loads(path.read_text())
    assert document["verdict"] == "FAIL"
    path.write_text(json.dumps(document | {"verdict": "PASS", "sentence": "PASS: well", "findings": []}))
    return path


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    for day in range(1, 6):
        keep_well(tmp_path, day)
    keep_well(tmp_path, 6, hosts=("n2",))
    keep_well(tmp_path, 7, libraries={"NCCL": "2.20"})
    keep_well(tmp_path, 8).write_text("{")
    keep_well(tmp_path, 9).write_text("")
    keep(tmp_path, 10)
    keep_well(tmp_path, 11, subject="allgather")
    keep_well(tmp_path, 12, run_id="now")
    damaged = keep_well(tmp_path, 13)
    damaged.write_text(damaged.read_text().replace('"time_us": 9.81', '"time_us": -1'))
    dangling = tmp_path / "2026-11-14T080000Z-allreduce-n1.json"
    dangling.symlink_to("nowhere")
    (tmp_path / "2026-11-15T080000Z-allreduce-n1.json").mkdir()
    os.mkfifo(tmp_path / "2026-11-16T080000Z-allreduce-n1.json")
    (tmp_path / "notes.txt").write_text("x")
    found = past_figures(tmp_path, NOW_LATE)
    assert found.used == 5
    assert {each.reason: each.count for each in found.left_out} == {
        "of another machine": 1,
        "of another NCCL": 1,
        "whose verdict is FAIL": 1,
        "that cannot be read": 5,
        "incomplete, or still running": 1,
    }
    assert found.collective_figure(ROW) is not None


def test_large_files_and_slow_disks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(1, 8):
        keep_well(tmp_path, day)
    monkeypatch.setattr(module, "MOST_RESULTS_READ", 6)
    assert past_figures(tmp_path, NOW_LATE).note.endswith(
        "1 not opened, because there are too many or the disk is slow"
    )
    monkeypatch.setattr(module, "MOST_RESULTS_LOOKED_AT", 5)
    assert past_figures(tmp_path, NOW_LATE).used == 5
    monkeypatch.setattr(module, "MOST_BYTES_OF_A_RESULT", 10)
    assert past_figures(tmp_path, NOW_LATE).used == 0
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    found = past_figures(tmp_path, NOW_LATE)
    assert (found.used, [each.count for each in found.left_out]) == (0, [7])


def test_the_newest_half_and_some_of_all_before_them() -> None:
    assert newest_and_spread(range(5), 6) == [0, 1, 2, 3, 4]
    assert newest_and_spread(range(100), 6) == [0, 1, 2, 3, 51, 99]
    assert newest_and_spread(range(100), 7) == [0, 1, 2, 3, 4, 51, 99]
    assert len(set(newest_and_spread(range(31), 30))) == 30


def test_without_a_folder_there_is_no_past(tmp_path: Path) -> None:
    assert find_past(None, NOW) is None
    empty = find_past(tmp_path, NOW)
    assert empty is not None
    assert empty.note == ""


def test_a_folder_that_cannot_be_read_stops_no_run(tmp_path: Path) -> None:
    found = find_past(tmp_path / "nowhere", NOW)
    assert found is not None
    assert found.note == f"this machine's past is unknown: there is no folder {tmp_path}/nowhere"
    assert found.collective_figure(ROW) is None
