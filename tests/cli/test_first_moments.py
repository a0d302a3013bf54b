"""Ctrl-C before a command runs, a folder that is gone, pipes as outputs, and standard input that does not wait."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.running import ROOT

_MAIN = "import sys; sys.argv[0] = 'gpubench'; from gpubench.__main__ import main; main()"
_INTERRUPTED_AT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


def started(*arguments: str, code: str = _MAIN, **how: object) -> subprocess.CompletedProcess[str]:
    """A whole process: what happens before the first line of gpubench counts."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120, **how)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("module", ["gpubench.cli.process", "gpubench.cli.app", "typer", "gpubench.jobs.check"])
def test_ctrl_c_during_the_start_is_one_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERRUPTED_AT", module)
    ended = started("check", "--simulate", "hgx-h200-2", code=_INTERRUPTED_AT + _MAIN)
    assert ended.returncode == 130
    assert ended.stderr.startswith("gpubench: error: interrupted\n")
    assert "Traceback" not in ended.stderr


def test_a_working_folder_that_is_gone_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    inside = f"import os; os.chdir({str(folder)!r}); os.rmdir({str(folder)!r}); {_MAIN}"
    ended = started("topo", "--simulate", "hgx-h200-2", "-o", "x.json", code=inside)
    assert (ended.returncode, "the current folder no longer exists" in ended.stderr) == (2, True)
    assert "Traceback" not in ended.stderr


def test_named_pipes_get_whole_outputs(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    pipes = [tmp_path / "x.json", tmp_path / "x.csv"]
    readers = []
    for pipe in pipes:
        os.mkfifo(pipe)
        readers.append(
            threading.Thread(target=lambda pipe=pipe: seen.update({pipe.name: pipe.read_text()}), daemon=True)
        )
        readers[-1].start()
    outputs = [word for pipe in pipes for word in ("-o", str(pipe))]
    ended = started("allreduce", "--simulate", "hgx-h200-2", "--sizes", "1M", *outputs)
    for reader in readers:
        reader.join(timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(seen["x.json"])["verdict"] == "PASS"
    assert len(seen["x.csv"].splitlines()) == 3


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpubench.errors import UsageError
    from gpubench.formats import registry

    monkeypatch.setattr(registry, "_SECONDS_FOR_A_READER", 0.1)
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(UsageError) as refused:
        registry.target_of(tmp_path / "x.json")
    assert refused.value.reason == "it is a pipe that nobody reads"


def test_standard_input_that_does_not_wait_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    log = (ROOT / "tests" / "logs").rglob("*.log")
    text = next(each for each in sorted(log) if each.stat().st_size < 50_000).read_bytes()

    def write_late() -> None:
        for part in (text[:100], text[100:]):
            threading.Event().wait(0.5)
            os.write(writing, part)
        os.close(writing)

    writer = threading.Thread(target=write_late, daemon=True)
    writer.start()
    ended = started("explain", "-", stdin=reading)
    writer.join(timeout=60)
    assert "Traceback" not in ended.stderr
    assert "GPU" in ended.stdout, ended.stderr


@pytest.mark.parametrize("version", ["5" * 5000, "550." + "5" * 5000])
def test_a_version_of_thousands_of_digits_is_refused(version: str) -> None:
    ended = started("check", "--quick", "--simulate", "hgx-h200-2*2", "--fault", f"node1:driver={version}")
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
