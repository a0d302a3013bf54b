"""Confidential computing and NVLink's bandwidth modes as NVML tells them, or does not."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.machine.gpus import NvmlFacts, read_node, read_settings
from gpubench.machine.probe import merge
from gpubench.machine.sysfs import SysfsFacts
from gpubench.model.facts.snapshot import ConfidentialComputing, DriverFacts, DriverSettings, ProbeFailure
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError

ABSENT = "this nvidia-ml-py does not know of it"


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


def test_a_library_that_knows_nothing_of_it() -> None:
    settings = read(library())
    assert settings == DriverSettings(
        unknown=dict.fromkeys(("confidential_computing", "nvlink_bandwidth_mode", "nvlink_bandwidth_reduced"), ABSENT)
    )


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
        nvmlSystemGetConfComputeState=fail(3),
        nvmlSystemGetNvlinkBwMode=fail(3),
        c_nvmlNvlinkGetBwMode_v1_t=Mode,
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


def test_what_nvml_knows_joins_what_the_kernel_says() -> None:
    fake = library(nvmlSystemGetNvlinkBwMode=lambda: 3)
    kernel = SysfsFacts(driver_settings=DriverSettings(parameters={"NvLinkDisable": "1"}, unknown={"configured": "x"}))
    settings = merge("node1", kernel, read_node(fake, 64), None).driver_settings
    assert (settings.parameters, settings.nvlink_bandwidth_mode) == ({"NvLinkDisable": "1"}, "half")
    assert set(settings.unknown) == {"configured", "confidential_computing", "nvlink_bandwidth_reduced"}


def test_without_nvml_its_part_says_why() -> None:
    failed = ProbeFailure(stage="nvml", error="no answer within 20 s", timed_out=True)
    absent = NvmlFacts(driver=DriverFacts(absent="Driver Not Loaded"))
    for facts, failures, reason in (
        (None, [failed], failed.error),
        (absent, [], "Driver Not Loaded"),
        (None, [], "NVML was not asked"),
    ):
        settings = merge("node1", None, facts, None, failures).driver_settings
        assert settings == DriverSettings(
            unknown=dict.fromkeys(
                ("confidential_computing", "nvlink_bandwidth_mode", "nvlink_bandwidth_reduced"), reason
            )
        )
