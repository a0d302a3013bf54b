import subprocess
import sys
from pathlib import Path

import pytest

from gpubench.machine.children import module_command, package_environment
from gpubench.machine.probe import probe

CHECKOUT = str(Path(__file__).parents[3])


def test_children_do_not_import_from_the_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user was run')")
    monkeypatch.chdir(tmp_path)
    snapshot = probe(60, {"PATH": "/usr/bin:/bin", "PYTHONPATH": CHECKOUT})
    assert [each for each in snapshot.failures if "a file of the user" in each.error or each.stage == "sysfs"] == []


def test_ranks_do_not_either(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('a file of the user was run')")
    command = module_command("gpubench", "--version")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("where", [CHECKOUT, ""], ids=["named", "current"])
def test_a_package_found_in_the_current_directory_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setattr(sys, "path", [where, "/elsewhere"])
    assert package_environment({"A": "1"}) == {"A": "1", "PYTHONPATH": CHECKOUT}
    assert package_environment({"PYTHONPATH": "/mine"}) == {"PYTHONPATH": f"{CHECKOUT}:/mine"}


def test_an_installed_package_is_found_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/usr/local/bin", CHECKOUT])
    assert package_environment({"A": "1"}) == {"A": "1"}
