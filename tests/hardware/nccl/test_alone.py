import json
import os
import sys

import pytest

from gpubench.hardware.nccl import alone
from gpubench.hardware.nccl.alone import start_asking
from tests.fakes import cupy_on_numpy


def test_another_process_tells_what_cupy_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), cupy_on_numpy.Nccl(1))
    alone.main()
    printed = capsys.readouterr().out
    assert json.loads(printed)["nccl"].endswith("from /fake/libnccl.so.2")
    ask = start_asking(dict(os.environ), [sys.executable, "-c", f"print({printed!r})"])
    assert ask() == json.loads(printed)["nccl"]


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('[1]')", "print('{}')"])
def test_where_none_answers_nothing_is_said(code: str) -> None:
    assert start_asking(dict(os.environ), [sys.executable, "-c", code])() == ""


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_SECONDS_TO_ANSWER", 0.2)
    assert start_asking(dict(os.environ), [sys.executable, "-c", "import time; time.sleep(600)"])() == ""
