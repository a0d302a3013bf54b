"""What a folder tells of one machine's past."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.formats.registry import DATED, Presentation, Target
from gpubench.model.results.report import COLLECTIVE_COLUMNS, CollectiveRow, Metadata
from gpubench.readers.results.history import past_runs
from tests.formats.sample import METADATA, REPORT, ROW

NOW = replace(METADATA, started_at="2026-11-20T08:00:00+00:00", run_id="now")


def keep(folder: Path, day: int, row: CollectiveRow = ROW, **changes: Any) -> Path:
    before = set(folder.iterdir())
    writer = DATED.writer(Target(path=folder), Presentation())
    metadata: Metadata = replace(
        METADATA, **({"started_at": f"2026-11-{day:02}T08:00:00+00:00", "run_id": f"run {day}"} | changes)
    )
    writer.begin(metadata, COLLECTIVE_COLUMNS)
    writer.row(row)
    writer.end(REPORT)
    (path,) = set(folder.iterdir()) - before
    return path


def days(folder: Path) -> list[int]:
    return sorted(int(began[8:10]) for began, _, _ in past_runs(folder, NOW))


def test_other_machines_options_and_the_run_itself_do_not_count(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    keep(tmp_path, 2, hosts=("n2",))
    keep(tmp_path, 3, options={**METADATA.options, "dtypes": ["bfloat16"]})
    keep(tmp_path, 4, origin="simulated")
    keep(tmp_path, 20, run_id="now")
    keep(tmp_path, 21)
    unfinished = keep(tmp_path, 5)
    unfinished.write_text(json.dumps(json.loads(unfinished.read_text()) | {"complete": False}))
    keep(tmp_path, 6).write_text("{")
    keep(tmp_path, 7).write_text("")
    (tmp_path / "notes.txt").write_text("x")
    assert days(tmp_path) == [1]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        past_runs(tmp_path / "nowhere", NOW)
