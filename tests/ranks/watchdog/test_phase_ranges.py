"""NVTX ranges of phases: not nested, and ended by the next phase."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.model.terms.ranks import Phase
from gpubench.ranks.watchdog.rank import Nvtx, find_nvtx, wrap_in_ranges
from tests.fakes.progress import FakeProgress


def test_a_range_lasts_until_the_next_phase() -> None:
    said: list[str] = []
    progress = FakeProgress()
    enter = wrap_in_ranges(progress.enter, Nvtx(said.append, lambda: said.append("end")))
    enter(Phase.SET_UP)
    enter(Phase.OPERATION, "1K in place", 20)
    enter(Phase.VERIFICATION, "1K in place")
    assert said == ["set-up", "end", "operation 1K in place", "end", "verification 1K in place"]
    assert progress.phases == [Phase.SET_UP, Phase.OPERATION, Phase.VERIFICATION]


def test_without_nvtx_nothing_is_put_before_the_progress() -> None:
    progress = FakeProgress()
    enter = progress.enter
    assert wrap_in_ranges(enter, None) is enter


def test_the_package_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    package = SimpleNamespace(
        push_range=lambda text, domain: said.append((text, domain)), pop_range=lambda domain: said.append(domain)
    )
    monkeypatch.setitem(sys.modules, "nvtx", package)
    found = find_nvtx()
    assert found is not None
    found.push("warm-up 1K")
    found.pop()
    assert said == [("warm-up 1K", "gpubench"), "gpubench"]


def test_then_the_library_of_an_older_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bytes] = []

    class Function:
        argtypes: tuple[type, ...] = ()

        def __call__(self, *arguments: bytes) -> int:
            said.extend(arguments)
            return 0

    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _name: SimpleNamespace(nvtxRangePushA=Function(), nvtxRangePop=Function())
    )
    found = find_nvtx()
    assert found is not None
    found.push("warm-up 1K")
    found.pop()
    assert said == [b"gpubench: warm-up 1K"]


def test_where_neither_is_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise OSError

    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert find_nvtx() is None
