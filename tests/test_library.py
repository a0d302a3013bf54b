"""gpubench for programs: what its functions return is what the command line says."""

import inspect
import json
import pydoc
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gpubench
from gpubench import allreduce, check, p2p, run, topo
from gpubench.cli.app import app
from gpubench.cli.functions import FOR_PEOPLE
from gpubench.cli.process import COMMANDS
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.results.report import CheckRow, CollectiveRow, PairRow, Record
from gpubench.model.results.result_file import MATRICES
from gpubench.model.results.topo import GpuRow
from gpubench.model.terms.verdict import Finding, Verdict
from tests.cli.running import ROOT
from tests.cli.running import gpubench as command_line

NODE = "hgx-h100-8"


def test_a_check_returns_what_the_command_line_says() -> None:
    found = check(simulate=NODE, fault=["gpu5:nvlink=12"], strict=True)
    said = command_line("check", "--simulate", NODE, "--fault", "gpu5:nvlink=12", "--strict", "--format", "json")
    document = json.loads(said.stdout)
    assert (found.exit_code, found.verdict, found.sentence) == (said.returncode, Verdict.FAIL, document["sentence"])
    assert [each.id for each in found.findings] == [each["id"] for each in document["findings"]]
    assert found.findings[0].subject == "GPU5 (0000:1b:00.0)"
    assert len(found.pairs) == len(document["pairs"])
    assert [row.busbw_gb_s for row in found.rows] == [row["busbw_gb_s"] for row in document["rows"]]


def test_paths_are_values_and_a_deadline_is_a_time() -> None:
    assert check(replay=ROOT / "tests/machines/h200x4-vm", quick=True).exit_code == 0
    for deadline in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="deadline_s="):
            topo(simulate=NODE, deadline_s=deadline)


def test_rows_are_typed_whether_they_came_one_by_one_or_with_the_report() -> None:
    reduced = allreduce(simulate=NODE, sizes="1M,64M", in_place=True)
    assert [(type(row), row.size_bytes) for row in reduced.rows] == [(CollectiveRow, 2**20), (CollectiveRow, 2**26)]
    copied = p2p(simulate="hgx-h200-2", sizes="256M")
    assert {type(row) for row in copied.pairs} == {PairRow}
    assert {row.peer for row in copied.pairs} == {"off", "on"}
    wired = topo(simulate=NODE)
    assert {row.path_class for row in wired.pairs if row.source[:3] == row.destination[:3] == "GPU"} == {"NV18"}
    assert [row.nvlinks_active for row in wired.section("gpus", GpuRow)] == [18] * 8


def test_any_command_runs_with_arguments_and_flags() -> None:
    read = run("explain", "tests/logs/h200x4-p2p-disabled")
    assert (read.verdict, read.exit_code) == (Verdict.FAIL, 1)
    assert run("allgather", simulate=NODE, sizes="1M", check=False, profile=None).metadata.subject == "allgather"


def test_what_cannot_be_raises_with_the_words_of_the_command_line() -> None:
    with pytest.raises(UsageError, match="No such option"):
        run("check", fast=True)
    with pytest.raises(UsageError) as unknown:
        allreduce(simulate="hgx-h100-9")
    assert "hgx-h100-8" in str(unknown.value)
    with pytest.raises(CouldNotMeasureError, match=r"did not end within 0\.01 s"):
        topo(simulate=NODE, deadline_s=0.01)


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="as a library under Open MPI's mpirun"):
        topo()


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'chek'") as raised:
        _ = gpubench.chek  # type: ignore[attr-defined]
    assert (raised.value.name, raised.value.obj) == ("chek", gpubench)  # from these Python suggests 'check'
    assert gpubench.RunResult.__name__ == "RunResult"
    assert set(gpubench.__all__) <= set(dir(gpubench))
    assert "sys" not in dir(gpubench)


