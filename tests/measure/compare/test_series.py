"""The choice of dated results to compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import DATED, Presentation, Target
from gpubench.measure.compare import report as history
from gpubench.measure.compare.report import HistorySelection, choose, compare_history
from gpubench.model.results.compare import HistoryRow, Use
from gpubench.model.results.history import CUT_SHORT, ResultHead
from gpubench.model.results.report import COLLECTIVE_COLUMNS, Metadata, Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.history import list_results, read_head
from tests.formats.sample import METADATA, REPORT, ROW

SLOW = replace(ROW, time_us=ROW.time_us * 3, busbw_gb_s=ROW.reached_gb_s / 3)


def keep(
    folder: Path,
    day: int,
    metadata: Metadata = METADATA,
    *,
    slow: bool = False,
    whole: bool = True,
    verdict: Verdict = Verdict.PASS,
) -> str:
    before = set(folder.iterdir())
    writer = DATED.writer(Target(path=folder), Presentation())
    writer.begin(replace(metadata, started_at=f"2026-11-{day:02}T08:00:00+00:00"), COLLECTIVE_COLUMNS)
    writer.row(SLOW if slow else ROW)
    if whole:
        writer.end(replace(REPORT, verdict=verdict, findings=()))
    (path,) = set(folder.iterdir()) - before
    return path.name


def chosen(folder: Path, last: int = 5) -> HistorySelection:
    return choose(list_results(folder), last)


def left_out(found: HistorySelection) -> dict[str, str | None]:
    return {row.file: row.reason for row in found.files if row.use == Use.LEFT_OUT}


def report_on(folder: Path) -> Report:
    return compare_history(chosen(folder), folder)


def with_options(**options: Any) -> Metadata:
    return replace(METADATA, options={**METADATA.options, **options})


def test_the_newest_is_compared_with_the_last_before_it(tmp_path: Path) -> None:
    names = [keep(tmp_path, day) for day in range(1, 9)]
    found = chosen(tmp_path, 3)
    (series,) = found.series
    assert series.name == names[-1].removesuffix(".json")
    assert [Path(file.name).name for file in (*series.base, series.new)] == names[4:]
    assert left_out(found) == dict.fromkeys(names[:4], "older than the last 3")
    assert [row.file for row in found.files] == names[::-1]
    assert [row.use for row in found.files] == [Use.NEW, *[Use.BASE] * 3, *[Use.LEFT_OUT] * 4]


def test_one_of_its_kind_says_in_what_it_differs(tmp_path: Path) -> None:
    alone = [keep(tmp_path, 1, replace(METADATA, hosts=("n2",))), keep(tmp_path, 2, with_options(dtypes=["bfloat16"]))]
    for day in (3, 4):
        keep(tmp_path, day)
    found = chosen(tmp_path)
    assert left_out(found) == {
        alone[0]: "another machine: n2, not n1",
        alone[1]: "other options: dtypes bfloat16, not float32",
    }
    assert found.doubts == ()


def test_a_newest_run_that_lost_a_gpu_is_a_doubt(tmp_path: Path) -> None:
    for day in (1, 2):
        keep(tmp_path, day)
    newest = keep(tmp_path, 3, replace(METADATA, ranks=METADATA.ranks[:1]))
    ((name, reason),) = chosen(tmp_path).doubts
    assert name == newest
    assert "1 × NVIDIA H200, not 2 × NVIDIA H200" in reason
    assert report_on(tmp_path).verdict is Verdict.WARN


@pytest.mark.parametrize(("day", "doubts"), [(4, 1), (1, 0)])
def test_what_was_cut_short_is_left_out_and_a_doubt_where_it_is_the_newest(
    tmp_path: Path, day: int, doubts: int
) -> None:
    for whole in (2, 3):
        keep(tmp_path, whole)
    name = keep(tmp_path, day, whole=False)
    found = chosen(tmp_path)
    assert left_out(found) == {name: CUT_SHORT}
    assert len(found.doubts) == doubts
    assert report_on(tmp_path).verdict is (Verdict.WARN if doubts else Verdict.PASS)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: "", "is empty"),
        (lambda text: text[:300], "is not a result"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "has schema version 2"),
        (lambda text: text.replace('"time_us": ', '"time_us": -'), "time_us is -9.81"),
        (lambda text: text[:-20], "no JSON"),
    ],
)
def test_files_that_are_no_results_are_left_out_by_name(
    tmp_path: Path, damage: Callable[[str], str], said: str
) -> None:
    kept = [keep(tmp_path, day) for day in (1, 2, 3)]
    (tmp_path / kept[2]).write_text(damage((tmp_path / kept[2]).read_text()))
    (tmp_path / "notes.txt").write_text("x")
    found = chosen(tmp_path)
    reasons = left_out(found)
    assert said in str(reasons[kept[2]])
    assert reasons["notes.txt"] == "not named like a dated result"
    assert [Path(file.name).name for file in (*found.series[0].base, found.series[0].new)] == kept[:2]
    assert [name for name, _ in found.doubts] == [kept[2]]


def test_comparisons_and_explanations_in_the_folder_are_not_opened(tmp_path: Path) -> None:
    for day in (1, 2):
        keep(tmp_path, day)
    (tmp_path / "2026-11-20T080000Z-compare-unknown.json").touch()
    found = chosen(tmp_path)
    assert left_out(found) == {"2026-11-20T080000Z-compare-unknown.json": "compare measures nothing"}
    assert found.doubts == ()


def test_only_the_newest_of_many_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_LOOKED_AT", 3)
    monkeypatch.setattr(history, "MOST_SERIES", 1)
    for day, host in enumerate(("n1", "n2", "n2", "n1", "n1"), 1):
        keep(tmp_path, day, replace(METADATA, hosts=(host,)))
    opened: list[Path] = []

    def read(path: Path) -> ResultHead:
        opened.append(path)
        return read_head(path)

    monkeypatch.setattr(history, "read_head", read)
    reasons = set(left_out(chosen(tmp_path)).values())
    assert len(opened) == 3
    assert "older than the newest 3, and not opened" in reasons


def test_more_kinds_than_one_looks_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_SERIES", 1)
    for day, host in enumerate(("n2", "n2", "n1", "n1"), 1):
        keep(tmp_path, day, replace(METADATA, hosts=(host,)))
    found = chosen(tmp_path)
    assert [one_series.name for one_series in found.series] == ["2026-11-04T080000Z-allreduce-n1"]
    assert set(left_out(found).values()) == {"not among the newest 1 kinds (use one folder per machine)"}


def test_a_slow_newest_result_fails_and_says_of_which_machine(tmp_path: Path) -> None:
    other = replace(METADATA, hosts=("n2",))
    for day in (1, 2, 3):
        keep(tmp_path, day)
        keep(tmp_path, day, other, slow=day == 3)
    report = report_on(tmp_path)
    assert report.verdict is Verdict.FAIL
    assert report.findings[0].id == "slower"
    assert report.findings[0].subject.startswith("2026-11-03T080000Z-allreduce-n2: 1 row")
    assert report.findings[0].comment == f"Run the same command again with `--output {tmp_path}/`."
    assert {row.use for row in report.rows(HistoryRow)} == {Use.NEW, Use.BASE}


@pytest.mark.parametrize("runs", [0, 1])
def test_nothing_to_compare_is_no_pass(tmp_path: Path, runs: int) -> None:
    for day in range(runs):
        keep(tmp_path, day + 1)
    report = report_on(tmp_path)
    assert report.verdict is Verdict.ERROR
    assert [finding.id for finding in report.findings] == ["nothing-before"]


def test_a_result_that_is_gone_when_it_is_read(tmp_path: Path) -> None:
    names = [keep(tmp_path, day) for day in (1, 2, 3)]
    kept = list_results(tmp_path)
    (tmp_path / names[1]).unlink()
    found = choose(kept, 5)
    assert len(found.series[0].base) == 1
    assert "No such file" in str(left_out(found)[names[1]])


def test_a_newest_result_with_nothing_readable_before_it(tmp_path: Path) -> None:
    names = [keep(tmp_path, day) for day in (1, 2)]
    kept = list_results(tmp_path)
    path = tmp_path / names[0]
    path.write_text(path.read_text().replace('"rows": [', '"rows": [1, '))
    found = choose(kept, 5)
    assert found.series == ()
    assert left_out(found)[names[1]] == "no result before it can be read"


def test_results_without_rows(tmp_path: Path) -> None:
    for day in (1, 2):
        path = tmp_path / keep(tmp_path, day)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": []}))
    found = chosen(tmp_path)
    assert found.series == ()
    assert set(left_out(found).values()) == {"has no rows to compare"}


def test_one_bad_night_is_no_baseline(tmp_path: Path) -> None:
    for day in (1, 2):
        keep(tmp_path, day)
    bad = keep(tmp_path, 3, slow=True, verdict=Verdict.WARN)
    keep(tmp_path, 4, slow=True)
    assert left_out(chosen(tmp_path)) == {bad: "its run ended with WARN, and most others ended better"}
    assert report_on(tmp_path).verdict is Verdict.FAIL


def test_a_machine_that_always_warns_is_compared_all_the_same(tmp_path: Path) -> None:
    verdicts = [Verdict.WARN, Verdict.SKIP, Verdict.WARN, Verdict.WARN, Verdict.FAIL, Verdict.WARN]
    names = [keep(tmp_path, day, verdict=verdict) for day, verdict in enumerate(verdicts, 1)]
    assert left_out(chosen(tmp_path)) == {names[4]: "its run ended with FAIL, and most others ended better"}
    assert left_out(chosen(tmp_path, 1)) == {
        names[4]: "its run ended with FAIL, and most others ended better",
        **dict.fromkeys(names[:3], "older than the last 1"),
    }
