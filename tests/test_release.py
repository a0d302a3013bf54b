"""The files of a release: the name on PyPI, the GitHub Action, the release workflow and the conda recipe."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import gpubench
from gpubench.errors import DISTRIBUTION
from tests.cli.running import ROOT, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
BARE_NAME = re.compile(
    r"(?<![\w./-])gpubench\[\w|\b(?:pip|pipx|uv|conda) (?:[\w-]+ )+['\"]?gpubench(?![\w/-])|\buvx gpubench"
)
"""Installs `gpubench` from PyPI, which is another project."""


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [
        ("pipx install 'gpubench[cuda13]'", True),
        ("pip install --upgrade gpubench", True),
        ("uvx gpubench", True),
        ('GPUBENCH: "gpubench[cuda13]"', True),
        ("uvx --from gpubench-cluster gpubench", False),
        ("pip install 'gpubench-cluster[local]' && gpubench", False),
        ("pip install '.[cuda13]' && ./gpubench[cuda13]", False),
    ],
)
def test_bare_names_are_recognized(line: str, is_bare: bool) -> None:
    assert bool(BARE_NAME.search(line)) == is_bare


def test_no_file_installs_the_other_project_of_that_name() -> None:
    folders = (".github", "benchmarks", "conda", "docs", "gpubench", "profiles", ".ci")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    text_files = [path for path in paths if path.is_file() and path.suffix not in (".png", ".pyc")]
    assert len(text_files) > 300
    bare = {
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in text_files
        for found in BARE_NAME.finditer(path.read_text(encoding="utf-8"))
    }
    assert bare == set()


def test_every_file_of_a_release_has_one_name_one_version_and_the_same_requirements() -> None:
    assert {PROJECT["name"], RECIPE["package"]["name"]} == {DISTRIBUTION}
    assert RECIPE["context"]["version"] == gpubench.__version__
    assert PROJECT["requires-python"] == f">={RECIPE['context']['python_min']}"
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    requirements = [line.replace(" ", "") for line in RECIPE["requirements"]["run"] if not line.startswith("python ")]
    assert requirements == PROJECT["dependencies"]


def test_actions_of_the_release_are_pinned_to_commits() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (.+)", text)
    assert len(used) == 6
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)] == []


VENV = f"""#!/bin/bash
mkdir -p "$3/bin" && cd "$3/bin"
echo 'echo "$@" > "$RUNNER_TEMP/installed"' > pip
echo 'exec {sys.executable} -m gpubench "$@"' > gpubench
chmod +x pip gpubench
"""
"""Stands in for `python3 -m venv DIR`: its pip notes what it should install, and its gpubench is this one."""


@pytest.mark.parametrize(
    ("fault", "code", "sentence"),
    [("", 0, "✅ PASS"), ("--fault gpu5:nvlink=12", 1, "❌ FAIL"), ("--no-such-option", 2, "")],
)
def test_the_steps_of_the_github_action_run_in_a_shell(fault: str, code: int, sentence: str, tmp_path: Path) -> None:
    inputs = {"command": f"check --quick --simulate hgx-h100-8 {fault}", "extras": "cuda13,local"}
    assert ACTION["inputs"].keys() == inputs.keys()
    (tmp_path / "python3").write_text(VENV)
    (tmp_path / "python3").chmod(0o755)
    summary = tmp_path / "summary"
    summary.touch()
    runner = {"RUNNER_TEMP": str(tmp_path), "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(summary)}
    runner |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    codes, annotations = [], ""
    for step in ACTION["runs"]["steps"]:
        own = {name: inputs[re.fullmatch(r"\$\{\{ inputs\.(\w+) }}", text)[1]] for name, text in step["env"].items()}  # type: ignore[index]
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ended = subprocess.run(
            command,
            env=environment(**runner, **own),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        codes.append(ended.returncode)
        annotations += ended.stdout
    assert codes == [0, code]
    assert (tmp_path / "installed").read_text() == f"install {ROOT}[cuda13,local]\n"
    assert sentence in summary.read_text(encoding="utf-8")
    assert ("::error" in annotations) == (code == 1)
