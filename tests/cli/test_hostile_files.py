"""Files that a stranger made to break who reads them: refused by name, in time, in little memory, never a traceback."""

import os
from pathlib import Path
from threading import Thread

import pytest

from benchmarks import hostile_files
from gpubench import profiles
from gpubench.readers import limits
from tests.cli.running import ROOT, gpubench
from tests.fakes.hostile_files import HOSTILE, NEVER, HostileFile

ALL = [(kind, attack) for kind, attacks in HOSTILE.items() for attack in attacks]


@pytest.mark.slow
@pytest.mark.parametrize("attack", [attack for _, attack in ALL], ids=[f"{kind}: {each.name}" for kind, each in ALL])
def test_every_attack_ends_in_words_in_time_and_in_little_memory(attack: HostileFile) -> None:
    assert hostile_files.run_attack(attack, seconds=60, gigabytes=8).is_well


def test_a_log_of_too_many_ranks_is_reported_and_the_rest_of_it_too(tmp_path: Path) -> None:
    logs = ROOT / "tests" / "logs" / "h200x4-normal"
    for path in logs.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    line = "a:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2000000000 cudaDev 0 busId 1a000 commId 0x2 - Init START\n"
    (tmp_path / "zz.log").write_text(line)
    result = gpubench("explain", str(tmp_path))
    assert (result.returncode, NEVER in result.stderr) == (0, False)
    assert "WARN log-limit" in result.stdout
    assert "a communicator of 2000000000 ranks" in result.stdout
    assert "0→1, 1→2, 2→3, 3→0" in result.stdout


SOURCES = {"explain": "logs/h200x4-normal/normal.4310.log", "compare": "results/h200x4/all_reduce.txt"}


@pytest.mark.parametrize("command", SOURCES)
def test_a_pipe_of_a_shell_is_read(command: str) -> None:
    """`explain <(cat FILE)` and `compare <(cat FILE) FILE`, in whose place a shell puts this name."""
    source = ROOT / "tests" / SOURCES[command]
    opened, written = os.pipe()

    def write() -> None:
        with os.fdopen(written, "wb") as pipe:
            pipe.write(source.read_bytes())

    writer = Thread(target=write)
    writer.start()
    others = [str(source)] if command == "compare" else []
    with os.fdopen(opened):
        result = gpubench(command, f"/dev/fd/{opened}", *others)
    writer.join()
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", SOURCES)
def test_a_pipe_by_name_waits_for_its_writer(command: str, tmp_path: Path) -> None:
    source = SOURCES[command]
    content, pipe = (ROOT / "tests" / source).read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    others = [str(ROOT / "tests" / source)] if command == "compare" else []
    result = gpubench(command, str(pipe), *others)
    writer.join()
    assert result.returncode == 0, result.stderr


def the_limits() -> dict[str, object]:
    """Every limit by the name that docs/reference/security.md has; those of profiles after the word."""
    return {
        f"{kind}{name}": value
        for kind, module in (("", limits), ("profiles ", profiles))
        for name, value in vars(module).items()
        if name.startswith(("MOST_", "LONGEST_", "SECONDS_"))
    }


def test_the_limits_are_documented() -> None:
    text = (ROOT / "docs/reference/security.md").read_text(encoding="utf-8")
    section = text.partition("## Files from strangers\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    documented = {
        ("profiles " if kind == "profiles" else "") + name.strip("`"): said
        for kind, names, most, why in rows[1:]
        for name, said in zip(names.split(", "), most.split(" / "), strict=True)
        if why
    }
    assert documented == {name: shown(value) for name, value in the_limits().items()}


def shown(value: object) -> str:
    """A limit as the page has it."""
    if isinstance(value, float):
        return f"{value:g} s"
    assert isinstance(value, int)
    return f"{value:,}"
