"""How far a run is: a bar on a terminal, lines in the log of a batch job, and what is left."""

import io
import os
import pty
import subprocess
import sys
from typing import TextIO

import pytest

from gpubench.formats.presenter import ProgressBar, ProgressLines, duration, make_progress_display, time_left
from tests.cli.running import ROOT, environment


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_after_ten_seconds_and_then_every_half_minute() -> None:
    said: list[str] = []
    now = [0.0]
    lines = ProgressLines(said.append, lambda: now[0])
    for second in range(0, 80, 5):
        now[0] = float(second)
        lines.update(second, 100, f"{second}M\nout of place")
    assert said == [
        "gpubench: 10 of 100, 10 s, about 90 s left: 10M\\nout of place",
        "gpubench: 40 of 100, 40 s, about 60 s left: 40M\\nout of place",
        "gpubench: 70 of 100, 70 s, about 30 s left: 70M\\nout of place",
    ]


def test_a_short_wait_is_no_line_and_a_long_one_is() -> None:
    said: list[str] = []
    lines = ProgressLines(said.append)
    lines.waiting("reading this machine", 3.0)
    lines.waiting("copies between 8 GPUs", 32.0)
    assert said == ["gpubench: copies between 8 GPUs: about 32 s"]


@pytest.mark.parametrize(
    ("done", "total", "elapsed", "left"),
    [
        (0, 9, 5.0, ""),
        (3, 9, 0.5, ""),
        (3, 9, 5.0, ", about 10 s left"),
        (9, 9, 5.0, ""),
        (1, 99, 60.0, ", about 98 min left"),
    ],
)
def test_what_is_left_is_told_once_there_is_something_to_tell_it_by(
    done: int, total: int, elapsed: float, left: str
) -> None:
    assert time_left(done, total, elapsed) == left


def test_durations_are_as_exact_as_an_estimate() -> None:
    assert [duration(seconds) for seconds in (0.4, 99.0, 150.0, 7200.0)] == ["0 s", "99 s", "2 min", "2 h"]


def test_a_rank_s_terminal_is_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def kind(stream: TextIO, *, is_rank: bool) -> type[object]:
        return type(make_progress_display(stream, is_rank=is_rank, say=lambda _: None))

    assert kind(Terminal(), is_rank=False) is ProgressBar
    assert kind(Terminal(), is_rank=True) is ProgressLines
    assert kind(io.StringIO(), is_rank=False) is ProgressLines
    monkeypatch.setenv("TERM", "dumb")
    assert kind(Terminal(), is_rank=False) is ProgressLines


def test_a_bar_is_gone_at_the_end_and_fits_a_narrow_terminal() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    bar.waiting("copies between 8 GPUs", 12.0)
    bar.update(3, 9, "1M out of place")
    with bar.hidden():
        stream.write("a row\n")
    bar.stop()
    shown = stream.getvalue()
    assert "0 of about 12 s" in shown
    assert "3/9, 0 s" in shown
    assert shown.endswith("\x1b[2K")


def test_a_terminal_is_told_at_once_what_is_done_and_stdout_has_the_answer_alone() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpubench", "--quick", "--width", "100"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, env=environment(TERM="xterm"), text=True
    ) as run:
        os.close(theirs)
        told = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                break
            told += part
            if not part:
                break
        answer = run.stdout.read() if run.stdout is not None else ""
    os.close(ours)
    assert b"reading this machine" in told
    assert answer.startswith("gpubench 0.")
