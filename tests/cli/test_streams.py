"""Streams that are closed, full or read-only: they change no exit code, and what is for one goes to no other."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpubench.cli.process import COMMANDS
from tests.cli.running import ROOT, environment, gpubench

LOG = str(ROOT / "tests" / "logs" / "h200x4-p2p-disabled")
SIMULATED = ("--simulate", "hgx-h200-4")
RUNS = {
    "": SIMULATED,
    "topo": SIMULATED,
    "p2p": SIMULATED,
    "kv": SIMULATED,
    "check": (*SIMULATED, "--quick"),
    "scan": ("--simulate", "hgx-h100-8*4", "--quick"),
    "watch": (*SIMULATED, "--for", "2s"),
    "run": ("--quiet", "--logs", "LOGS", "--", "sh", "-c", f"cp {LOG}/* $GPUBENCH_RUN_FOLDER"),
    "explain": (LOG,),
    "compare": ("RESULT", "RESULT"),
    "report": ("RESULT",),
    "collective": (*SIMULATED, "--sizes", "1M"),
    "overlap": (*SIMULATED, "--sizes", "1M"),
    "plan": (*SIMULATED, "--parameters", "7B"),
    "profiles": (),
}
"""Arguments of each command, one entry for all collectives; RESULT is a file of an earlier run, LOGS a new folder."""

DONE, FAILED, COULD_NOT_MEASURE = 0, 1, 3


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("streams") / "result.json"
    assert gpubench("allreduce", *SIMULATED, "--sizes", "1M", "-o", str(path)).returncode == DONE
    return str(path)


OWN = shlex.join([sys.executable, "-m", "gpubench"])


def shell(redirection: str, *arguments: str, program: str = OWN) -> "subprocess.CompletedProcess[str]":
    """A command whose streams a shell redirects; what it prints otherwise is captured."""
    line = f"set -o pipefail; {program} {shlex.join(arguments)} {redirection}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False, env=environment(), cwd=ROOT
    )


def words_of(command: str, module: str, result: str) -> Sequence[str]:
    words = RUNS[module if command else ""]
    files = {"RESULT": result, "LOGS": tempfile.mkdtemp(dir=Path(result).parent)}
    return [each for each in (command, *(files.get(word, word) for word in words)) if each]


FIRST_OF_KIND = {"": ""} | {
    "collective" if each.module == "collective" else each.name: each.name for each in reversed(COMMANDS)
}


def test_every_command_has_a_run_here() -> None:
    assert RUNS.keys() == FIRST_OF_KIND.keys()


def test_a_command_without_stdout_ends_as_with_one(result: str) -> None:
    for module, first in FIRST_OF_KIND.items():
        words = words_of(first, module, result)
        closed = shell(">&-", *words)
        assert "Traceback" not in closed.stderr, words
        usual = gpubench(*words_of(first, module, result)).returncode
        assert closed.returncode == usual, (words, closed.stderr)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2</dev/null", "<&- 2>&-"])
def test_what_cannot_be_narrated_reaches_no_data_and_changes_no_verdict(redirection: str) -> None:
    ended = shell(redirection, "topo", *SIMULATED, "--format", "json")
    assert ended.returncode == DONE
    assert json.loads(ended.stdout)["verdict"] == "PASS"


@pytest.mark.parametrize("redirection", [">&- 2>&-", "<&- >&- 2>&-"])
def test_a_verdict_is_the_exit_code_where_no_stream_is_left(redirection: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    words = ("check", *SIMULATED, "--quick", "--fault", "gpu1:nvlink=12", "-o", str(kept))
    assert shell(redirection, *words).returncode == FAILED
    assert json.loads(kept.read_text())["verdict"] == "FAIL"


@pytest.mark.parametrize("module", ["topo", "profiles"])
@pytest.mark.parametrize("more", [(), ("--help",)], ids=["run", "help"])
def test_a_full_disk_under_stdout_is_named(module: str, more: Sequence[str], result: str) -> None:
    """Of topo a process of its own is asked: it also is Python that ends with a stream that cannot be flushed."""
    ended = shell("> /dev/full", *words_of(module, module, result), *more)
    assert ended.returncode == COULD_NOT_MEASURE
    assert "stdout can no longer be written: No space left on device" in ended.stderr
    assert not re.search("Traceback|Exception", ended.stderr)


def test_stdout_that_takes_nothing_is_not_said_to_be_full() -> None:
    ended = shell("1< /dev/null", "topo", *SIMULATED)
    assert ended.returncode == COULD_NOT_MEASURE
    assert "stdout can no longer be written: Bad file descriptor" in ended.stderr
    assert "full" not in ended.stderr


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("profiles", "list")])
def test_a_help_that_nobody_reads_judges_nothing(words: Sequence[str]) -> None:
    ended = shell("| true", *words)
    assert (ended.returncode, ended.stderr) == (DONE, "")


@pytest.mark.parametrize(("fault", "codes"), [((), {DONE}), (("--fault", "gpu1:nvlink=9"), {DONE, FAILED})])
def test_a_reader_that_goes_away_ends_every_command_quietly(fault: Sequence[str], codes: set[int], result: str) -> None:
    """What had failed before may be exit code 1; that nobody reads is no error."""
    for module, first in FIRST_OF_KIND.items():
        words = words_of(first, module, result)
        faulty = fault if "--simulate" in words and module not in ("watch", "plan") else ()
        ended = shell("| head -1", *words, *faulty)
        assert ended.stderr == "", words
        assert ended.returncode in (codes if faulty else {DONE, FAILED}), words


def test_a_wrong_command_is_wrong_usage_where_nobody_can_be_told() -> None:
    assert shell("2>/dev/full", "nosuch").returncode == 2


@pytest.mark.parametrize(
    "words", [("topo", *SIMULATED), ("allreduce", *SIMULATED, "--sizes", "1M"), ("watch", *SIMULATED, "--for", "2s")]
)
def test_a_recording_that_does_not_fit_is_named_and_not_stdout(words: Sequence[str], tmp_path: Path) -> None:
    """A file that may have a KiB stands for a disk that is full."""
    folder = tmp_path / "seen"
    ended = shell("", *words, "--record", str(folder), program=f"ulimit -f 1; {OWN}")
    assert ended.returncode == COULD_NOT_MEASURE, ended.stderr
    assert f"{folder}/nodes/node0.json can no longer be written: File too large" in ended.stderr
    assert not re.search("Traceback|stdout", ended.stderr)


def test_a_fault_of_the_program_itself_judges_nothing() -> None:
    broken = "import gpubench.cli.process as process; process.run_and_exit(lambda launch: 1 // 0)"
    ended = subprocess.run(
        [sys.executable, "-c", broken], capture_output=True, text=True, check=False, env=environment()
    )
    assert ended.returncode == COULD_NOT_MEASURE
    assert "ZeroDivisionError" in ended.stderr
    assert "The machine may be healthy" in ended.stderr.splitlines()[-1]
