"""`--record` and `--replay` of collectives as a user has them, on simulated machines; real ranks are in tests/mpi."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import MPI_ENVIRONMENT, environment, gpubench

MACHINE = ("--simulate", "hgx-h200-4", "--sizes", "1K:4G:64")
STAGED = (*MACHINE, "--fault", "link0-3:staged=yes")


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """A report without what differs from run to run, and without where it comes from."""

    def anonymous(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: anonymous(held) for name, held in value.items() if name != "origin"}
        return [anonymous(each) for each in value] if isinstance(value, list) else value

    known = {
        name: held
        for name, held in document["metadata"].items()
        if name not in ("run_id", "started_at", "command", "source")
    }
    plain: dict[str, Any] = anonymous(document | {"metadata": known, "duration_s": 0})
    return plain


def recorded(folder: Path, *arguments: str, collective: str = "allreduce") -> str:
    """What the run said, as JSON."""
    result = gpubench(collective, *arguments, "--record", str(folder), "--format", "json")
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [
        ("allreduce", MACHINE),
        ("allreduce", (*STAGED, "--percentiles")),
        ("allreduce", (*STAGED, "--strict", "--evidence", "--in-place")),
        ("alltoall", ("--simulate", "hgx-h100-8*2", "--np", "8", "--sizes", "8,1M", "--fault", "node1.gpu5:nvlink=12")),
    ],
)
def test_what_was_simulated_is_replayed(tmp_path: Path, collective: str, arguments: tuple[str, ...]) -> None:
    folder = tmp_path / "seen"
    shown = gpubench(collective, *arguments, "--record", str(folder), "--format", "json")
    again = gpubench(collective, "--replay", str(folder), "--format", "json")
    assert (again.returncode, again.stderr) == (shown.returncode, shown.stderr)
    documents = [json.loads(result.stdout) for result in (shown, again)]
    assert documents[1]["metadata"]["origin"] == "simulated"
    assert documents[1]["metadata"]["source"] == f"--replay {folder}"
    assert comparable(documents[0]) == comparable(documents[1])


def test_every_format_and_section_is_as_it_was(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    recorded(Path(folder), *STAGED)
    for shown in (
        ("--format", "csv", "--section", "fallback"),
        ("--format", "jsonl"),
        ("--plot", "--width", "80", "--evidence"),
        ("--exit-style", "nagios"),
    ):
        was = gpubench("allreduce", *STAGED, *shown)
        now = gpubench("allreduce", "--replay", folder, *shown)
        if shown[-1] == "jsonl":
            lines = [[json.loads(line) for line in result.stdout.splitlines()[1:]] for result in (was, now)]
            for each in lines:
                del each[-1]["duration_s"]
            assert lines[0] == lines[1]
        else:
            # What stands above the first rank says where it comes from.
            texts = [result.stdout[max(0, result.stdout.find("  rank 0-3 on")) :] for result in (was, now)]
            assert texts[0] == texts[1] != ""
        assert (was.returncode, was.stderr) == (now.returncode, now.stderr)


def test_what_is_asked_of_it_at_home_is_stricter_and_shows_more(tmp_path: Path) -> None:
    recorded(tmp_path / "seen", *STAGED)
    folder = str(tmp_path / "seen")
    assert gpubench("allreduce", "--replay", folder).returncode == 1
    strict = gpubench("allreduce", "--replay", folder, "--strict", "--evidence")
    assert strict.returncode == gpubench("allreduce", *STAGED, "--strict").returncode == 1
    assert "evidence that a path is direct" in strict.stdout


def test_a_recording_is_not_overwritten_and_shows_its_nodes_too(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    recorded(Path(folder), *MACHINE)
    second = gpubench("allreduce", *MACHINE, "--record", folder)
    assert second.returncode == 2
    assert "already has a recording" in second.stderr
    assert "GPU3" in gpubench("topo", "--replay", folder).stdout
    other = gpubench("broadcast", "--replay", folder)
    assert other.returncode == 2
    assert "has no samples for broadcast" in other.stderr
    assert "gpubench broadcast --record" in other.stderr


def test_a_run_that_was_cut_short_is_replayed_as_far_as_it_went(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    whole = list(csv.DictReader(io.StringIO(_csv(folder))))
    samples = folder / "allreduce.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:4]) + lines[4][:40])
    result = gpubench("allreduce", "--replay", str(folder), "--format", "csv")
    assert result.returncode == 3
    assert list(csv.DictReader(io.StringIO(result.stdout))) == whole[:3]
    table = gpubench("allreduce", "--replay", str(folder))
    assert "the run was cut short, so only some rows were measured" in " ".join(table.stdout.split())
    assert "recording-cut-short" in table.stdout
    assert "3 rows without a final line, up to 64K out of place" in " ".join(table.stdout.split())


def _csv(folder: Path) -> str:
    return gpubench("allreduce", *MACHINE, "--record", str(folder), "--format", "csv").stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "allreduce.jsonl").write_text(""), "allreduce.jsonl: empty"),
        (lambda folder: (folder / "allreduce.jsonl").write_bytes(b"\xff\xfe\n"), "allreduce.jsonl cannot be read"),
        (lambda folder: (folder / "allreduce.jsonl").write_text("junk\n"), "line 1: no JSON"),
        (lambda folder: _replace(folder, '"schema_version": 1', '"schema_version": 7'), "schema_version 7"),
        (lambda folder: _replace(folder, '"hosts": ["', '"hosts": ["else'), "which is not in the recording"),
        (lambda folder: _replace(folder, '"staged": [[', '"staged": [[9, 1], ['), "the pair [9, 1]"),
        (lambda folder: _replace(folder, '"rows": ', '"rows": 1'), "the end of"),
        (lambda folder: next((folder / "nodes").glob("*.json")).write_text("{"), "the JSON is broken"),
    ],
)
def test_a_damaged_recording_names_its_line(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = tmp_path / "seen"
    recorded(folder, *STAGED)
    damage(folder)
    result = gpubench("allreduce", "--replay", str(folder))
    assert result.returncode == 2
    assert said in result.stderr
    assert "try:" in result.stderr
    assert "Traceback" not in result.stderr


def _replace(folder: Path, old: str, new: str) -> None:
    file = folder / "allreduce.jsonl"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--record", "x"), "--replay and --record exclude each other"),
        (("--simulate", "hgx-h200-4"), "--replay and --simulate exclude each other"),
        (("--sizes", "8"), "--replay and --sizes exclude each other"),
        (("--np", "3"), "--replay and --np exclude each other"),
        (("--in-place",), "--replay and --in-place exclude each other"),
        (("--no-check",), "--replay and --no-check exclude each other"),
        (("--no-evidence",), "--replay and --no-evidence exclude each other"),
        (("--split", "2"), "--replay and --split exclude each other"),
        (("--algo", "ring"), "--replay and --algo exclude each other"),
        (("--mode", "latency"), "--replay and --mode exclude each other"),
        ((), "--replay nowhere has no recording"),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: tuple[str, ...], said: str) -> None:
    result = gpubench("allreduce", "--replay", "nowhere", *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "try:" in result.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts() -> None:
    result = gpubench("allreduce", "--record", "/proc/x")
    assert result.returncode == 2
    assert "--record /proc/x cannot be written" in result.stderr


def test_a_launcher_is_told_that_it_is_not_needed(tmp_path: Path) -> None:
    under = environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2", **MPI_ENVIRONMENT)
    result = gpubench("allreduce", "--replay", str(tmp_path), env=under)
    assert result.returncode == 2
    assert "allreduce --replay under" in result.stderr


def test_what_says_how_to_show_it_stands_beside_a_replay(tmp_path: Path) -> None:
    recorded(tmp_path / "run", *MACHINE)
    shown = ("--evidence", "--strict", "--plot", "--width", "90", "--no-progress", "--output", str(tmp_path / "x.csv"))
    result = gpubench("allreduce", "--replay", str(tmp_path / "run"), "--section", "evidence", *shown)
    assert result.returncode == 0, result.stderr
