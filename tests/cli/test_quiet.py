"""The short options that mean the same in every command: -o, -q, -v."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.generate import commands, help_of
from gpubench.cli.app import app
from tests.cli.running import ROOT, gpubench

STAGED = ("--simulate", "hgx-h200-4", "--fault", "link0-1:staged=yes")
RUNS = (
    ("topo", "--simulate", "hgx-h200-4", "--fault", "gpu1:nvlink=12"),
    ("p2p", *STAGED),
    ("allreduce", *STAGED, "--sizes", "1G"),
    ("check", *STAGED),
    ("explain", str(ROOT / "tests" / "logs" / "h200x4-p2p-disabled")),
)


def test_a_command_with_a_report_has_them_all() -> None:
    shown = {each: " ".join(help_of(each).split()) for each in commands()}
    with_report = {each: text for each, text in shown.items() if "--output" in text}
    assert len(with_report) > 10
    for names in ("-o, --output FILE", "-q, --quiet", "-v, --verbose"):
        assert [each for each, text in with_report.items() if names not in text] == []


def test_every_command_but_profiles_has_a_report() -> None:
    assert {each for each in commands() if "--output" not in help_of(each)} == {"profiles"}
    assert "-o" in help_of("profiles", "learn")


@pytest.mark.parametrize("arguments", RUNS, ids=lambda each: each[0])
def test_quiet_shows_findings_and_the_last_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    loud = gpubench(*arguments)
    quiet = gpubench(*arguments, "-q", "-o", str(kept), "-o", str(tmp_path / "result.txt"))
    assert quiet.returncode == loud.returncode
    assert quiet.stderr == ""
    document = json.loads(kept.read_text())
    lines = quiet.stdout.splitlines()
    assert lines[-1] == document["sentence"]
    heads = [line for line in lines[:-1] if not line.startswith(" ")]
    assert document["findings"]
    assert len(heads) == len(document["findings"])
    for head, finding in zip(heads, document["findings"], strict=True):
        assert head.startswith(f"{finding['severity']} {finding['id']}: ")
    assert (tmp_path / "result.txt").read_text().splitlines() == loud.stdout.splitlines()


def test_a_healthy_machine_is_one_line() -> None:
    result = gpubench("topo", "--simulate", "hgx-h200-4", "-q")
    assert (len(result.stdout.splitlines()), result.stdout[:18], result.stderr) == (1, "PASS (simulated): ", "")


@pytest.mark.parametrize("name", ["json", "csv"])
def test_what_programs_read_is_the_same(name: str) -> None:
    run = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:1M", "--format", name)
    loud, quiet = (CliRunner().invoke(app, [*run, *more]).stdout for more in ((), ("-q",)))
    if name == "json":
        loud, quiet = (json.dumps(json.loads(each)["rows"]) for each in (loud, quiet))
    assert quiet == loud


def test_summary_and_monitoring_keep_their_one_line() -> None:
    run = ("topo", "--simulate", "hgx-h200-4", "--fault", "gpu1:nvlink=12")
    for option in (("--summary",), ("--exit-style", "nagios")):
        assert gpubench(*run, *option, "-q").stdout == gpubench(*run, *option).stdout


@pytest.mark.parametrize(
    ("more", "said"), [(("-v",), "--quiet and --verbose"), (("--plot",), "--plot and --quiet exclude each other")]
)
def test_what_contradicts_it_is_refused(more: tuple[str, ...], said: str) -> None:
    result = gpubench("allreduce", "--simulate", "hgx-h200-4", "-q", *more)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