@pytest.mark.parametrize("command", ["topo", "allreduce", "explain", "plan"])
def test_help_shows_the_parameters_that_the_function_takes(command: str) -> None:
    function = getattr(gpubench, command)
    parameters = inspect.signature(function).parameters
    help_all = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    options = set(re.findall(r"^  (?:-\w, )?--([a-z0-9-]+)", help_all, re.MULTILINE)) - {"help", "help-all"}
    keywords = {name.strip("_").replace("_", "-") for name in parameters} - {"files", "deadline-s"}
    assert options - keywords == {each.replace("_", "-") for each in FOR_PEOPLE | {"format"}} & options
    assert keywords <= options
    assert all(f"    {name}: " in function.__doc__ for name in parameters.keys() - {"deadline_s"})
    assert all(each.default is not inspect.Parameter.empty for name, each in parameters.items() if name != "files")


PRINTED: list[tuple[str, dict[str, Any], str]] = [
    ("allreduce", {"sizes": "1M,64M"}, "<allreduce: PASS, 4 rows (simulated)>"),
    ("topo", {}, "<topo: PASS, 240 rows (simulated)>"),
    (
        "topo",
        {"fault": "gpu5:nvlink=12"},
        "<topo: FAIL, 240 rows, 1 finding: nvlink-down GPU5 (0000:1b:00.0) (simulated)>",
    ),
]


@pytest.mark.parametrize(("command", "options", "expected"), PRINTED)
def test_a_result_prints_as_one_line(command: str, options: dict[str, Any], expected: str) -> None:
    found = run(command, simulate=NODE, **options)
    assert str(found) == repr(found) == expected


def test_rows_and_findings_print_what_is_known_of_them() -> None:
    found = check(simulate=NODE, fault=["gpu5:nvlink=12"])
    assert repr(found.findings[0]).startswith("<FAIL nvlink-down: GPU5 (0000:1b:00.0): 6 of 18 NVLinks down")
    row = repr(found.rows[0])
    assert row.startswith("CollectiveRow(collective='allreduce', ")
    assert "=None" not in row
    assert len(repr(found.report)) < 2000


def test_a_finding_has_its_commands_node_and_devices_as_fields() -> None:
    pytest.importorskip("pandas")
    result = check(simulate=NODE, fault=["gpu5:nvlink=12"], quick=True)
    finding = result.findings[0]
    assert (finding.node, finding.devices) == ("node0", ("GPU5",))
    assert finding.commands == ("nvidia-smi --gpu-reset -i 0000:1b:00.0",)
    (row,) = result.to_frame("findings").to_dict("records")
    assert (row["node"], row["devices"], row["commands"]) == ("node0", ["GPU5"], list(finding.commands))


def test_sections_are_listed_and_no_other_name_is_an_empty_table() -> None:
    pytest.importorskip("pandas")
    wired = topo(simulate=NODE)
    for name in wired.sections:
        assert len(wired.to_frame(name)) == len(wired.section(name) if name not in MATRICES else wired.to_frame(name))
    assert (len(wired.section("gpus")), len(wired.to_frame("matrix")), wired.section("checks")) == (8, 16, [])
    assert allreduce(simulate=NODE, sizes="64M").sections[0] == "rows"
    for look in (wired.section, wired.to_frame):
        with pytest.raises(UsageError, match="no section 'gpu'") as unknown:
            look("gpu")
        assert unknown.value.next_step == "section 'gpus'"
        with pytest.raises(UsageError, match="no section 'nods'") as absent:  # Only check has a section `nodes`
            look("nods")
        assert absent.value.next_step.removeprefix("section ").strip("'") in ("", *wired.sections)
    with pytest.raises(UsageError, match="has GpuRow, not PairRow"):
        wired.section("gpus", PairRow)
    with pytest.raises(UsageError, match="is a matrix"):
        wired.section("matrix")


