"""A stored result is shown again as its run showed it; test_every_output.py does so in every format."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.formats.registry import FORMATS
from tests.cli.running import ROOT, environment, gpubench

RESULTS = ROOT / "tests" / "results"
STAGED = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:1G:32", "--fault", "link0-1:staged=yes")
SUFFIXES = {each.name: each.suffix for each in FORMATS if each.suffix is not None}


def kept(folder: Path, *arguments: str, name: str = "result.json") -> Path:
    gpubench(*arguments, "-o", str(folder / name), "-q")
    return folder / name


def timeless(text: str) -> str:
    """A table without how long its run took: each run takes its own time."""
    return re.sub(r"^took [\d.]+ s$", "took a while", text, flags=re.MULTILINE)


@pytest.mark.parametrize("arguments", [STAGED, ("check", "--simulate", "hgx-h200-2", "--fault", "gpu1:nvlink=12")])
def test_the_terminal_shows_what_the_run_showed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    path = str(kept(tmp_path, *arguments))
    for look in ((), ("-q",), ("-v",), ("--summary",), ("--width", "60"), ("--exit-style", "nagios")):
        first, again = gpubench(*arguments, *look), gpubench("report", path, *look)
        assert (timeless(again.stdout), again.returncode, again.stderr) == (
            timeless(first.stdout),
            first.returncode,
            first.stderr,
        )


def test_curves_can_be_drawn_later(tmp_path: Path) -> None:
    path = str(kept(tmp_path, *STAGED))
    assert gpubench("report", path, "--plot").stdout == gpubench(*STAGED, "--plot").stdout


@pytest.mark.parametrize("name", sorted(str(path.relative_to(RESULTS)) for path in RESULTS.glob("*/*.json")))
def test_results_of_real_machines_are_shown(name: str, tmp_path: Path) -> None:
    stored = json.loads((RESULTS / name).read_text())
    result = gpubench("report", str(RESULTS / name), "-o", str(tmp_path / "a.html"), "-o", str(tmp_path / "a.md"))
    assert "Traceback" not in result.stderr
    assert f"\n{stored['verdict']}" in result.stdout or f"verdict: {stored['verdict']}" in result.stdout
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_a_comparison_is_shown_again(tmp_path: Path) -> None:
    one = kept(tmp_path, *STAGED[:5])
    two = kept(tmp_path, *STAGED, name="new.json")
    comparison = kept(tmp_path, "compare", str(one), str(two), name="diff.json")
    first, again = gpubench("compare", str(one), str(two)), gpubench("report", str(comparison))
    assert (again.stdout, again.returncode) == (first.stdout, first.returncode)


def test_a_section_is_one_that_the_file_has(tmp_path: Path) -> None:
    path = str(kept(tmp_path, "topo", "--simulate", "hgx-h100-8"))
    assert gpubench("report", path, "--format", "csv", "--section", "nics").stdout.startswith("node,")
    result = gpubench("report", path, "--format", "csv", "--section", "checks")
    assert (result.returncode, "--section 'checks' is not known" in result.stderr) == (2, True)
    assert "one of gpus, nvlinks, nics" in result.stderr


def test_a_run_that_was_cut_short_stays_so(tmp_path: Path) -> None:
    whole = kept(tmp_path, *STAGED, name="result.jsonl").read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole.splitlines(keepends=True)[:4]) + '{"kind": "row", "coll')
    result = gpubench("report", str(cut), "--format", "json")
    found = json.loads(result.stdout)
    assert (result.returncode, found["complete"], found["verdict"], len(found["rows"])) == (3, False, "ERROR", 3)
    monitored = gpubench("report", str(cut), "--exit-style", "nagios")
    assert (monitored.returncode, monitored.stdout.startswith("GPUBENCH UNKNOWN")) == (3, True)


def test_a_document_whose_names_were_sorted_is_one(tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    sentence = gpubench("report", str(path), "--summary").stdout
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert gpubench("report", str(path), "--summary").stdout == sentence


def test_lines_of_an_older_gpubench_do_not_name_their_sections(tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED, name="result.jsonl")
    *lines, last = path.read_text().splitlines()
    report = json.loads(last)
    del report["sections"]
    path.write_text("\n".join([*lines, json.dumps(report)]) + "\n")
    assert gpubench("report", str(path)).stdout == gpubench(*STAGED).stdout


def changed(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: document.update(schema_version=2), "has schema version 2"),
        (lambda document: document.pop("metadata"), "is not a gpubench result"),
        (lambda document: document["metadata"].pop("subject"), "metadata has no field 'subject'"),
        (lambda document: document["metadata"].update(hosts="node0"), "metadata.hosts is 'node0'"),
        (lambda document: document["metadata"].update(options={}), "cannot be displayed: KeyError"),
        (lambda document: document.update(verdict="GOOD"), "verdict is 'GOOD'"),
        (lambda document: document.update(sentence=7), "sentence is 7"),
        (lambda document: document.update(rows={}), "rows"),
        (lambda document: document.update(rows=[{}]), "rows[0] has no field"),
        (lambda document: document["rows"][0].update(size_bytes="1K"), "rows[0].size_bytes is '1K'"),
        (lambda document: document.update(future=[]), "has an unknown section future"),
        (lambda document: document.update(findings=[{"id": "x"}]), "findings[0] has no field"),
        (lambda document: document["metadata"].update(source="\ud800"), "a lone surrogate"),
    ],
)
def test_a_result_that_was_damaged_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    changed(path, change)
    result = gpubench("report", str(path))
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    assert "  try:      " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("# nccl-tests version 2.17\n", "is not the start of a file that gpubench can read"),
        ("collective,backend,origin\n", "no column ranks"),
        ('{"results": []}', "another program wrote it"),
        ("[1, 2]", "is not the start of a file that gpubench can read"),
        ('{"schema_version": 1, "comp', "no JSON"),
        ("a\0b", "a NUL byte"),
    ],
)
def test_what_is_no_result_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    result = gpubench("report", "file.json", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("error:") == 1


def test_a_folder_or_nothing_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in gpubench("report", str(tmp_path)).stderr
    assert "does not exist" in gpubench("report", str(tmp_path / "none.json")).stderr
    assert gpubench("report").returncode == 2


def test_defaults_of_this_command_are_none_of_the_run(tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    env = environment(GPUBENCH_FORMAT="json", GPUBENCH_WIDTH="90")
    assert gpubench("report", str(path), env=env).stdout == path.read_text()


def test_a_report_is_written_by_a_process_that_measures_nothing(tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "results") + "/"])
    assert result.exit_code == 1
    assert ["-allreduce-" in each.name for each in (tmp_path / "results").iterdir()] == [True]


def test_how_long_a_run_took_is_kept_and_said_where_all_is_asked_for(tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    took = json.loads(path.read_text())["duration_s"]
    assert took > 0
    told = gpubench("report", str(path), "-v").stdout.splitlines()
    assert told[-2] == f"took {took:.1f} s"
    assert "took" not in gpubench("report", str(path)).stdout.splitlines()[-2]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"verdict": "PASS", "sentence": "PASS: all fine"}, "verdict is PASS, but"),
        ({"verdict": "WARN", "sentence": "WARN: nearly"}, "verdict is WARN, but"),
        ({"sentence": "PASS: all fine"}, "the sentence is not"),
    ],
)
def test_a_verdict_that_its_findings_contradict_is_refused(changes: dict[str, Any], seen: str, tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for command in (["report", str(path)], ["compare", str(path), str(path)]):
        shown = gpubench(*command)
        assert (shown.returncode, seen in shown.stderr, shown.stdout) == (2, True, "")


@pytest.mark.parametrize("field", ["time_us", "busbw_gb_s", "size_bytes"])
def test_a_figure_below_0_is_refused(field: str, tmp_path: Path) -> None:
    path = kept(tmp_path, *STAGED)
    document = json.loads(path.read_text())
    document["rows"][2][field] = -1
    path.write_text(json.dumps(document))
    shown = gpubench("report", str(path))
    assert (shown.returncode, f"rows[2].{field} is -1" in shown.stderr) == (2, True)


def test_the_lines_of_two_runs_are_no_result_of_one(tmp_path: Path) -> None:
    """The last run's verdict would stand for both."""
    slow, fast = (tmp_path / f"{name}.jsonl" for name in ("slow", "fast"))
    sizes = ("--simulate", "hgx-h100-8", "--sizes", "64M:256M:4")
    gpubench("allreduce", *sizes, "--fault", "gpu0:speed=0.3", "-o", str(slow))
    gpubench("allreduce", *sizes, "-o", str(fast))
    both = tmp_path / "both.jsonl"
    both.write_text(slow.read_text() + fast.read_text())
    result = gpubench("report", str(both))
    assert (result.returncode, "another run begins" in result.stderr) == (2, True), result.stderr
