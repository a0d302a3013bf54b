"""Ctrl-C before a command runs, a folder that is gone, pipes as outputs, and standard input that does not wait."""

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpubench.formats.delivery import interruption
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


CHECK = ("check", "--simulate", "hgx-h200-2*2")
ALLREDUCE = ("allreduce", "--simulate", "hgx-h200-2", "--sizes", "1M")
LOG = str(ROOT / "tests" / "logs" / "h200x4-p2p-disabled")
MOMENTS = [
    ("gpubench.cli.process", CHECK),
    ("gpubench.cli.app", CHECK),
    ("typer", CHECK),
    ("gpubench.jobs.check", CHECK),
    ("gpubench.formats.presenter", CHECK),
    ("gpubench.measure.check.health", CHECK),
    ("gpubench.jobs.collective.simulated", ALLREDUCE),
    ("gpubench.model.results.sentence", ALLREDUCE),
    ("gpubench.jobs.report", ("report", "--machine", "hgx-b200-8*2", "pasted.txt")),
    ("gpubench.measure.explain.report", ("explain", LOG)),
    ("gpubench.jobs.rounds", ("scan", "--simulate", "hgx-h100-8*4", "--quick")),
]
"""Modules whose import is interrupted, and the command that imports them."""


@pytest.mark.parametrize(("module", "words"), MOMENTS, ids=lambda each: each if isinstance(each, str) else each[0])
def test_ctrl_c_is_one_line_with_the_next_command(
    module: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERRUPTED_AT", module)
    ended = started(*words, code=_INTERRUPTED_AT + _MAIN)
    assert (ended.returncode, ended.stderr.count("\n")) == (130, 1), ended.stderr
    assert ended.stderr.startswith("gpubench: interrupted ")
    again = shlex.split(ended.stderr.partition(". Try: ")[2])
    assert again[: len(words)] == ["gpubench", *words][: len(words)]


@pytest.mark.parametrize(
    ("typed", "rows", "stored_result", "said"),
    [
        ("topo", 0, "", "before the first result. Try: gpubench topo"),
        ("allreduce --sizes 1K:4G -v", 12, "", "after 12 rows. Try: gpubench allreduce -v --sizes 1M"),
        ("allreduce -b 8 -e 4G -f=2", 1, "", "after 1 row. Try: gpubench allreduce --sizes 1M"),
        ("p2p -o 'my run.json'", 3, "my run.json", "kept in my run.json. Try: gpubench report 'my run.json'"),
        ("report x.json", 9, "", "Try: gpubench report x.json"),
    ],
)
def test_what_is_kept_and_what_to_type_after_ctrl_c(
    typed: str, rows: int, stored_result: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpubench", *shlex.split(typed)])
    assert interruption(rows, stored_result).endswith(said)


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
        registry.make_target(tmp_path / "x.json")
    assert refused.value.reason == "it is a pipe without a reader"


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


_INTERRUPTED_AFTER_ROWS = """
from gpubench.formats.presenter import Presenter
def interrupted(presenter, report):
    raise KeyboardInterrupt
Presenter.end = interrupted
"""


def test_output_and_errors_in_one_file_end_with_one_last_line() -> None:
    """In a terminal, or with `2>&1`, the report's own last line would stand above the one with the command."""
    command = [sys.executable, "-c", _INTERRUPTED_AFTER_ROWS + _MAIN, *ALLREDUCE]
    apart = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    assert apart.stdout.splitlines()[-1].startswith("ERROR (simulated): the run was cut short")
    both = subprocess.run(command, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=120, check=False)
    assert "cut short" not in both.stdout
    assert both.stdout.splitlines()[-1].startswith("gpubench: interrupted after ")
