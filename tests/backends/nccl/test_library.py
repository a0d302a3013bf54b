"""The variables that a libnccl reads, and the NCCL of a process without torch."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpubench.backends.nccl import library as nccl_library
from gpubench.backends.nccl.library import check_variables, start_asking, unverified
from gpubench.errors import UsageError
from tests.fakes import cupy_on_numpy

KNOWN = ("NCCL_DEBUG", "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_PXN_DISABLE")


def library(folder: Path, names: tuple[str, ...] = KNOWN) -> str:
    path = folder / "libnccl.so.2"
    path.write_bytes(b"\x7fELF\0NCCL_MAX_\0" + b"".join(name.encode() + b"\0" for name in names) + b"NCCL_TAIL_X")
    return str(path)


def test_known_variables_pass(tmp_path: Path) -> None:
    assert check_variables(["NCCL_MAX_NCHANNELS", "NCCL_PXN_DISABLE"], library(tmp_path), ()) == ()


def test_one_that_nccl_does_not_know_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        check_variables(["NCCL_PXN_DISABLE", "NCCL_MAX_CHANNELS"], library(tmp_path), ("NCCL_NET",))
    assert str(refused.value).startswith("--set NCCL_MAX_CHANNELS: this NCCL has no such variable")
    assert refused.value.next_step == "--set NCCL_MAX_NCHANNELS=..."
    with pytest.raises(UsageError, match="NCCL_TAIL_X"):
        check_variables(["NCCL_TAIL_X"], library(tmp_path), ())


def test_a_plugin_may_read_what_nccl_does_not(tmp_path: Path) -> None:
    set_too = ("NCCL_TUNER_PLUGIN",)
    assert check_variables(["NCCL_TUNER_CONFIG_FILE"], library(tmp_path), set_too) == ("NCCL_TUNER_CONFIG_FILE",)


def test_variables_of_others_are_not_known_to_have_a_reader(tmp_path: Path) -> None:
    assert check_variables(["UCX_TLS", "NCCL_ALGO"], library(tmp_path), ()) == ("UCX_TLS",)


@pytest.mark.parametrize("names", [(), ("NCCL_MAX_NCHANNELS",)])
def test_a_library_that_does_not_tell_refuses_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert check_variables(["NCCL_MAX_NCHANNELS"], library(tmp_path, names), ()) == ("NCCL_MAX_NCHANNELS",)
    assert check_variables(["NCCL_ALGO"], str(tmp_path / "missing"), ()) == ("NCCL_ALGO",)


def test_the_finding_names_them() -> None:
    (found,) = unverified(["UCX_TLS", "NCCL_X"])
    assert (found.id, found.severity, found.subject) == ("variable-not-verified", "WARN", "--set UCX_TLS, NCCL_X")
    assert unverified([]) == ()


def test_another_process_tells_what_cupy_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(1), cupy_on_numpy.Nccl(1))
    nccl_library.main()
    printed = capsys.readouterr().out
    assert json.loads(printed)["nccl"].endswith("from /fake/libnccl.so.2")
    ask = start_asking(dict(os.environ), [sys.executable, "-c", f"print({printed!r})"])
    assert ask() == json.loads(printed)["nccl"]


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('[1]')", "print('{}')"])
def test_where_none_answers_nothing_is_said(code: str) -> None:
    assert start_asking(dict(os.environ), [sys.executable, "-c", code])() == ""


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_SECONDS_TO_ANSWER", 0.2)
    assert start_asking(dict(os.environ), [sys.executable, "-c", "import time; time.sleep(600)"])() == ""
