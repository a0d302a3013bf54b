"""Confidential computing and NVLink's bandwidth modes as NVML tells them, or does not."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.machine.gpus import read_settings
from gpubench.model.facts.snapshot import ConfidentialComputing, DriverSettings
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError


class Settings(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint) for name in ("version", "environment", "ccFeature", "devToolsMode", "multiGpuMode")
    )


class Mode(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("bIsBest", ctypes.c_uint), ("bwMode", ctypes.c_uint8))


def library(*gpus: FakeGpu, **functions: Any) -> FakeNvml:
    fake = FakeNvml(*(gpus or (FakeGpu("06"), FakeGpu("07"))))
    for name, function in functions.items():
        setattr(fake, name, function)
    return fake


def read(fake: FakeNvml) -> DriverSettings:
    return read_settings(fake, dict(enumerate(fake.gpus)))


def fail(code: int) -> Any:
    def raise_it(*arguments: object) -> Any:
        raise NVMLError(code)

    return raise_it


def test_confidential_computing_with_what_it_says_of_several_gpus() -> None:
    def fill(reference: Any) -> int:
        form = reference._obj
        form.environment, form.ccFeature, form.devToolsMode, form.multiGpuMode = 2, 1, 0, 1
        return 0

    fake = library(c_nvmlSystemConfComputeSettings_v1_t=Settings, nvmlSystemGetConfComputeSettings=fill)
    assert read(fake).confidential_computing == ConfidentialComputing(
        enabled=True, developer_tools=False, environment="production", multi_gpu="protected_pcie"
    )


@pytest.mark.parametrize("settings", [fail(3), lambda form: 13])
def test_an_older_driver_knows_its_state_alone(settings: Any) -> None:
    fake = library(
        c_nvmlSystemConfComputeSettings_v1_t=Settings,
        nvmlSystemGetConfComputeSettings=settings,
        nvmlSystemGetConfComputeState=lambda: SimpleNamespace(environment=9, ccFeature=0, devToolsMode=1),
    )
    read_ = read(fake)
    assert read_.confidential_computing == ConfidentialComputing(enabled=False, developer_tools=True)
    assert "confidential_computing" not in read_.unknown


def test_what_is_not_supported_says_so() -> None:
    fake = library(
        nvmlSystemGetConfComputeState=fail(3), nvmlSystemGetNvlinkBwMode=fail(3), c_nvmlNvlinkGetBwMode_v1_t=Mode
    )
    unknown = read(fake).unknown
    assert unknown["confidential_computing"] == unknown["nvlink_bandwidth_mode"] == "Not Supported"
    assert unknown["nvlink_bandwidth_reduced"] == "this nvidia-ml-py has no nvmlDeviceGetNvlinkBwMode"
    assert read_settings(fake, {}).unknown["nvlink_bandwidth_reduced"] == "there is no GPU that answers"


@pytest.mark.parametrize(("mode", "word"), [(0, "full"), (1, "off"), (4, "3quarter"), (9, None)])
def test_modes_of_the_whole_node(mode: int, word: str | None) -> None:
    settings = read(library(nvmlSystemGetNvlinkBwMode=lambda: mode))
    assert settings.nvlink_bandwidth_mode == word
    assert ("nvlink_bandwidth_mode" in settings.unknown) == (word is None)


def test_gpus_with_modes_of_their_own() -> None:
    def answer(best: int) -> Any:
        def fill(reference: Any) -> int:
            reference._obj.bIsBest = best
            return 0

        return {"nvmlDeviceGetNvlinkBwMode": fill}

    gpus = (FakeGpu("06", replies=answer(1)), FakeGpu("07", replies=answer(0)), FakeGpu("08"))
    assert read(library(*gpus, c_nvmlNvlinkGetBwMode_v1_t=Mode)).nvlink_bandwidth_reduced == ("GPU1",)
