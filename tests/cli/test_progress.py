"""Commands that read much, or scan many nodes, say how far they are."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpubench.cli.app import run_command_line
from gpubench.formats import presenter as presenting
from gpubench.jobs import compare as compare_job
from gpubench.jobs import explain as explain_job
from gpubench.jobs import rounds as scan_progress

LOG = "tests/logs/h200x4-p2p-disabled"


class Heard:
    """A display that keeps what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.waits: list[tuple[str, float]] = []
        self.stopped = 0

    def update(self, done: int, total: int, label: str) -> None:
        self.steps.append((done, total, label))

    def waiting(self, label: str, seconds: float) -> None:
        self.waits.append((label, seconds))

    @contextmanager
    def hidden(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.stopped += 1


def gpubench(*arguments: str) -> None:
    """Run a command line in this process, which hears what it is told."""
    sys.argv = ["gpubench", *arguments]
    run_command_line(None)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    display = Heard()
    monkeypatch.setattr(sys, "argv", sys.argv)
    for module in (presenting, scan_progress):
        monkeypatch.setattr(module, "make_progress_display", lambda *_, **__: display)
    return display


def test_a_scan_tells_its_rounds(heard: Heard) -> None:
    gpubench("scan", "--simulate", "hgx-h100-8*16", "--fault", "node3.gpu2:nvlink=9")
    done, totals = zip(*(step[:2] for step in heard.steps), strict=True)
    assert list(done) == list(range(len(done)))
    assert (set(totals[:4]), set(totals[4:])) == ({3}, {11})
    assert heard.stopped == 1


def test_a_quick_scan_is_over_after_three(heard: Heard) -> None:
    gpubench("scan", "--simulate", "hgx-h100-8*16", "--quick")
    assert heard.steps[-1] == (3, 3, "rounds at most, after screening")


def test_long_logs_and_results_are_told(heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpubench("explain", LOG)
    assert heard.steps == []
    monkeypatch.setattr(explain_job, "_LONG_BYTES", 0)
    gpubench("explain", LOG)
    assert heard.steps[-1][2].startswith("MiB of logs read, now tests/logs")
    result = str(tmp_path / "a.json")
    gpubench("allreduce", "--simulate", "hgx-h100-8", "-o", result)
    gpubench("compare", result, result)
    monkeypatch.setattr(compare_job, "_SECONDS_WORTH_TELLING", 0.0)
    gpubench("compare", result, result)
    assert [label for label, _ in heard.waits] == ["reading 2 results"]


def test_quiet_tells_nothing(heard: Heard) -> None:
    gpubench("scan", "--simulate", "hgx-h100-8*16", "-q")
    assert heard.steps == []
