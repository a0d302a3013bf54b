"""What a scan that was killed had found is in the verdict of the one that goes on, and of the one judged again."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import gpubench

MACHINE = "hgx-h100-8*10"
DIED = '{"absent": {"5": "its supervisor is gone"}, "failed": {"3/1": "its worker died (signal 9, in phase 0)"}}\n'


@cache
def scanned(*words: str) -> list[str]:
    """The lines of a scan with these words."""
    with tempfile.TemporaryDirectory() as folder:
        gpubench("scan", "--simulate", MACHINE, *words, "--rounds", f"{folder}/rounds")
        return Path(folder, "rounds", "scan.jsonl").read_text().splitlines(keepends=True)


def kept(folder: Path, *words: str, lines: int | None = None) -> list[str]:
    """The lines of a scan with these words, of which so many are left in the folder."""
    found = scanned(*words)[:lines]
    (folder / "scan.jsonl").write_text("".join(found))
    return found


def judged(folder: Path, how: str, *words: str) -> tuple[int, Mapping[str, Any]]:
    """Exit code and report of a scan that is judged again, or that goes on."""
    source = ("--replay", str(folder)) if how == "replay" else ("--simulate", MACHINE, "--resume", str(folder))
    result = gpubench("scan", *source, *words, "--format", "json")
    return result.returncode, json.loads(result.stdout)


def named(report: Mapping[str, Any]) -> list[str]:
    return sorted(part["subject"] for part in report["parts"] if part["verdict"] == "FAIL")


@pytest.mark.parametrize("how", ["replay", "resume"])
@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("behind", [1, 2])
def test_who_died_in_phase_0_is_named(tmp_path: Path, how: str, rounds: int, behind: int) -> None:
    """Behind the first measurement of phase 0, or behind both."""
    lines = kept(tmp_path, lines=2 + rounds)
    (tmp_path / "scan.jsonl").write_text("".join([*lines[:behind], DIED, *lines[behind:]]))
    code, report = judged(tmp_path, how)
    assert (code, named(report)) == (1, ["node3 rail 1", "node5"])
    seen = {part["subject"]: part["seen"] for part in report["parts"]}
    assert seen["node5"] == "its supervisor is gone in phase 0"
    assert seen["node3 rail 1"] == "its worker died (signal 9, in phase 0)"


@pytest.mark.parametrize("how", ["replay", "resume"])
def test_who_died_in_the_phase_0_of_a_job_that_went_on_is_named(tmp_path: Path, how: str) -> None:
    lines = kept(tmp_path)
    (tmp_path / "scan.jsonl").write_text("".join([*lines, DIED]))
    code, report = judged(tmp_path, how)
    assert (code, named(report)) == (1, ["node3 rail 1", "node5"])


def test_a_scan_that_was_killed_in_its_phase_0_is_never_green(tmp_path: Path) -> None:
    (head,) = kept(tmp_path, lines=1)
    code, report = judged(tmp_path, "replay")
    assert (code, report["verdict"]) == (3, "ERROR")
    assert {row["verdict"] for row in report["cells"]} == {"ERROR"}
    (tmp_path / "scan.jsonl").write_text(head + DIED)
    code, report = judged(tmp_path, "replay")
    assert (code, named(report)) == (1, ["node3 rail 1", "node5"])


@pytest.mark.parametrize("fault", ["node2.gpu5:speed=0.5", "node1:acs=on"])
def test_what_phase_0_had_found_stays_found_where_it_is_well_later(tmp_path: Path, fault: str) -> None:
    kept(tmp_path, "--fault", fault, lines=3)
    before = judged(tmp_path, "replay")[1]
    code, report = judged(tmp_path, "resume")
    assert len(report["rounds"]) >= 3
    of_rounds = ("cells-not-measured", "suspects-not-confirmed")
    wanted = {(each["id"], each["subject"]) for each in before["findings"] if each["id"] not in of_rounds}
    assert wanted
    assert wanted <= {(each["id"], each["subject"]) for each in report["findings"]}
    assert report["verdict"] == ("FAIL" if "gpu" in fault else "WARN")
    assert judged(tmp_path, "replay")[0] == code


@pytest.mark.parametrize("how", ["replay", "resume"])
@pytest.mark.parametrize("words", [["--quick"], []])
def test_quick_leaves_no_kept_round_out(tmp_path: Path, how: str, words: list[str]) -> None:
    """A node that died behind the screening was well to --quick."""
    kept(tmp_path, "--fault", "node4.nic1:bandwidth=0.5", "--fault", "node9:dies=round7")
    code, report = judged(tmp_path, how, *words)
    assert (code, named(report)) == (1, ["node4 rail 1", "node9"])


@pytest.mark.parametrize("place", ["99/1", "3/8", "3", "x/y", "3/1/1"])
def test_rails_that_are_not_there_did_not_fail(tmp_path: Path, place: str) -> None:
    lines = kept(tmp_path, lines=3)
    (tmp_path / "scan.jsonl").write_text("".join([*lines, DIED.replace("3/1", place)]))
    result = gpubench("scan", "--replay", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
