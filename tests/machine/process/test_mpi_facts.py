# ruff: noqa: N802 - MPI's own names
"""What MPI libraries say of GPUs, on objects that have the same functions; tests/mpi asks a real one."""

import ctypes
from typing import Any

import pytest

from gpubench.machine.environment import read_library


class Running:
    """A library that is started and says nothing of GPUs."""

    initialized, finalized = 1, 0
    _handle = ctypes.CDLL(None)._handle

    def MPI_Initialized(self, flag: Any) -> int:
        flag._obj.value = self.initialized
        return 0

    def MPI_Finalized(self, flag: Any) -> int:
        flag._obj.value = self.finalized
        return 0

    def MPI_Get_library_version(self, text: Any, length: Any) -> int:
        text.value = b"MPICH Version:      4.2.0\nMPICH Release date: x\n"
        return 0


class Ended(Running):
    finalized = 1


class NotStarted(Running):
    initialized = 0


class CudaAware(Running):
    def MPIX_Query_cuda_support(self) -> int:
        return 1


class Mpich(Running):
    answer, error = 1, 0

    def MPIX_GPU_query_support(self, kind: int, flag: Any) -> int:
        assert kind == 0
        flag._obj.value = self.answer
        return self.error


class MpichWithout(Mpich):
    answer = 0


class MpichThatFails(Mpich):
    error = 1


@pytest.mark.parametrize(
    ("library", "expected"),
    [(Running(), None), (CudaAware(), True), (Mpich(), True), (MpichWithout(), False), (MpichThatFails(), None)],
)
def test_who_takes_memory_of_gpus(library: Running, expected: bool | None) -> None:
    facts = read_library(library)
    assert facts.cuda_aware is expected
    assert facts.version == "MPICH Version: 4.2.0"
    assert ("cuda_aware" in facts.unknown) == (expected is None)
    assert {"cuda_built", "pml", "accelerator"} <= set(facts.unknown)


@pytest.mark.parametrize("library", [Ended(), NotStarted(), object()])
def test_a_library_that_does_not_run_is_not_asked(library: Any) -> None:
    facts = read_library(library)
    assert (facts.cuda_aware, facts.pml) == (None, None)
    assert facts.unknown["cuda_aware"] == "MPI is not running in this process"


def test_variables_of_another_layout_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ctypes.Structure):
        kind, name = b"btl", b"tcp"
        in_dll = classmethod(lambda kind, library, name: kind())

    monkeypatch.setattr("gpubench.machine.environment._Component", Other)
    facts = read_library(Running())
    assert (facts.pml, facts.accelerator) == (None, None)
    Other.kind = b"pml"
    assert read_library(Running()).pml == "tcp"
