"""Folders of dated results: what is read of them, and what is said of files that are none."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import UsageError
from gpubench.formats.registry import DATED, Presentation, Target
from gpubench.model.results.report import COLLECTIVE_COLUMNS
from gpubench.readers.results.history import list_results, read_head
from tests.formats.sample import METADATA, REPORT, ROWS

NAME = "2026-11-20T080000Z-allreduce-n1.json"


def kept(folder: Path) -> Path:
    writer = DATED.writer(Target(path=folder), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for row in ROWS:
        writer.row(row)
    writer.end(REPORT)
    return folder / NAME


@pytest.mark.parametrize("layout", [{"indent": 4}, {"separators": (",", ":")}, {"sort_keys": True, "indent": 1}])
def test_a_document_that_was_laid_out_anew_is_read_too(tmp_path: Path, layout: dict[str, Any]) -> None:
    path = kept(tmp_path)
    head = read_head(path)
    path.write_text(json.dumps(json.loads(path.read_text()), **layout))
    assert read_head(path) == head


def _without(name: str) -> Callable[[str], str]:
    return lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != name})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: "", "is empty"),
        (lambda text: text[:400], "is not a result"),
        (lambda _: "[]", "is not a result: ValueError: not a JSON object"),
        (lambda _: "\x00\x01", "is not a result"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "has schema version 99"),
        (lambda text: text.replace('"verdict": "FAIL"', '"verdict": "FINE"'), "'FINE' is not a valid Verdict"),
        (lambda text: text.replace("2026-11-20T08:00:00+00:00", "yesterday"), "yesterday"),
        (_without("metadata"), "KeyError: 'metadata'"),
        (_without("schema_version"), "has no schema_version"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, damage: Callable[[str], str], said: str) -> None:
    path = kept(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError) as caught:
        read_head(path)
    assert said in caught.value.seen
    assert caught.value.seen.startswith(str(path))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        list_results(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a folder") as caught:
        list_results(kept(tmp_path))
    assert "gpubench compare BASE" in caught.value.next_step


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied") as caught:
        list_results(tmp_path)
    assert caught.value.next_step == f"ls -ld {tmp_path}"
