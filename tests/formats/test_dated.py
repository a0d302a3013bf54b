"""Results that are kept in a folder: names that nobody has, documents that are whole."""

import json
from pathlib import Path
from threading import Thread

import pytest

from gpubench.formats.registry import DATED, Presentation, Target, Writer
from gpubench.model.results.report import COLLECTIVE_COLUMNS
from tests.formats.sample import METADATA, REPORT, ROW


def begun(folder: Path) -> Writer:
    writer = DATED.writer(Target(path=folder), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    return writer


def test_runs_of_one_second_do_not_overwrite_each_other(tmp_path: Path) -> None:
    threads = [Thread(target=lambda: begun(tmp_path).end(REPORT)) for _ in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    names = {path.name for path in tmp_path.iterdir()}
    first = "2026-11-20T080000Z-allreduce-n1"
    assert names == {f"{first}.json", *(f"{first}~{number}.json" for number in range(2, 13))}
    assert all(json.loads(path.read_text())["complete"] for path in tmp_path.iterdir())


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    writer = DATED.writer(Target(path=tmp_path), Presentation())
    writer.row(ROW)
    writer.end(REPORT)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="a folder"):
        DATED.writer(Target(), Presentation()).begin(METADATA, COLLECTIVE_COLUMNS)
