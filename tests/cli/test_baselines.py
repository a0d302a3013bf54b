"""Results under a name: kept while all is well, and what others are held against."""

import json
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.readers.results.history import baseline_folder, baseline_names, baseline_path
from tests.cli.running import ROOT, environment, gpubench

RUN = ("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1K:1G:32")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return environment(GPUBENCH_BASELINES=str(tmp_path / "kept"))


def test_a_run_is_kept_and_another_is_held_against_it(tmp_path: Path, variables: dict[str, str]) -> None:
    kept = gpubench(*RUN, "--save-baseline", "good", env=variables)
    assert kept.returncode == 0
    assert "gpubench: baseline good is kept\n" in kept.stderr
    assert json.loads((tmp_path / "kept" / "good.json").read_text())["complete"]
    for fault, code, verdict in (((), 0, "PASS"), (("--fault", "gpu5:nvlink=12"), 1, "FAIL")):
        now = tmp_path / "now.json"
        gpubench(*RUN, *fault, "-o", str(now), env=variables)
        compared = gpubench("compare", "--against", "good", str(now), env=variables)
        assert (compared.returncode, compared.stdout.splitlines()[-1].partition(" (simulated):")[0]) == (code, verdict)


def test_without_a_home_nothing_is_kept_in_the_working_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no HOME"):
        baseline_path("good", {})
    assert baseline_names({"HOME": ""}) == []
    nowhere = {name: value for name, value in environment(PYTHONPATH=str(ROOT)).items() if name != "HOME"}
    run = gpubench(*RUN, "--save-baseline", "good", env=nowhere, cwd=tmp_path)
    assert (run.returncode, "there is no HOME" in run.stderr, list(tmp_path.iterdir())) == (2, True, [])


def test_a_watch_has_no_rows_to_compare_and_is_not_called_damaged(tmp_path: Path, variables: dict[str, str]) -> None:
    watch = ("watch", "--simulate", "hgx-h200-2", "--for", "1s")
    gpubench(*watch, "--save-baseline", "w", "-o", str(tmp_path / "now.json"), env=variables)
    compared = gpubench("compare", "--against", "w", str(tmp_path / "now.json"), env=variables)
    assert (compared.returncode, "ERROR nothing-compared" in compared.stdout) == (3, True)


def test_a_run_that_could_not_be_measured_spoils_no_baseline(tmp_path: Path, variables: dict[str, str]) -> None:
    check = ("check", "--simulate", "hgx-h100-8", "--save-baseline", "node")
    gpubench(*check, env=variables)
    good = (tmp_path / "kept" / "node.json").read_text()
    silent = gpubench(*check, "--fault", "node0:silent=nvml", env=variables)
    assert "gpubench: baseline node is not kept: ERROR\n" in silent.stderr
    assert (tmp_path / "kept" / "node.json").read_text() == good
    failed = gpubench(*check, "--fault", "gpu5:nvlink=12", env=variables)
    assert "gpubench: baseline node is kept, although the run is FAIL and so not a healthy baseline\n" in failed.stderr


def test_a_stored_result_becomes_a_baseline(tmp_path: Path, variables: dict[str, str]) -> None:
    stored = tmp_path / "stored.json"
    gpubench(*RUN, "-o", str(stored), env=variables)
    assert gpubench("report", str(stored), "--save-baseline", "old", env=variables).returncode == 0
    assert gpubench("compare", "--against", "old", str(stored), env=variables).returncode == 0


def test_names_that_are_not_there_and_words_that_are_none_are_refused(variables: dict[str, str]) -> None:
    gpubench(*RUN, "--save-baseline", "good", env=variables)
    missing = gpubench("compare", "--against", "god", "now.json", env=variables)
    assert missing.returncode == 2
    assert "expected: one of good" in missing.stderr
    path = gpubench(*RUN, "--save-baseline", "../good", env=variables)
    assert (path.returncode, path.stdout) == (2, "")
    assert "'../good' is not a valid name for a baseline" in path.stderr
    for files in ((), ("one.json", "two.json")):
        wrong = gpubench("compare", "--against", "good", *files, env=variables)
        assert (wrong.returncode, "expected: one file" in wrong.stderr) == (2, True)


def test_the_folder_is_the_users_own() -> None:
    assert baseline_folder({"HOME": "/home/a"}) == Path("/home/a/.local/share/gpubench/baselines")
    assert baseline_folder({"HOME": "/home/a", "XDG_DATA_HOME": "/data"}) == Path("/data/gpubench/baselines")
    assert baseline_path("2026-11.a_b", {"GPUBENCH_BASELINES": "/kept"}) == Path("/kept/2026-11.a_b.json")
    for word in ("", ".hidden", "a/b", "a b", "é", "a" * 101):
        with pytest.raises(UsageError):
            baseline_path(word, {"HOME": "/home/a"})
