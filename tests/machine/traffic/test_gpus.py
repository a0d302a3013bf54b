"""The child that asks the driver: its answers in time, its silence, its end."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpubench.machine import gpu_child
from gpubench.machine.traffic import GpuChild
from gpubench.model.facts.traffic import GpuReading
from gpubench.model.terms.plain import to_plain
from tests.fakes.nvml import FakeGpu, FakeNvml

READING = GpuReading(index=0, bus_id="0000:06:00.0", nvlink_sent_bytes=5, pcie_sent_gb_s=1.5)
ANSWER = json.dumps({"gpus": [to_plain(READING)]})


@contextmanager
def child(program: str, deadline: float = 20.0) -> Iterator[GpuChild]:
    made = GpuChild({}, 20.0, deadline, command=[sys.executable, "-c", program])
    try:
        yield made
    finally:
        made.close()


def test_a_driver_that_hangs_costs_readings_and_comes_back() -> None:
    """It answers the second question only once a third line arrives, as one that was wedged for a while."""
    program = f"""
import sys
for number, _ in enumerate(sys.stdin):
    if number != 1: print({ANSWER!r}, flush=True)
    else: sys.stdin.readline(); print({ANSWER!r}, flush=True)
"""
    with child(program, deadline=0.5) as gpus:
        gpus.read()
        first = gpus.read()
        assert first == ((), "the driver did not answer within 0.5 s")
        found, why = gpus.read()
        assert found == ()
        assert why is not None
        assert why.startswith("the driver has not answered for ")
        assert gpus._process.stdin is not None
        gpus._process.stdin.write(b"\n")
        gpus._process.stdin.flush()
        assert gpus._read_line(20.0) is not None
        gpus._seconds = 20.0
        assert gpus.read() == ((READING,), None)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("pass", "the process that reads the driver has ended"),
        ("input(); print('no JSON', flush=True); input()", "returned an invalid answer"),
        ("""input(); print('{"gpus": [{"index": "x"}]}', flush=True); input()""", "returned an invalid answer"),
        ("""input(); print('{"silent": "NVML does not answer"}', flush=True); input()""", "NVML does not answer"),
    ],
)
def test_what_is_no_answer_is_said(program: str, why: str) -> None:
    with child(program) as gpus:
        found, reason = gpus.read()
        assert found == ()
        assert reason is not None
        assert why in reason


def test_a_child_that_ended_is_not_asked_again() -> None:
    with child("pass") as gpus:
        assert [gpus.read()[1] for _ in range(2)] == ["the process that reads the driver has ended"] * 2


def answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: Callable[[], object], *arguments: str
) -> list[dict[str, object]]:
    monkeypatch.setattr(gpu_child, "open_library", library)
    monkeypatch.setattr(sys, "stdin", ["\n", "\n"])
    assert gpu_child.main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_child_answers_every_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = answered(monkeypatch, capsys, lambda: FakeNvml(FakeGpu("06"), FakeGpu("07")), "1")
    assert [[each["bus_id"] for each in line["gpus"]] for line in lines] == [["0000:07:00.0"]] * 2  # type: ignore[attr-defined]


def test_the_child_says_why_it_knows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = answered(monkeypatch, capsys, lambda: None)
    assert "NVML does not start" in str(line["silent"])

    class Broken(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            self._fail(999)
            return 0

    (line,) = answered(monkeypatch, capsys, Broken)
    assert line == {"silent": "NVML does not answer (Unknown Error)"}
