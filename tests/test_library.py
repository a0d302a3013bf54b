"""gpubench for programs: what its functions return is what the command line says."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import gpubench
from gpubench import allreduce, check, p2p, run, topo
from gpubench.cli.process import COMMANDS
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.hardware.launch import module_command
from gpubench.jobs import library
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.topo import GpuRow
from gpubench.model.terms.verdict import Verdict
from tests.cli import forking
from tests.cli.running import ROOT
from tests.cli.running import gpubench as command_line

NODE = "hgx-h100-8"


@pytest.fixture(autouse=True)
def _forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are forks of a process that has imported gpubench; `test_a_process_of_its_own` starts one as it is."""
    monkeypatch.setattr(library, "module_command", lambda _, *arguments: [*forking.for_shells(), *arguments])


def test_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "module_command", module_command)
    assert topo(simulate=NODE).exit_code == 0


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
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        _ = gpubench.chek  # type: ignore[attr-defined]
    assert gpubench.RunResult.__name__ == "RunResult"


def test_the_page_of_the_library_is_python_that_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    text = (Path(ROOT) / "docs" / "library.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    for example in examples:
        if ".plot(" not in example or find_spec("matplotlib"):
            exec(compile(example, "library.md", "exec"), names)
    assert "nvlink-down" in capsys.readouterr().out


def test_every_command_is_a_function_with_typed_keywords() -> None:
    names = {each.name for each in COMMANDS} - {"profiles"}
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