def test_a_typed_program_works_and_mypy_finds_what_is_misspelt() -> None:
    """mypy --strict reads this file, and reports an `ignore` that it does not need."""
    result = check(simulate=NODE, fault=["gpu5:nvlink=12"], quick=True, deadline_s=60)
    names: list[str] = [finding.subject for finding in result.findings]
    checks: list[CheckRow] = result.section("checks", CheckRow)
    rows: list[Record | Finding] = result.section("checks")
    sections: tuple[str, ...] = result.sections
    assert (len(checks), names[0], sections[0]) == (len(rows), "GPU5 (0000:1b:00.0)", "checks")
    with pytest.raises(UsageError, match="--simulat"):
        check(simulat=NODE)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        _ = result.finding  # type: ignore[attr-defined]
    assert (ROOT / "gpubench" / "py.typed").exists()


def test_the_page_of_the_library_is_python_that_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    text = (Path(ROOT) / "docs/how-to/notebook.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    for example in examples:
        if ".plot(" not in example or find_spec("matplotlib"):
            exec(compile(example, "notebook.md", "exec"), names)
    assert "nvlink-down" in capsys.readouterr().out


def test_every_command_is_a_function_with_typed_keywords() -> None:
    names = {each.name for each in COMMANDS} - {"profiles", "run"}
    assert {"RunResult", "__version__", "load", "run", *names} == set(gpubench.__all__)
    assert all(callable(getattr(gpubench, name)) and getattr(gpubench, name).__doc__ for name in names)
    stub = (ROOT / "gpubench" / "__init__.pyi").read_text()
    assert all(f"def {name}(" in stub for name in names)
    assert "    expect_gpus: int | None = None,\n" in stub
    assert "    fault: Several = None,\n" in stub
    assert "    from_: One | None = None,\n" in stub


def test_a_stored_result_is_loaded_as_it_was_returned(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    found = allreduce(simulate=NODE, sizes="1K,64M", output=path)
    loaded = gpubench.load(path)
    assert (loaded.sentence, loaded.exit_code, loaded.rows) == (found.sentence, found.exit_code, found.rows)
    changed = gpubench.compare(path, path)
    assert (changed.verdict, changed.exit_code) == (Verdict.PASS, 0)
    with pytest.raises(UsageError):
        gpubench.load(tmp_path / "missing.json")


LOADED = [  # what `report` reads, `load` reads
    ("tests/results/h200x4/all_reduce.txt", "allreduce", Verdict.PASS),
    ("tests/results/h200x4/nvbandwidth.txt", "p2p", Verdict.PASS),
    ("tests/pasted/watchdog-zero-ranks.log", "explain", Verdict.FAIL),
]


@pytest.mark.parametrize(("file", "subject", "verdict"), LOADED)
def test_tables_and_logs_of_other_programs_are_loaded(file: str, subject: str, verdict: Verdict) -> None:
    loaded, reported = gpubench.load(ROOT / file), gpubench.report(ROOT / file)
    assert (loaded.metadata.subject, loaded.verdict) == (subject, verdict)
    assert (loaded.rows, loaded.pairs, loaded.findings) == (reported.rows, reported.pairs, reported.findings)


def test_results_become_frames_and_show_themselves_in_notebooks() -> None:
    pytest.importorskip("pandas")
    found = allreduce(simulate=NODE, sizes="1K,64M")
    frame = found.to_frame()
    assert set(frame["size_bytes"]) == {1024, 2**26}
    assert topo(simulate=NODE).to_frame("gpus")["nvlinks_active"].sum() == 8 * 18
    assert len(gpubench.scan(simulate="hgx-h100-8*4").to_frame()) > 0
    page = found._repr_html_()
    assert page.startswith("<iframe ")
    assert "&lt;!DOCTYPE html&gt;" in page or "&lt;!doctype html&gt;" in page


def test_help_shows_types_and_defaults() -> None:
    text = pydoc.plain(pydoc.render_doc(allreduce))
    assert "function allreduce in module gpubench" in text
    assert "timeout: float | None = 60.0" in text
    assert "Sizes in bytes: 1K:4G" in text
