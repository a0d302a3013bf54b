"""Files whose machine lost power: behind the last byte on the disk stand NUL bytes that were promised to the file."""

from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench

NEVER_WRITTEN = bytes(4096)
SIMULATED = ("--simulate", "hgx-h200-4")
RECORDED = {
    "topo": SIMULATED,
    "p2p": SIMULATED,
    "kv": (*SIMULATED, "--blocks", "1"),
    "check": (*SIMULATED, "--quick"),
    "allreduce": (*SIMULATED, "--sizes", "1K:1M:32"),
    "watch": (*SIMULATED, "--for", "2s"),
    "scan": ("--simulate", "hgx-h100-8*4", "--quick"),
}


def last_line(*words: str) -> tuple[int, str, str]:
    """The exit code and the verdict of a run, and what it complained of."""
    ended = gpubench(*words, "--summary")
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("command", RECORDED)
def test_a_recording_is_replayed_as_without_them(command: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    gpubench(command, *RECORDED[command], "--rounds" if command == "scan" else "--record", folder)
    before = last_line(command, "--replay", folder)
    lines = sorted(Path(folder).glob("*.jsonl"))
    assert lines
    for path in lines:
        path.write_bytes(path.read_bytes() + NEVER_WRITTEN)
    assert last_line(command, "--replay", folder) == before


@pytest.mark.parametrize("resumed", [False, True])
def test_of_rounds_the_line_that_was_not_finished_is_left_out(resumed: bool, tmp_path: Path) -> None:
    gpubench("scan", *RECORDED["scan"], "--rounds", str(tmp_path))
    path = tmp_path / "scan.jsonl"
    whole = path.read_bytes()
    shorter = whole[: whole[:-1].rfind(b"\n") + 1]
    source = ("--resume", str(tmp_path), "--simulate", "hgx-h100-8*4") if resumed else ("--replay", str(tmp_path))
    path.write_bytes(shorter)
    before = last_line("scan", *source, "--quick")
    path.write_bytes(whole[: len(shorter) + 20] + NEVER_WRITTEN)
    assert last_line("scan", *source, "--quick") == before


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_result_is_reported_as_without_them(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"result{suffix}"
    gpubench("allreduce", *SIMULATED, "--sizes", "1K:1M:32", "-o", str(path))
    before = last_line("report", str(path))
    path.write_bytes(path.read_bytes() + NEVER_WRITTEN)
    assert last_line("report", str(path)) == before


def test_a_log_of_nccl_is_explained_as_without_them(tmp_path: Path) -> None:
    for path in (ROOT / "tests" / "logs" / "h200x4-p2p-disabled").glob("*.log"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = last_line("explain", str(tmp_path))
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() + NEVER_WRITTEN)
    assert last_line("explain", str(tmp_path)) == before
